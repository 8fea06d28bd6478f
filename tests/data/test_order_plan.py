"""The order fingerprint in a checkpoint: differences are listed, and an approximate resume shows other samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.order.lanes import Cursor, DataState, LaneState
from clipstream.data.pipeline import training_loader
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from tests.support.loaders import IMAGE, data, digest
from tests.support.pictures import ByteTokenizer, make_shards


class Lower(ByteTokenizer):
    """Another tokenizer of the same size."""

    def encode(self, texts: Any) -> Any:
        return super().encode([text.lower() for text in texts])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_shards(tmp_path_factory.mktemp("shards"), [130, 70, 200, 10])


def loader(
    settings: DataSettings, start: DataState | None = None, *, seed: int = 3, approximate: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Loader:  # fmt: skip
    inputs = ModelInputs(tokenizer or ByteTokenizer(), IMAGE)
    return training_loader(settings, inputs, world=World(), seed=seed, start=start, approximate=approximate)


def state_after(settings: DataSettings, steps: int, **more: Any) -> DataState:
    with loader(settings, **more) as stream:
        for _ in range(steps):
            next(stream)
        return stream.state()


def keys_of(settings: DataSettings, steps: int, *args: Any, **more: Any) -> list[str]:
    with loader(settings, *args, **more) as stream:
        return [key for _ in range(steps) for key in next(stream).keys]


def test_a_changed_setting_is_told_with_both_values(shards: list[str]) -> None:
    start = state_after(data(shards), 3)
    for changes, told in (
        ({"global_batch_size": 16}, "data.global_batch_size: 12 -> 16"),
        ({"batch_schedule": [[7, 16]]}, "data.batch_schedule: [] -> [[7, 16]]"),
        ({"lanes": 6}, "data.lanes: 8 -> 6"),
        ({"shuffle": {"window": 11, "shards": 1}}, "data.shuffle.window: 10 -> 11\n  data.shuffle.shards: 2 -> 1"),
        ({"lanes": 2, "sampling": {"mode": "epoch"}}, "data.sampling.mode: resampled -> epoch"),
    ):
        with pytest.raises(SettingsError) as caught:
            loader(data(shards, **changes), start)
        said = str(caught.value)
        assert f"\n  {told}\n" in said and "--resume-approximate: the run then continues at step 3" in said


def test_changed_shards_seeds_and_tokenizers_are_told(shards: list[str]) -> None:
    start = state_after(data(shards), 3)
    heavier = {"train": {"shards": shards[:3]}, "more": {"shards": shards[3:], "weight": 2}}
    with pytest.raises(SettingsError) as caught:
        loader(data(shards, sources=heavier), start, seed=4, tokenizer=Lower())
    said = str(caught.value)
    assert "run.seed: 3 -> 4" in said and "data.sources.train.shards: 4, named " in said
    assert "data.sources.more.shards: none -> 1, named " in said and "data.sources.more.weight: none -> 2.0" in said
    assert said.count("tokenizer: 256 tokens, 16 a text, of kind ") == 1


def test_going_on_approximately_shows_other_samples_at_the_same_step(
    shards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start, changed = state_after(data(shards), 3), data(shards, global_batch_size=16)
    with loader(changed, start, approximate=True) as stream:
        batch = next(stream)
        assert (batch.step, len(batch)) == (3, 16)
        after = stream.state()
        following = [digest([next(stream)]) for _ in range(4)]
    said = capsys.readouterr().err
    assert "warning: --resume-approximate: from step 3 on, the data start anew, in a different order" in said
    assert "data.global_batch_size: 12 -> 16" in said
    fresh = keys_of(changed, 8)
    assert keys_of(changed, 8, start, approximate=True) != fresh
    # The new order is one that is gone on with exactly, and a further change makes a further one.
    with loader(changed, after) as stream:
        assert [digest([next(stream)]) for _ in range(4)] == following
    again = keys_of(data(shards), 8, after, approximate=True)
    assert again not in (keys_of(data(shards), 8), keys_of(data(shards), 8, start))


def test_without_a_change_and_with_another_tokenizer_alone_the_data_stay_where_they_were(
    shards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start, expected = state_after(data(shards), 3), keys_of(data(shards), 8)[36:]
    assert keys_of(data(shards), 5, start, approximate=True) == expected and capsys.readouterr().err == ""
    with pytest.raises(SettingsError, match="the data continue at their position"):
        loader(data(shards), start, tokenizer=Lower())
    assert keys_of(data(shards), 5, start, approximate=True, tokenizer=Lower()) == expected


@pytest.mark.parametrize("mode", ["resampled", "epoch"])
def test_nothing_is_replayed_however_far_a_run_has_come(mode: str, shards: list[str], tmp_path: Path) -> None:
    """To replay 10^12 steps takes years."""
    settings = data(shards, sampling={"mode": mode}, lanes=4)
    start = state_after(settings, 1)
    far = {lane: LaneState(10**12, [Cursor(10**12, 1, 3)]) for lane in start.lanes}
    with loader(settings, replace(start, step=10**12, lanes=far)) as stream:
        batch = next(stream)
        health = stream.health.sources["train"]
    assert batch.step == 10**12 and health.read == 12 == len(batch)
