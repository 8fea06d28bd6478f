"""Owns what all tests share: property tests have no time limit of their own, as machines are shared and noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
