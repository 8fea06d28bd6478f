"""The position of a run: everything a checkpoint stores as JSON, so that a resumed run repeats the same bits.

The parts are owned and updated by the objects named in their docstrings; `Trainer.state()` collects them. All values
except `TrainState.data` are the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clipstream.data.order.lanes import DataState
from clipstream.training.settings import EarlyStopState
from clipstream.utils.section import Count

SourceCounts = dict[str, int | str | dict[str, int | str]]  # as clipstream.data.loader.health.merge_counts


@dataclass
class IntervalState:
    """Sums since the last training line, owned by `Trainer`."""

    loss: float = 0.0  # over steps that were not skipped
    grad_norm: float = 0.0  # over steps that changed the weights
    parts: dict[str, float] = field(default_factory=dict)  # as `loss`, of the losses that it adds up
    steps: Count = 0  # all steps
    overflows: Count = 0  # fp16 steps whose loss scale was too large
    skipped: Count = 0  # steps without a finite loss or gradient


@dataclass
class RollbackState:
    """Owned by `Rollback`."""

    nonfinite: Count = 0  # steps skipped in a row, up to now
    last_finite: Count = 0  # steps done before this row began
    applied: bool = False  # whether any step of the run changed the weights
    saves: list[Count] = field(default_factory=list)  # steps of checkpoints that were saved, newest last
    rollbacks: Count = 0  # rollbacks since the last checkpoint that proved good
    rolled_back_at: int = -1  # step of the last rollback; -1 for none


@dataclass
class StepState:
    """Owned by `TrainStep`."""

    precision: str = "auto"  # of the forward pass, after `auto` was resolved
    scaler: dict[str, int | float] = field(default_factory=dict)  # state of torch's GradScaler; empty without fp16
    # micro-batch size that `auto` found; it decides the last bits. None if all samples fit, or not auto
    micro_batch: Count | None = None
    ema_updates: Count | None = None  # updates of the averaged weights; None without averaging


@dataclass
class TrainState:
    """Position of a run between two steps."""

    step: Count = 0  # steps done
    samples: Count = 0  # samples trained on, over all ranks
    # position in the data after the last batch trained on: one rank's part; in a checkpoint, all merged
    data: DataState = field(default_factory=DataState)
    # data counters of all ranks since the run began, by source
    health: dict[str, SourceCounts] = field(default_factory=dict)
    evaluation_pending: bool = False  # whether the evaluation of this step was interrupted and has to be repeated
    interval: IntervalState = field(default_factory=IntervalState)
    rollback: RollbackState = field(default_factory=RollbackState)
    early_stop: EarlyStopState = field(default_factory=EarlyStopState)
    train_step: StepState = field(default_factory=StepState)
