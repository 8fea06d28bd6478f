"""What happens after steps without a finite loss or gradient: continue, roll back to a checkpoint, or end the run.

A single such step is skipped (see `step`): it changes nothing, and the run continues with the next batch. After
`max_nonfinite` of them in a row the weights are assumed broken: weights, moments, averages, loss scale and random
states return to the last good checkpoint. The step count, and with it the position in data and schedule, stays, so
that no batch is seen twice and every metrics line remains valid. A checkpoint is good if its weights gave a finite loss
later, so it must be older than the first step of the row.

Without a good checkpoint, or after `max_rollbacks` rollbacks with no newer good checkpoint in between, the run ends.
All decisions depend on results that are the same on all ranks, and the state is saved, so a resumed run decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from clipstream.errors import DivergedError
from clipstream.text import counted
from clipstream.training.settings import TrainSettings
from clipstream.training.state import RollbackState
from clipstream.training.step import StepResult

REMEMBERED = 100  # saves: older ones are rarely kept
Restore = Callable[[Sequence[int]], int | None]

_NEVER = (
    "nothing was trained or saved: look at the weights that --pretrained names and at your own loss, if there is one, "
    "and try --precision fp32"
)
_ADVICE = (
    "lower --lr or give more --warmup, set --grad-clip-norm 1, or take a wider --precision (bf16 in place of fp16, or "
    "fp32); the samples of these steps are in nonfinite.jsonl in the run's folder"
)


class Rollback:
    """Counts non-finite steps and restores a checkpoint when there are too many.

    Args:
        restore: loads the newest of the checkpoints with the given steps that still exists; returns its step, or None
            if there is none. Collective.
    """

    def __init__(self, settings: TrainSettings, restore: Restore, state: RollbackState | None = None) -> None:
        self.settings, self.restore = settings, restore
        self.state = state or RollbackState()

    def on_save(self, step: int) -> None:
        """Remember that a checkpoint of `step` was saved."""
        self.state.saves = [*(saved for saved in self.state.saves if saved != step), step][-REMEMBERED:]

    def on_step(self, step: int, result: StepResult) -> int | None:
        """Count a step, and roll back if it is one non-finite step too many.

        Args:
            step: steps done, this one included.

        Returns:
            The step of the checkpoint that was restored, or None.

        Raises DivergedError: a rollback is due and impossible, or did not help before.
        """
        state = self.state
        if result.overflow:  # says something about fp16's loss scale, nothing about the weights
            return None
        if not result.skipped:
            state.nonfinite, state.applied = 0, True
            return None
        if state.nonfinite == 0:
            state.last_finite = step - 1
        state.nonfinite += 1
        count = state.nonfinite
        if count < self.settings.max_nonfinite:
            return None
        what = f"step {step}: loss or gradients were not finite for {counted(count, 'step')} in a row"
        good = [saved for saved in state.saves if saved < state.last_finite]
        in_vain = 0 if max(good, default=-1) > state.rolled_back_at else state.rollbacks
        if in_vain >= self.settings.max_rollbacks:
            again = f", and to go back {counted(in_vain, 'time')} did not help" if in_vain else ""
            raise DivergedError(f"{what}{again}: {_ADVICE}")
        if not state.applied:
            raise DivergedError(f"{what}, from the first one on, so {_NEVER}")
        restored = self.restore(good) if good else None
        if restored is None:
            raise DivergedError(f"{what}, and there is no checkpoint from before to go back to: {_ADVICE}")
        state.saves = good  # the newer ones hold broken weights
        state.rollbacks, state.rolled_back_at, state.nonfinite = in_vain + 1, step, 0
        return restored

    def on_end(self, step: int) -> None:
        """Check a run that ended after `step` steps. Raises DivergedError: no step of the run changed the weights."""
        if step and not self.state.applied:
            raise DivergedError(f"none of {counted(step, 'step')} gave finite gradients, so {_NEVER}")

    def refuse_weights(self, step: int) -> NoReturn:
        """Raise DivergedError for weights that are not finite after the last step, and so cannot be saved."""
        raise DivergedError(f"the weights after step {step} are NaN or infinite, and are not saved: {_ADVICE}")
