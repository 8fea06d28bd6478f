"""Owns how ranks agree that an evaluation failed on one of them, so that the others do not wait for it for ever.

A rank that fails cannot reach the others where they are: in some collective of the evaluator. So before each of them
the ranks tell one another that all is well, and a rank that failed tells that instead, once. It catches no error of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from clipstream.errors import ClipstreamError
from clipstream.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank.

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
        """What an error says."""
        if isinstance(error, ClipstreamError):
            return cls(rank, str(error), type(error))
        return cls(rank, f"{type(error).__name__}: {error}")


class Failed(Exception):
    """An evaluation failed on some rank; raised on all of them."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Torn(RuntimeError):
    """A collective broke off: the ranks can agree on nothing any more. The cause is its error."""


class AgreeingWorld(World):
    """A world whose collectives raise `Failed` on all ranks where one of them has told a failure instead."""

    @classmethod
    def of(cls, world: World) -> AgreeingWorld:
        """The same rank among the same ranks."""
        return cls(**{field.name: getattr(world, field.name) for field in fields(World)})

    def settle(self, failure: Failure | None = None) -> None:
        """Tell how this rank is, and hear how the others are. Collective, and matched by any other collective.

        Raises:
            Failed: some rank has failed; the first of them is told.
        """
        try:
            told = World.gather_objects(self, failure)
        except Exception as error:
            raise Torn(str(error)) from error
        if found := [one for one in told if one is not None]:
            raise Failed(found[0])

    def gather_objects(self, value: Any) -> list[Any]:
        """As World's."""
        found: list[Any] = self._together(super().gather_objects, value)
        return found

    def broadcast_object(self, value: Any) -> Any:
        """As World's."""
        return self._together(super().broadcast_object, value)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """As World's."""
        found: torch.Tensor = self._together(super().all_reduce_sum, tensor)
        return found

    def gather_rows(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """As World's."""
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
