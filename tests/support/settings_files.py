"""Settings files and the errors of loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clipstream.config.settings import Settings, load
from clipstream.data.settings import CaptionSettings
from clipstream.errors import SettingsError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(argv: list[str], **more: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(argv, **more)
    return str(caught.value).split("\nerror: ")


def at(settings: Settings, key: str) -> Any:
    found: Any = settings
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


class OwnCaption:
    """A user's extractor, with settings of its own."""

    class Settings(CaptionSettings):
        """Its settings."""

        depth: int = 1
        loud: bool = False


OWN = f"{__name__}:OwnCaption"
