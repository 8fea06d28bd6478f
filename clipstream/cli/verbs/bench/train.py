"""The command line of `clipstream bench train`: how fast a model trains under one setting after another.

A command line enters and is checked, before torch is imported; `ladder` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from clipstream.cli.verbs.bench.options import NAMES, Options
from clipstream.config.dump import print_config, take_flag
from clipstream.config.flags import own_flags
from clipstream.config.settings import load
from clipstream.config.validate import validate_sources
from clipstream.data.settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, did_you_mean
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.pretrained import preflight, preflight_teacher
from clipstream.utils import atomic_write
from clipstream.utils.logs import set_level

OWN_FLAGS = {
    "--rungs": f"settings to measure, separated by ',': {', '.join(NAMES)}; all unless given",
    "--rounds": "rounds in which the rungs take turns (3)",
    "--steps": "measured steps of a turn (5)",
    "--warmup-steps": "steps before them, which are not measured (2)",
    "--loss-steps": "steps after which losses are compared; the first turn of each rung has as many (20)",
    "--loss-tolerance": "largest difference to the baseline's loss, as a share of it, of settings to use (0.01)",
    "--against": "open_clip: measure the training step of open_clip's trainer as well, on the same tensors",
    "--csv": "file for the table",
    "--plot": "file for a plot, SVG or PNG; needs matplotlib (pip install 'clipstream[bench]')",
    "--yaml": "file for the settings to use, for --config",
}
GENERATED = "toy:train"  # source of the batches where no shards are given


def bench(argv: Sequence[str]) -> int:
    """Measure, print the tables, and return the exit code.

    Raises ClipstreamError: wrong settings, or the baseline cannot run.
    """
    every, argv = take_flag(argv)
    own, flags = own_flags(argv, OWN_FLAGS)
    settings, options = load(flags), options_of(own)
    set_level(settings.log.level)
    if every is not None:
        return print_config(settings, "bench train", every)
    if not settings.data.sources:
        options = replace(options, shards=False)
        source = SourceSettings.model_validate({"shards": GENERATED})
        data = settings.data.model_copy(update={"sources": {"train": source}})
        settings = settings.model_copy(update={"data": data})
    validate_sources(settings)
    ask = World.from_env().local_rank == 0
    preflight(settings.model, settings.tokenizer, loss_type=chosen_loss_type(settings.loss), ask=ask)
    if (teacher := settings.distill.teacher(settings.model.cache_dir)) is not None:
        preflight_teacher(teacher, ask=ask)
    from clipstream.cli.verbs.bench.ladder import run
    from clipstream.distributed.launch import run_ranks

    return run_ranks(settings.run, partial(run, settings, options))


def options_of(own: Mapping[str, str]) -> Options:
    """The options that the verb's own flags give. Raises SettingsError: a flag has a wrong value."""
    rungs = tuple(own["--rungs"].split(",")) if "--rungs" in own else NAMES
    for name in rungs:
        if name not in NAMES:
            raise SettingsError(
                f"--rungs: there is no {name!r}{did_you_mean(name, NAMES)}; here are {', '.join(NAMES)}"
            )
    if own.get("--against", "open_clip") != "open_clip":
        raise SettingsError(f"--against: expected open_clip, not {own['--against']!r}")
    files = {name: Path(own[f"--{name}"]) if f"--{name}" in own else None for name in ("csv", "plot", "yaml")}
    for name, path in files.items():
        try:
            if path is not None and World.from_env().is_main:
                atomic_write.probe(path)
        except OSError as error:
            raise SettingsError(f"--{name}: {path} cannot be written ({error.strerror})") from error
    if files["plot"] is not None and files["plot"].suffix not in (".svg", ".png"):
        raise SettingsError(f"--plot: expected a name that ends in .svg or .png, not {files['plot']}")
    return Options(
        rungs=rungs,
        rounds=_number(own, "--rounds", 3, 1),
        steps=_number(own, "--steps", 5, 1),
        warmup_steps=_number(own, "--warmup-steps", 2, 0),
        loss_steps=_number(own, "--loss-steps", 20, 1),
        loss_tolerance=_share(own, "--loss-tolerance", 0.01),
        open_clip="--against" in own,
        csv=files["csv"],
        plot=files["plot"],
        yaml=files["yaml"],
    )


def _number(own: Mapping[str, str], flag: str, default: int, least: int) -> int:
    text = own.get(flag, str(default))
    if not text.isdecimal() or int(text) < least:
        raise SettingsError(f"{flag}: expected a whole number, at least {least}, not {text!r}")
    return int(text)


def _share(own: Mapping[str, str], flag: str, default: float) -> float:
    try:
        value = float(own.get(flag, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{flag}: expected a number, at least 0, not {own[flag]!r}")
    return value
