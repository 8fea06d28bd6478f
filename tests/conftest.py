"""Owns what all tests share: property tests have no time limit of their own, as machines are shared and noisy."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards may be named by commands, also where the suite runs with WDS_SECURE=1."""
    monkeypatch.delenv("WDS_SECURE", raising=False)
