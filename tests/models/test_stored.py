"""Towers whose features come from a store: absent in training, whole in checkpoints and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.errors import SettingsError
from clipstream.features.manifest import encode_rows
from clipstream.models.settings import Tower
from clipstream.models.towers import Towers
from tests.support import model_files
from tests.support.steps import assert_close

PIXELS = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(1, 100, (3, 12), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
TOWERS: list[tuple[Tower, ...]] = [("image",), ("text",), ("image", "text")]


def both(folder: Path, names: tuple[Tower, ...], **config: Any) -> tuple[Towers, Towers]:
    """A model, and the same without some towers, whose weights are in `folder`."""
    name = model_files.write(folder, **config)
    whole, part = model_files.build(name).eval(), model_files.build(name, lock_image=True).eval()
    whole.save_pretrained(folder / "model")
    for tower in names:
        part.remove(tower, folder / "model" / "open_clip_model.safetensors")
    return whole, part


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("names", TOWERS)
def test_stored_rows_take_the_place_of_a_tower(names: tuple[Tower, ...], custom: bool, tmp_path: Path) -> None:
    """What is saved is the whole model, which is also there for an evaluation."""
    whole, part = both(tmp_path, names, custom_text=custom)
    with torch.no_grad():
        features = whole(PIXELS, IDS)
        images = encode_rows(features.image, "float32") if "image" in names else PIXELS
        texts = encode_rows(features.text, "float32") if "text" in names else IDS
        found = part(images, texts)
        assert [tensor.shape[0] for tensor in part.zeros(2, "cpu")] == [2, 2]
        assert part(*part.zeros(2, "cpu")).image.shape == (2, 24)
    torch.testing.assert_close(found[:2], features[:2], rtol=0, atol=1e-6)
    assert part.n_parameters < whole.n_parameters
    before = part.clip.state_dict().keys()
    left = {name.partition(".")[0] for name in before}
    assert ("visual" in left) == ("image" not in names)
    assert (("text" if custom else "transformer") in left) == ("text" not in names)
    assert_close(part.saved_tensors(), whole.clip.state_dict(), 0)
    assert dict(part.skip_stored(whole.clip.state_dict().items())).keys() == before
    for _ in range(2):
        with part.whole("cpu") as towers, torch.no_grad():
            assert torch.equal(towers.encode_image(PIXELS), whole.encode_image(PIXELS))
            # torch has another kernel for attention whose weights need no gradient.
            torch.testing.assert_close(towers.encode_text(IDS), whole.encode_text(IDS), rtol=0, atol=1e-6)
            trained = {name for name, parameter in towers.named_parameters() if parameter.requires_grad}
        assert part.clip.state_dict().keys() == before
        assert not any(name.startswith("clip.visual") for name in trained)


def test_a_damaged_model_of_the_store_is_found_before_training(tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    whole, file = model_files.build(name), tmp_path / "model" / "open_clip_model.safetensors"
    whole.save_pretrained(tmp_path / "model")
    content = file.read_bytes()
    for damaged, said in (
        (content[:1000], "cannot be read"),
        (content[:-40] + bytes(40), "has other weights"),
        (None, "cannot be read"),
    ):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(SettingsError, match=f"{said}.*clipstream precompute"):
            for tower in ("image", "text"):
                model_files.build(name).remove(tower, file)


def test_a_checkpoint_with_another_tower_is_refused(tmp_path: Path) -> None:
    whole, part = both(tmp_path, ("image",))
    state = whole.clip.state_dict()
    state["visual.proj"] = state["visual.proj"] + 1
    with pytest.raises(SettingsError, match=r"image tower is not the one of the feature store .* visual.proj differs"):
        dict(part.skip_stored(state.items()))
