"""config.yaml repeats a run from any folder, and protects secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipstream.cli.verbs.evaluate import main as evaluate
from clipstream.cli.verbs.train import main
from clipstream.config.config_file import dump, portable, secrets
from clipstream.config.settings import load
from clipstream.errors import SettingsError
from clipstream.models.pretrained import ModelFiles, look_up
from clipstream.storage.shard_url import has_secret
from tests.support.runs import MODEL, flags, furnish, lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A furnished folder."""
    return furnish(tmp_path_factory.mktemp("portable"))


def test_config_yaml_repeats_the_run_from_any_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    there = furnish(place / "there")
    argv = [part.replace(str(place), ".") for part in flags(place, "one", "--val-data", "val/*.tar", steps=2)]
    monkeypatch.chdir(there)
    assert main(argv) == 0
    (there / "model.json").unlink()  # its content is in config.yaml
    monkeypatch.chdir("/")
    assert main(["--config", str(there / "runs/one/config.yaml"), "--name", "two"]) == 0
    assert lines(there, "two") == lines(there, "one")
    one, two = (lines(there, name, "eval") for name in ("one", "two"))
    for record in (*one, *two):  # it has names as they were given
        record["model"], record["data"][0]["shards"] = Path(record["model"]["name"]).name, ""
    assert two == one
    assert evaluate(["--checkpoint", str(there / "runs/two"), "--device", "cpu"]) == 0


def test_paths_are_absolute_and_other_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    (tmp_path / "w.pt").touch()
    given = {
        "a/{0..3}.tar::b/*.tar": f"{tmp_path}/a/{{0..3}}.tar::{tmp_path}/b/*.tar",
        "{a,b}/0.tar": f"{tmp_path}/{{a,b}}/0.tar",
        "{/a,/b}/0.tar": "{/a,/b}/0.tar",
        "/x/0.tar": "/x/0.tar",
        "~/0.tar": "~/0.tar",
        "${DATA}/0.tar": "${DATA}/0.tar",
        "https://host/{0..3}.tar": "https://host/{0..3}.tar",
        "pipe:cat a/0.tar": "pipe:cat a/0.tar",
        "folder:pictures": f"folder:{tmp_path}/pictures",
        "benchmark:sets/one#test": f"benchmark:{tmp_path}/sets/one#test",
        "benchmark:https://host/one": "benchmark:https://host/one",
        "synthetic:": "synthetic:",
    }
    for spec, absolute in given.items():
        settings = load(["--train-data", spec, "--logs", "runs", "--data.cache", "cache"])
        found = portable(settings)
        assert found.data.sources["train"].shards == absolute
        assert (found.run.logs, found.data.cache) == (f"{tmp_path}/runs", f"{tmp_path}/cache")
    given_stage = ["--stages.one.until", "5", "--stages.one.set", "{data.sources.train.shards: a.tar, optim.lr: 1e-3}"]
    found = portable(load(["--train-data", "b.tar", *given_stage]))
    assert found.stages["one"].set == {"data.sources.train.shards": f"{tmp_path}/a.tar", "optim.lr": 1e-3}
    argv = ["--evals.z.type", "zero_shot", "--evals.z.data.shards", "a.tar", "--evals.z.templates", "openai"]
    more = ["--evals.z.classes", "names.txt", "--pretrained", "w.pt", "--remote-sync", "copy"]
    found = portable(load(argv + more))
    zero_shot: Any = found.evals["z"]
    assert (zero_shot.classes, zero_shot.templates) == (f"{tmp_path}/names.txt", "openai")
    assert zero_shot.data.shards == f"{tmp_path}/a.tar" and found.checkpoint.remote_sync == f"{tmp_path}/copy"
    assert (found.model.name, found.model.config) == ("ViT-B-32", None) and found.model.pretrained == f"{tmp_path}/w.pt"
    assert portable(load(["--pretrained", "webli"])).model.pretrained == "webli"
    key = "--data.sources.train.caption"
    labels = [f"{key}.type", "label", f"{key}.classes", "names.txt", f"{key}.templates", "plain"]
    caption: Any = portable(load(["--train-data", "a.tar", *labels])).data.sources["train"].caption
    assert (caption.classes, caption.templates) == (f"{tmp_path}/names.txt", "plain")


def test_the_models_config_is_in_it_and_gives_way_to_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {**MODEL, "init_logit_bias": None, "text_cfg": {**MODEL["text_cfg"], "pad_id": None}}  # type: ignore[dict-item]
    (tmp_path / "tiny.json").write_text(json.dumps(own))
    (tmp_path / "config.yaml").write_text(dump(load(["--model", "tiny.json"])))
    (tmp_path / "tiny.json").unlink()
    found = load(["--config", "config.yaml"]).model
    files = look_up(found)
    assert found.name == f"{tmp_path}/tiny.json" and isinstance(files, ModelFiles) and files.model_cfg == own
    with pytest.raises(SettingsError, match="mutually exclusive"):
        look_up(found.model_copy(update={"name": "hf-hub:o/n"}))
    other = load(["--config", "config.yaml", "--model", "RN50"]).model
    assert (other.name, other.config) == ("RN50", None)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("https://me:hunter2@host/0.tar", True),
        ("https://${TOKEN}@host/0.tar", False),
        ("https://host/0.tar?sig=hunter2&x=1", True),
        ("pipe:curl -H 'Authorization: Bearer hunter2' https://host/0.tar", True),
        ("pipe:curl -H 'Authorization: Bearer $TOKEN' https://host/0.tar", False),
        ("pipe:curl -u me:hunter2 https://host/0.tar", True),
        ("a photo of a key ring", False),
        ("https://host/{0..9}.tar", False),
    ],
)
def test_what_a_secret_is(text: str, secret: bool) -> None:
    assert has_secret(text) == secret
    assert secrets(load(["--train-data", text])) == ["data.sources.train.shards"] * secret


def test_a_secret_stays_in_one_file_for_its_owner(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"pipe:cat {place}/pairs/{{00000..00003}}.tar # token=hunter2"
    argv = flags(place, "secret", "--train-data", command, "--checkpoint.remote-sync", f"{place}/copy", steps=1)
    monkeypatch.setattr("sys.argv", ["train.py", *argv])
    before = os.umask(0)
    try:
        assert main(argv) == 0
    finally:
        os.umask(before)
    said = capsys.readouterr()
    assert said.err.count("warning: data.sources.train.shards has a password or key") == 1
    assert "${NAME}" in said.err and "--remote-sync copies it" in said.err and "hunter2" not in said.out + said.err
    folder = place / "runs" / "secret"
    holding = [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert holding == [folder / "config.yaml"] and holding[0].stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(holding[0].read_text())["data"]["sources"]["train"]["shards"] == command
