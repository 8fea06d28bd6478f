"""Results equal clip-benchmark's on data in its layout, on 1 and 3 ranks; the layout as a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from clipstream.data.sources import expand
from clipstream.data.sources.tars import of_source
from clipstream.errors import SettingsError
from clipstream.evals.retrieval_and_loss import Retrieval
from clipstream.evals.settings import RetrievalSettings, ZeroShotSettings
from clipstream.evals.zero_shot import ZeroShot
from tests.support.clipbenchmark import (
    CLASSES,
    DEBIAN,
    TEMPLATES,
    batches,
    drawn,
    evaluate,
    fashion,
    kinds,
    retrieval,
    save_model,
    tokenize,
    write_benchmark,
    zero_shot,
)
from tests.support.evaluating import evaluated
from tests.support.hubserver import serve
from tests.support.ranks import run_ranks

COUNT = 150
NAMES = {  # ours -> clip-benchmark's
    "top1": "acc1", "top5": "acc5", "mean_per_class_recall": "mean_per_class_recall", "mAP": "mean_average_precision",
    **{f"text_to_image_R@{k}": f"image_retrieval_recall@{k}" for k in (1, 5, 10)},
    **{f"image_to_text_R@{k}": f"text_retrieval_recall@{k}" for k in (1, 5, 10)},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def written(folder: Path, samples: dict[str, Any]) -> dict[str, str]:
    return {kind: str(write_benchmark(folder / f"set_{kind}", some, kind=kind)) for kind, some in samples.items()}


def compare(ours: dict[str, Any], theirs: dict[str, dict[str, float]]) -> None:
    """Each of clip-benchmark's figures with ours."""
    for kind, figures in theirs.items():
        same = {NAMES[name]: value for name, value in ours[kind].items() if name in NAMES}
        assert same == pytest.approx(figures, abs=1e-6), kind


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """A set of each kind, and clip-benchmark's figures of open_clip's model and transform."""
    samples = kinds(drawn(COUNT), COUNT)
    clip, _, transform = open_clip.create_model_and_transforms(f"local-dir:{model}")
    clip.eval()
    of = {"": zero_shot, "multilabel": zero_shot, "retrieval": retrieval}
    figures = {kind: of[kind](clip, batches(some, transform), tokenize) for kind, some in samples.items()}
    return written(tmp_path_factory.mktemp("sets"), samples), figures


@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_clip_benchmark_on_any_number_of_ranks(model: Path, sets: Any, size: int) -> None:
    roots, expected = sets
    for found in run_ranks(size, evaluate, str(model), roots):
        compare(found, expected)
    one, several, captions = (found[kind] for kind in ("", "multilabel", "retrieval"))
    assert one["n"] == several["n"] == captions["n"] == COUNT and one["chance"] == 0.1
    assert captions["captions"] == sum(1 + i % 4 for i in range(COUNT))
    assert 0.1 < one["top1"] < one["top5"] < 1 and one["top1"] != one["mean_per_class_recall"]
    assert several["chance_mAP"] < several["mAP"] < 0.9
    assert captions["image_to_text_R@1"] < captions["image_to_text_R@10"] < 0.9


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN.is_dir(), reason="the package dataset-fashion-mnist is not installed")
def test_equal_to_clip_benchmarks_own_code_on_fashion_mnist(model: Path, tmp_path: Path) -> None:
    """On 9,500 of 10,000 images, so that classes are not of one size; `make reference` installs what it needs."""
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval

    roots, theirs = written(tmp_path, kinds(fashion(9500), 250)), {}
    clip, _, transform = open_clip.create_model_and_transforms(f"local-dir:{model}")
    for kind, root in roots.items():
        task = "zeroshot_retrieval" if kind == "retrieval" else "zeroshot_classification"
        dataset = builder.build_dataset(f"wds/{Path(root).name}", root=root, transform=transform, task=task)
        loader = torch.utils.data.DataLoader(dataset.batched(64), batch_size=None, shuffle=False, num_workers=0)
        given = clip.eval(), loader, tokenize
        if kind == "retrieval":
            theirs[kind] = zeroshot_retrieval.evaluate(*given, "cpu", amp=False, recall_k_list=[1, 5, 10])
        else:
            texts = dataset.classes, dataset.templates
            theirs[kind] = zeroshot_classification.evaluate(*given, *texts, "cpu", amp=False)
    assert {kind: len(found) for kind, found in theirs.items()} == {"": 3, "multilabel": 1, "retrieval": 6}
    for size in (1, 2, 3):
        for ours in run_ranks(size, evaluate, str(model), roots):
            compare(ours, theirs)


def test_the_layout_over_http(tmp_path: Path) -> None:
    write_benchmark(tmp_path / "org/set/main", drawn(7), shards=2)
    write_benchmark(tmp_path / "org/set/main", drawn(3, 7), split="train", shards=1)
    with serve(tmp_path) as (address, _):
        root = f"{address}/org/set/resolve/main"
        assert expand(f"benchmark:{root}") == [f"{root}/test/{n}.tar" for n in (0, 1)]
        assert expand(f"benchmark:{root}/#train") == [f"{root}/train/0.tar"]
        found = of_source([f"benchmark:{root}"])
        assert found is not None
        assert (found.classes, found.templates, found.kind) == (CLASSES, TEMPLATES, "classification")
        assert evaluated({"type": "zero_shot", "data": {"shards": f"benchmark:{root}"}})["n"] == 7


def test_the_layout_in_a_bucket() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe({"/sets/a/test/nshards.txt": b"2", "/sets/a/classnames.txt": b"cat\n dog \n\neel\n"})
    found = of_source("benchmark:memory://sets/a")
    assert found is not None and found.shards == [f"memory://sets/a/test/{n}.tar" for n in (0, 1)]
    assert found.classes == ["cat", "dog", "", "eel"] and found.templates is None  # a blank line counts, as there
    with pytest.raises(SettingsError, match=r"train/nshards\.txt is not there"):
        expand("benchmark:memory://sets/a#train")


def test_a_page_of_the_hub_stands_for_its_files() -> None:
    for page in ("https://huggingface.co/datasets/a/b", "https://huggingface.co/datasets/a/b/tree/main/"):
        found = of_source(f"benchmark:{page}")
        assert found is not None and found.root == "https://huggingface.co/datasets/a/b/resolve/main"


def test_what_is_no_benchmark_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"test/nshards\.txt is not there; CLIP_benchmark's layout is ROOT/test"):
        expand(f"benchmark:{tmp_path}")
    (tmp_path / "odd" / "test").mkdir(parents=True)
    (tmp_path / "odd" / "test" / "nshards.txt").write_text("two")
    with pytest.raises(SettingsError, match="holds 'two', not the number of tars"):
        expand(f"benchmark:{tmp_path}/odd")
    with pytest.raises(SettingsError, match="expected benchmark:ROOT"):
        expand("benchmark:")
    assert of_source("sets/a", "benchmark") == of_source("benchmark:sets/a")
    assert of_source("a.tar") is None and of_source(["benchmark:a", "b.tar"]) is None


def test_settings_go_before_the_benchmarks_own(tmp_path: Path) -> None:
    root = write_benchmark(tmp_path, drawn(4))
    made = ZeroShot(ZeroShotSettings.model_validate({"data": {"shards": f"benchmark:{root}"}}))
    assert made.classes == CLASSES and [t("x") for t in made.templates] == [t.format(c="x") for t in TEMPLATES]
    told = {"data": {"shards": f"benchmark:{root}"}, "classes": ["a", "b"], "templates": ["{}!"], "label": "json:n"}
    other = ZeroShot(ZeroShotSettings.model_validate(told))
    assert (other.classes, other.templates[0]("x"), other.labelling.label) == (["a", "b"], "x!", "json:n")
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    assert Retrieval(RetrievalSettings.model_validate({"data": {"shards": f"benchmark:{root}#test"}})).all is False
