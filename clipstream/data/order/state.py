"""The position in the order of samples, as a checkpoint keeps it.

The loader gives a DataState of its rank's lanes after each batch; the checkpoint writer merges the ranks' parts into
`TrainState.data`. The position of a lane does not depend on ranks and workers, so a run resumes on any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Fingerprint = dict[str, Any]  # setting or shards -> JSON value, of all that fixes the order; see order_fingerprint


@dataclass
class Cursor:
    """Position of a lane in one source: its next sample.

    Attributes:
        group: number of the lane's group of shards.
        window: number of the window in the group.
        position: number of the sample in the window.
        skipped: the group's shards, by their index in it, that could not be opened; a resumed run skips them too.
    """

    group: int = 0
    window: int = 0
    position: int = 0
    skipped: list[int] = field(default_factory=list)

    def copy(self) -> Cursor:
        """A copy that shares nothing with the cursor."""
        return replace(self, skipped=list(self.skipped))


@dataclass
class LaneState:
    """Position of a lane.

    Attributes:
        drawn: number of slots that the lane has filled or left empty.
        cursors: one per source, in the order of names.
    """

    drawn: int
    cursors: list[Cursor]


@dataclass(frozen=True)
class DataState:
    """Position of the data after a batch.

    Attributes:
        step: number of the next batch.
        lanes_total: L, lanes of all ranks.
        fingerprint: all that fixes the order of samples.
        salt: how often the order was restarted under other settings (--resume-approximate).
        restarted_at: number of the first batch of the present order.
        lanes: by number; those of one rank, or of all after `merge`.
    """

    step: int = 0
    lanes_total: int = 0
    fingerprint: Fingerprint = field(default_factory=dict)
    salt: int = 0
    restarted_at: int = 0
    lanes: dict[int, LaneState] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[DataState]) -> DataState:
        """The state of the run, from the states of all ranks."""
        lanes = {lane: state for part in parts for lane, state in part.lanes.items()}
        return replace(parts[0], lanes=dict(sorted(lanes.items())))
