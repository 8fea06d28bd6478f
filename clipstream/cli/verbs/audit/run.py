"""The audit on a rank: settings enter; tables, a file and perhaps an error leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clipstream.checkpoint import store
from clipstream.checkpoint.state import read_meta
from clipstream.config.settings import Settings, require_equal, resolve
from clipstream.data.batch import Batch
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.loader.stored import StoredData
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.models.teacher import Teacher
from clipstream.models.towers import Towers
from clipstream.tools.feature_stores import open_stores
from clipstream.tools.precision_audit import audit_step, synthetic_batch
from clipstream.tools.resume import carried_over
from clipstream.train.run import build_loader, build_model, build_step, build_teacher, load_checkpoint, with_workers
from clipstream.training.state import TrainState
from clipstream.utils.console import ResultConsole


def audit(settings: Settings, own: Mapping[str, str], world: World, watch: FailureWatch) -> None:
    """Audit on this rank, and print the tables on rank 0.

    Raises:
        SettingsError: settings, model or shards that cannot be used.
        ClipstreamError: what has to be float32 is not, or --json cannot be written.
    """
    require_equal(settings, world)
    run = Path(own["--run"]) if "--run" in own else None
    found = None if run is None else store.agree(lambda: store.newest(run / "checkpoints"), world)
    state = None if found is None else read_meta(found).train
    settings = carried_over(resolve(settings, world), state, world, own_lanes=settings.data.lanes != "auto")
    stored = open_stores(settings)
    towers, tokenizer = build_model(settings, world, stored)
    teacher = build_teacher(settings, world)
    batch = build_batch(settings, world, towers, tokenizer, state, teacher, stored)
    _, step = build_step(settings, world, towers, teacher, stored)
    done = 0 if found is None else load_checkpoint(found, step).step
    step.unlock(done)
    result = audit_step(step, batch)
    if world.is_main:
        result.show(ResultConsole(120))
        if "--json" in own:
            try:
                result.write(Path(own["--json"]))
            except OSError as error:
                raise ClipstreamError(f"--json: {own['--json']} could not be written ({error.strerror})") from error
    if result.of("error"):
        raise ClipstreamError(f"the step computes in 16 bits what needs float32: {result.verdict}")


def build_batch(
    settings: Settings,
    world: World,
    towers: Towers,
    tokenizer: Tokenizer,
    state: TrainState | None,
    teacher: Teacher | None,
    stored: StoredData | None,
) -> Batch:
    """This rank's part of the batch at a position of the data; without sources, of random pictures and texts."""
    if not settings.data.sources:
        return synthetic_batch(settings.data.global_batch_size, world, settings.run.seed, towers, tokenizer, teacher)
    with build_loader(
        with_workers(settings, world, stored), world, towers, tokenizer, state, teacher, stored
    ) as loader:
        batch: Batch = next(loader).clone()
        return batch
