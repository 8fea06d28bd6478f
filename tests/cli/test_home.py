"""`~` in settings, flags and arguments that name a file or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from clipstream.cli.main import VERBS, verb_of
from clipstream.cli.verbs import check, compare, index
from clipstream.config.settings import Settings, accepts_text, load
from clipstream.data.settings import PathTokenizer
from clipstream.data.sources import expand
from clipstream.utils.section import items_of, leaves, names_path
from tests.support.tars import write_tar

# Keys whose text is no path; a new one is told here, or has the type `section.PathText`.
NO_PATH = {
    "run.name", "run.device", "tokenizer.name", "optim.name", "train.compile_backend", "train.early_stop.metric",
    "checkpoint.keep_best", *(f"log.sinks.NAME.{key}" for key in ("project", "notes", "space")),
}  # fmt: skip
NO_PATH_ANYWHERE = {  # the last part of a key; shards have a language of their own, which `expand` reads
    "type", "shards", "train_shards", "tune_shards", "image_key", "separator", "path", "key", "fallback", "transform",
    "background", "fetch", "label", "grad_checkpointing", "profile", "negatives", "short",
    "by", "target", "wrong", "answer", "category", "group",
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder; the working folder is another one."""
    folder, here = tmp_path / "home", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(here)
    return folder


def test_every_setting_that_names_a_file_or_a_folder_may_begin_with_the_home_folder(home: Path) -> None:
    paths = {
        key: field
        for key, field in leaves(Settings)
        if accepts_text(field.annotation, "~") and key not in NO_PATH and key.rpartition(".")[2] not in NO_PATH_ANYWHERE
    }
    assert len(paths) > 12
    for key, field in paths.items():
        fields: dict[str, Any] = {"value": (field.annotation, field)}
        assert create_model("One", **fields)(value="~/x y").model_dump() == {"value": f"{home}/x y"}, key
    assert PathTokenizer(name="~/t").name == f"{home}/t"
    assert all(map(names_path, paths.values())), "config.yaml has the absolute paths of these"


def test_flags_and_files_alike(home: Path) -> None:
    (home / "a.yaml").write_text(
        "run: {logs: ~/yaml}\nmodel: {pretrained: 'local-dir:~/weights'}\ndata: {cache: ~/c}\n"
    )
    settings = load(["--config=~/a.yaml", "--model=~/m.json", "--evals.z.type=zero_shot", "--evals.z.classes=~/n.txt"])
    assert (settings.run.logs, settings.data.cache) == (f"{home}/yaml", f"{home}/c")
    assert (settings.model.name, settings.model.pretrained) == (f"{home}/m.json", f"local-dir:{home}/weights")
    assert settings.evals["z"].model_dump()["classes"] == f"{home}/n.txt"
    settings = load(["--config=~/a.yaml", "--logs=~/flag", "--resume=~/r", "--tokenizer=~/t"])
    assert (settings.run.logs, settings.checkpoint.resume) == (f"{home}/flag", f"{home}/r")
    assert settings.tokenizer.model_dump()["name"] == f"{home}/t"


def test_flags_of_the_verbs_own(home: Path) -> None:
    verbs = [one for name in VERBS for one in (verb_of(name), *verb_of(name).topics)]
    paths = [field for verb in verbs for field in verb.own.model_fields.values() if names_path(field)]
    assert len(paths) > 12
    for field in paths:
        several = items_of(field.annotation) is not None
        fields: dict[str, Any] = {"value": (field.annotation, field)}
        made = create_model("One", **fields)(value=["~/x"] if several else "~/x")
        assert made.model_dump() == {"value": [f"{home}/x"] if several else f"{home}/x"}


def test_shards_in_all_their_forms(home: Path) -> None:
    for name in ("0", "1"):
        write_tar(home / f"a/{name}.tar", [{"__key__": name, "txt": "a dog"}])
        (home / f"classes/{name}").mkdir(parents=True)
        (home / f"classes/{name}/0.jpg").write_bytes(b"")
    tars = [f"{home}/a/0.tar", f"{home}/a/1.tar"]
    for spec in ("~/a/{0,1}.tar", "~/a/*.tar", "{~/a/0,~/a/1}.tar", "~/a/0.tar::~/a/1.tar", ["~/a/0.tar", tars[1]]):
        assert expand(spec) == tars
    assert expand("folder:~/classes") == [f"folder:{home}/classes/{name}" for name in "01"]


def test_check_index_and_compare(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(home / "a/0.tar", [{"__key__": "0", "txt": "a dog", "jpg": b"no picture"}])
    (home / "run").mkdir()
    (home / "run/metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "samples": 2}\n')
    assert index.main(["~/a/0.tar", "--into=~/indexes"]) == 0
    assert len(list((home / "indexes").iterdir())) == 1
    assert compare.main(["~/run", "--out=~/page.html"]) == 0
    assert (home / "page.html").is_file()
    assert check.main(["~/a/0.tar", "--samples=1"]) == 3
    assert "undecodable_image" in capsys.readouterr().err
    assert not list(Path().iterdir())
