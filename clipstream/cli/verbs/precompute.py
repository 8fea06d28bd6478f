"""The verb `clipstream precompute STORE --towers image`: features of frozen towers, computed once and stored.

The command line is checked here, before torch is imported; `run` does the work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clipstream.checkpoint.store import named, with_own_config
from clipstream.config.entry import command_line, entry_point
from clipstream.config.flags import choice_flag, number_flag
from clipstream.config.settings import Written
from clipstream.config.validate import validate_sources
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, errors_as
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings
from clipstream.precompute import CHUNK_ROWS, ROWS_MULTIPLE, STORED_DTYPES, StoreOptions
from clipstream.utils.atomic_write import claim_output
from clipstream.utils.section import own_path

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,60}")
TAKEN = ("image", "text", "ids", "samples", "texts", "model")  # names that no teacher may have
OWN_FLAGS = {
    "--checkpoint": "run or checkpoint with the model, as --model",
    "--towers": "towers of --model to compute: image, text or both",
    "--teacher": "NAME=MODEL[,PRETRAINED]: another model whose towers to compute, with its own image size and "
    "tokenizer; can be repeated",
    "--views": "number of augmented views per image; 0: the preprocessing of evaluation (default: 0)",
    "--dtype": f"dtype of the stored features: {', '.join(STORED_DTYPES)} (default: float16)",
    "--zstd": "compress the files with zstd",
    "--random-weights": "allow a teacher without pretrained weights, for tests",
    "--chunk-rows": f"samples per file, a multiple of {ROWS_MULTIPLE} (default: {CHUNK_ROWS})",
}


@entry_point
def main(argv: list[str]) -> int:
    written, options, teachers = arguments(argv)
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


def arguments(argv: Sequence[str]) -> tuple[Written, StoreOptions, dict[str, ModelSettings]]:
    """Settings, the store to write, and teachers by name. Raises SettingsError: a flag or a setting is wrong."""
    pairs = zip(argv, [*argv[1:], "--"], strict=False)
    bare = ("--zstd", "--random-weights")
    tokens = [f"{word}=true" if word in bare and after.startswith("--") else word for word, after in pairs]
    command = command_line("precompute", tokens, OWN_FLAGS, many=("--teacher",))
    own, (store, *flags) = command.own, command.flags or [""]
    if not store or store.startswith("-"):
        raise SettingsError("missing STORE: clipstream precompute STORE --towers image --train-data …")
    flags += [f"--model={own['--checkpoint']}"] if "--checkpoint" in own else []
    claim_output(own_path(store), "STORE")
    written = command.load(flags, ranks=1)  # --batch-size is that of a forward pass, whatever the number of ranks
    settings = written.settings
    teachers = _teachers(own.get("--teacher", ""), settings.model.cache_dir)
    towers = choice_flag(own, "--towers", ("image", "text", "both"), "")
    if not towers and not teachers:
        raise SettingsError("set --towers image, text or both, or --teacher NAME=MODEL[,PRETRAINED]")
    chunk_rows = number_flag(own, "--chunk-rows", CHUNK_ROWS, least=0)
    if chunk_rows < 1 or chunk_rows % ROWS_MULTIPLE:
        raise SettingsError(f"--chunk-rows: expected a multiple of {ROWS_MULTIPLE}, not {chunk_rows}")
    views = number_flag(own, "--views", 0, least=0)
    if views and not settings.data.augment.enabled:
        raise SettingsError("--views requires data.augment.enabled")
    micro = settings.train.micro_batch_size
    chosen: dict[str, Any] = {"": (), "image": ("image",), "text": ("text",), "both": ("image", "text")}
    options = StoreOptions(
        folder=Path(own_path(store)).absolute(),
        towers=chosen[towers],
        views=views,
        dtype=choice_flag(own, "--dtype", STORED_DTYPES, "float16"),
        zstd=choice_flag(own, "--zstd", ("true", "false"), "false") == "true",
        chunk_rows=chunk_rows,
        random_weights=choice_flag(own, "--random-weights", ("true", "false"), "false") == "true",
        batch_size=min(micro if isinstance(micro, int) else settings.data.global_batch_size, chunk_rows),
    )
    return written, options, teachers


def _teachers(lines: str, cache_dir: str | None) -> dict[str, ModelSettings]:
    """The teachers by name, of the values of --teacher. Raises SettingsError."""
    teachers: dict[str, ModelSettings] = {}
    for text in lines.splitlines():
        name, _, model = text.partition("=")
        model, _, pretrained = model.partition(",")
        if not model or not NAME.fullmatch(name):
            raise SettingsError(
                f"--teacher: expected NAME=MODEL[,PRETRAINED], with a NAME of letters, digits, - and _, not {text!r}"
            )
        if name.lower() in (*TAKEN, *map(str.lower, teachers)):
            raise SettingsError(f"--teacher: the name {name} is already used in the store: use another name")
        names = {"name": named(model), "pretrained": named(pretrained) if pretrained else None}
        teachers[name] = ModelSettings(**with_own_config(names), cache_dir=cache_dir)
    return teachers
