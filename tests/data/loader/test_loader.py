"""The loader: the same order for every layout, resume, health counts, workers that die or hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clipstream.data.build import training_loader
from clipstream.data.order.lanes import DataState
from clipstream.data.order_plan import stable_names
from clipstream.data.settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from tests.support.loaders import INPUTS, data, digest, digests, evaluation_of, loader
from tests.support.pictures import make_shards, picture
from tests.support.tars import write_tar

SCHEDULE = {"batch_schedule": [[7, 30], [20, 9]], "lanes": 6}


def test_scheduled_sizes_of_the_batch_are_those_of_every_layout(shards: list[str]) -> None:
    whole = loader(data(shards, **SCHEDULE))
    batches = [next(whole) for _ in range(25)]
    wanted = [12] * 7 + [30] * 13 + [9] * 5
    assert [len(batch) for batch in batches] == wanted
    assert [batch.global_size for batch in batches] == wanted
    expected = digests(data(shards, **SCHEDULE), 1, 25)
    for ranks, workers in [(1, 2), (2, 0), (3, 1)]:
        assert digests(data(shards, workers=workers, **SCHEDULE), ranks, 25) == expected, (ranks, workers)
    parts = [loader(data(shards, **SCHEDULE), rank, 2) for rank in range(2)]
    for _ in range(9):
        for part in parts:
            next(part)
    state = DataState.merge([part.state() for part in parts])
    assert digests(data(shards, workers=2, **SCHEDULE), 3, 16, state) == expected[9:]
    with pytest.raises(SettingsError, match="data order"):
        loader(data(shards, lanes=6), start=state)


def test_a_schedule_says_how_many_steps_hold_the_samples() -> None:
    settings = data("a.tar", **SCHEDULE)
    for samples in range(1, 700):
        steps = settings.steps_for(samples)
        held = [sum(settings.batch_size(step) for step in range(count)) for count in (steps - 1, steps)]
        assert held[0] < samples <= held[1]


def test_another_seed_gives_other_batches(shards: list[str]) -> None:
    settings = data(shards)
    other = training_loader(settings, INPUTS, world=World(), seed=4)
    assert digest([next(other)]) != digests(settings, 1, 1)[0]


def test_what_takes_a_dropped_samples_place_does_not_depend_on_how_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [b"no picture", b"", picture(1)[:100]]
    samples = [
        {
            "__key__": f"{n:03d}",
            "jpg": bad[n % 3] if n % 5 == 0 else picture(n),
            "txt": "" if n % 7 == 0 else f"text {n}",
        }
        for n in range(60)
    ]
    write_tar(tmp_path / "a.tar", samples)
    settings = data(str(tmp_path / "a.tar"), lanes=3, global_batch_size=16, max_sample_failures=1.0)
    many = digests(settings, 1, 30)
    monkeypatch.setattr("clipstream.data.loader.pipeline.READ_BYTES", 1)
    assert digests(settings, 1, 30) == many
    monkeypatch.setattr("clipstream.data.loader.pipeline.READ_SECONDS", -1.0)
    assert digests(settings, 1, 30) == many


def test_the_first_samples_may_be_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": f"text {i}"} for i in range(4)]
    del samples[2]["txt"]
    shard = write_tar(tmp_path / "a.tar", samples)
    with loader(data(str(shard), workers=2, lanes=2, global_batch_size=8, trace=4)) as stream:
        next(stream)
    said = capfd.readouterr().err
    assert said.count("trace ") == 4 and "trace 4 of 4: " in said and f" in {shard}\n" in said
    assert "  caption    'text " in said and "  image      JPEG " in said and "-> 16 x 16" in said
    assert "  ids        " in said and "  used       slot " in said and "  read       jpg " in said


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_usable_ends_with_what_was_seen_and_the_flag_to_use(shards: list[str], workers: int) -> None:
    caption = {"type": "text", "key": "caption"}
    settings = data(shards, workers=workers, sources={"train": {"shards": shards, "caption": caption}})
    with pytest.raises(DataError) as caught, loader(settings) as stream:
        next(stream)
    message = str(caught.value)
    for word in ("'train'", "no_caption", "txt", "json", "caption.en", "--caption-key", "--caption-json"):
        assert word in message, message


@pytest.mark.parametrize("workers", [0, 1])
def test_missing_shards_end_the_run_by_name(tmp_path: Path, workers: int) -> None:
    settings = data(str(tmp_path / "{00000..00003}.tar"), workers=workers)
    with pytest.raises(DataError, match="none of the 4 shards tried") as caught, loader(settings) as stream:
        next(stream)
    assert "00000.tar: missing" in str(caught.value)


def test_a_few_broken_shards_are_skipped_within_the_budget_and_told_once(
    shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.tar"
    for content in (b"<html>not found</html>" * 100, Path(shards[2]).read_bytes()[:9000]):
        broken.write_bytes(content)
        with loader(data([*shards, str(broken)], workers=1)) as stream:
            for _ in range(30):
                next(stream)
            (loss,) = stream.health.take_dropped()
        assert (loss.shard, loss.key) == (str(broken), None) and list(stream.health.sources["train"].faults) == [
            loss.shard
        ]
        assert loss.reason in ("not_a_tar", "missing_end", "truncated_member")
        assert capsys.readouterr().err.count("broken.tar") == 1
    strict = data([*shards, str(broken)], max_shard_failures=0)
    with pytest.raises(DataError, match="max-shard-failures"), loader(strict) as stream:
        for _ in range(20):
            next(stream)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_member_that_cannot_be_read_is_a_dropped_sample(tmp_path: Path, workers: int) -> None:
    paths = make_shards(tmp_path, [40, 40])
    with loader(data(paths, workers=workers, lanes=2, max_sample_failures=1.0)) as stream:
        next(stream)  # both shards are open
        os.truncate(paths[0], 2048)
        for _ in range(20):
            next(stream)
        health = stream.health.sources["train"]
    assert health.dropped["unreadable_member"] > 0
    assert health.read == health.used + health.dropped.total()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (3, 2)])
def test_evaluation_sees_every_sample_once(shards: list[str], ranks: int, workers: int) -> None:
    source = SourceSettings(shards=shards)
    keys: list[str] = []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks)
        with evaluation_of(source, world=world, workers=workers) as stream:
            for batch in stream:
                assert len(batch) == batch.pixels.shape[0] == batch.ids.shape[0] and bool((batch.weights == 1).all())
                keys += batch.keys
    assert sorted(key.split("/")[1] for key in keys) == [f"{i:06d}" for i in range(66)]


def test_evaluation_may_take_the_first_samples_only(shards: list[str]) -> None:
    with evaluation_of(SourceSettings(shards=shards), max_samples=17) as stream:
        assert sorted(key.split("/")[1] for batch in stream for key in batch.keys) == [f"{i:06d}" for i in range(17)]


def test_evaluation_takes_whole_data_sets_only(shards: list[str], tmp_path: Path) -> None:
    def read(*paths: str) -> int:
        source = SourceSettings(shards=list(paths))
        with evaluation_of(source) as stream:
            return sum(len(batch) for batch in stream)

    with pytest.raises(DataError, match=r"of 7 shards, .*gone\.tar does not exist"):
        read(*shards, str(tmp_path / "gone.tar"))
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(shards[2]).read_bytes()[:20000])
    with pytest.raises(DataError, match=r"cut\.tar"):
        read(*shards, str(cut))


def test_a_renewed_signature_and_a_moved_folder_leave_the_order(tmp_path: Path, shards: list[str]) -> None:
    moved = [str(Path(path).rename(tmp_path / Path(path).name)) for path in make_shards(tmp_path / "old", [13, 7])]
    first, second = loader(data(moved[:2])), loader(data(moved[:2]))
    assert first.fingerprint == second.fingerprint
    names = [stable_names([f"https://host/{i}.tar?sig={sig}&se=2026" for i in range(3)]) for sig in ("A", "B")]
    assert names[0] == names[1] == ["0.tar", "1.tar", "2.tar"]
    assert len(set(stable_names([f"https://host/get?id={i}" for i in range(3)]))) == 3
