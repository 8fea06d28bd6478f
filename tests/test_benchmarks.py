"""The benchmarks run, on small inputs: their figures are not looked at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from clipstream.precompute import main as precompute
from tests.support.forks import ROOT, run_fork
from tests.support.runs import furnish


def output_of(benchmark: str, *flags: str) -> str:
    """The output of a benchmark."""
    return run_fork(f"benchmarks/{benchmark}.py", *flags, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_input_path(tmp_path: Path) -> None:
    shards = sorted(str(path) for path in (furnish(tmp_path) / "pairs").glob("*.tar"))
    more = ("--size", "16", "--batch-size", "4", "--workers", "1", "--rounds", "1", "--seconds", "0.1")
    assert "clipstream" in output_of("input", *shards, "--streams", "clipstream", *more)


def test_the_loss() -> None:
    table = output_of("loss", "--sizes", "16", "--width", "8", "--rounds", "1")
    assert "clip" in table and "siglip" in table


def test_saving(tmp_path: Path) -> None:
    model = ("--model", str(furnish(tmp_path) / "model.json"), "--folder", str(tmp_path))
    assert "s a save" in output_of("saving", *model, "--batch", "4", "--rounds", "2")


def test_features(tmp_path: Path) -> None:
    sizes = ("--rows", "9000", "--large", "30000", "--width", "8", "--batch", "64", "--rounds", "1", "--batches", "1")
    table = output_of("features", *sizes, "--folder", str(tmp_path))
    assert "of memcpy" in table and "loader, 64 lanes" in table and "opening 30,000 rows" in table and "int8" in table


def test_precompute(tmp_path: Path) -> None:
    shards = sorted(str(path) for path in (furnish(tmp_path) / "pairs").glob("*.tar"))
    model = ("--model", str(tmp_path / "model.json"), "--batch-size", "8", "--workers", "1", "--rounds", "1")
    assert "of the bare loop" in output_of("precompute", *shards, *model)


def test_accuracy_of_stored_types(tmp_path: Path) -> None:
    shards, classes = str(furnish(tmp_path) / "val/{00000..00001}.tar"), tmp_path / "classes.txt"
    classes.write_text("one\ntwo\nthree\n")
    flags = ("--towers", "both", "--train-data", shards, "--model", str(tmp_path / "model.json"), "--workers", "1")
    stores = [str(tmp_path / dtype) for dtype in ("float32", "int8")]
    for store in stores:
        assert (
            precompute([store, *flags, "--dtype", Path(store).name, "--precision", "fp32", "--run.threads", "1"]) == 0
        )
    table = output_of("stored_accuracy", *stores, "--labels", shards, "--classes", str(classes)).splitlines()
    assert "zero_shot_top1" in table[0] and "(+0.000)" in table[1] and table[2].startswith("int8")


def test_text_buckets(tmp_path: Path) -> None:
    folder = furnish(tmp_path)
    shards = sorted(str(path) for path in (folder / "pairs").glob("*.tar"))
    more = ("--batch", "6", "--rounds", "1", "--chunks", "3", "--caption", "caption.en")
    table = output_of("text_buckets", *shards, "--model", str(folder / "model.json"), *more)
    assert (
        "one bucket" in table and "packed (auto)" in table and "3 chunks, 2 kept" in table and "a pass costs" in table
    )


def test_the_gpus_models(tmp_path: Path) -> None:
    """All that does not need a GPU: tiny models in place of the four, on the CPU."""
    shards, page = str(furnish(tmp_path) / "pairs/{00000..00003}.tar"), tmp_path / "page.md"
    page.write_text("# Figures\n\n<!-- benchmarks/gpu.py: table -->\nold\n<!-- benchmarks/gpu.py: end -->\nAfter it.\n")
    small = ("--device", "cpu", "--small", "--rounds", "1", "--steps", "1", "--warmup", "1", "--workers", "1")
    table = output_of("gpu", shards, *small, "--write", str(page), "--csv", str(tmp_path / "gpu.csv"))
    for model in ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-B-16-SigLIP"):
        for row in ("clipstream", "open_clip", "from shards"):
            (line,) = (line for line in table.splitlines() if line.startswith(f"| {model} | 8 | {row} |"))
            assert "not run" not in line
    text = page.read_text()
    assert text.startswith("# Figures") and text.endswith("After it.\n") and "old" not in text and table.strip() in text
    assert len((tmp_path / "gpu.csv").read_text().splitlines()) == 17


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_gpus_benchmark_needs_a_gpu() -> None:
    with pytest.raises(AssertionError, match="torch sees no GPU here"):
        output_of("gpu")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--models", "ViT-B-31"], "invalid choice: 'ViT-B-31'"),
        (["--steps", "0"], "--steps: invalid positive value: '0'"),
        (["--write", "absent.md"], "absent.md lacks the markers"),
    ],
)
def test_the_gpus_benchmark_checks_its_flags_before_it_measures(flags: list[str], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        output_of("gpu", "--device", "cpu", "--small", *flags)


def test_compile(tmp_path: Path) -> None:
    folder = furnish(tmp_path)
    shards = sorted(str(path) for path in (folder / "pairs").glob("*.tar"))
    small = ("--batch", "6", "--rounds", "1", "--steps", "2", "--curve-batch", "3", "--compile", "step")
    small += ("--backend", "eager", "--loss-samples", "4")  # inductor needs a C++ compiler
    more = ("--model", str(folder / "model.json"), "--caption", "caption.en")
    table = output_of("compile", *shards, *more, *small)
    assert "auto, channels-last" in table and "the same, compile step" in table and "loss, 4 samples" in table
    assert "largest relative difference" in table
