"""Why a run ends, as the ranks tell it to each other and to the user."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from clipstream.errors import INTERRUPTED, ClipstreamError

KILLED = "ended without an error message: killed, or out of memory"
GONE = "gives no sign of life: killed, out of memory or stopped, or its host or network is down"


@dataclass(frozen=True)
class Cause:
    """Why a run ends."""

    rank: int  # where the error was raised
    code: int  # the exit code
    message: str  # for the user
    dead: list[int] = field(default_factory=list)  # ranks that ended without an error
    broken: bool = False  # whether a connection broke, and all ranks give signs of life
    stuck: bool = False  # whether another rank may be stuck, and should print its stack
    spare: bool = False  # whether the ranks meet in the spare store, as the first one does not answer

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Cause:
        """The cause that an error on `rank` is, or on the rank that the error names."""
        named = getattr(error, "rank", None)
        rank = rank if named is None else named
        if isinstance(error, ClipstreamError):
            return cls(rank, error.exit_code, str(error))
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, INTERRUPTED, "interrupted")
        if isinstance(error, RuntimeError) and "Timed out waiting" in str(error):  # torch has no type for it
            message = (
                "waited longer than --run.timeout for another rank, which is stuck or busy: see its stack above or in "
                f"its output ({first_line(str(error))})"
            )
            return cls(rank, 1, message, stuck=True)
        return cls(rank, 1, f"{type(error).__name__}: {error}")

    @classmethod
    def of_dead(cls, ranks: list[int], hosts: Sequence[str] = (), why: str = KILLED) -> Cause:
        return cls(ranks[0], 1, f"{name_ranks(ranks, hosts)} {why}", dead=ranks)

    @classmethod
    def from_json(cls, text: str) -> Cause:
        """The cause of which `json.dumps(asdict(cause))` is in the store."""
        return cls(**json.loads(text))


def name_ranks(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Ranks and their hosts, for messages: 'rank 2, rank 3 on node-b'."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(f" on {hosts[rank]}" if hosts else "", []).append(f"rank {rank}")
    return ", ".join(f"{', '.join(names)}{host}" for host, names in by_host.items())


def first_line(text: str) -> str:
    return text.partition("\n")[0]
