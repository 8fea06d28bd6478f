"""The loader: scheduled batches, dropped samples and broken shards, evaluation, names that leave the order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clipstream.data.order.lanes import DataState
from clipstream.data.order_plan import stable_names
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from tests.support.loaders import data, digests, evaluation_of, loader
from tests.support.pictures import make_shards, picture
from tests.support.tars import write_tar

SCHEDULE = {"batch_schedule": [[7, 30], [20, 9]], "lanes": 6}


def test_scheduled_sizes_of_the_batch_are_those_of_every_layout(shards: list[str]) -> None:
    whole = loader(data(shards, **SCHEDULE))
    batches = [next(whole) for _ in range(25)]
    wanted = [12] * 7 + [30] * 13 + [9] * 5
    assert [len(batch) for batch in batches] == [batch.global_size for batch in batches] == wanted
    expected = digests(data(shards, **SCHEDULE), 1, 25)
    for ranks, workers in [(1, 2), (3, 0)]:
        assert digests(data(shards, workers=workers, **SCHEDULE), ranks, 25) == expected, (ranks, workers)
    parts = [loader(data(shards, **SCHEDULE), rank, 2) for rank in range(2)]
    for _ in range(9):
        for part in parts:
            next(part)
    state = DataState.merge([part.state() for part in parts])
    assert digests(data(shards, workers=2, **SCHEDULE), 3, 16, state) == expected[9:]
    settings = data("a.tar", **SCHEDULE)
    for samples in range(1, 700):
        steps = settings.steps_for(samples)
        held = [sum(settings.batch_size(step) for step in range(count)) for count in (steps - 1, steps)]
        assert held[0] < samples <= held[1]


def test_what_takes_a_dropped_samples_place_does_not_depend_on_how_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [b"no picture", b"", picture(1)[:100]]
    images = [bad[n % 3] if n % 5 == 0 else picture(n) for n in range(60)]
    texts = [f"text {n}" if n % 7 else "" for n in range(60)]
    pairs = enumerate(zip(images, texts, strict=True))
    write_tar(tmp_path / "a.tar", [{"__key__": f"{n:03d}", "jpg": image, "txt": text} for n, (image, text) in pairs])
    settings = data(str(tmp_path / "a.tar"), lanes=3, global_batch_size=16, max_sample_failures=1.0)
    many = digests(settings, 1, 30)
    monkeypatch.setattr("clipstream.data.pipeline.READ_BYTES", 1)
    assert digests(settings, 1, 30) == many
    monkeypatch.setattr("clipstream.data.pipeline.READ_SECONDS", -1.0)
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


def test_nothing_usable_ends_with_what_was_seen_and_the_flag_to_use(shards: list[str], tmp_path: Path) -> None:
    caption = {"type": "text", "key": "caption"}
    settings = data(None, workers=2, sources={"train": {"shards": shards, "caption": caption}})
    with pytest.raises(DataError) as caught, loader(settings) as stream:
        next(stream)
    for word in ("'train'", "no_caption", "txt", "json", "caption.en", "--caption-key", "--caption-json"):
        assert word in str(caught.value)
    missing = data(str(tmp_path / "{00000..00003}.tar"), workers=1)
    said = "none of the 4 shards tried(.|\n)*00000.tar: missing"
    with pytest.raises(DataError, match=said), loader(missing) as stream:
        next(stream)


@pytest.mark.parametrize(("key", "value"), [("prefetch", 10**9), ("prefetch", 10**20), ("global_batch_size", 2**63)])
def test_more_batches_than_memory_are_refused_with_the_settings(shards: list[str], key: str, value: int) -> None:
    with pytest.raises(SettingsError, match=r"GiB, more than the memory .* lower --data.prefetch, --data.global-batch"):
        loader(data(shards, workers=1, **{key: value}))


@pytest.mark.parametrize(("workers", "replaced"), [(0, False), (1, True)])
def test_a_tar_that_changes_during_training_is_an_error_that_names_it(
    tmp_path: Path, workers: int, replaced: bool
) -> None:
    """Also where it is replaced between two passes, and where failures may be many."""
    paths = make_shards(tmp_path, [40, 40])
    with loader(data(paths, workers=workers, lanes=1, max_sample_failures=1.0, max_shard_failures=1.0)) as stream:
        next(stream)  # both shards are open
        if replaced:
            (new,) = make_shards(tmp_path / "new", [41])
            os.replace(new, paths[0])
        else:
            os.truncate(paths[0], 2048)
        with pytest.raises(DataError, match=f"{paths[0]} has changed since its samples were listed"):
            for _ in range(60):
                next(stream)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (3, 1)])
def test_evaluation_sees_every_sample_once_or_the_first_ones(shards: list[str], ranks: int, workers: int) -> None:
    keys: list[str] = []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks)
        with evaluation_of(SourceSettings(shards=shards), world=world, workers=workers) as stream:
            for batch in stream:
                assert len(batch) == batch.pixels.shape[0] == batch.ids.shape[0] and bool((batch.weights == 1).all())
                keys += batch.keys
    assert sorted(key.split("/")[1] for key in keys) == [f"{i:06d}" for i in range(66)]
    with evaluation_of(SourceSettings(shards=shards), max_samples=17) as stream:
        assert sorted(key.split("/")[1] for batch in stream for key in batch.keys) == [f"{i:06d}" for i in range(17)]


def test_evaluation_takes_whole_data_sets_only(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "cut.tar").write_bytes(Path(shards[2]).read_bytes()[:20000])
    for name, said in (("gone.tar", r"of 7 shards, .*gone\.tar does not exist"), ("cut.tar", r"cut\.tar")):
        source = SourceSettings(shards=[*shards, str(tmp_path / name)])
        with pytest.raises(DataError, match=said), evaluation_of(source) as stream:
            list(stream)


def test_a_renewed_signature_and_a_moved_folder_leave_the_order(tmp_path: Path) -> None:
    paths = make_shards(tmp_path / "old", [13, 7])
    before = loader(data(paths)).fingerprint
    assert loader(data([str(Path(path).rename(tmp_path / Path(path).name)) for path in paths])).fingerprint == before
    names = [stable_names([f"https://host/{i}.tar?sig={sig}&se=2026" for i in range(3)]) for sig in ("A", "B")]
    assert names[0] == names[1] == ["0.tar", "1.tar", "2.tar"]
    assert len(set(stable_names([f"https://host/get?id={i}" for i in range(3)]))) == 3
