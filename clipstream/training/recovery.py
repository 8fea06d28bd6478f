"""Owns what becomes of a run whose loss or gradients are not finite: it goes on, goes back, or ends.

One such step is left out (see `step`): it changed nothing, and the run goes on with the next batch. After
`max_nonfinite` of them in a row the weights are at fault, and what a step changes (weights, moments, averages, the
scaler, random states) becomes that of the last good checkpoint again. The count of steps, and with it the position in
the data and the schedule, stays where it is, so that no batch is seen twice and every line of the metrics stands. Good
is a checkpoint whose weights gave a finite loss afterwards, so one from before the step that began the row.

Without one, or after `max_rollbacks` returns with no good checkpoint in between, the run ends. All of it follows from
results that are the same on all ranks, and its state is saved, so a resumed run does what it would have done.

It never reads a checkpoint, and never leaves out a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clipstream.errors import DivergedError
from clipstream.training.settings import TrainSettings
from clipstream.training.step import StepResult

REMEMBERED = 100  # saves: older ones are rarely kept
Restore = Callable[[Sequence[int]], int | None]


class Recovery:
    """Takes the result of each step.

    Args:
        settings: how many steps in a row, and how many returns; see `max_nonfinite` and `max_rollbacks` there.
        restore: called on all ranks with the steps of good checkpoints, to put one's content back: the newest that is
            still there. Gives its step; None where there is none.
        state: what `state()` gave, of a resumed run.

    Attributes:
        row: steps that were left out since the last finite one.
    """

    def __init__(self, settings: TrainSettings, restore: Restore, state: dict[str, Any] | None = None) -> None:
        self.settings, self.restore = settings, restore
        state = state or {}
        self.row: int = state.get("row", 0)
        self._before: int = state.get("before", 0)  # steps done when the row began
        self._saves: list[int] = state.get("saves", [])
        self._rollbacks: int = state.get("rollbacks", 0)  # without progress
        self._rolled_at: int = state.get("rolled_at", -1)

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "row": self.row,
            "before": self._before,
            "saves": list(self._saves),
            "rollbacks": self._rollbacks,
            "rolled_at": self._rolled_at,
        }

    def saved(self, step: int) -> None:
        """There is a checkpoint of so many steps."""
        self._saves = [*(saved for saved in self._saves if saved != step), step][-REMEMBERED:]

    def take(self, step: int, result: StepResult) -> int | None:
        """Count a step, and go back where it is one too many.

        Args:
            step: steps done with it.
            result: of it.

        Returns:
            The step of the checkpoint that the run went back to; None as a rule.

        Raises:
            DivergedError: it cannot go back, or not again.
        """
        if result.overflow:  # of fp16's factor: it tells nothing
            return None
        if not result.skipped:
            self.row = 0
            return None
        if self.row == 0:
            self._before = step - 1
        self.row += 1
        if self.row < self.settings.max_nonfinite:
            return None
        return self._go_back(step)

    def _go_back(self, step: int) -> int:
        what = f"step {step}: loss or gradients were not finite for {self.row} step{'s' * (self.row > 1)} in a row"
        good = [saved for saved in self._saves if saved < self._before]
        in_vain = 0 if max(good, default=-1) > self._rolled_at else self._rollbacks
        if in_vain >= self.settings.max_rollbacks:
            again = f", and to go back {in_vain} time{'s' * (in_vain > 1)} did not help" if in_vain else ""
            raise DivergedError(f"{what}{again}: {_ADVICE}")
        found = self.restore(good) if good else None
        if found is None:
            raise DivergedError(f"{what}, and there is no checkpoint from before to go back to: {_ADVICE}")
        self._saves = good  # the others are of weights that gave nothing finite
        self._rollbacks, self._rolled_at, self.row = in_vain + 1, step, 0
        return found


_ADVICE = (
    "lower --lr or give more --warmup, set --grad-clip-norm 1, or take a wider --precision (bf16 in place of fp16, or "
    "fp32); the samples of these steps are in nonfinite.jsonl in the run's folder"
)
