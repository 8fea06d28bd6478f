"""Source types: built-in ones named by `type`, users' own, and what their errors become."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from clipstream.config.dump import dump
from clipstream.config.settings import load
from clipstream.data.build import training_loader
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.sources import TYPES, OpenShard, Source, SourceContext, SourceType, expand, source_type
from clipstream.data.sources.indexes import count_samples
from clipstream.distributed.world import World
from clipstream.errors import DataError, Dropped, SettingsError
from clipstream.storage.download import ShardError
from clipstream.storage.tar import SampleRef, ShardIndex
from clipstream.testing import check_source
from tests.support.loaders import INPUTS
from tests.support.pictures import make_shards, picture

HERE = f"{__name__}:"


class Letters(SourceType):
    """Each item is a shard of three samples."""

    counted = True

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self.context = context

    def list_shards(self, spec: str) -> Sequence[str]:
        return [f"{spec}{number}" for number in range(4)]

    def open(self, shard: str) -> OpenShard:
        return OpenLetters()

    def num_samples(self, shard: str) -> int | None:
        return 3 if self.counted else None


class OpenLetters(OpenShard):
    def __init__(self) -> None:
        self.index = ShardIndex([SampleRef(str(number)) for number in range(3)])

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        return {"jpg": picture(int(ref.key)), "txt": b"a letter"}


class Uncounted(Letters):
    counted = False


class NotListed(Letters):
    def list_shards(self, spec: str) -> Sequence[str]:
        raise KeyError("no list")


class NotOpened(Letters):
    def open(self, shard: str) -> OpenShard:
        if shard.endswith("0"):
            raise KeyError("no shard")
        return OpenLetters()


class NotLoaded(Letters):
    def open(self, shard: str) -> OpenShard:
        return Broken()


class Broken(OpenLetters):
    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        if ref.key == "0":
            raise KeyError("no sample")
        if ref.key == "1":
            raise Dropped("own_reason")
        return super().load(ref, suffixes)


def settings(name: str, **more: Any) -> SourceSettings:
    return SourceSettings.model_validate({"type": HERE + name, "shards": ["a*", "b::c"], **more})


def test_the_settings_name_every_built_in_type() -> None:
    assert set(SourceSettings.builtin) == {"auto", *TYPES}
    for name in TYPES:
        assert SourceType in source_type(name).__mro__


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
        expand(tar, "table")


def test_a_type_of_ones_own_lists_and_opens_its_shards() -> None:
    source = Source(settings("Letters"))
    assert source.names == ["a*0", "a*1", "a*2", "a*3", "b::c0", "b::c1", "b::c2", "b::c3"]
    assert source.samples == 24 and source.summary() == "8 shards, 24 samples" and source.missing == []
    assert count_samples(source) == [3] * 8
    assert source.open("a*0").load(SampleRef("1"))["txt"] == b"a letter"
    with pytest.raises(SettingsError, match=r"data\.sources\.a\.type: .*Uncounted does not know the samples of a\*0"):
        count_samples(Source(settings("Uncounted"), SourceContext(key="data.sources.a")))


def test_a_type_that_cannot_be_used_is_named() -> None:
    with pytest.raises(SettingsError, match=r"KeyError.*no list.*test_registry\.py"):
        Source(settings("NotListed"))
    with pytest.raises(SettingsError, match=r"derive it from .*SourceType"):
        Source(settings("OpenLetters"))
    with pytest.raises(SettingsError, match="type 'zip' is not one of"):
        load(["--data.sources.train.type=zip", "--data.sources.train.shards=a"])


class NoIndex(OpenLetters):
    def __init__(self) -> None:
        self.index = [SampleRef("0")]  # type: ignore[assignment]


def test_what_a_type_returns_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed in (None, [], (), "a0", {"a0"}, {"a0": 3}, [Path("a0")], iter([]), 7):
        monkeypatch.setattr(Letters, "list_shards", lambda self, spec, listed=listed: listed)
        with pytest.raises(SettingsError, match=r":Letters: list_shards\('a\*'\) returned .*, not a list"):
            Source(settings("Letters"))
    monkeypatch.setattr(Letters, "list_shards", lambda self, spec: (f"{spec}{number}" for number in range(2)))
    source = Source(settings("Letters"))
    assert source.names == ["a*0", "a*1", "b::c0", "b::c1"], "a generator of names is a list"
    for members in (None, [], "a cat", {"txt": "a cat"}, {"jpg": b"", "txt": None}):
        monkeypatch.setattr(OpenLetters, "load", lambda self, ref, suffixes=None, members=members: members)
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
    def read(name: str) -> Any:
        data = DataSettings.model_validate(
            {
                "global_batch_size": 6, "lanes": 2, "workers": workers,
                "max_shard_failures": 1, "max_sample_failures": 1,
                "sources": {"train": {"type": HERE + name, "shards": "x"}}, "sampling": {"mode": "epoch"},
            }
        )  # fmt: skip
        with training_loader(data, INPUTS, world=World(), seed=0) as loader:
            for _ in range(4):
                next(loader)
            return loader.health.sources["train"]

    health = read("NotLoaded")
    assert set(health.dropped) == {"source_error", "own_reason"}
    (fault,) = read("NotOpened").faults.items()
    assert fault[0] == "x0" and "source_error: KeyError('no shard') at test_registry.py" in fault[1]


def test_the_run_s_settings_keep_the_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    flags = [f"--data.sources.train.type={HERE}Letters", "--data.sources.train.shards=[here, not here]"]
    source = load(flags).data.sources["train"]
    assert (
        source.type == f"{HERE}Letters"
        and f"{tmp_path}/here" in dump(load(flags))
        and "- not here" in dump(load(flags))
    )


def test_the_check_passes_right_types_and_names_what_is_wrong() -> None:
    check_source(Letters, settings("Letters"))

    class Repeated(Letters):
        def list_shards(self, spec: str) -> Sequence[str]:
            return ["same"]

    class Miscounted(Letters):
        def num_samples(self, shard: str) -> int:
            return 4

    class Capital(Letters):
        def open(self, shard: str) -> OpenShard:
            shard_ = OpenLetters()
            shard_.load = lambda ref, suffixes=None: {"JPG": b""}  # type: ignore[method-assign]
            return shard_

    class Dotted(Letters):
        def open(self, shard: str) -> OpenShard:
            shard_ = OpenLetters()
            shard_.load = lambda ref, suffixes=None: {".jpg": b""}  # type: ignore[method-assign]
            return shard_

    class OneName(Letters):
        def list_shards(self, spec: str) -> Sequence[str]:
            return spec

    class Unopened(Letters):
        def open(self, shard: str) -> Any:
            return None

    class Unindexed(Letters):
        def open(self, shard: str) -> OpenShard:
            return NoIndex()

    for wrong, message in (
        (Repeated, "two shards have the same name"),
        (Miscounted, "num_samples gave 4, and it has 3"),
        (Capital, r"write the suffix 'JPG' in lower case"),
        (Dotted, r"write the suffix '\.jpg' .* without a dot before it"),
        (OneName, r"list_shards\('a\*'\) gave str: return a list"),
        (Unopened, r"open\('a\*0'\) gave NoneType: derive it from .*OpenShard"),
        (Unindexed, r"open\('a\*0'\)\.index is no ShardIndex"),
        (OpenLetters, "derive it from"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_source(wrong, settings("Letters"))  # type: ignore[arg-type]
