"""Data sets in CLIP_benchmark's layout, our figures of them, and its figures by scikit-learn and a copy of its formulas
(clip-benchmark 1.6.2, metrics/zeroshot_retrieval.py). `make reference` compares with its own code.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, balanced_accuracy_score, top_k_accuracy_score

from clipstream.distributed.world import World
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from tests.support.evaluating import CONFIG, context_of, evaluated
from tests.support.pictures import ByteTokenizer
from tests.support.tars import write_tar

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
TEMPLATES = ["a photo of a {c}.", "{c}", "the {c} of a shop"]
CAPTIONS = ("{i:03d} {c}", "{c:.4} {i:03d}", "no {i:03d} {c}", "{i:03d}: a {c}")
Samples = list[tuple[Image.Image, int]]


def save_model(folder: Path) -> Path:
    """A small model that open_clip loads, too, whose guesses spread over all classes, by more than float32 rounds."""
    config = folder / "tiny.json"
    # The last place of a text sees all of it; where the largest id is, as CLIP pools, most of these bytes would be cut.
    config.write_text(json.dumps({**CONFIG, "text_cfg": {**CONFIG["text_cfg"], "pool_type": "last"}}))  # type: ignore[dict-item]
    towers = build_towers(ModelSettings(name=str(config)), seed=4)
    with torch.no_grad():
        for weight in towers.clip.visual.parameters():
            weight *= 5 if weight.ndim > 1 else 1
    towers.save_pretrained(folder / "saved")
    return folder / "saved"


def tokenize(texts: list[str]) -> torch.Tensor:
    """The model's ids, as clip-benchmark takes them."""
    return torch.from_numpy(ByteTokenizer().encode(texts)).long()


def drawn(count: int, start: int = 0) -> Samples:
    """Pictures with a class each, that of the larger numbers more often."""
    found = []
    for i in range(start, start + count):
        draw = np.random.default_rng(i)
        label = int(draw.choice(len(CLASSES), p=np.arange(1, 11) / 55))
        plane = draw.integers(0, 90, (28, 28, 3), dtype=np.uint8)
        plane[2 * label : 2 * label + 8, 4:24, i % 3] += 120
        found.append((Image.fromarray(plane), label))
    return found


def fashion(count: int) -> Samples:
    """The first test pictures of Fashion-MNIST with their classes, where Debian's package is installed."""
    pictures = gzip.decompress((DEBIAN / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((DEBIAN / "t10k-labels-idx1-ubyte.gz").read_bytes())
    planes = np.frombuffer(pictures, np.uint8, offset=16).reshape(-1, 28, 28)
    classes = np.frombuffer(labels, np.uint8, offset=8)
    return [(Image.fromarray(planes[i]).convert("RGB"), int(classes[i])) for i in range(count)]


def several(number: int, label: int) -> np.ndarray[Any, Any]:
    """A picture's class, and others; one class is nobody's."""
    labels = np.zeros(len(CLASSES), dtype=np.int64)
    labels[[label, number % 7, (number * number) % 9]] = 1
    labels[3] = 0
    return labels


def write_benchmark(
    root: Path, samples: Sequence[tuple[Image.Image, Any]], *, kind: str = "", split: str = "test", shards: int = 3
) -> Path:
    """Write a set: of classes (int), of several labels (0 and 1 for each class), or of captions (a list of texts)."""
    for shard in range(shards):
        write_tar(root / split / f"{shard}.tar", [_members(i, *samples[i]) for i in range(shard, len(samples), shards)])
    (root / split / "nshards.txt").write_text(f"{shards}\n")
    if kind:
        (root / "dataset_type.txt").write_text(f"{kind}\n")
    if kind != "retrieval":
        (root / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
        (root / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    return root


def _members(number: int, picture: Image.Image, target: Any) -> dict[str, Any]:
    kind = ("webp", "png")[number % 2]
    out = io.BytesIO()
    picture.save(out, kind, lossless=True)
    sample = {"__key__": f"s{number:07d}", kind: out.getvalue()}
    if isinstance(target, int):
        return {**sample, "cls": str(target)}
    if isinstance(target, np.ndarray):
        labels = io.BytesIO()
        np.save(labels, target)
        return {**sample, "npy": labels.getvalue()}
    return {**sample, "txt": "\n".join(target)}


class _Loader(list[Any]):
    """Batches with what clip-benchmark asks of a data loader."""

    class dataset:
        classes = CLASSES


def batches(samples: Sequence[tuple[Image.Image, Any]], transform: Callable[[Image.Image], torch.Tensor]) -> _Loader:
    """Pictures and targets in batches of 64, as its collate functions make them."""
    loader = _Loader()
    for start in range(0, len(samples), 64):
        some = samples[start : start + 64]
        targets: Any = [target for _, target in some]
        if not isinstance(targets[0], list):
            targets = torch.from_numpy(np.array(targets))
        loader.append((torch.stack([transform(picture) for picture, _ in some]), targets))
    return loader


def zero_shot(clip: Any, loader: _Loader, tokenize: Callable[[list[str]], torch.Tensor]) -> dict[str, float]:
    """acc1, acc5 and mean_per_class_recall, or mean_average_precision."""
    unit = torch.nn.functional.normalize
    with torch.no_grad():
        rows = [
            unit(clip.encode_text(tokenize([t.format(c=c) for t in TEMPLATES])), dim=-1).mean(dim=0) for c in CLASSES
        ]
        classifier = unit(torch.stack(rows), dim=1)
        logits = torch.cat([unit(clip.encode_image(pixels), dim=-1) @ classifier.T for pixels, _ in loader])
    targets = torch.cat([target for _, target in loader])
    if targets.ndim == 2:
        present = targets.any(dim=0)  # one class is nobody's, whose precision is 0
        found = average_precision_score(targets[:, present], logits[:, present])
        return {"mean_average_precision": float(found * present.double().mean())}
    return {
        "acc1": float(top_k_accuracy_score(targets, logits, k=1, labels=range(len(CLASSES)))),
        "acc5": float(top_k_accuracy_score(targets, logits, k=5, labels=range(len(CLASSES)))),
        "mean_per_class_recall": float(balanced_accuracy_score(targets, logits.argmax(dim=1))),
    }


def retrieval(clip: Any, loader: _Loader, tokenize: Callable[[list[str]], torch.Tensor]) -> dict[str, float]:
    """image_retrieval_recall@k and text_retrieval_recall@k."""
    unit = torch.nn.functional.normalize
    captions = [texts for _, targets in loader for texts in targets]
    with torch.no_grad():
        images = torch.cat([unit(clip.encode_image(pixels), dim=-1) for pixels, _ in loader])
        texts = torch.cat([unit(clip.encode_text(tokenize(some)), dim=-1) for some in captions])
    owners = torch.arange(len(captions)).repeat_interleave(torch.tensor([len(some) for some in captions]))
    scores, right = texts @ images.T, owners[:, None] == torch.arange(len(images))
    found = {}
    for way, matrix, truth in (("image", scores, right), ("text", scores.T, right.T)):
        for k in (1, 5, 10):
            hit = truth.gather(1, matrix.topk(k, dim=1).indices).any(dim=1)
            found[f"{way}_retrieval_recall@{k}"] = float(hit.double().mean())
    return found


def kinds(pictures: Samples, pairs: int) -> dict[str, Any]:
    """A set of each kind, by its dataset_type.txt: of all pictures, and of the first of them with captions."""
    captions = [[CAPTIONS[k].format(i=i, c=CLASSES[pictures[i][1]]) for k in range(1 + i % 4)] for i in range(pairs)]
    return {
        "": pictures,
        "multilabel": [(picture, several(i, label)) for i, (picture, label) in enumerate(pictures)],
        "retrieval": [(pictures[i][0], texts) for i, texts in enumerate(captions)],
    }


@lru_cache
def _loaded(model: str) -> Towers:
    return build_towers(ModelSettings(name=f"local-dir:{model}"), seed=0)


def evaluate(world: World, model: str, roots: dict[str, str]) -> dict[str, dict[str, float]]:
    """What our evaluators say of each set."""
    found = {}
    for kind, root in roots.items():
        section = {"type": "retrieval" if kind == "retrieval" else "zero_shot", "batch_size": 64}
        context = context_of(world, towers=_loaded(model))
        found[kind] = evaluated({**section, "data": {"shards": f"benchmark:{root}"}}, context)
    return found
