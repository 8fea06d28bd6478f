"""Source types: built-in ones named by `type`, users' own, and what their errors become."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from clipstream.config.config_file import dump
from clipstream.config.settings import load
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import OpenShard, Source, SourceContext, SourceType, expand
from clipstream.data.sources.indexes import count_samples
from clipstream.errors import DataError, Dropped, SettingsError, ShardError
from clipstream.storage.tar import SampleRef, ShardIndex
from tests.support.loaders import data, loader
from tests.support.pictures import make_shards, picture


class Letters(SourceType):
    """Each item is four shards of three samples."""

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self.context = context

    def list_shards(self, spec: str) -> Any:
        return [f"{spec}{number}" for number in range(4)]

    def open(self, shard: str) -> Any:
        return OpenLetters()

    def num_samples(self, shard: str) -> int | None:
        return 3


class OpenLetters(OpenShard):
    def __init__(self) -> None:
        self.index = ShardIndex([SampleRef(str(number)) for number in range(3)])

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> Any:
        return {"jpg": picture(int(ref.key)), "txt": b"a letter"}


class NoIndex(OpenLetters):
    def __init__(self) -> None:
        self.index = [SampleRef("0")]  # type: ignore[assignment]


class Broken(Letters):
    """Of its shards the first cannot be opened, and of each other shard's samples the last alone can be used."""

    def open(self, shard: str) -> OpenShard:
        if shard.endswith("0"):
            raise KeyError("no shard")
        return BrokenShard()


class BrokenShard(OpenLetters):
    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> Any:
        if ref.key == "0":
            raise KeyError("no sample")
        if ref.key == "1":
            raise Dropped("own_reason")
        return super().load(ref, suffixes)


def settings(name: str, **more: Any) -> SourceSettings:
    return SourceSettings.model_validate({"type": f"{__name__}:{name}", "shards": ["a*", "b::c"], **more})


def loads(members: Any) -> Any:
    """A method `open` of shards whose samples have these members."""
    shard = type("Loads", (OpenLetters,), {"load": lambda self, ref, suffixes=None: members})
    return lambda self, name: shard()


def test_names_choose_the_type_unless_it_is_set(tmp_path: Path) -> None:
    tar, other = make_shards(tmp_path, [2, 1])
    odd = Path(other).rename(tmp_path / "odd.csv")
    with pytest.raises(DataError, match=r"odd\.csv"):
        Source(SourceSettings(shards=str(odd)))
    assert Source(SourceSettings(type="tar", shards=f"{tar}::{odd}")).names == [tar, str(odd)]
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    (tmp_path / "classes" / "cat" / "0.jpg").write_bytes(b"")
    named = Source(SourceSettings(type="folder", shards=str(tmp_path / "classes"))).names
    assert named == expand(f"folder:{tmp_path}/classes") == [f"folder:{tmp_path}/classes/cat"]
    with pytest.raises(SettingsError, match=r"expected a table with the suffix \.csv"):
        expand(tar, SourceSettings(type="table", shards=tar))


def test_a_type_of_ones_own_lists_and_opens_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(settings("Letters"))
    assert source.names == ["a*0", "a*1", "a*2", "a*3", "b::c0", "b::c1", "b::c2", "b::c3"]
    assert source.samples == 24 and source.summary() == "8 shards, 24 samples" and source.missing == []
    assert count_samples(source) == [3] * 8
    assert source.open("a*0").load(SampleRef("1"))["txt"] == b"a letter"
    monkeypatch.setattr(Letters, "num_samples", lambda self, shard: None)
    with pytest.raises(SettingsError, match=r"data\.sources\.a\.type: .*Letters does not know the samples of a\*0"):
        count_samples(Source(settings("Letters"), SourceContext(key="data.sources.a")))


def test_a_type_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"derive it from .*SourceType"):
        Source(settings("OpenLetters"))
    with pytest.raises(SettingsError, match="type 'zip' is not one of"):
        load(["--data.sources.train.type=zip", "--data.sources.train.shards=a"])
    monkeypatch.setattr(Letters, "list_shards", lambda self, spec: {}["no list"])
    with pytest.raises(SettingsError, match=r"KeyError.*no list.*test_registry\.py"):
        Source(settings("Letters"))


def test_what_a_type_returns_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed in (None, [], (), "a0", {"a0"}, {"a0": 3}, [Path("a0")], iter([]), 7):
        monkeypatch.setattr(Letters, "list_shards", lambda self, spec, listed=listed: listed)
        with pytest.raises(SettingsError, match=r":Letters: list_shards\('a\*'\) returned .*, not a list"):
            Source(settings("Letters"))
    monkeypatch.setattr(Letters, "list_shards", lambda self, spec: (f"{spec}{number}" for number in range(2)))
    source = Source(settings("Letters"))
    assert source.names == ["a*0", "a*1", "b::c0", "b::c1"], "a generator of names is a list"
    for members in (None, [], "a cat", {"txt": "a cat"}, {"jpg": b"", "txt": None}):
        monkeypatch.setattr(Letters, "open", loads(members))
        shard = source.open("a*0")
        for read in (shard.load, shard.look):
            with pytest.raises(Dropped, match=r":Letters: load returned .*: return members as bytes") as caught:
                read(SampleRef("0"))
            assert caught.value.reason == "source_error"
    for opened in (None, object(), NoIndex()):
        monkeypatch.setattr(Letters, "open", lambda self, name, opened=opened: opened)
        with pytest.raises(ShardError, match=r":Letters: open returned \w+ with \w+ as `index`: derive it from"):
            source.open("a*0")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_a_type_of_ones_own_are_counted(workers: int) -> None:
    limits = {"max_shard_failures": 1, "max_sample_failures": 1, "sampling": {"mode": "epoch"}}
    sources = {"train": {"type": f"{__name__}:Broken", "shards": "x"}}
    with loader(data(None, sources=sources, workers=workers, lanes=2, global_batch_size=6, **limits)) as stream:
        for _ in range(4):
            next(stream)
        health = stream.health.sources["train"]
    assert set(health.dropped) == {"source_error", "own_reason"}
    (fault,) = health.faults.items()
    assert fault[0] == "x0" and "source_error: KeyError('no shard') at test_registry.py" in fault[1]


def test_the_run_s_settings_keep_the_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    name = f"{__name__}:Letters"
    run = load([f"--data.sources.train.type={name}", "--data.sources.train.shards=[here, not here]"])
    assert run.data.sources["train"].type == name
    assert f"{tmp_path}/here" in dump(run) and "- not here" in dump(run)
