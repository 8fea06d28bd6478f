"""A run that somebody else may have made: naming it runs no code, no command, and fetches nothing."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import clipstream
from clipstream.cli.main import main
from clipstream.config.settings import load
from clipstream.data.sources import entries
from clipstream.errors import SettingsError
from tests.support.runs import flags, furnish

CODE = "import pathlib, sys\npathlib.Path(__file__).with_name('ran').touch()\n\ndef part(*_):\n    return None\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = furnish(tmp_path_factory.mktemp("made"))
    assert main(["train", *flags(place, "run", "--workers", "0", "--val-data", f"{place}/val/*.tar", steps=2)]) == 0
    return place / "runs" / "run"


class Foreign:
    """A copy of the run, in whose folder this process is, with a module that leaves a mark where it is imported."""

    def __init__(self, made: Path, folder: Path) -> None:
        self.run, self.mark, self.data = folder / "run", folder / "run" / "ran", f"{made.parent.parent}/val/*.tar"
        shutil.copytree(made, self.run)
        for name in ("evil", "evil-2"):
            (self.run / f"{name}.py").write_text(CODE)
        self.config = self.run / "config.yaml"
        self.tree: dict[str, Any] = yaml.safe_load(self.config.read_text())

    def write(self, key: str, value: object) -> None:
        """Write a setting, of which {mark} is the path that code would leave."""
        tree, *path = self.tree, *key.split(".")
        for part in path[:-1]:
            tree = tree.setdefault(part, {})
        tree[path[-1]] = value.replace("{mark}", str(self.mark)) if isinstance(value, str) else value
        self.config.write_text(yaml.safe_dump(self.tree))


@pytest.fixture
def foreign(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: None) -> Iterator[Foreign]:
    found = Foreign(made, tmp_path)
    monkeypatch.chdir(found.run)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the folder is added
    yield found
    sys.modules.pop("evil", None)


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the paths that it is asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()


def verbs(foreign: Foreign) -> dict[str, list[str]]:
    run = str(foreign.run)
    return {
        "evaluate": ["evaluate", run],
        "checkpoint": ["evaluate", "--checkpoint", f"{run}/checkpoints/latest"],
        "with data": ["evaluate", run, foreign.data],
        "export": ["export", run, f"{foreign.run.parent}/out", "--to", "open_clip"],
        "search": ["search", run, foreign.data, "a cat"],
        "interpolate": ["interpolate", run, "--alphas", "[0.5]", "--model.name", run],
        "audit": ["audit", "precision", "--run", run],
    }


@pytest.mark.parametrize(
    "shards",
    [
        "pipe:touch {mark}",
        " pipe:touch {mark}",
        "a.tar::pipe:touch {mark}",
        ["a.tar", "pipe:touch {mark}"],
        "{pi,pi}pe:touch {mark}",
        "benchmark:pipe:touch {mark};",
        "URL/a.tar",
        "benchmark:URL",
    ],
)
def test_commands_and_urls_of_a_named_run_are_an_error_where_they_are_read(
    foreign: Foreign, asked: tuple[str, list[str]], shards: str | list[str]
) -> None:
    own = [
        part.replace("URL", asked[0]).replace("{mark}", str(foreign.mark))
        for part in [*([shards] if isinstance(shards, str) else shards)]
    ]
    for key in ("data.sources.train.shards", "evals.val.data.shards"):
        foreign.write(key, own if isinstance(shards, list) else own[0])
    settings = load([], run=foreign.run)
    for source in (settings.data.sources["train"], settings.evals["val"].data):
        assert source is not None
        with pytest.raises(
            SettingsError, match=rf"config.yaml:\d+: .* only named: read .*, and add --config {foreign.config}"
        ):
            list(entries(source.shards, source.type))
    assert not foreign.mark.exists() and not asked[1]
    allowed = load(["--config", str(foreign.config)], run=foreign.run)
    assert allowed.data.sources["train"].shards == (own if isinstance(shards, list) else own[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.type", "evil:part"),
        ("tokenizer.type", "evil-2:part"),
        ("data.sources.train.transform", "evil-2:part"),
        ("data.sources.train.type", "evil-2:part"),
        ("data.sources.train.type", "evil:part"),
        ("data.sources.train.transform", "evil:part"),
        ("data.sources.train.caption", {"type": "evil:part"}),
        ("data.image_transform", {"type": "evil:part"}),
        ("evals.mine", {"type": "evil:part"}),
        ("loss.type", "evil:part"),
        ("optim.type", "evil:part"),
        ("schedule.type", "evil:part"),
        ("tokenizer", {"type": "hub", "name": "a/b", "trust_remote_code": True}),
        ("tokenizer", {"type": "hub", "name": "a/b", "trust_remote_code": "yes"}),
    ],
)
def test_code_that_a_named_run_names_is_not_imported(foreign: Foreign, key: str, value: object) -> None:
    foreign.write(key, value)
    with pytest.raises(SettingsError, match=r"config.yaml:\d+: .* is Python code, not used, .* add --config "):
        load([], run=foreign.run)
    foreign.write("log.sinks", {"mine": {"type": "evil:part"}})
    assert "evil" not in sys.modules and not foreign.mark.exists()


def test_sinks_of_a_named_run_are_left_out(foreign: Foreign) -> None:
    foreign.write("log.sinks", {"mine": {"type": "evil:part"}})
    assert load([], run=foreign.run).log.sinks == {} and not foreign.mark.exists()


@pytest.mark.parametrize("verb", ["evaluate", "checkpoint", "with data", "export", "search", "interpolate", "audit"])
def test_no_verb_runs_a_command_of_the_run_that_it_names(
    foreign: Foreign, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipstream.export.run.prove", lambda *_: [])  # which reads the files in a process of its own
    for key in ("data.sources.train.shards", "evals.val.data.shards"):
        foreign.write(key, "pipe:touch {mark}")
    code = main(verbs(foreign)[verb])
    said = capsys.readouterr().err
    assert not foreign.mark.exists(), said
    needless = verb in ("with data", "search")  # which have data of their own
    assert (code == 0) == (needless or verb == "export"), said
    assert needless or f"add --config {foreign.config}" in said, said


@pytest.mark.parametrize("verb", ["evaluate", "with data", "export", "search", "interpolate", "audit"])
def test_no_verb_imports_code_of_the_run_that_it_names(
    foreign: Foreign, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign.write("tokenizer.type", "evil:part")
    assert main(verbs(foreign)[verb]) == 2
    assert f"add --config {foreign.config} to use it" in capsys.readouterr().err
    assert not foreign.mark.exists() and "evil" not in sys.modules


def test_python_asks_by_the_file(foreign: Foreign) -> None:
    calls: list[Callable[[], object]] = [
        lambda: clipstream.load_model(foreign.run, device="cpu"),
        lambda: clipstream.zero_shot(foreign.run, ["a", "b"]),
    ]
    foreign.write("tokenizer.type", "evil:part")
    for call in calls:
        with pytest.raises(SettingsError, match="add --config"):
            call()
    assert not foreign.mark.exists()
    with pytest.raises(SettingsError, match="tokenizer"):  # it is imported, and is no tokenizer
        clipstream.load_model(foreign.run, device="cpu", config=foreign.config)
    assert foreign.mark.exists()


@pytest.mark.parametrize("name", ["hf-hub:some/model", "hf_hub:some/model", "local-dir:/somewhere"])
def test_a_towers_name_is_no_address(foreign: Foreign, name: str) -> None:
    """timm 1.0 reads the configuration of `hf-hub:ORG/NAME` from the Hub when a model is made, also without weights."""
    config = next(foreign.run.glob("checkpoints/step_*/open_clip_config.json"))
    tree = json.loads(config.read_text())
    tree["model_cfg"]["vision_cfg"] = {"timm_model_name": name, "image_size": 16}
    shutil.copytree(config.parent, foreign.run.parent / "model")
    (foreign.run.parent / "model" / config.name).write_text(json.dumps(tree))
    with pytest.raises(SettingsError, match="is not the name of a timm model"):
        clipstream.load_model(foreign.run.parent / "model", device="cpu")


def test_what_is_asked_for_is_used(foreign: Foreign) -> None:
    foreign.write("evals.val.data.shards", "pipe:touch {mark}; cat " + foreign.data.replace("*", "00000"))
    assert main(["evaluate", str(foreign.run), "--config", str(foreign.config)]) == 0
    assert foreign.mark.exists()
