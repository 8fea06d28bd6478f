"""Owns what all tests share: property tests have no time limit of their own, as machines are shared and noisy."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.pictures import make_shards

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards may be named by commands, also where the suite runs with WDS_SECURE=1."""
    monkeypatch.delenv("WDS_SECURE", raising=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards of different sizes, one of a single sample; modules may have others by this name."""
    return make_shards(tmp_path_factory.mktemp("shards"), [13, 7, 20, 1, 16, 9])
