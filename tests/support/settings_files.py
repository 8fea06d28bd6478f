"""Settings files and the errors of loading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipstream.config.settings import load
from clipstream.data.settings import CaptionSettings
from clipstream.errors import SettingsError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(argv: list[str], ranks: int = 1) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(argv, ranks=ranks)
    return str(caught.value).split("\nerror: ")


class OwnCaption:
    """A user's extractor, with settings of its own."""

    class Settings(CaptionSettings):
        """Its settings."""

        depth: int = 1
        loud: bool = False


OWN = f"{__name__}:OwnCaption"
