"""The verb `clipstream audit precision`: what one training step computes in which dtype.

Takes the settings of `clipstream.train`, or a run's folder with `--run`, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from clipstream.config.dump import print_config, take_flag
from clipstream.config.entry import run_main, show_help
from clipstream.config.flags import own_flags
from clipstream.config.settings import Settings, load
from clipstream.config.validate import validate_sources
from clipstream.distributed.launch import run_ranks
from clipstream.errors import SettingsError
from clipstream.losses.settings import chosen_loss_type
from clipstream.models.pretrained import preflight, preflight_teacher
from clipstream.utils import atomic_write
from clipstream.utils.logs import set_level

TOPIC = "precision"
OWN_FLAGS = {
    "--run": "a run's folder: its settings and the weights of its newest checkpoint",
    "--batch": "shards (the default where the settings name some) or synthetic, for random pictures and texts",
    "--json": "file for everything that was found",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code: 1 if what has to be float32 is not."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    topics = [token for token in argv[:1] if not token.startswith("-")]
    if show_help("audit", argv[len(topics) :], OWN_FLAGS):
        return 0
    if topics != [TOPIC]:
        raise SettingsError(f"what is to be audited? Give clipstream audit {TOPIC} …")
    every, argv = take_flag(argv[1:])
    own, flags = own_flags(argv, OWN_FLAGS)
    settings = _load(own, flags)
    set_level(settings.log.level)
    if every is not None:
        return print_config(settings, "audit", every)
    if _synthetic(own, settings):
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"sources": {}})})
    else:
        validate_sources(settings)
    preflight(settings.model, settings.tokenizer, loss_type=chosen_loss_type(settings.loss))
    if (teacher := settings.distill.teacher(settings.model.cache_dir)) is not None:
        preflight_teacher(teacher)
    from clipstream.cli.verbs.audit.run import audit  # imports torch

    return run_ranks(settings.run, partial(audit, settings, own))


def _load(own: Mapping[str, str], flags: Sequence[str]) -> Settings:
    """The settings of the command line, on top of those of a run.

    Raises SettingsError: wrong settings or flags, or a folder without a run.
    """
    if "--run" in own:
        config = Path(own["--run"]) / "config.yaml"
        if not config.is_file():
            raise SettingsError(f"--run: {own['--run']} holds no run: there is no config.yaml in it")
        flags = ["--config", str(config), *flags]
    if "--json" in own:
        try:
            atomic_write.probe(Path(own["--json"]))
        except OSError as error:
            raise SettingsError(f"--json: {own['--json']} cannot be written ({error.strerror})") from error
    return load(flags)


def _synthetic(own: Mapping[str, str], settings: Settings) -> bool:
    """Whether the batch is random.

    Raises SettingsError: shards are wanted and there are none, or features come from stores, which cannot be random.
    """
    data = settings.data
    choice = own.get("--batch", "shards" if data.sources or data.image_features else "synthetic")
    if choice not in ("shards", "synthetic"):
        raise SettingsError(f"--batch: expected shards or synthetic, not {choice!r}")
    if choice == "shards" and not data.sources and not data.image_features:
        raise SettingsError("--batch: there are no shards: give --train-data SHARDS")
    if choice == "synthetic" and (data.image_features or data.text_features or data.teacher_features):
        raise SettingsError("--batch: features of a store cannot be random: give --batch shards")
    return choice == "synthetic"
