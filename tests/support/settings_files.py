"""Settings files and the errors of loading them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clipstream.config.plan import draft, plan, survey
from clipstream.config.settings import Settings, load, read
from clipstream.config.validate import validate_run
from clipstream.data.source_settings import CaptionSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.pretrained import preflight
from clipstream.utils.section import value_at

if TYPE_CHECKING:
    from clipstream.training.state import TrainState  # imports torch


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(argv: list[str], **more: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(argv, **more)
    return str(caught.value).split("\nerror: ")


def start(line: str | list[str]) -> Settings:
    """What a run with these flags does before it imports torch, less its look at the network."""
    flags = [f"--{flag}" for flag in f" {line}".split(" --")[1:]] if isinstance(line, str) else line
    written = read(["--train-data=a.tar", "--steps=10", *flags], ranks=1)
    settings = draft(validate_run(written, World()), 1).settings
    preflight(settings.model, settings.tokenizer, loss_type=chosen_loss_type(settings.loss), ask=False)
    return settings


def planned(settings: Settings, ranks: int = 1, state: TrainState | None = None) -> Settings:
    """The settings in effect on so many ranks, without what the size of the data chooses."""
    return plan(survey(settings, count=False), ranks, state).settings


def error_of(line: str | list[str]) -> str:
    """What it says."""
    with pytest.raises(SettingsError) as caught:
        start(line)
    return str(caught.value)


def at(settings: Settings, key: str) -> Any:
    return value_at(settings, key.split("."))


class OwnCaption:
    """A user's extractor, with settings of its own."""

    class Settings(CaptionSettings):
        """Its settings."""

        depth: int = 1
        loud: bool = False


OWN = f"{__name__}:OwnCaption"
