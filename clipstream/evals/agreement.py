"""Agreement of the ranks that an evaluation failed on one of them, so that the others do not wait for it forever.

A rank that fails cannot reach the others, which are in some collective of the evaluator. `AgreeingWorld` therefore
exchanges a status before each collective: a rank that failed sends its failure there, once, and all ranks raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Failure:
    """An error on one rank.

    Attributes:
        rank: that rank.
        message: for users.
        kind: class of error that ends a process with the right exit code.
    """

    rank: int
    message: str
    kind: type[ClipstreamError] = ClipstreamError

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failure:
        """The failure that an error describes."""
        if isinstance(error, ClipstreamError):
            return cls(rank, str(error), type(error))
        return cls(rank, f"{type(error).__name__}: {error}")


class Failed(Exception):
    """An evaluation failed on some rank; raised on all of them."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Torn(RuntimeError):
    """A collective itself failed: the ranks can no longer agree. Its cause is the collective's error."""


class AgreeingWorld(World):
    """A world whose collectives raise `Failed` on all ranks if a rank sent a failure instead of taking part."""

    @classmethod
    def of(cls, world: World) -> AgreeingWorld:
        """The same rank among the same ranks."""
        return cls(**{field.name: getattr(world, field.name) for field in fields(World)})

    def settle(self, failure: Failure | None = None) -> None:
        """Exchange this rank's status with the others. Collective; any other collective matches it.

        Raises:
            Failed: some rank failed; has the failure of the first one.
        """
        try:
            statuses = World.gather_objects(self, failure)
        except Exception as error:
            raise Torn(str(error)) from error
        if failures := [status for status in statuses if status is not None]:
            raise Failed(failures[0])

    def gather_objects(self, value: Any) -> list[Any]:
        """See World."""
        found: list[Any] = self._together(super().gather_objects, value)
        return found

    def broadcast_object(self, value: Any) -> Any:
        """See World."""
        return self._together(super().broadcast_object, value)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See World."""
        found: torch.Tensor = self._together(super().all_reduce_sum, tensor)
        return found

    def gather_rows(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """See World."""
        found: torch.Tensor = self._together(super().gather_rows, tensor, counts)
        return found

    def _together(self, collective: Callable[..., Any], *args: Any) -> Any:
        if self.size == 1:
            return collective(*args)
        self.settle()
        try:
            return collective(*args)
        except Torn:
            raise
        except Exception as error:
            raise Torn(str(error)) from error
