"""The verb precompute: compute and store features of frozen towers and teachers.

The command line is checked here, before torch is imported; `run` does the work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from clipstream.checkpoint.store import resolve_model_name, with_own_config
from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag, switch
from clipstream.config.help import READING
from clipstream.config.settings import Written
from clipstream.config.validate import validate_sources
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, errors_as
from clipstream.features import CHUNK_ROWS, ROWS_MULTIPLE
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
from clipstream.precompute import StoredDtype, StoreOptions
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.section import PathText, Section

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,60}")
TAKEN = ("image", "text", "ids", "samples", "texts", "model")  # names that no teacher may have


class PrecomputeFlags(Section):
    """Compute the features of frozen towers and teachers, and store them in STORE. Rerun the same command to continue
    after an interruption, or to add parts.
    """

    store: OutPath = argument("folder to write the features to")
    checkpoint: PathText | None = flag("run or checkpoint with the model, as --model", form="FOLDER")
    towers: Literal["image", "text", "both"] | None = flag("towers of --model to compute: image, text or both")
    teacher: list[PathText] = flag(
        "NAME=MODEL[,PRETRAINED]: another model whose towers to compute, with its own image size and tokenizer; can be "
        "repeated",
        [],
    )
    views: int = flag("number of augmented views per image; 0: the preprocessing of evaluation", 0, ge=0)
    dtype: StoredDtype = flag("dtype of the stored features", "float16")
    zstd: bool = switch("compress the files with zstd")
    random_weights: bool = switch("allow a teacher without pretrained weights, for tests")
    chunk_rows: int = flag(
        f"samples per file, a multiple of {ROWS_MULTIPLE}", CHUNK_ROWS, multiple_of=ROWS_MULTIPLE, gt=0
    )


def run(command: CommandLine[PrecomputeFlags]) -> int:
    written, options, teachers = read_command(command)
    settings, found = written.settings, validate_sources(written)
    ask = World.from_env().local_rank == 0
    if options.towers:
        preflight(settings.model, settings.tokenizer, loss_type=chosen_loss_type(settings.loss), ask=ask)
    for name, model in teachers.items():
        if model.is_fresh and not options.random_weights:
            raise SettingsError(f"--teacher {name}: {model.name} has no weights: use {name}={model.name},PRETRAINED")
        with errors_as(SettingsError, f"--teacher {name}", SettingsError):
            preflight(model, ask=ask)
    from clipstream.precompute.run import precompute

    return run_ranks(settings.run, partial(precompute, found, options, teachers))


def read_command(command: CommandLine[PrecomputeFlags]) -> tuple[Written, StoreOptions, dict[str, ModelSettings]]:
    """Settings, the store to write, and teachers by name. Raises SettingsError: a flag or a setting is wrong."""
    own = command.own
    flags = command.flags + ([f"--model={own.checkpoint}"] if own.checkpoint else [])
    claim_output(own.store, "STORE")
    written = command.load(flags, ranks=1)  # --batch-size is that of a forward pass, whatever the number of ranks
    settings = written.settings
    teachers = _teachers(own.teacher, settings.model.cache_dir)
    if not own.towers and not teachers:
        raise SettingsError("set --towers image, text or both, or --teacher NAME=MODEL[,PRETRAINED]")
    if own.views and not settings.data.augment.enabled:
        raise SettingsError("--views requires data.augment.enabled")
    micro = settings.train.micro_batch_size
    options = StoreOptions(
        folder=Path(own.store).absolute(),
        towers=("image", "text") if own.towers == "both" else (own.towers,) if own.towers else (),
        views=own.views,
        dtype=own.dtype,
        zstd=own.zstd,
        chunk_rows=own.chunk_rows,
        random_weights=own.random_weights,
        batch_size=min(micro if isinstance(micro, int) else settings.data.global_batch_size, own.chunk_rows),
    )
    return written, options, teachers


def _teachers(given: Sequence[str], cache_dir: str | None) -> dict[str, ModelSettings]:
    """The teachers by name, of the values of --teacher. Raises SettingsError."""
    teachers: dict[str, ModelSettings] = {}
    for text in given:
        name, _, model = text.partition("=")
        model, _, pretrained = model.partition(",")
        if not model or not NAME.fullmatch(name):
            raise SettingsError(
                f"--teacher: expected NAME=MODEL[,PRETRAINED], with a NAME of letters, digits, - and _, not {text!r}"
            )
        if name.lower() in (*TAKEN, *map(str.lower, teachers)):
            raise SettingsError(f"--teacher: the name {name} is already used in the store: use another name")
        pair = {"name": resolve_model_name(model), "pretrained": resolve_model_name(pretrained) if pretrained else None}
        teachers[name] = ModelSettings(**with_own_config(pair), cache_dir=cache_dir)
    return teachers


main = Verb("precompute", PrecomputeFlags, run, (*READING, "Model", "Batch", "Device and precision"))
