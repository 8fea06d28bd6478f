"""The position of a run: everything a checkpoint stores as JSON, so that a resumed run repeats the same bits.

The parts are owned and updated by the objects named in their docstrings; `Trainer.state()` collects them. All values
except `TrainState.data` are the same on every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from clipstream.data.order.lanes import DataState
from clipstream.training.early_stop import EarlyStopState

SourceHealth = dict[str, int | dict[str, int | str]]  # as clipstream.data.loader.health.Health.summary


@dataclass
class IntervalState:
    """Sums since the last training line, owned by `Trainer`.

    Attributes:
        loss: over steps that were not skipped.
        grad_norm: over steps that changed the weights.
        steps: all steps.
        overflows: fp16 steps whose loss scale was too large.
        skipped: steps without a finite loss or gradient.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0
    overflows: int = 0
    skipped: int = 0


@dataclass
class RollbackState:
    """Owned by `Rollback`.

    Attributes:
        nonfinite: steps skipped in a row, up to now.
        last_finite: steps done before this row began.
        applied: whether any step of the run changed the weights.
        saves: steps of checkpoints that were saved, newest last.
        rollbacks: rollbacks since the last checkpoint that proved good.
        rolled_back_at: step of the last rollback; -1 for none.
    """

    nonfinite: int = 0
    last_finite: int = 0
    applied: bool = False
    saves: list[int] = field(default_factory=list)
    rollbacks: int = 0
    rolled_back_at: int = -1


@dataclass
class StepState:
    """Owned by `TrainStep`.

    Attributes:
        precision: of the forward pass, after `auto` was resolved.
        scaler: state of torch's GradScaler; empty without fp16.
        micro_batch: micro-batch size that `auto` found; it decides the last bits. None if all samples fit, or not auto.
        ema_updates: updates of the averaged weights; None without averaging.
    """

    precision: str = "auto"
    scaler: dict[str, int | float] = field(default_factory=dict)
    micro_batch: int | None = None
    ema_updates: int | None = None


@dataclass
class TrainState:
    """Position of a run between two steps.

    Attributes:
        step: steps done.
        samples: samples trained on, over all ranks.
        data: position in the data after the last batch trained on: one rank's part; in a checkpoint, all merged.
        health: data counters of all ranks since the run began, by source.
        evaluation_pending: whether the evaluation of this step was interrupted and has to be repeated.
    """

    step: int = 0
    samples: int = 0
    data: DataState = field(default_factory=DataState)
    health: dict[str, SourceHealth] = field(default_factory=dict)
    evaluation_pending: bool = False
    interval: IntervalState = field(default_factory=IntervalState)
    rollback: RollbackState = field(default_factory=RollbackState)
    early_stop: EarlyStopState = field(default_factory=EarlyStopState)
    train_step: StepState = field(default_factory=StepState)

    def to_json(self) -> dict[str, object]:
        """As nested dictionaries."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: object) -> TrainState:
        """The state that `to_json` wrote.

        Raises:
            ValueError: a value has another type.
        """
        return TypeAdapter(cls).validate_python(values)
