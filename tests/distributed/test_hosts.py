"""What a fault costs a run on two hosts, which are network namespaces: `make test-cluster`.

Every fault takes a run that saves at its end alone; the same command goes on, and its weights, moments, random states
and lines are those of a run that nothing happened to, bit by bit.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.faults import (
    STEPS,
    Moment,
    command,
    differences,
    finish,
    kill,
    last_step,
    saved_step,
    strike,
    wait_for_steps,
)
from tests.support.forks import TIMEOUT, wait_until
from tests.support.hosts import Cluster, Rank, missing, seconds_until, two_hosts
from tests.support.runs import MODEL, furnish, lines

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

NAMED = 30.0  # s within which dead ranks and their host are named
RESTART = 60.0  # s; torchrun gives a stopped rank 30 s more to end
HSDP = ("--train.parallel", "fsdp", "--train.fsdp-replicas", "2")
# What a step draws and keeps beside weights and moments.
VARIANTS = ((), ("--train.ema", "0.9"), ("--model", "{place}/drawing.json"), ("--train.micro-batch-size", "4"))


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


@pytest.mark.parametrize("number", range(30))
def test_a_killed_rank_costs_no_step(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str], number: int
) -> None:
    moment = Moment.draw(number)
    more = [word.format(place=place) for word in VARIANTS[number % len(VARIANTS)]]
    other, name = undisturbed(moment.ranks, *more), f"killed-{number}"
    ranks = cluster.start(command(place, name, *more), moment.ranks)
    fault = ranks[moment.rank]
    found = strike(place, name, ranks, [moment.rank], lambda: kill(fault), at=moment.at, delay=moment.delay)
    print(f"{moment}, {' '.join(more)}: {found}")
    wanted = [-signal.SIGKILL if rank == moment.rank else 75 for rank in range(moment.ranks)]
    assert (found.lost, found.codes) == (0, wanted), found.said
    assert found.named is not None and found.host_named is not None, found.said
    check(place, cluster, name, moment.ranks, other, *more)


@pytest.mark.parametrize("number", range(10))
def test_a_killed_rank_of_two_replicas_costs_no_step(
    place: Path, cluster: Cluster, undisturbed: Callable[..., str], number: int
) -> None:
    moment, name = Moment.draw(100 + number, sizes=[4]), f"replicas-{number}"
    other = undisturbed(4, *HSDP)
    ranks = cluster.start(command(place, name, *HSDP), 4)
    fault = ranks[moment.rank]
    found = strike(place, name, ranks, [moment.rank], lambda: kill(fault), at=moment.at, delay=moment.delay)
    print(f"{moment}: {found}")
    assert (found.lost, [code for code in found.codes if code != -signal.SIGKILL]) == (0, [75] * 3), found.said
    check(place, cluster, name, 4, other, *HSDP)


def stop(ranks: list[Rank], cluster: Cluster) -> None:
    kill(ranks[3], signal.SIGSTOP)


def cut(ranks: list[Rank], cluster: Cluster) -> None:
    cluster.set_link(False)


def lose_south(ranks: list[Rank], cluster: Cluster) -> None:
    cluster.hosts[1].lose_power()


def lose_north(ranks: list[Rank], cluster: Cluster) -> None:
    cluster.hosts[0].lose_power()


@pytest.mark.parametrize(
    ("fault", "dead"), [(stop, [3]), (cut, []), (lose_south, [2, 3]), (lose_north, [0, 1])],
    ids=["stopped", "link down", "host gone", "first host gone"],
)  # fmt: skip
@pytest.mark.parametrize("more", [(), HSDP], ids=["ddp", "hsdp"])
def test_hosts_that_vanish_are_named_and_cost_no_step(
    place: Path,
    cluster: Cluster,
    undisturbed: Callable[..., str],
    fault: Callable[[list[Rank], Cluster], None],
    dead: list[int],
    more: tuple[str, ...],
) -> None:
    """Where the link is down, each host names the other one; one of them saves."""
    name, other = f"{fault.__name__}-{len(more)}", undisturbed(4, *more)
    ranks, named = cluster.start(command(place, name, *more), 4), dead or range(4)
    found = strike(place, name, ranks, dead, lambda: fault(ranks, cluster), at=12, delay=0.05, named=named)
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


def lose_rank(cluster: Cluster) -> None:
    os.kill(cluster.ranks_of_torchrun()[1], signal.SIGKILL)


def lose_first_rank(cluster: Cluster) -> None:
    os.kill(cluster.ranks_of_torchrun()[0], signal.SIGKILL)


def stop_rank(cluster: Cluster) -> None:
    os.kill(cluster.ranks_of_torchrun()[1], signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "limit"), [(lose_rank, RESTART), (lose_first_rank, RESTART), (stop_rank, RESTART + 30)]
)
def test_torchrun_goes_on_by_itself(
    place: Path,
    cluster: Cluster,
    undisturbed: Callable[..., str],
    tmp_path: Path,
    fault: Callable[[Cluster], None],
    limit: float,
) -> None:
    name, other = f"torchrun-{fault.__name__}", undisturbed(2)
    logs = cluster.torchrun(command(place, name), 1, 3, tmp_path)
    for launcher in cluster.started:
        wait_until(lambda: last_step(place, name) >= 12, launcher)
    last = last_step(place, name)
    fault(cluster)
    again = seconds_until(lambda: last_step(place, name) > last + 2, 4 * RESTART)
    said = "".join(log.read_text() for log in logs)
    print(f"{name}: again after {again}")
    assert again is not None and again < RESTART, said
    for launcher in cluster.started:
        assert launcher.wait(TIMEOUT) == 0, said
    (_, second) = [line["step"] for line in lines(place, name, "start")]
    assert second >= last, said
    assert differences(place, name, other) == []
