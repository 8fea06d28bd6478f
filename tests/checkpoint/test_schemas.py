"""Files that are read back may hold anything: they are read, left out, or refused in a sentence."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.checkpoint.state import STATE, CheckpointMeta
from clipstream.checkpoint.store import Best, Marker
from clipstream.config.settings import load
from clipstream.data.order.lanes import Cursor, DataState, LaneState
from clipstream.errors import SettingsError
from clipstream.models.model_config import ModelConfig, check_config
from clipstream.training.optimizer_state import groups_from_json
from clipstream.training.state import TrainState
from tests.support.json_values import JSON, changed, places
from tests.support.model_files import TEXT, VIT
from tests.support.settings_files import planned

STATE_JSON = CheckpointMeta(
    TrainState(3, 24, DataState(3, 2, {"a": 1}, lanes={0: LaneState(12, [Cursor(1, 2, 3, [0])])}))
)
FILES: dict[str, Any] = {
    "state": json.loads(json.dumps(STATE_JSON.to_json())),
    "marker": {"serial": 1, "step": 2, "files": {"a/b": 3}, "checksums": {"a/b": "x"}},
    "best": {"metric": "val/loss", "value": 1.5, "serial": 2},
    "groups": [{"params": [0, 1], "t": {"__tensor__": [1.0], "dtype": "float32"}, "__changed__": ["t"]}],
    "model": {
        "model_cfg": {"embed_dim": 24, "vision_cfg": VIT, "text_cfg": {**TEXT, "hf_tokenizer_name": "a"}},
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "size": [32, 32], "interpolation": "bicubic"},
    },
}


def read(kind: str, text: str, folder: Path) -> None:
    """Read a file; errors other than SettingsError (ValueError of groups, which `load` names) are raised."""
    if kind == "state":
        meta = CheckpointMeta.from_json(text.encode(), Path("folder"))
        assert meta.train.step >= 0 and all(lane.drawn >= 0 for lane in meta.train.data.lanes.values())
    elif kind == "marker":
        marker = Marker.from_json(text.encode())
        assert marker is None or all(size >= 0 and ".." not in name for name, size in marker.sizes.items())
    elif kind == "best":
        Best.from_text(f"step_1\n{text}")
    elif kind == "groups":
        groups_from_json(text, torch.optim.SGD([torch.zeros(2, requires_grad=True)]))
    else:
        (path := folder / "model.json").write_text(text)
        config = ModelConfig.read(path)
        check_config("it", config.model_cfg, None)


@pytest.mark.parametrize("kind", list(FILES))
@given(data=st.data())
@settings(max_examples=150)
def test_any_value_anywhere_is_read_or_refused(kind: str, tmp_path: Path, data: st.DataObject) -> None:
    read(kind, json.dumps(FILES[kind]), tmp_path)
    at = data.draw(st.sampled_from(places(FILES[kind])))
    content = changed(FILES[kind], at, data.draw(JSON))
    if at and isinstance(at[-1], str) and data.draw(st.booleans()):
        del reduce(getitem, at[:-1], content)[at[-1]]
    text = json.dumps(content)
    try:
        read(kind, text if data.draw(st.integers(0, 9)) else text[: data.draw(st.integers(0, len(text)))], tmp_path)
    except (SettingsError, ValueError) as error:
        assert isinstance(error, SettingsError) or kind == "groups"


@pytest.mark.parametrize("shards", [None, -5, "x", [], {}])
def test_shards_of_the_shuffle_that_no_run_wrote_are_not_taken_over(shards: object) -> None:
    settings = load(["--train-data", "synthetic:", "--precision", "fp32"])
    odd = TrainState(data=DataState(lanes_total=1, fingerprint={"data.shuffle.shards": shards}))
    for state in (odd, TrainState(data=DataState(lanes_total=1))):
        assert planned(settings, state=state).data.shuffle == settings.data.shuffle


def test_files_of_a_checkpoint_are_below_it() -> None:
    for name in ("../x", "/x", "a/../../x", "a\0"):
        assert Marker.from_json(json.dumps({**FILES["marker"], "files": {name: 1}}).encode()) is None
    with pytest.raises(SettingsError, match=rf"{STATE} is invalid: train.step: .*not -5"):
        CheckpointMeta.from_json(json.dumps({**FILES["state"], "train": {"step": -5}}).encode(), Path())


@pytest.mark.parametrize(
    ("part", "changed"),
    [("vision_cfg", {"layers": [3, 4, 10**9, 3]}), ("text_cfg", {"width": 10**8, "heads": 1})],
)
def test_sizes_that_no_machine_holds_are_refused(part: str, changed: dict[str, Any]) -> None:
    model = json.loads(json.dumps(FILES["model"]["model_cfg"]))
    model[part] |= changed
    with pytest.raises(SettingsError, match=f"{part}.{next(iter(changed))}"):
        ModelConfig.of(model, "it")
