"""What a fault costs a run on two hosts, which are network namespaces: `make test-cluster`.

Every fault takes a run that saves at its end alone; the same command goes on, and its weights, moments, random states
and lines are those of a run that nothing happened to, bit by bit. What is measured is printed: who is named, when all
end, and what is lost.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forks import TIMEOUT, wait_until
from tests.support.hosts import Cluster, Rank, missing, seconds_until, two_hosts
from tests.support.runs import MODEL, flags, furnish, lines

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

NAMED = 30.0  # s within which dead ranks and their host are named
HSDP = ("--train.parallel", "fsdp", "--train.fsdp-replicas", "2")
# What a step draws and keeps beside weights and moments.
VARIANTS = ((), ("--train.ema", "0.9"), ("--model", "{place}/drawing.json"), ("--train.micro-batch-size", "4"))

STEPS = 40
WEIGHTS, MOMENTS, RANDOM, STATE = "open_clip_model.safetensors", "optimizer.safetensors", "rng.pt", "state.json"


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
        place, name, "--workers", "1", "--resume", "auto", "--run.deterministic", "true",
        "--checkpoint.every", "1000000", *more, steps=steps,
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
    for file in (WEIGHTS, MOMENTS):
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_hosts() as made:
        yield made


@pytest.fixture(autouse=True)
def _sound(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.end()
    cluster.mend()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("place"))
    drawing = MODEL | {"vision_cfg": MODEL["vision_cfg"] | {"patch_dropout": 0.5}}
    (folder / "drawing.json").write_text(json.dumps(drawing))
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path, cluster: Cluster) -> Callable[..., str]:
    """The name of a run on some ranks with some flags that nothing happened to."""
    names: dict[tuple[object, ...], str] = {}

    def name(ranks: int, *more: str) -> str:
        if (ranks, more) not in names:
            names[ranks, more] = made = f"undisturbed-{len(names)}"
            finish(cluster, command(place, made, *more), ranks)
        return names[ranks, more]

    return name


def check(place: Path, cluster: Cluster, name: str, ranks: int, other: str, *more: str) -> None:
    """Take a run that was saved to its end, and compare it with another one."""
    saved = saved_step(place, name)
    finish(cluster, command(place, name, *more), ranks)
    assert [line["step"] for line in lines(place, name, "start")] == ([0, saved] if saved else [0])
    assert differences(place, name, other) == []


@pytest.mark.parametrize("number", range(40))
def test_a_killed_rank_costs_no_step(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str], number: int
) -> None:
    """The last ten runs keep two replicas of four shards."""
    replicas, name = number >= 30, f"killed-{number}"
    moment = Moment.draw(number, sizes=[4]) if replicas else Moment.draw(number)
    variant = HSDP if replicas else VARIANTS[number % len(VARIANTS)]
    more = [word.format(place=place) for word in variant]
    other = undisturbed(moment.ranks, *more)
    ranks = cluster.start(command(place, name, *more), moment.ranks)
    fault = ranks[moment.rank]
    found = strike(place, name, ranks, [moment.rank], lambda: kill(fault), at=moment.at, delay=moment.delay)
    print(f"{moment}, {' '.join(more)}: {found}")
    wanted = [-signal.SIGKILL if rank == moment.rank else 75 for rank in range(moment.ranks)]
    assert (found.lost, found.codes) == (0, wanted), found.said
    assert found.named is not None and found.host_named is not None, found.said
    check(place, cluster, name, moment.ranks, other, *more)


# The ranks that a fault takes, and what it does.
FAULTS: dict[str, tuple[list[int], Callable[[list[Rank], Cluster], object]]] = {
    "stopped": ([3], lambda ranks, cluster: kill(ranks[3], signal.SIGSTOP)),
    "link down": ([], lambda ranks, cluster: cluster.set_link(False)),
    "host gone": ([2, 3], lambda ranks, cluster: cluster.hosts[1].lose_power()),
    "first host gone": ([0, 1], lambda ranks, cluster: cluster.hosts[0].lose_power()),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("more", [(), HSDP], ids=["ddp", "hsdp"])
def test_hosts_that_vanish_are_named_and_cost_no_step(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str], fault: str, more: tuple[str, ...]
) -> None:
    """Where the link is down, each host names the other one; one of them saves."""
    dead, strikes = FAULTS[fault]
    name, other = f"{fault.replace(' ', '-')}-{len(more)}", undisturbed(4, *more)
    ranks, named = cluster.start(command(place, name, *more), 4), dead or range(4)
    found = strike(place, name, ranks, dead, lambda: strikes(ranks, cluster), at=12, delay=0.05, named=named)
    print(f"{name}: {found}")
    alive = [code for rank, code in enumerate(found.codes) if rank not in dead]
    assert found.lost == 0 and (alive == [75] * len(alive) or sorted(alive, key=str) == [1, 1, 75, 75]), found.said
    assert found.named is not None and found.named < NAMED, found.said
    assert found.host_named is not None and found.host_named < NAMED, found.said
    # A rank that is back writes nothing.
    saved = (place / "runs" / name / "checkpoints").stat().st_mtime_ns
    cluster.mend()
    for rank in dead:
        ranks[rank].process.send_signal(signal.SIGCONT)
    assert seconds_until(lambda: all(rank.process.poll() is not None for rank in ranks), 120) is not None
    assert (place / "runs" / name / "checkpoints").stat().st_mtime_ns == saved
    check(place, cluster, name, 4, other, *more)


def test_a_link_that_loses_a_fifth_of_the_packets_costs_no_step(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str]
) -> None:
    """The run goes on, or ends by itself with the ranks named and no step lost; it does not hang."""
    name, other = "lossy", undisturbed(4)
    ranks = cluster.start(command(place, name), 4)
    wait_for_steps(place, name, ranks, 5)
    cluster.lose_packets(0.2)
    began = time.monotonic()
    ended = seconds_until(lambda: all(rank.process.poll() is not None for rank in ranks), TIMEOUT)
    codes, last, saved = [rank.process.poll() for rank in ranks], last_step(place, name), saved_step(place, name)
    print(f"lossy: ended {time.monotonic() - began:.1f} s, codes {codes}, trained {last}, saved {saved}")
    assert ended is not None and saved == last and set(codes) in ({0}, {75})
    if saved < STEPS:
        check(place, cluster, name, 4, other)
    assert differences(place, name, other) == []


def test_a_link_that_is_down_for_ten_seconds_ends_nothing(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str]
) -> None:
    name, other = "blinking", undisturbed(4)
    ranks = cluster.start(command(place, name), 4)
    wait_for_steps(place, name, ranks, 12)
    cluster.set_link(False)
    time.sleep(10)
    cluster.mend()
    assert [rank.process.wait() for rank in ranks] == [0] * 4
    assert differences(place, name, other) == []


@pytest.mark.parametrize("number", range(10))
def test_a_second_kill_during_the_rescue_leaves_a_whole_checkpoint(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str], number: int
) -> None:
    moment, name = Moment.draw(200 + number, sizes=[3, 4]), f"twice-{number}"
    other = undisturbed(moment.ranks)
    ranks = cluster.start(command(place, name, "--checkpoint.every", "5"), moment.ranks)
    second = next(rank for rank in ranks[number % moment.ranks :] + ranks if rank.number != moment.rank)
    # A rescue takes 2 to 4 s, of which the agreement that a rank is dead takes 2.
    timer = threading.Timer(1.8 + 0.1 * number, lambda: second.process.kill())

    def fault() -> None:
        kill(ranks[moment.rank])
        timer.start()

    dead = [moment.rank, second.number]
    found = strike(place, name, ranks, dead, fault, at=6 + moment.at % 20, delay=moment.delay)
    timer.join()
    wait_until(lambda: second.process.poll() is not None)
    print(f"{moment}, then rank {second.number}: {found}")
    assert found.ended is not None and found.lost <= 5, found.said
    check(place, cluster, name, moment.ranks, other)
