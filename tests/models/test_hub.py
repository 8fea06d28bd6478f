"""Models and tokenizers of a Hub: revisions, ETags, redirects, truncated bodies, gated files, outages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import hubtree
from tests.support.commands import run_code
from tests.support.hubserver import Behaviour, serve
from tests.support.hubtree import write_code

OLD = "fedcba9876543210fedcba9876543210fedcba98"
WEIGHTS = "open_clip_model.safetensors"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in two revisions, whose weights differ; `main` is the newer one."""
    folder = tmp_path_factory.mktemp("served")
    home = folder / hubtree.REPO
    for commit, seed in ((hubtree.REVISION, 11), (OLD, 5)):
        snapshot = home / commit
        snapshot.mkdir(parents=True)
        config = hubtree.tiny_config()
        (snapshot / "open_clip_config.json").write_text(json.dumps(config))
        hubtree.write_tokenizer(snapshot)
        hubtree.write_model(snapshot, config, seed)
    (home / "v1").symlink_to(OLD)
    large, coded = folder / "someone" / "large" / OLD, folder / "someone" / "coded" / OLD
    for repo in (large, coded, folder / "someone" / "empty" / OLD, folder / "someone" / "gated" / OLD):
        repo.mkdir(parents=True)
        (repo.parent / "main").symlink_to(home / hubtree.REVISION if "gated" in str(repo) else OLD)
    (home / "main").symlink_to(hubtree.REVISION)
    for file in (home / hubtree.REVISION).iterdir():
        (large / file.name).symlink_to(file)
    (large / WEIGHTS).unlink()
    (large / WEIGHTS).write_bytes(bytes(range(256)) * 100_000)  # in parts of 10 MB, as the client writes them
    hubtree.write_tokenizer(coded)
    write_code(coded, folder / "ran")
    return folder


@pytest.fixture
def hub(served: Path) -> Iterator[tuple[str, Behaviour]]:
    with serve(served) as running:
        yield running


FETCH = """
import hashlib, sys
from clipstream.data.settings import TokenizerSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.pretrained import fetch, preflight
from clipstream.models.settings import ModelSettings
for words in sys.argv[1:]:
    name, pretrained, trust = f"{words}||".split("|")[:3]
    settings = ModelSettings(name=name, pretrained=pretrained or None)
    try:
        if trust:
            coded = {"type": "hub", "name": "someone/coded", "trust_remote_code": trust}
            files = fetch(settings, TokenizerSettings.model_validate(coded), World())
            print(sorted(file.name for file in files.tokenizer.glob("*.py")))
            continue
        preflight(settings)
        files = fetch(settings, None, World())
        digest = hashlib.sha256(files.weights.read_bytes()).hexdigest()
        print(files.weights.parent.name, digest, files.tokenizer.name)
    except SettingsError as error:
        print("error", str(error).partition("\\n")[0])
assert "torch" not in sys.modules
"""


def fetch(endpoint: str, cache: Path, *models: str, **env: str) -> list[str]:
    """Of each `NAME[|PRETRAINED]`, revision and hash of its weights and revision of its tokenizer; or the error.

    Of `NAME||TRUST`, the code of a tokenizer that is trusted or not.
    """
    env = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "NO_PROXY": "*", "HF_HUB_DISABLE_XET": "1", **env}
    return run_code(FETCH, *models, **env).splitlines()


def expected(served: Path, commit: str) -> str:
    digest = hashlib.sha256((served / hubtree.REPO / commit / WEIGHTS).read_bytes()).hexdigest()
    return f"{commit} {digest} {hubtree.REVISION}"


def test_files_by_name_tag_and_revision_after_an_outage(
    hub: tuple[str, Behaviour], served: Path, tmp_path: Path
) -> None:
    endpoint, behaviour = hub
    config = hubtree.write_named_config(tmp_path)
    models = (f"hf-hub:{hubtree.REPO}", f"{config}|webli", f"hf-hub:{hubtree.REPO}@v1", f"hf-hub:{hubtree.REPO}@{OLD}")
    behaviour.out = True
    (line,) = fetch(endpoint, tmp_path / "cache", models[0])
    assert line.startswith(f"error cannot download {WEIGHTS} of {hubtree.REPO!r} from {endpoint}: ") and "503" in line
    behaviour.out = False
    behaviour.asked.clear()
    new, old = expected(served, hubtree.REVISION), expected(served, OLD)
    assert fetch(endpoint, tmp_path / "cache", *models) == [new, new, old, old]
    gets = [path for method, path, _ in behaviour.asked if method == "GET"]
    assert sum(path.startswith("/storage/") and path.endswith(WEIGHTS) for path in gets) == 2  # once per revision
    assert not any(f"{hubtree.REVISION}/open_clip_config" in path for path in gets)  # from before the outage
    behaviour.asked.clear()
    assert fetch(endpoint, tmp_path / "cache", *models) == [new, new, old, old] and not behaviour.asked


def test_a_cut_body_continues_where_it_broke(hub: tuple[str, Behaviour], tmp_path: Path) -> None:
    endpoint, behaviour = hub
    behaviour.cuts = 2
    calls = 1 if int(version("huggingface_hub").split(".")[0]) >= 1 else 3  # older clients continue when called again
    *cut, line = [fetch(endpoint, tmp_path, "hf-hub:someone/large")[0] for _ in range(calls)]
    assert all(told.startswith(f"error cannot download {WEIGHTS} of 'someone/large'") for told in cut), cut
    assert line.split()[:2] == [OLD, hashlib.sha256(bytes(range(256)) * 100_000).hexdigest()]
    ranges = [asked for method, path, asked in behaviour.asked if method == "GET" and path.endswith(WEIGHTS) and asked]
    assert behaviour.cuts == 0 and set(ranges) == {"bytes=10485760-"}, ranges


def test_unknown_and_gated_repositories_are_named(hub: tuple[str, Behaviour], tmp_path: Path) -> None:
    endpoint, behaviour = hub
    behaviour.gated.add("someone/gated")
    models = ["someone/gated", "nobody/nothing", f"{hubtree.REPO}@v9", "someone/empty"]
    *lines, empty = fetch(endpoint, tmp_path, *(f"hf-hub:{name}" for name in models))
    for line, name in zip(lines, models, strict=False):
        assert line.startswith(f"error cannot download open_clip_config.json of {name!r} from {endpoint}: ")
    assert empty == "error the Hub's repository 'someone/empty' has no open_clip_config.json"
    (opened,) = fetch(endpoint, tmp_path, "hf-hub:someone/gated", HF_TOKEN=behaviour.token)
    assert opened.startswith(hubtree.REVISION)


def test_a_tokenizers_code_is_downloaded_where_it_is_trusted(hub: tuple[str, Behaviour], tmp_path: Path) -> None:
    config = hubtree.write_named_config(tmp_path, "own")
    assert fetch(hub[0], tmp_path, f"{config}||False", f"{config}||True") == ["[]", "['mine.py']"]
