"""No output of a verb may be one of its inputs, or a file of the user's: each flag that names one is tried."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from clipstream.checkpoint.store import Subject
from clipstream.cli.main import VERBS, main, verb_of
from clipstream.config.help import spellings as flag_spellings
from clipstream.config.help import trait
from clipstream.config.settings import Settings
from clipstream.export.proof import read
from clipstream.export.run import Exported
from clipstream.report.records import markdown_table
from tests.support.hostile_text import HOSTILE, obeyed
from tests.support.pictures import make_shards, picture
from tests.support.runs import MODEL
from tests.support.tars import write_tar

MODEL_FLAGS = "--model model.json --device cpu --workers 0 --precision fp32 --data.lanes 4"
# (verb, topic, flag) of each output file -> a command, and the inputs that it may not replace.
FILES = {
    ("check", "", "--json"): ("check --all {data} --json {out}", "pairs.csv data/00000.tar"),
    ("check", "", "--html"): ("check --all {data} --html {out}", "pairs.csv data/00000.tar photos/a.txt photos/a.jpg"),
    ("check", "", "--yaml"): ("check --all {data} --yaml {out}", "pairs.csv data/00000.tar"),
    ("filter", "", "--out"): (
        "filter pairs.csv --where=key>='0' --scores x=scores.csv --data.sources.train.keep keep.txt --out {out}",
        "pairs.csv scores.csv keep.txt",
    ),
    ("compare", "", "--out"): ("compare run --out {out}", "run/metrics.jsonl run/config.yaml"),
    ("evaluate", "", "--output"): (
        f"evaluate --val-data pairs.csv {MODEL_FLAGS} --suite suite.yaml --output {{out}}",
        "pairs.csv model.json suite.yaml classes.txt",
    ),
    ("evaluate", "", "--report"): (
        f"evaluate --val-data {{data}} {MODEL_FLAGS} --report {{out}}",
        "pairs.csv data/00000.tar",
    ),
    ("bench", "", "--output"): (
        f"bench --train-data {{data}} {MODEL_FLAGS} --batch-size 4 --seconds 0.1 --counts 0 --output {{out}}",
        "pairs.csv model.json",
    ),
    ("bench", "train", "--csv"): (f"bench train --train-data {{data}} {MODEL_FLAGS} --csv {{out}}", "pairs.csv"),
    ("bench", "train", "--yaml"): (
        f"bench train --config settings.yaml --train-data {{data}} {MODEL_FLAGS} --yaml {{out}}",
        "pairs.csv settings.yaml",
    ),
    ("audit", "", "--json"): (
        f"audit precision --train-data {{data}} {MODEL_FLAGS} --batch-size 4 --json {{out}}",
        "pairs.csv model.json",
    ),
    ("search", "duplicates", "--out"): (
        "search duplicates store --html page.html --images pairs.csv --out {out}",
        "pairs.csv",
    ),
    ("search", "duplicates", "--html"): ("search duplicates store --html {out} --images pairs.csv", "pairs.csv"),
    ("search", "doubt", "--out"): ("search doubt store --html page.html --images pairs.csv --out {out}", "pairs.csv"),
    ("search", "doubt", "--html"): ("search doubt store --html {out} --images pairs.csv", "pairs.csv"),
    ("search", "neighbours", "--out"): ("search neighbours store --query-key 0 --out {out}", "pairs.csv"),
    ("search", "clusters", "--out"): ("search clusters store --k 2 --out {out}", "pairs.csv"),
    ("label", "", "--out"): ("label local-dir:store/model pairs.csv --classes classes.txt --out {out}", "pairs.csv"),
    ("label", "", "--html"): (
        "label local-dir:store/model pairs.csv --classes classes.txt --html {out}",
        "pairs.csv classes.txt photos/a.jpg",
    ),
    ("search", "scores", "--out"): ("search scores store --out {out}", "pairs.csv"),
}
OTHERS = {  # flags of files or folders that are read, are caches, or are folders, which other tests try
    ("check", "", "--folder"), ("check", "", "--table"), ("filter", "", "--language-model"),
    ("filter", "", "--balance"), ("index", "", "--into"), ("search", "*", "--cache"),
    ("search", "neighbours", "--query-image"), ("search", "neighbours", "--mine"), ("search", "doubt", "--worst"),
    ("evaluate", "", "--checkpoint"), ("evaluate", "", "--suite"), ("evaluate", "", "--evals-root"),
    ("interpolate", "", "--out"), ("audit", "", "--run"), ("precompute", "", "--chunk-rows"),
    ("export", "*", "--config"), ("export", "*", "--int8"), ("export", "*", "--push-to-hub"),
    ("precompute", "", "--checkpoint"), ("search", "", "--html"), ("export", "features", "--format"),
    ("export", "features", "--captions"), ("export", "features", "--images"), ("export", "features", "--rows"),
    ("export", "features", "--cache"), ("label", "", "--classes"), ("label", "", "--templates"),
    ("label", "", "--attributes"), ("label", "", "--links"),
}  # fmt: skip
ABOUT_FILES = re.compile(r"(?i)\b(file|folder|write|page)\b")


@cache
def stored() -> Path:
    """A store of the features of pairs.csv."""
    folder = Path(tempfile.mkdtemp()) / "store"
    atexit.register(shutil.rmtree, folder.parent)
    assert main(f"precompute {folder} --towers both --train-data pairs.csv {MODEL_FLAGS}".split()) == 0
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an input of each kind."""
    for number, name in enumerate("abc"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "photos" / f"{name}.jpg").write_bytes(picture(number))
        (tmp_path / "photos" / f"{name}.txt").write_text(f"picture {name}")
    make_shards(tmp_path / "data", [3, 2])
    rows = "".join(f"photos/{name}.jpg,picture {name},{number}\n" for number, name in enumerate("abc", 1))
    texts = {
        "pairs.csv": f"filepath,title,n\n{rows}",
        "scores.csv": "shard,key,x\npairs.csv,0,1\npairs.csv,1,2\npairs.csv,2,3\n",
        "keep.txt": "0\n1\n2\n",
        "classes.txt": "a\nb\nc\n",
        "model.json": json.dumps(MODEL),
        "settings.yaml": "run: {seed: 3}\n",
        "suite.yaml": "evals: {kinds: {type: zero_shot, classes: classes.txt, templates: plain, data: {shards: "
        "data/00000.tar, caption: {type: label, label: cls}}}}\n",
        "run/metrics.jsonl": '{"step": 1, "loss": 1.0}\n',
        "run/config.yaml": "run: {seed: 3}\n",
    }
    (tmp_path / "run").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stored(), tmp_path / "store")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_each_flag_that_names_a_file_is_tried() -> None:
    """A new flag is added to FILES or OTHERS."""
    found = set()
    for name in VERBS:
        for verb in (verb_of(name), *verb_of(name).topics):
            topic = verb.name.removeprefix(name).strip()
            for key, field in verb.own.model_fields.items():
                flag = flag_spellings(key, field)[0]
                if flag.startswith("--") and ABOUT_FILES.search(f"{trait(field, 'form')} {field.description}"):
                    found.add((name, topic if (name, "*", flag) not in OTHERS else "*", flag))
    assert found == {*FILES, *OTHERS}


def spellings(place: Path, name: str) -> Iterator[str]:
    """Paths of one file: relative, absolute, through a link, a hard link (a file replaced leaves its other links)."""
    suffix = Path(name).suffix
    os.symlink(place / name, place / f"link{suffix}")
    os.link(place / name, place / f"same{suffix}")
    links = [f"link{suffix}"] if name.startswith("photos") else [f"link{suffix}", f"same{suffix}"]
    yield from (name, f"run/../{name}", str(place / name), *links)


@pytest.mark.parametrize("case", FILES, ids=" ".join)
def test_no_file_that_is_read_is_written(
    case: tuple[str, str, str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, names = FILES[case]
    for name in names.split():
        data = {"data": "data/*.tar", "phot": "photos"}.get(name[:4], "pairs.csv")
        for out in spellings(place, name):
            before = contents(place)
            code = main(command.format(data=data, out=out).split())
            said = capsys.readouterr().err
            assert (code, contents(place)) == (2, before), f"{out}: {said}"
            assert out in said and "nothing was written" in said, said
        for link in place.glob("link.*"), place.glob("same.*"):
            next(link).unlink()


def test_a_file_url_an_other_output_and_a_pattern_are_seen(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        f"check --all file://{place}/pairs.csv --json pairs.csv": "--json: pairs.csv is read",
        "check --all pairs.csv --json new.json --html ./new.json": "--html: ./new.json is also the file of --json",
        "evaluate --val-data pairs.csv --model model.json --device cpu --output x.csv --report x.jsonl":
            "is also the file of --output",
        "filter *.csv --where=key>='0' --out kept.csv": "--out: kept.csv would be read by the next call, as *.csv",
        "compare run --out data/00000.tar": "--out: data/00000.tar is a file of other content",
        "search scores store --out pairs.csv": "--out: pairs.csv is a file of other content",
    }  # fmt: skip
    before = contents(place)
    for command, why in refused.items():
        if command.startswith("filter"):
            (place / "scores.csv").unlink()
            before = contents(place)
        assert main(command.split()) == 2, command
        assert why in (said := capsys.readouterr().err), said
        assert contents(place) == before


def test_folders_are_no_inputs_either(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "new" / ".parts").mkdir(parents=True)
    shutil.copy(place / "data" / "00000.tar", place / "new" / ".parts" / "x.tar")
    os.symlink(place / "new" / ".parts", place / "way")
    refused = {
        "pack new new/.parts/x.tar": "OUT: ",
        "pack new way/x.tar": "OUT: ",
        "pack data/out data/*/*.tar data/*.tar": "would be read by the next call",
        "stage new --train-data way/x.tar": "FOLDER: ",
        "stage new --train-data new/.parts/x.tar": "is ",
        "export features store store": "OUT: store is read",
        f"precompute photos --towers image --train-data photos {MODEL_FLAGS}": "STORE: photos is read",
    }
    for command, why in refused.items():
        if "data/*/" in command:
            shutil.copytree(place / "data", place / "data" / "old")
        before = contents(place)
        assert main(command.split()) == 2, command
        assert why in (said := capsys.readouterr().err), said
        assert contents(place) == before, command


def test_what_a_verb_has_written_is_replaced(place: Path) -> None:
    """Also in the folder of the data, and after other verbs have read it in this process."""
    for _ in range(2):
        assert main(["check", "--all", "photos", "--json", "report.json", "--html", "photos/report.html"]) == 0
        assert main(["filter", "pairs.csv", "--where=key>'0'", "--out", "kept.parquet"]) == 0
        assert main(["filter", "pairs.csv", "--where=key>'0'", "--out", "kept.csv"]) == 0
        assert main(["check", "--all", "pairs.csv", "--yaml", "own.yaml", "--data.sources.train.keep", "kept.csv"]) == 0
        assert main(["search", "scores", "store", "--out", "scores.jsonl"]) == 0
        assert main(["compare", "run", "--out", "run/report.html"]) == 0


def test_names_of_data_are_no_control_characters_of_a_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In data cards, settings and tables: names of shards and members, and what the user calls the result."""
    name = re.sub("[/\\\\\udcff]", "", HOSTILE) + "\nb: c"
    shard = write_tar(place / f"{name}.tar", [{"__key__": "a", "jpg": picture(1), "txt": "red", f"x{HOSTILE}": b"1"}])
    out = f"new{name}"
    assert main(["pack", out, str(shard)]) == 0
    assert main(["stage", "fast", "--train-data", str(shard)]) == 0
    shown = capsys.readouterr().out.splitlines()
    texts = [path.read_text() for path in (place / out / "README.md", place / "fast" / "staged.yaml")]
    for line in [*shown, *(line for text in texts for line in text.split("\n"))]:
        assert not obeyed(line), line
        assert not line.startswith(("b: c", "nb: c")), line
    (row,) = [line for line in texts[0].splitlines() if line.startswith("| source train")]
    assert r"\x1b]8;;http:" in row and row.endswith("` |")
    assert yaml.safe_load(texts[1])["data"]["sources"]["train"]["shards"]
    assert not [line for line in markdown_table(("a",), [[HOSTILE]]).split("\n") if obeyed(line)]
    settings = Settings.model_validate({"data": {"sources": {"train": {"shards": str(shard)}}}})
    assert not obeyed(read(settings.data.sources["train"]).origin)
    card = Exported("x", "onnx", "", None, Subject("", run=place), settings, None, ())  # type: ignore[arg-type]
    assert r"\nb: c" in card._data() and not obeyed(card._data())
