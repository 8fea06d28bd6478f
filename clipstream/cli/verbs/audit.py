"""The verb `clipstream audit precision`: what one training step computes in which dtype.

Takes the settings of `clipstream.train`, or a run's folder with `--run`, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clipstream.checkpoint import store
from clipstream.config.entry import command_line, entry_point
from clipstream.config.flags import choice_flag, output_file
from clipstream.config.plan import Survey, agree, survey
from clipstream.config.settings import Settings, Written, require_equal
from clipstream.config.validate import preflight_models, validate_sources
from clipstream.data.batch import Batch, ImageSpec
from clipstream.distributed.launch import FailureWatch, run_ranks
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.utils.console import ResultConsole

if TYPE_CHECKING:
    from clipstream.data.loader.recipe import ModelInputs

TOPIC = "precision"
OWN_FLAGS = {
    "--run": "run folder with the settings and weights (newest checkpoint) to audit",
    "--batch": "shards (default, if set) or synthetic (random images and texts)",
    "--json": "write all results to this file",
}
LENGTHS = (3, 21)  # words of a synthetic text: at least, and one more than at most


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 1 if 16 bits are found where float32 is needed."""
    topics = [token for token in argv[:1] if not token.startswith("-")]
    command = command_line("audit", argv[len(topics) :], OWN_FLAGS)
    if topics != [TOPIC]:
        raise SettingsError(f"audit requires a topic: clipstream audit {TOPIC} …")
    own, run = command.own, None
    if "--run" in own:
        run = Path(own["--run"])
        if not (run / "config.yaml").is_file():
            raise SettingsError(f"--run: {own['--run']} is not a run folder: config.yaml is missing")
    output_file(own, "--json")
    settings, places = command.load(run=run)
    if _synthetic(own, settings):
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"sources": {}})})
        found = survey(settings, count=False)
    else:
        found = validate_sources(Written(settings, places))
    preflight_models(settings)
    return run_ranks(settings.run, partial(audit, found, own))


def _synthetic(own: Mapping[str, str], settings: Settings) -> bool:
    """Whether the batch is random."""
    data = settings.data
    default = "shards" if data.sources or data.image_features else "synthetic"
    choice = choice_flag(own, "--batch", ("shards", "synthetic"), default)
    if choice == "shards" and not data.sources and not data.image_features:
        raise SettingsError("--batch shards requires --train-data SHARDS")
    if choice == "synthetic" and (data.image_features or data.text_features or data.teacher_features):
        raise SettingsError("--batch synthetic cannot replace features of a store: use --batch shards")
    return choice == "synthetic"


def audit(found: Survey, own: Mapping[str, str], world: World, watch: FailureWatch) -> None:
    """Audit on this rank, and print the tables on rank 0.

    Raises:
        SettingsError: settings, model or shards cannot be used.
        ClipstreamError: 16 bits where float32 is needed, or --json cannot be written.
    """
    from clipstream.checkpoint import resume
    from clipstream.train import build_model, build_plan, build_step, first_batch, own_inputs
    from clipstream.training.precision_audit import audit_step

    require_equal(found.settings, world)
    run = Path(own["--run"]) if "--run" in own else None
    checkpoints = None if run is None else run / "checkpoints"
    last = None if checkpoints is None else resume.agree(lambda: store.newest(checkpoints), world, checkpoints)
    resumed = resume.Resumed(last, None).with_meta(found.settings.train, found.settings.data, world)
    made = build_plan(agree(found, world), world, resumed.state)
    settings, model = made.settings, build_model(made, world)
    if settings.data.sources:
        batch = first_batch(made, world, model, resumed.state)
    else:
        batch = synthetic_batch(settings, world, own_inputs(settings, model))
    step = build_step(settings, world, model)
    step.unlock(0 if last is None else resume.load_into(step, last).step)
    result = audit_step(step, batch)
    if world.is_main:
        result.show(ResultConsole(120))
        if "--json" in own:
            with errors_as(ClipstreamError, f"--json: cannot write {own['--json']}", OSError):
                result.write(Path(own["--json"]))
    if result.of("error"):
        raise ClipstreamError(f"16-bit computations where float32 is required: {result.verdict}")


def synthetic_batch(settings: Settings, world: World, inputs: ModelInputs) -> Batch:
    """This rank's part of a batch of random images, and of texts of 3 to 20 words."""
    import torch

    size = settings.data.global_batch_size
    start, stop = (size * rank // world.size for rank in (world.rank, world.rank + 1))
    draw = torch.Generator().manual_seed(settings.run.seed * 1000 + world.rank)
    texts = [" ".join(["word"] * int(n)) for n in torch.randint(*LENGTHS, (stop - start,), generator=draw)]

    def pixels(like: ImageSpec) -> torch.Tensor:
        return torch.randint(0, 256, (stop - start, 3, *like.size), dtype=torch.uint8, generator=draw)

    ids = torch.from_numpy(inputs.tokenizer.encode(texts)).int()
    others: dict[str, torch.Tensor] = {}
    if inputs.teacher_image is not None:
        others["teacher_pixels"] = pixels(inputs.teacher_image)
    if inputs.teacher_tokenizer is not None:
        others["teacher_ids"] = torch.from_numpy(inputs.teacher_tokenizer.encode(texts)).int()
    keys = tuple(f"synthetic/{number}" for number in range(start, stop))
    one = torch.ones(stop - start)
    return Batch(pixels(inputs.image), ids, one, keys, torch.zeros_like(one, dtype=torch.uint8), 0, size, **others)  # type: ignore[arg-type]
