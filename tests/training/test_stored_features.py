"""Training from a feature store gives the losses, checkpoints and evaluations of training from pictures."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import open_clip
import pytest
import torch

from clipstream.cli.verbs.precompute import main as precompute
from clipstream.cli.verbs.train import main
from tests.support import model_files
from tests.support.pictures import picture
from tests.support.ranks import end_ranks
from tests.support.runs import flags, furnish, lines, same_weights, train_on, weights
from tests.support.tars import write_tar

# Crops of whole square pictures, in which the transform of training draws nothing.
PLAIN = ("--data.augment.scale", "[1,1]", "--data.augment.ratio", "[1,1]")
MODES = {
    "resampled": (),
    "epoch": ("--data.sampling.mode", "epoch"),
    "indexed": ("--data.sampling.mode", "indexed", "--data.sampling.remainder", "pad"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a model with weights, and stores of the features of both of its towers."""
    folder = furnish(tmp_path_factory.mktemp("stored"))
    for shard, count in enumerate([21, 17, 19, 5]):
        samples = [
            {
                "__key__": f"{shard}{i:03d}",
                "jpg": picture(5 * (100 * shard + i)),
                "txt": f"picture {i} of shard {shard}",
            }
            for i in range(count)
        ]
        write_tar(folder / "pairs" / f"{shard:05d}.tar", samples)
    model_files.build(str(folder / "model.json"), seed=3).save_pretrained(folder / "model")
    for name, views in (("store", "1"), ("evaluated", "0")):
        assert precompute([str(folder / name), "--towers", "both", "--views", views, "--dtype", "float32",
                           *command(folder, "none", 1)]) == 0  # fmt: skip
    return folder


def command(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    model = ("--pretrained", f"local-dir:{folder}/model")
    return flags(folder, name, *model, *PLAIN, "--lr-scheduler", "const", *more, steps=steps)


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in lines(folder, name)]


@pytest.mark.parametrize("mode", MODES)
def test_losses_are_those_of_the_frozen_tower(mode: str, place: Path) -> None:
    assert main(command(place, f"live-{mode}", 4, "--lock-image", *MODES[mode])) == 0
    more = ("--image-features", f"{place}/store", *MODES[mode])
    assert main(command(place, f"stored-{mode}", 4, *more)) == 0
    assert losses(place, f"stored-{mode}") == pytest.approx(losses(place, f"live-{mode}"), rel=1e-6)
    live, stored = weights(place, f"live-{mode}", 4), weights(place, f"stored-{mode}", 4)
    assert live.keys() == stored.keys()
    assert all(torch.equal(live[name], stored[name]) for name in live if name.startswith("visual."))


def test_losses_with_stored_texts_are_those_of_the_frozen_text_tower(place: Path) -> None:
    assert main(command(place, "live-text", 3, "--lock-text")) == 0
    named = ("--optim.wd-exclude", '["*token_embedding*"]', "--force-custom-text")  # in the store, by another name
    assert main(command(place, "stored-text", 3, "--text-features", f"{place}/store", *named)) == 0
    assert losses(place, "stored-text") == pytest.approx(losses(place, "live-text"), rel=1e-6)


def test_open_clip_loads_the_checkpoint_of_a_run_from_a_store(place: Path) -> None:
    assert main(command(place, "loaded", 2, "--image-features", f"{place}/store")) == 0
    folder = place / "runs/loaded/checkpoints/step_00000002"
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    saved = weights(place, "loaded", 2)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(place: Path) -> None:
    stored = ("--image-features", f"{place}/store")
    assert main(command(place, "undisturbed", 6, *stored)) == 0
    assert main(command(place, "broken", 4, *stored)) == 0
    assert main(command(place, "broken", 6, *stored, "--resume", "latest")) == 0
    assert same_weights(weights(place, "undisturbed", 6), weights(place, "broken", 6))


def test_a_run_goes_on_from_the_store_to_pictures(place: Path) -> None:
    assert main(command(place, "switched", 2, "--image-features", f"{place}/store")) == 0
    assert main(command(place, "switched", 4, "--lock-image", "--resume", "latest")) == 0
    assert main(command(place, "never-switched", 4, "--lock-image")) == 0
    assert losses(place, "switched") == pytest.approx(losses(place, "never-switched"), rel=1e-6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(parallel: str, place: Path) -> None:
    more = ("--image-features", f"{place}/store", "--train.micro-batch-size", "5")
    assert main(command(place, f"one-{parallel}", 3, *more)) == 0
    argv = command(place, f"two-{parallel}", 3, *more, "--train.parallel", parallel)
    assert [end.code for end in end_ranks(2, train_on, argv)] == [0, 0]
    assert losses(place, f"two-{parallel}") == pytest.approx(losses(place, f"one-{parallel}"), rel=0, abs=1e-5)


def test_evaluations_load_the_tower(place: Path) -> None:
    more = ("--val-data", f"{place}/val/{{00000..00001}}.tar")
    assert main(command(place, "live-eval", 2, "--lock-image", *more)) == 0
    assert main(command(place, "stored-eval", 2, "--image-features", f"{place}/store", *more)) == 0
    live, stored = (lines(place, name, "image_to_text_R@1")[-1] for name in ("live-eval", "stored-eval"))
    assert stored == pytest.approx(live, abs=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--image-mean", "0.1 0.1 0.1"), "mean: "),
        (("--tokenizer.context-length", "6"), "tokenizer: "),
    ],
)
def test_another_transform_or_tokenizer_is_refused(
    more: tuple[str, ...], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(place, "refused", 2, "--image-features", f"{place}/store", *more)) == 2
    error = capsys.readouterr().err
    assert "store" in error and said in error


@pytest.mark.parametrize(
    ("base", "idle"),
    [
        (
            ["--lock-image", "--image-features={}/store"],
            ["model.image.precision=bf16", "model.image.cache_gib=0.01", "train.kept_micro_batches=2"],
        ),
        (
            ["--lock-image", "--data.augment.enabled=false"],
            ["data.augment.flip=0.5", "data.decoder=exact", "model.patch_dropout=0.5", "train.compile_mode=default",
             "data.sampling.remainder=pad"],
        ),
        (["--image-features={}/evaluated"], ["data.augment={flip: 0.5}", "data.decoder=exact"]),
        (["--data.sampling.mode=epoch"], ["data.sampling.replacement=false", "optim.text_pooler_own_group=true"]),
    ],
    ids=["stored", "plain", "evaluated", "epoch"],
)  # fmt: skip
def test_settings_without_effect_are_told(
    base: list[str], idle: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are those of a run without them."""
    base, names = [word.format(place) for word in base], [f"{kind}-{idle[0]}".replace(".", "-") for kind in "ab"]
    assert main(command(place, names[0], 3, *base)) == 0
    capsys.readouterr()
    assert main(command(place, names[1], 3, *base, *(f"--{setting}" for setting in idle))) == 0
    told = capsys.readouterr()
    keys = [setting.partition("=")[0] for setting in idle]
    assert [key for key in keys if not re.search(f"notice: --{key}: ", told.out + told.err)] == []
    assert same_weights(*(weights(place, name, 3) for name in names))


def test_another_tower_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_files.build(str(place / "model.json"), seed=4).save_pretrained(place / "other")
    argv = command(place, "refused", 2, "--image-features", f"{place}/store")
    argv[argv.index("--pretrained") + 1] = f"local-dir:{place}/other"
    assert main(argv) == 2
    assert "weights" in capsys.readouterr().err


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
