"""A folder that the tests of runs on several ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import furnish


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A furnished folder; runs have names of their own."""
    return furnish(tmp_path_factory.mktemp("distributed"))
