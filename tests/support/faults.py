"""Runs on two hosts that a fault ends, and what is measured of them: who is named, when all end, and what is lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.forks import wait_until
from tests.support.hosts import Cluster, Rank, seconds_until
from tests.support.runs import flags, lines

STEPS = 40
MODEL, MOMENTS, RANDOM, STATE = "open_clip_model.safetensors", "optimizer.safetensors", "rng.pt", "state.json"


@dataclass
class Outcome:
    """What became of a run with a fault. Times are seconds since the fault; None: not within the limit."""

    last: int  # the last step in the run's metrics when the survivors had ended
    named: float | None = None  # until a survivor printed each dead rank
    host_named: float | None = None  # until a survivor printed the dead ranks' host
    ended: float | None = None  # until all survivors had ended
    codes: list[int | None] = field(default_factory=list)  # of all ranks
    saved: int = 0  # step of the latest checkpoint
    said: str = ""  # what the survivors printed after the fault

    @property
    def lost(self) -> int:
        """Steps that the next start does again."""
        return max(0, self.last - self.saved)

    def __str__(self) -> str:
        def shown(seconds: float | None) -> str:
            return "never" if seconds is None else f"{seconds:.1f} s"

        return (
            f"rank named {shown(self.named)}, host named {shown(self.host_named)}, ended {shown(self.ended)}, "
            f"codes {self.codes}, trained {self.last}, saved {self.saved}, lost {self.lost}"
        )


def command(place: Path, name: str, *more: str, steps: int = STEPS) -> list[str]:
    """A run's command line, which is also that of its next start; it saves at its end alone."""
    return flags(
        place, name, "--resume", "auto", "--run.deterministic", "true", "--checkpoint.every", "1000000", *more,
        steps=steps,
    )  # fmt: skip


def last_step(place: Path, name: str) -> int:
    """The last step in the run's metrics."""
    path = place / "runs" / name / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return max((int(step) for step in re.findall(r'^\{"step": (\d+), "samples"', text, re.M)), default=0)


def saved_step(place: Path, name: str) -> int:
    """The step of the checkpoint that the next start goes on from; 0 if there is none."""
    path = place / "runs" / name / "checkpoints/latest"
    return int(path.read_text().strip()[-8:]) if path.exists() else 0


def wait_for_steps(place: Path, name: str, ranks: Sequence[Rank], steps: int) -> None:
    """Wait until a run has done some steps; an error if a rank ends before."""
    for rank in ranks:
        wait_until(lambda: last_step(place, name) >= steps, rank.process)


def strike(
    place: Path,
    name: str,
    ranks: Sequence[Rank],
    dead: Collection[int],
    fault: Callable[[], object],
    *,
    at: int,
    delay: float = 0.0,
    limit: float = 120.0,
    named: Collection[int] | None = None,
) -> Outcome:
    """Wait until the run has done `at` steps and `delay` seconds, let the fault happen, and measure.

    Args:
        dead: the ranks that the fault takes; the others are the survivors.
        named: the ranks that are to be named, if others than these.
    """
    survivors = [rank for rank in ranks if rank.number not in dead]
    wait_for_steps(place, name, ranks, at)
    time.sleep(delay)
    output = {rank.number: Path(rank.process.stderr.name) for rank in survivors}
    before = {number: len(path.read_bytes()) for number, path in output.items()}
    fault()
    found = Outcome(last_step(place, name))
    named = dead if named is None else named
    hosts = {rank.host.name for rank in ranks if rank.number in named}
    began = time.monotonic()

    def look() -> bool:
        found.said = "".join(path.read_bytes()[before[number] :].decode() for number, path in output.items())
        if found.named is None and all(re.search(rf"\brank {number}\b", found.said) for number in named):
            found.named = time.monotonic() - began
        if found.host_named is None and all(re.search(rf"\b{host}\b", found.said) for host in hosts):
            found.host_named = time.monotonic() - began
        return all(rank.process.poll() is not None for rank in survivors)

    found.ended = seconds_until(look, limit)
    look()
    found.codes = [rank.process.poll() for rank in ranks]
    found.last, found.saved = max(found.last, last_step(place, name)), saved_step(place, name)
    return found


def finish(cluster: Cluster, argv: Sequence[str], ranks: int, **env: str) -> float:
    """Start the run's command again on a sound cluster, take the run to its end; the seconds until then."""
    cluster.end()
    cluster.mend()
    began = time.monotonic()
    started = cluster.start(argv, ranks, **env)
    codes = [rank.process.wait() for rank in started]
    assert codes == [0] * ranks, [rank.process.stderr.read().decode() for rank in started]
    cluster.end()
    return time.monotonic() - began


def differences(place: Path, one: str, other: str, step: int = STEPS) -> list[str]:
    """What differs between two runs' checkpoints of a step and their lines until then, bit by bit.

    The line of a step that was saved by survivors may be missing; the next one counts both then.
    """
    folders = [place / "runs" / name / "checkpoints" / f"step_{step:08d}" for name in (one, other)]
    found = []
    for file in (MODEL, MOMENTS):
        mine, theirs = (load_file(folder / file) for folder in folders)
        if mine.keys() != theirs.keys():
            found.append(f"{file}: names")
        found += [f"{file}: {name}" for name in mine.keys() & theirs.keys() if not same(mine[name], theirs[name])]
    if not same(*(torch.load(folder / RANDOM, weights_only=False) for folder in folders)):
        found.append(RANDOM)
    states = [json.loads((folder / STATE).read_text())["train"] for folder in folders]
    found += [f"{STATE}: {key}" for key in ("step", "samples", "data") if states[0][key] != states[1][key]]
    mine, theirs = ({line["step"]: line for line in lines(place, name)} for name in (one, other))
    again = {line["step"] for line in lines(place, one, "start")}
    merged = again | {number + 1 for number in again}
    differing = [number for number in range(1, step + 1) if mine.get(number) != theirs.get(number)]
    return found + [f"line of step {number}" for number in differing if number not in merged]


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool((one == other) if not hasattr(one, "shape") else (one == other).all())


@dataclass(frozen=True)
class Moment:
    """When a rank is killed: drawn, and the same for each number."""

    ranks: int
    rank: int
    at: int  # steps done
    delay: float  # s after them

    @classmethod
    def draw(cls, number: int, sizes: Sequence[int] = (2, 2, 3, 4)) -> Moment:
        draw = random.Random(number)
        ranks = draw.choice(sizes)
        return cls(ranks, draw.randrange(ranks), draw.randrange(1, STEPS - 8), draw.uniform(0, 0.25))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}, {self.delay * 1e3:.0f} ms after step {self.at}"


def kill(rank: Rank, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(rank.process.pid, number)
