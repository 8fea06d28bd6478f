"""Time per stage of the data pipeline: measured, reported as the bottleneck, warned of once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipstream.data import sources
from clipstream.data.decode import train_transform
from clipstream.data.loader import loader as loading
from clipstream.data.loader import sampler
from clipstream.data.loader.stage_timing import IDLE, StageTimes, Stopwatch, sum_times
from clipstream.report.outputs import PATIENCE, DataStallWarning
from clipstream.storage import tar
from clipstream.training.trainer import NEGLIGIBLE
from tests.support.clocks import Clock
from tests.support.loaders import data, loader
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.trainer_runs import lap

DELAY = 0.02


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.lists(st.floats(1e-6, 1e3)), st.sampled_from([0.5, 0.9, 0.99]))
def test_sums_and_quantiles(first: list[float], second: list[float], share: float) -> None:
    parts = [StageTimes(), StageTimes()]
    for part, values in zip(parts, (first, second), strict=True):
        for value in values:
            part.add([lap("decode", value)])
    whole, values = sum_times(parts), sorted(first + second)
    exact = values[max(0, math.ceil(share * len(values)) - 1)]
    assert whole.quantile("decode", share) == pytest.approx(exact, rel=0.1)
    summary = whole.summary()["decode"]
    assert summary["count"] == len(values) and summary["seconds"] == pytest.approx(sum(values))


def test_a_stage_lasts_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    said: list[str] = []
    watch, times = Stopwatch(), StageTimes()
    for stage in ("read", "decode", "read", IDLE):
        watch.begin(stage, "a")
        said.append(watch.doing()[0])
        clock.advance(0.25)
    times.add([watch.take()])
    assert said == ["read a", "decode a", "read a", "idle a"]
    assert {stage: times.summary()[stage]["count"] for stage in times.buckets} == {"read": 2, "decode": 1}
    assert (times.seconds["read"], times.seconds["decode"]) == (0.5, 0.25) and times.longest() == "read"
    assert not watch.take().numbers


def test_what_is_being_done_is_told_and_safe_to_print() -> None:
    watch = Stopwatch()
    assert watch.doing() == ("start", 0.0)
    names = ["0.tar/a", "0.tar/\udcff\x1b[2J", "1.tar/" + "k" * 80_000, "beyond what is kept"]
    for method, first, second, said in (
        ("begin", "open", "0.tar", "open 0.tar"),
        ("touch", 1234, None, "open 0.tar (1,234 bytes came)"),
        ("begin", "order", "", "order"),
        ("begin", "read", "\udcff" + "é" * 2000, "read \\udcff" + "é" * 494),
        ("name", names, None, "read 0.tar/a"),
        ("at", "decode", 1, "decode 0.tar/\\udcff\\x1b[2J"),
        ("at", "read", 2, "read 1.tar/" + "k" * 494),
        ("at", "read", 3, "read ?"),
        ("begin", "tokenize", "", "tokenize"),
    ):
        getattr(watch, method)(*(one for one in (first, second) if one is not None))
        assert watch.doing()[0] == said


CLOCKS: list[Clock] = []  # of the test that runs, one of each process


def slowed(function: Callable[..., Any], delay: float) -> Callable[..., Any]:
    def slow(*args: Any, **more: Any) -> Any:
        CLOCKS[0].advance(delay)
        return function(*args, **more)

    return slow


def slow_transform(sample: Any) -> Any:
    """As a user's own."""
    CLOCKS[0].advance(DELAY)
    return sample


PLACES = {
    "open": (sources.Source, "open"),
    "order": (sampler.WindowSampler, "take"),
    "read": (tar.Shard, "load"),
    "decode": (train_transform.TrainTransform, "__call__"),
    "tokenize": (ByteTokenizer, "encode"),
}


@pytest.mark.parametrize(("workers", "stage"), [*enumerate([*PLACES, "transform", "decode"])])
def test_a_delay_is_found_in_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, stage: str
) -> None:
    CLOCKS[:] = [Clock(monkeypatch, shared=False)]
    shards = make_shards(tmp_path, [3] * 12)
    delay = DELAY * {"tokenize": 12, "open": 6}.get(stage, 1)  # of a batch, of a shard, of a sample
    source: dict[str, Any] = {"shards": shards}
    if stage == "transform":
        source["transform"] = f"{__name__}:slow_transform"
    else:
        place, name = PLACES[stage]
        monkeypatch.setattr(place, name, slowed(getattr(place, name), delay))
    with loader(data(None, workers=workers % 3, sources={"train": source})) as stream:
        for _ in range(6):
            next(stream)
        times = stream.take_times()
    assert times.longest() == stage
    at_once = 12 if stage == "order" else 1  # samples of an interval, at most
    assert 0.9 * delay < times.quantile(stage, 0.5) < 1.1 * at_once * delay
    assert {name for name, seconds in times.seconds.items() if seconds > 0} == {stage}


def test_what_waits_to_be_counted_does_not_grow_with_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_UNCOUNTED", 500)
    with loader(data(make_shards(tmp_path, [30] * 4), global_batch_size=100)) as stream:
        for _ in range(8):
            next(stream)
            assert sum(len(one.numbers) for one in stream._intervals) < 500
        assert stream.take_times().summary()["decode"]["count"] == 800


def write(sink: DataStallWarning, step: int, wait: float, seconds: float = 20.0) -> None:
    times = StageTimes()
    times.add([lap("decode", 0.25)])
    times.add([lap(IDLE, 0.5)])
    bottleneck = "training" if wait < NEGLIGIBLE else "decode"
    line = {"step": step, "data_wait": wait, "seconds": seconds, "bottleneck": bottleneck}
    sink.write({**line, "stages": times.summary()})


def test_waiting_is_warned_of_once_with_its_stage(capsys: pytest.CaptureFixture[str]) -> None:
    sink = DataStallWarning()
    write(sink, 10, 0.1)
    for step in range(20, 20 + 10 * (PATIENCE + 3), 10):
        write(sink, step, 0.9)
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "--workers" in said
    assert "90% of its time (step 40)" in said and "'decode', 2" in said
    write(sink, 100, 0.0)
    for step in range(110, 110 + 10 * PATIENCE, 10):
        write(sink, step, 0.9)
    assert "(step 130)" in capsys.readouterr().err
    sink = DataStallWarning()
    for step in range(10):  # a moment is no news
        write(sink, step, 0.9 if step % 3 else 0.0)
    for step in range(10):
        write(sink, step, 0.9, seconds=0.1)
    sink.write({"step": 3, "loss": 1.0})
    assert not capsys.readouterr().err
