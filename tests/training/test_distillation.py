"""Training with a live teacher that has its own picture size and tokenizer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clipstream.cli.verbs.train import main
from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.pipeline import training_loader
from clipstream.distributed.world import World
from clipstream.models.execution.batch_features import Teacher
from clipstream.models.precision import autocast
from clipstream.models.towers import Towers
from tests.support import hubtree
from tests.support.loaders import IMAGE, data, digest
from tests.support.model_files import build
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.runs import MODEL, flags, furnish, go, lines, weights


class ReversedBytes(ByteTokenizer):
    """Another tokenizer: the bytes of a text from its end, and fewer of them."""

    context_length = 9

    def encode(self, texts: Any) -> Any:
        return super().encode([text[::-1] for text in texts])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a model's configuration, and a teacher with images and a tokenizer of its own."""
    folder = furnish(tmp_path_factory.mktemp("distill"))
    (folder / "words").mkdir()
    hubtree.write_tokenizer(folder / "words")
    text: Any = {**MODEL["text_cfg"], "context_length": 12, "hf_tokenizer_name": str(folder / "words")}
    config = {**MODEL, "vision_cfg": {**MODEL["vision_cfg"], "image_size": 24}, "text_cfg": text}
    (folder / "teacher.json").write_text(json.dumps(config))
    build(str(folder / "teacher.json"), seed=5).save_pretrained(folder / "teacher")
    build(str(folder / "model.json"), seed=5).save_pretrained(folder / "alike")
    return folder


def distilled(place: Path, name: str, *more: str, teacher: str = "teacher", steps: int = 8) -> list[str]:
    """A run that learns from a teacher alone."""
    alone = ("--distill-model", f"local-dir:{place}/{teacher}", "--distill.contrastive", "0")
    return flags(place, name, *alone, *more, steps=steps)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_adds_pixels_and_ids_of_the_teacher(tmp_path: Path, workers: int) -> None:
    settings = data(make_shards(tmp_path, [13, 7]), workers=workers)
    student, teacher = (ByteTokenizer(), IMAGE), (ReversedBytes(), ImageSpec((24, 24)))
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(training_loader(settings, ModelInputs(*parts), world=World(), seed=3))
            for parts in ((*student, *teacher), student, teacher)
        ]
        for _ in range(4):
            batch, own, wanted = (next(loader) for loader in loaders)
            assert own.teacher_pixels is None and own.teacher_ids is None
            assert digest([batch]) == digest([own])
            assert torch.equal(batch.teacher_pixels, wanted.pixels)  # the same crops at another size
            assert torch.equal(batch.teacher_ids, wanted.ids)


def test_the_chunks_of_a_teacher_give_the_same_features(place: Path) -> None:
    towers: Towers = build(f"local-dir:{place}/alike")
    teacher = Teacher(towers, "cpu", lambda: autocast("cpu", "fp32"))
    pixels, ids = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8), torch.randint(1, 99, (7, 8))
    batch = Batch(pixels, ids, torch.ones(7), ("",) * 7, torch.zeros(7), 0, 7, features={"other.image": torch.ones(7)})
    whole = teacher(batch).features
    assert whole.keys() == {"other.image", "teacher.image", "teacher.text"}
    for name, features in teacher(batch, 3).features.items():
        torch.testing.assert_close(features, whole[name], rtol=0, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in towers.parameters()) and not towers.training
    assert teacher.scale == pytest.approx(float(towers.clip.logit_scale.exp()))


def test_a_student_learns_from_a_teacher_of_other_images_and_tokens(place: Path) -> None:
    more = ("--distill.type", "affinity", "--distill.features", "16", "--distill.teacher-temperature", "0.02")
    go(distilled(place, "other", *more, "--lr", "1e-2", "--warmup", "0", steps=16))
    found = lines(place, "other")
    for key in ("loss", "loss_affinity", "loss_features"):
        assert sum(line[key] for line in found[-4:]) < 0.7 * sum(line[key] for line in found[:4]), key
    assert all(line["loss"] == pytest.approx(line["loss_affinity"] + 16 * line["loss_features"]) for line in found)
    assert set(weights(place, "other", 16)) == set(load_file(place / "alike" / "open_clip_model.safetensors"))


@pytest.mark.parametrize(("teacher", "weight", "told"), [("", "200", 0), ("", "2000", 1), ("start", "1", 0)])
def test_a_term_that_outweighs_the_others_is_told(
    place: Path, teacher: str, weight: str, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = f"local-dir:{place}/alike"
    more = ("--distill.contrastive", "1", "--distill.type", "relational", "--distill.features", weight,
            *(("--pretrained", alike, "--model.allow-mismatch", "true") if teacher else ()))  # fmt: skip
    go(flags(place, f"weight_{teacher}{weight}", "--distill-model", teacher or alike, *more, steps=1))
    assert capsys.readouterr().err.count("the loss: its term") == told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--distill-model", "ViT-B-32"], "distill.model: ViT-B-32 has no weights: set distill.pretrained"),
        (["--distill-model", "ViT-B-32", "--distill-pretrained", "opnai"], "'opnai' is neither a tag nor a file"),
    ],
)
def test_a_teacher_that_cannot_be_had(
    place: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(place, "none", *given)) == 2
    assert said in capsys.readouterr().err
    assert not (place / "runs" / "none").exists()
