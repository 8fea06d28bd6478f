"""The benchmarks run, on small inputs: their figures are not looked at."""

from __future__ import annotations

import csv
import importlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import webdataset

from clipstream.cli.verbs.precompute import main as precompute
from clipstream.config.settings import Settings
from clipstream.distributed.world import World
from tests.support.forks import ROOT, run_fork


def output_of(benchmark: str, *flags: str) -> str:
    return run_fork(f"benchmarks/{benchmark}.py", *flags, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def shards(place: Path) -> list[str]:
    return sorted(map(str, (place / "pairs").glob("*.tar")))


@pytest.fixture(scope="module")
def model(place: Path) -> tuple[str, str]:
    return "--model", str(place / "model.json")


@pytest.mark.ci
def test_the_input_path(shards: list[str]) -> None:
    more = ("--size", "16", "--batch-size", "4", "--workers", "1", "--rounds", "1", "--seconds", "0.1")
    assert "clipstream" in output_of("input", *shards, "--streams", "clipstream", *more)


def test_a_caption_of_the_json_takes_the_place_of_a_text(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suffix that occurs twice in a sample ends webdataset (0.2.86 to 1.0.2: "duplicate file name in tar file")."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module: Any = importlib.import_module("input")
    written = module.write_captioned(module.Work("own", shards[:1], 16, "caption.alt"), tmp_path / "own")
    found = list(webdataset.WebDataset(written, shardshuffle=False))
    wanted = list(webdataset.WebDataset(shards[:1], shardshuffle=False))
    assert [sample.keys() for sample in found] == [sample.keys() for sample in wanted] and len(found) > 3
    assert [one["txt"] for one in found] == [json.loads(one["json"])["caption"]["alt"][0].encode() for one in wanted]


@pytest.mark.ci
def test_seconds_to_a_level(place: Path, model: tuple[str, str], tmp_path: Path) -> None:
    for name, shards in (("emoji-train", "pairs"), ("emoji-val", "val")):
        (tmp_path / name).symlink_to(place / shards)
    (tmp_path / "small.yaml").write_text("data: {global_batch_size: 8, workers: 0}\ntrain: {steps: 4}\n")
    recipes = [f"{name}: {tmp_path / 'small.yaml'} {' '.join(model)}" for name in ("first", "second")]
    recipes[1] += " --stages.slow.until 2 --stages.slow.set '{optim.lr: 1.0e-5}'"
    words = ["--every", "2", "--seeds", "0", "1", "--level", "2", "--csv", str(tmp_path / "rows.csv")]
    words += [word for recipe in recipes for word in ("--recipe", recipe)]
    words += ["--before", f"second: touch {tmp_path}/before"]
    table = output_of("time_to_accuracy", "emoji", str(tmp_path), str(tmp_path / "out"), *words)
    assert table.count("0/2") == 2 and (tmp_path / "before").exists()
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [int(row["step"]) for row in rows] == [2, 4] * 4
    assert all(float(row["cpu_s"]) > 0 and int(row["samples"]) == 8 * int(row["step"]) for row in rows)
    words[words.index("--level") + 1] = "0"  # what is there is not run again
    assert output_of("time_to_accuracy", "emoji", str(tmp_path), str(tmp_path / "out"), *words).count("2/2") == 2


@pytest.mark.ci
def test_the_loss() -> None:
    table = output_of("loss", "--sizes", "16", "--width", "8", "--rounds", "1")
    assert "clip" in table and "siglip" in table


@pytest.mark.ci
def test_saving(model: tuple[str, str], tmp_path: Path) -> None:
    assert "s a save" in output_of("saving", *model, "--folder", str(tmp_path), "--batch", "4", "--rounds", "2")


@pytest.mark.ci
def test_features(tmp_path: Path) -> None:
    sizes = ("--rows", "9000", "--large", "30000", "--width", "8", "--batch", "64", "--rounds", "1", "--batches", "1")
    table = output_of("features", *sizes, "--folder", str(tmp_path))
    assert "of memcpy" in table and "loader, 64 lanes" in table and "opening 30,000 rows" in table and "int8" in table


@pytest.mark.ci
def test_precompute(shards: list[str], model: tuple[str, str]) -> None:
    small = ("--batch-size", "8", "--workers", "1", "--rounds", "1")
    assert "of the bare loop" in output_of("precompute", *shards, *model, *small)


@pytest.mark.ci
def test_images_of_a_group_find_each_other(shards: list[str], model: tuple[str, str]) -> None:
    asked = ("--queries", shards[0], "--gallery", shards[0].replace("00000", "*"), "--by", "n")
    assert "21 queries, 62 images, mAP 1.0000, R@1 1.0000" in output_of("groups", model[1], *asked)


@pytest.mark.ci
def test_accuracy_of_stored_types(place: Path, model: tuple[str, str], tmp_path: Path) -> None:
    data, classes = str(place / "val/{00000..00001}.tar"), tmp_path / "classes.txt"
    classes.write_text("one\ntwo\nthree\n")
    flags = ("--towers", "both", "--train-data", data, *model, "--workers", "0", "--precision", "fp32")
    stores = [str(tmp_path / dtype) for dtype in ("float32", "int8")]
    for store in stores:
        assert precompute([store, *flags, "--dtype", Path(store).name, "--run.threads", "1"]) == 0
    table = output_of("stored_accuracy", *stores, "--labels", data, "--classes", str(classes)).splitlines()
    assert "zero_shot_top1" in table[0] and "(+0.000)" in table[1] and table[2].startswith("int8")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("benchmark", "flags", "said"),
    [
        ("text_buckets", "--chunks 3", ["one bucket", "packed (auto)", "3 chunks, 2 kept", "a pass costs"]),
        (
            "compile",  # inductor needs a C++ compiler
            "--steps 2 --curve-batch 3 --compile step --backend eager --loss-samples 4",
            ["auto, channels-last", "the same, compile step", "loss, 4 samples", "largest relative difference"],
        ),
    ],
)
def test_ways_of_a_step(benchmark: str, flags: str, said: list[str], shards: list[str], model: tuple[str, str]) -> None:
    small = ("--batch", "6", "--rounds", "1", "--caption", "caption.en")
    table = output_of(benchmark, *shards, *model, *small, *flags.split())
    assert all(text in table for text in said)


@pytest.mark.ci
def test_the_gpus_models(tmp_path: Path) -> None:
    """All that does not need a GPU: tiny models, on the CPU."""
    page, file = tmp_path / "page.md", tmp_path / "gpu.csv"
    page.write_text("# Figures\n\n<!-- benchmarks/gpu.py: table -->\nold\n<!-- benchmarks/gpu.py: end -->\nAfter it.\n")
    small = ("--device", "cpu", "--small", "--rounds", "1", "--steps", "1", "--workers", "1", "--minutes", "20")
    ways = ("eager-packed", "open_clip", "compiled", "shards", "open_clip-compiled")
    models = ("--models", "ViT-B-32", "ViT-B-16-SigLIP", "--rows", *ways)
    printed = output_of("gpu", *small, *models, "--write", str(page), "--csv", str(file))
    with file.open(newline="") as opened:
        rows = {(row["model"], row["row"]): row for row in csv.DictReader(opened)}
    assert len(rows) == 10
    for (model, way), row in rows.items():
        if (model, way) == ("ViT-B-16-SigLIP", "eager-packed"):
            assert "no causal mask (SigLIP)" in row["note"] and not row["samples_per_s"]
            continue
        assert float(row["lowest"]) <= float(row["samples_per_s"]) <= float(row["highest"]) and row["batch"] == "8"
        assert bool(row["backward_ms"]) == (not way.startswith("open_clip"))
        padded = float(row["tflops_padded"]) / float(row["tflops"])
        assert padded == 1 if model.endswith("SigLIP") else padded > 1
        assert way == "shards" or not row["note"]
        assert int(row["warmup_steps"]) == 4 if way in ("eager-packed", "open_clip") else int(row["warmup_steps"]) >= 8
    text = page.read_text()
    assert text.startswith("# Figures") and text.endswith("After it.\n") and "old" not in text
    assert text.partition("-->\n")[2].partition("<!--")[0] in printed and "| ViT-B-16-SigLIP | 8 | compiled |" in text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/gpu.py, whose models have no weights."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu")
    batches = [SimpleNamespace(global_size=8)]
    model = SimpleNamespace(batches=batches, padded=None, build=None, world=World(), settings=Settings())
    monkeypatch.setattr(module, "ladder_of", lambda *_: model)
    monkeypatch.setattr(module, "make", lambda *_: ["x.tar"])
    return module


def test_each_row_of_the_gpus_is_in_the_file_before_the_next_one_is_measured(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "gpu.csv", []

    def measure(ladder: Any, rung: Any, seconds: float, args: Any, row: dict[str, Any]) -> None:
        seen.append((rung.name, file.read_text().splitlines(), seconds))
        row["note"] = f"{rung.name} was here"

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 0.0))
    ways = ["eager-padded", "compiled", "shards"]
    gpu.main(["--device", "cpu", "--models", "ViT-B-32", "--minutes", "1", "--csv", str(file), "--rows", *ways])
    assert [len(lines) for _, lines, _ in seen] == [1, 2, 3] and "compiled was here" in seen[2][1][2]
    assert [seconds for *_, seconds in seen] == [36, 36, 60]  # nothing was used: the last has all
    gpu.main(["--device", "cpu", "--models", "ViT-B-32", "--minutes", "0", "--csv", str(file), "--rows", *ways])
    assert len(seen) == 3 and file.read_text().count("no time is left") == 3


def test_kernels_of_the_gpus_are_added_by_name_and_counted_once_where_they_overlap(gpu: Any) -> None:
    kernels = [gpu.Kernel(0, 5000, "a"), gpu.Kernel(3000, 9000, "b"), gpu.Kernel(20000, 30000, "a")]
    assert gpu.busy_ms(kernels) == 19
    lines = [line.split() for line in gpu.by_time(kernels, steps=2).splitlines()]
    assert lines == [["7.50", "ms", "71.4%", "1", "x", "a"], ["3.00", "ms", "28.6%", "0", "x", "b"]]


def test_a_row_of_the_gpus_stops_when_its_time_is_over(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles_for_long(*_: object) -> None:
        while True:
            with suppress(Exception):  # as compilers have it
                time.sleep(0.01)

    ladder, row = gpu.ladder_of(), {"batch": 8}
    monkeypatch.setattr(ladder, "build", compiles_for_long)
    gpu.measure(ladder, gpu.RUNGS[0], 0.05, None, row)
    assert row["note"] == "stopped after 0 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_gpus_benchmark_checks_its_flags_and_that_there_is_a_gpu(
    gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, said in (
        ([], "no GPU is available to torch"),
        (["--device", "cpu", "--models", "ViT-B-31"], "invalid choice: 'ViT-B-31'"),
        (["--device", "cpu", "--steps", "0"], "--steps: invalid positive value: '0'"),
        (["--device", "cpu", "--write", "absent.md"], "absent.md lacks the markers"),
    ):
        with pytest.raises(SystemExit) as end:
            gpu.main(flags)
        assert said in f"{end.value} {capsys.readouterr().err}"
