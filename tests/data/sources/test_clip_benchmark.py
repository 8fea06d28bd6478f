"""Data sets of the Hub by name: CLIP_benchmark's layout and Parquet, read remotely or downloaded."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.support.clipbenchmark import CLASSES, drawn, write_benchmark
from tests.support.evaluating import CONFIG
from tests.support.forks import ROOT
from tests.support.hubserver import Behaviour, serve
from tests.support.image_files import save
from tests.support.ranks import TIMEOUT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SUITE = """
evals:
  cars:
    type: zero_shot
    data: {shards: 'benchmark:${CLIPSTREAM_EVALS}/wds_cars'}
  pairs:
    type: retrieval
    data: {shards: 'benchmark:${CLIPSTREAM_EVALS}/wds_pairs'}
    fetch: ask for it
  both: {type: mean, of: {cars: top1, pairs: text_to_image_R@1}}
"""
FLAGS = "--model tiny.json --tokenizer tests.tools.test_evaluate:Bytes --model.allow-mismatch --device cpu --workers 1"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets in CLIP_benchmark's layout, and one of Parquet."""
    folder: Path = tmp_path_factory.mktemp("served")
    org = folder / "datasets/clip-benchmark"
    pictures = drawn(30)
    write_benchmark(org / "wds_cars" / COMMIT, pictures)
    write_benchmark(org / "wds_cars" / COMMIT, pictures[:3], split="train", shards=1)
    pairs = [(picture, [f"{i} a", CLASSES[label]]) for i, (picture, label) in enumerate(pictures)]
    write_benchmark(org / "wds_pairs" / COMMIT, pairs, kind="retrieval", shards=1)
    rows = [{"image": {"bytes": save(picture), "path": None}, "label": label} for picture, label in pictures[:9]]
    data = folder / "datasets/someone/table" / COMMIT / "data"
    data.mkdir(parents=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), data / "test-0.parquet")
    for home in folder.glob("datasets/*/*"):
        (home / "main").symlink_to(COMMIT)
    return folder


@pytest.fixture
def hub(served: Path) -> Iterator[tuple[str, Behaviour]]:
    with serve(served) as running:
        yield running


def run(endpoint: str, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder, with the Hub's address in the environment, as users set it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env={**clean, **own, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def evaluate(endpoint: str, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "suite.yaml").write_text(SUITE)
    return run(endpoint, folder, sys.executable, "-m", "clipstream", "evaluate", *FLAGS.split(), *words, **env)


def figures(path: Path) -> dict[str, dict[str, float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["eval"]: {name: line[name] for name in line["metrics"] if name != "seconds"} for line in lines}


@pytest.mark.slow
def test_a_suite_from_the_hub_gives_what_its_copy_gives(hub: tuple[str, Behaviour], tmp_path: Path) -> None:
    """Read from the Hub through the cache, which a second evaluation reads; and fetched as a message says."""
    endpoint, behaviour = hub
    suite = ["--suite", "suite.yaml", "--evals-root"]
    there = [*suite, "hf://datasets/clip-benchmark", "--data.cache", "cache"]
    done = evaluate(endpoint, tmp_path, *there, "--output", "there.jsonl")
    assert done.returncode == 0, done.stderr
    behaviour.asked.clear()
    assert evaluate(endpoint, tmp_path, *there, "--output", "again.jsonl").returncode == 0
    assert not [path for method, path, _ in behaviour.asked if method == "GET" and path.endswith(".tar")]
    missing = evaluate(endpoint, tmp_path, *suite, "sets")
    assert missing.returncode == 2 and "2 of 2 data sets are missing" in missing.stderr
    (command,) = [line.strip() for line in missing.stderr.splitlines() if line.strip().startswith("hf ")]
    tool = str(Path(sys.executable).parent / "hf")
    fetched = run(endpoint, tmp_path, tool, *shlex.split(command)[1:])
    assert fetched.returncode == 0, fetched.stderr
    assert not (tmp_path / "sets/wds_cars/train").exists()
    done = evaluate(endpoint, tmp_path, *suite, "sets", "--missing", "skip", "--output", "here.jsonl")
    assert done.returncode == 0, done.stderr
    first, again, here = (figures(tmp_path / f"{name}.jsonl") for name in ("there", "again", "here"))
    assert first == again and first["cars"] == here["cars"] and (first["cars"]["n"], first["pairs"]["n"]) == (30, 30)
    assert first["both"]["mean"] == (first["cars"]["top1"] + first["pairs"]["text_to_image_R@1"]) / 2
    assert here.keys() == {"cars", "both"} and here["both"]["mean"] == here["cars"]["top1"]
    rows = "hf://datasets/someone/table@main/data/test-0.parquet"
    told = {
        "type": "zero_shot",
        "label": "json:label",
        "classes": CLASSES,
        "templates": "plain",
        "data": {"shards": rows},
    }
    done = evaluate(endpoint, tmp_path, "--evals.table", json.dumps(told), "--output", "table.jsonl")
    assert done.returncode == 0, done.stderr
    assert figures(tmp_path / "table.jsonl")["table"]["n"] == 9


LOOK = """
import hashlib, sys
from clipstream.data.sources.tars import of_source
from clipstream.storage.download import Fetcher
from clipstream.storage.shard_cache import ShardCache
from clipstream.errors import ClipstreamError
for name in sys.argv[1:]:
    try:
        found = of_source(f"benchmark:hf://datasets/{name}")
        store = ShardCache("cache", fetcher=Fetcher(retries=1, backoff=0.01))
        sums = [hashlib.sha256(store.local(shard).read_bytes()).hexdigest() for shard in found.shards]
        print(found.kind, len(found.classes or []), *sums)
    except ClipstreamError as error:
        print("error", error)
"""


def look(endpoint: str, folder: Path, *names: str, **env: str) -> list[str]:
    """The kind of a data set, how many classes it has, its shards' digests; or what is wrong."""
    done = run(endpoint, folder, sys.executable, "-c", LOOK, *names, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_layout_by_a_name_on_the_hub(hub: tuple[str, Behaviour], served: Path, tmp_path: Path) -> None:
    """At its newest revision or another one; shards come once into a cache; and what the Hub does not give is told."""
    endpoint, behaviour = hub
    home = served / "datasets/clip-benchmark/wds_cars/main"
    sums = [hashlib.sha256((home / f"test/{n}.tar").read_bytes()).hexdigest() for n in range(3)]
    names = ("clip-benchmark/wds_cars", f"clip-benchmark/wds_cars@{COMMIT}", "clip-benchmark/wds_pairs")
    newest, told, pairs, none = look(endpoint, tmp_path, *names, "nobody/wds_cars")
    assert newest == told == " ".join(["classification", "10", *sums]) and pairs.startswith("retrieval 0 ")
    assert none.startswith("error benchmark:hf://datasets/nobody/wds_cars: test/nshards.txt is not there")
    behaviour.asked.clear()
    behaviour.gated.add("datasets/clip-benchmark/wds_cars")
    assert look(endpoint, tmp_path, *names, HF_TOKEN=behaviour.token) == [newest, told, pairs]
    assert not [path for method, path, _ in behaviour.asked if method == "GET" and path.endswith(".tar")]
    closed = "\n".join(look(endpoint, tmp_path, names[0]))
    assert closed.startswith("error benchmark:hf://datasets/clip-benchmark/wds_cars: test/nshards.txt: ")
    assert "Access is restricted" in closed
    deaf = "\n".join(look("http://127.0.0.1:9", tmp_path, names[0]))
    assert deaf.startswith("error") and "test/nshards.txt: " in deaf and "onnect" in deaf
