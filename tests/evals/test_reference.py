"""Fashion-MNIST's test set with clip-benchmark's own reader and metrics, and with ours; `make reference`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch

from tests.support.clipbenchmark import DEBIAN, evaluate, fashion, kinds, save_model, tokenize, write_benchmark
from tests.support.ranks import run_ranks

KS = (1, 5, 10)
COUNT = 9500  # of 10,000 pictures, so that classes are not of one size
PAIRS = 250  # pictures with captions, few enough that a model which has learnt nothing finds some
NAMES = {
    **{"top1": "acc1", "top5": "acc5", "mean_per_class_recall": "mean_per_class_recall"},
    **{"mAP": "mean_average_precision"},
    **{f"text_to_image_R@{k}": f"image_retrieval_recall@{k}" for k in KS},
    **{f"image_to_text_R@{k}": f"text_retrieval_recall@{k}" for k in KS},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DEBIAN.is_dir(), reason="the package dataset-fashion-mnist is not installed"),
    pytest.mark.skipif(
        np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="clip-benchmark needs an older numpy: make reference"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A set of each kind, by its dataset_type.txt."""
    folder, samples = tmp_path_factory.mktemp("sets"), kinds(fashion(COUNT), PAIRS)
    return {kind: str(write_benchmark(folder / f"set_{kind}", some, kind=kind)) for kind, some in samples.items()}


@pytest.fixture(scope="module")
def theirs(model: Path, roots: dict[str, str]) -> dict[str, dict[str, float]]:
    """What clip-benchmark says, from its reading of the tars on."""
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval

    clip, _, transform = open_clip.create_model_and_transforms(f"local-dir:{model}")
    clip.eval()

    def by(root: str, task: str, run: Callable[..., dict[str, float]], *args: Any, **more: Any) -> dict[str, float]:
        dataset = builder.build_dataset(f"wds/{Path(root).name}", root=root, transform=transform, task=task)
        loader = torch.utils.data.DataLoader(dataset.batched(64), batch_size=None, shuffle=False, num_workers=0)
        texts = () if task == "zeroshot_retrieval" else (dataset.classes, dataset.templates)
        return run(clip, loader, tokenize, *texts, *args, amp=False, **more)

    found = {
        kind: by(roots[kind], "zeroshot_classification", zeroshot_classification.evaluate, "cpu")
        for kind in ("", "multilabel")
    }
    more = {"recall_k_list": list(KS)}
    found["retrieval"] = by(roots["retrieval"], "zeroshot_retrieval", zeroshot_retrieval.evaluate, "cpu", **more)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_figure_is_clip_benchmarks_own(
    model: Path, roots: dict[str, str], theirs: dict[str, dict[str, float]], size: int
) -> None:
    expected = {kind: len(found) for kind, found in theirs.items()}
    assert expected == {"": 3, "multilabel": 1, "retrieval": 6}
    for rank, ours in enumerate(run_ranks(size, evaluate, str(model), roots)):
        assert (ours[""]["n"], ours["retrieval"]["n"]) == (COUNT, PAIRS)
        for kind, found in theirs.items():
            for name, value in ours[kind].items():
                if name not in NAMES:
                    continue
                difference = abs(value - found[NAMES[name]])
                if rank == 0:
                    print(f"{size} ranks: {name} {value:.6f}, clip-benchmark {found[NAMES[name]]:.6f}")
                assert difference < 1e-6, (name, value, found)
                expected[kind] -= rank == 0
    assert not any(expected.values())  # each of its figures has been compared
