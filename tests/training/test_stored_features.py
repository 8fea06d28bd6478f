"""Training from a feature store gives the losses, checkpoints and evaluations of training from pictures."""

from __future__ import annotations

import shutil
from pathlib import Path

import open_clip
import pytest
import torch

from clipstream.cli.verbs.precompute import main as precompute
from clipstream.cli.verbs.train import main
from tests.support import model_files
from tests.support.pictures import picture
from tests.support.runs import flags, furnish, go, lines, same_weights, weights
from tests.support.tars import write_tar

# Crops of whole square pictures, in which the transform of training draws nothing.
PLAIN = ("--data.augment.scale", "[1,1]", "--data.augment.ratio", "[1,1]")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a model with weights, stores of the features of both of its towers, and a run without."""
    folder = furnish(tmp_path_factory.mktemp("stored"))
    for shard, count in enumerate([21, 17, 19, 5]):
        samples = [
            {"__key__": f"{shard}{i:03d}", "jpg": picture(5 * (100 * shard + i)), "txt": f"image {i} of shard {shard}"}
            for i in range(count)
        ]
        write_tar(folder / "pairs" / f"{shard:05d}.tar", samples)
    model_files.build(str(folder / "model.json"), seed=3).save_pretrained(folder / "model")
    for name, views in (("store", "1"), ("evaluated", "0")):
        assert precompute([str(folder / name), "--towers", "both", "--views", views, "--dtype", "float32",
                           *command(folder, "none", 1)]) == 0  # fmt: skip
    go(command(folder, "live", 4, "--lock-image", "--val-data", f"{folder}/val/{{00000..00001}}.tar"))
    return folder


def command(folder: Path, name: str, steps: int, *more: str, model: str = "model") -> list[str]:
    weights = ("--pretrained", f"local-dir:{folder}/{model}")
    return flags(folder, name, *weights, *PLAIN, "--lr-scheduler", "const", *more, steps=steps)


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in lines(folder, name)]


def test_a_run_is_that_of_the_frozen_tower(place: Path) -> None:
    """Losses, evaluations and checkpoints, which have the whole model."""
    val = ("--val-data", f"{place}/val/{{00000..00001}}.tar")
    go(command(place, "stored", 4, "--image-features", f"{place}/store", *val))
    assert losses(place, "stored") == pytest.approx(losses(place, "live"), rel=1e-6)
    live, stored = (lines(place, name, "image_to_text_R@1")[-1] for name in ("live", "stored"))
    timeless = [name for name in live["metrics"] if name != "seconds"]
    assert [stored[name] for name in timeless] == pytest.approx([live[name] for name in timeless], abs=1e-6)
    saved, expected = weights(place, "stored", 4), weights(place, "live", 4)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(expected[name], saved[name]) for name in saved if name.startswith("visual."))
    folder = place / "runs/stored/checkpoints/step_00000004"
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_losses_with_stored_texts_are_those_of_the_frozen_text_tower(place: Path) -> None:
    go(command(place, "live-text", 3, "--lock-text"))
    named = ("--optim.wd-exclude", '["*token_embedding*"]', "--force-custom-text")  # in the store, by another name
    go(command(place, "stored-text", 3, "--text-features", f"{place}/store", *named))
    assert losses(place, "stored-text") == pytest.approx(losses(place, "live-text"), rel=1e-6)


def test_a_run_goes_on_from_the_store_to_images(place: Path) -> None:
    go(command(place, "switched", 2, "--image-features", f"{place}/store"))
    go(command(place, "switched", 4, "--lock-image", "--resume", "latest"))
    assert losses(place, "switched") == pytest.approx(losses(place, "live"), rel=1e-6)


@pytest.mark.parametrize(
    ("more", "model", "said"),
    [
        (("--image-mean", "0.1 0.1 0.1"), "model", "mean: "),
        (("--tokenizer.context-length", "6"), "model", "tokenizer: "),
        ((), "other", "weights"),
    ],
)
def test_another_transform_tokenizer_or_tower_is_refused(
    more: tuple[str, ...], model: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_files.build(str(place / "model.json"), seed=4).save_pretrained(place / "other")
    assert main(command(place, "refused", 2, "--image-features", f"{place}/store", *more, model=model)) == 2
    error = capsys.readouterr().err
    assert "store" in error and said in error


def test_settings_without_effect_on_unaugmented_features_are_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are those of a run without them."""
    base = [f"--image-features={place}/evaluated"]
    go(command(place, "without", 3, *base))
    capsys.readouterr()
    go(command(place, "idle", 3, *base, "--data.augment={flip: 0.5}", "--data.decoder=exact"))
    told = "".join(capsys.readouterr())
    assert all(f"notice: --data.{key}: " in told for key in ("augment", "decoder"))
    assert same_weights(weights(place, "without", 3), weights(place, "idle", 3))


def test_a_damaged_store_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "store", tmp_path / "store")
    chunk = next((tmp_path / "store" / "image").rglob("*.safetensors"))
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    assert main(command(place, "damaged", 40, "--image-features", str(tmp_path / "store"))) == 3
    error = capsys.readouterr().err
    assert chunk.name in error and "clipstream precompute" in error
    chunk.unlink()
    assert main(command(place, "damaged-2", 40, "--image-features", str(tmp_path / "store"))) != 0
    assert chunk.name in capsys.readouterr().err
