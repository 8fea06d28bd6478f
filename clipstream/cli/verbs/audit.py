"""The verb audit: audit the dtypes of a training step.

`clipstream audit precision` takes the settings of training, or a run's folder with `--run`, and changes nothing.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag, output_file
from clipstream.config.config_file import require_equal
from clipstream.config.help import READING
from clipstream.config.plan import Survey, survey
from clipstream.config.settings import Settings, Written
from clipstream.config.validate import preflight_models, validate_sources
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.launch import run_ranks
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.utils.console import ResultConsole
from clipstream.utils.section import PathText, Section


class AuditFlags(Section):
    """Audit the dtypes of one training step: casts, float32 operations, fp16 underflow of gradients, and 16-bit
    computations where float32 is required (exit code 1).
    """

    topic: Literal["precision"] = argument("what is audited: precision")
    run: PathText | None = flag("run folder with the settings and weights (newest checkpoint) to audit", form="FOLDER")
    batch: Literal["shards", "synthetic"] | None = flag(
        "shards (default, if set) or synthetic (random images and texts)"
    )
    json_: OutPath | None = flag("write all results to this file", form="FILE")


def run(command: CommandLine[AuditFlags]) -> int:
    """Audit the step, and return the exit code: 1 if 16 bits are found where float32 is needed."""
    own, folder = command.own, None
    if own.run is not None:
        folder = Path(own.run)
        if not (folder / "config.yaml").is_file():
            raise SettingsError(f"--run: {folder} is not a run folder: config.yaml is missing")
    output_file(own.json_, "--json")
    settings, places = command.load(run=folder)
    if _synthetic(own, settings):
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"sources": {}})})
        found = survey(settings, count=False)
    else:
        found = validate_sources(Written(settings, places))
    preflight_models(settings)
    return run_ranks(settings.run, partial(audit, found, own))


def _synthetic(own: AuditFlags, settings: Settings) -> bool:
    """Whether the batch is random."""
    data = settings.data
    choice = own.batch or ("shards" if data.sources or data.image_features else "synthetic")
    if choice == "shards" and not data.sources and not data.image_features:
        raise SettingsError("--batch shards requires --train-data SHARDS")
    if choice == "synthetic" and (data.image_features or data.text_features or data.teacher_features):
        raise SettingsError("--batch synthetic cannot replace features of a store: use --batch shards")
    return choice == "synthetic"


def audit(found: Survey, own: AuditFlags, world: World, watch: FailureWatch) -> None:
    """Audit on this rank, and print the tables on rank 0.

    Raises:
        SettingsError: settings, model or shards cannot be used.
        ClipstreamError: 16 bits where float32 is needed, or --json cannot be written.
    """
    from clipstream.train import audit_rank  # imports torch

    require_equal(found.settings, world)
    result = audit_rank(found, world, None if own.run is None else Path(own.run) / "checkpoints")
    if world.is_main:
        result.show(ResultConsole(120))
        if own.json_:
            with errors_as(ClipstreamError, f"--json: cannot write {own.json_}", OSError):
                result.write(Path(own.json_))
    if result.of("error"):
        raise ClipstreamError(f"16-bit computations where float32 is required: {result.verdict}")


main = Verb(
    "audit",
    AuditFlags,
    run,
    (*READING, "Model", "Batch", "Loss and optimizer", "Device and precision", "Speed and memory"),
)
