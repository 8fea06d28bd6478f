"""Frozen towers: no graph, a precision of their own, and the original weights in what is saved."""

from __future__ import annotations

import itertools
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from clipstream.errors import SettingsError
from clipstream.models.precision import autocast, prepare
from clipstream.models.settings import TOWERS, Precision, Tower
from clipstream.models.towers import Towers
from tests.support.model_files import build, write, write_text_tower

PIXELS = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[49406, 5, 49407, *[0] * 9], [49406, 7, 8, 9, 49407, *[0] * 7]]).repeat(2, 1)[:3].int()


def encode(towers: Towers, tower: Tower, precision: Precision = "fp32") -> torch.Tensor:
    """The tower's features in training."""
    with autocast("cpu", precision):
        return towers.encode_image(PIXELS) if tower == "image" else towers.encode_text(IDS)


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("tower", TOWERS)
def test_a_frozen_tower_computes_in_its_own_precision_in_any_run(tower: Tower, custom: bool, tmp_path: Path) -> None:
    name = write(tmp_path, custom_text=custom)
    exact = encode(build(name, **{f"lock_{tower}": True}).train(), tower)
    narrow = build(name, **{f"lock_{tower}": True}).train()
    prepare(narrow, "pure_bf16")
    expected = {"fp32": exact, "bf16": encode(narrow, tower, "pure_bf16")}
    assert not torch.equal(exact, expected["bf16"])
    torch.testing.assert_close(exact, expected["bf16"], rtol=0, atol=0.02)
    for own, run in itertools.product(("fp32", "bf16"), ("fp32", "bf16", "pure_bf16", "fp64")):
        towers = build(name, **{f"lock_{tower}": True}).train()
        towers.set_precision(tower, own)
        prepare(towers, run)
        found = encode(towers, tower, run)
        assert found.dtype == (torch.float64 if run == "fp64" else torch.float32) and not found.requires_grad
        # In float64, features are normalised anew.
        torch.testing.assert_close(found.float(), expected[own], rtol=0, atol=1e-6 if run == "fp64" else 0)


@pytest.mark.parametrize("tower", TOWERS)
def test_what_is_saved_has_the_weights_before_the_conversion(tower: Tower, tmp_path: Path) -> None:
    whole = build(write(tmp_path))
    towers = deepcopy(whole)
    getattr(towers, f"lock_{tower}")()
    towers.set_precision(tower, "bf16")
    for model in (towers, deepcopy(towers)):
        saved = model.saved_tensors()
        assert saved.keys() == whole.clip.state_dict().keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in whole.clip.state_dict().items())
    other = build(write(tmp_path), seed=1).clip.state_dict()
    towers.clip.load_state_dict(dict(towers.skip_stored(other.items())))
    assert all(torch.equal(towers.saved_tensors()[name], tensor) for name, tensor in other.items())
    lean = deepcopy(whole)
    getattr(lean, f"lock_{tower}")()
    lean.set_precision(tower, "bf16", keep=False)
    own = "visual." if tower == "image" else ("transformer.", "token_", "positional_", "ln_final.", "text_")
    assert lean.saved_tensors().keys() == {name for name in other if not name.startswith(own)}


def test_a_new_projection_is_trained_in_the_precision_of_training(tmp_path: Path) -> None:
    text = write_text_tower(tmp_path / "bert")
    towers = build(write(tmp_path, text_cfg=text), text_model=text["hf_model_name"], lock_text=True)
    with pytest.raises(SettingsError, match=r"model\.text\.precision: text\.proj\.weight of the text tower is trained"):
        towers.set_precision("text", "bf16")
