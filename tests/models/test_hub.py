"""Models and tokenizers of a Hub: revisions, ETags, redirects, truncated bodies, gated files, outages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import hubtree
from tests.support.hubserver import Behaviour, serve
from tests.support.hubtree import write_code
from tests.support.ranks import python

OLD = "fedcba9876543210fedcba9876543210fedcba98"
WEIGHTS = "open_clip_model.safetensors"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in two revisions, whose weights differ; `main` is the newer one."""
    folder = tmp_path_factory.mktemp("served")
    home = folder / hubtree.REPO
    for commit, seed in ((hubtree.REVISION, 11), (OLD, 5)):
        (home / commit).mkdir(parents=True)
        snapshot = home / commit
        config = hubtree.tiny_config()
        (snapshot / "open_clip_config.json").write_text(json.dumps(config))
        hubtree.write_tokenizer(snapshot)
        hubtree.write_model(snapshot, config, seed)
    (home / "main").symlink_to(hubtree.REVISION)
    (home / "v1").symlink_to(OLD)
    (folder / "someone" / "gated").mkdir(parents=True)
    (folder / "someone" / "gated" / "main").symlink_to(home / hubtree.REVISION)
    large = folder / "someone" / "large" / OLD  # in parts of 10 MB, as the client writes them
    large.mkdir(parents=True)
    for file in (home / hubtree.REVISION).iterdir():
        (large / file.name).symlink_to(file)
    (large / WEIGHTS).unlink()
    (large / WEIGHTS).write_bytes(bytes(range(256)) * 100_000)
    (large.parent / "main").symlink_to(OLD)
    (folder / "someone" / "empty" / OLD).mkdir(parents=True)
    (folder / "someone" / "empty" / "main").symlink_to(OLD)
    return folder


@pytest.fixture
def hub(served: Path) -> Iterator[tuple[str, Behaviour]]:
    with serve(served) as running:
        yield running


FETCH = """
import hashlib, sys
from clipstream.errors import SettingsError
from clipstream.models.pretrained import fetch, preflight, resolve
from clipstream.models.settings import ModelSettings
from clipstream.distributed.world import World
for words in sys.argv[1:]:
    name, _, pretrained = words.partition("|")
    settings = ModelSettings(name=name, pretrained=pretrained or None)
    try:
        preflight(settings)
        fetch(settings, None, World())
        source = resolve(settings)
        digest = hashlib.sha256(source.weights.read_bytes()).hexdigest()
        print(source.weights.parent.name, digest, source.tokenizer.name)
    except SettingsError as error:
        print("error", error)
assert "torch" not in sys.modules
"""


def fetch(endpoint: str, cache: Path, *models: str, **env: str) -> list[str]:
    """Of each `NAME[|PRETRAINED]`, revision and hash of its weights and revision of its tokenizer; or why not."""
    env = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "NO_PROXY": "*", "HF_HUB_DISABLE_XET": "1", **env}
    return python(FETCH, *models, **env).splitlines()


def expected(served: Path, commit: str) -> str:
    digest = hashlib.sha256((served / hubtree.REPO / commit / WEIGHTS).read_bytes()).hexdigest()
    return f"{commit} {digest} {hubtree.REVISION}"


def test_by_name_by_tag_and_by_revision_each_once(hub: tuple[str, Behaviour], served: Path, tmp_path: Path) -> None:
    endpoint, behaviour = hub
    config = hubtree.write_named_config(tmp_path)
    models = (f"hf-hub:{hubtree.REPO}", f"{config}|webli", f"hf-hub:{hubtree.REPO}@v1", f"hf-hub:{hubtree.REPO}@{OLD}")
    new, old = expected(served, hubtree.REVISION), expected(served, OLD)
    assert fetch(endpoint, tmp_path / "cache", *models) == [new, new, old, old]
    gets = [path for method, path, _ in behaviour.asked if method == "GET" and path.endswith(WEIGHTS)]
    assert sum(path.startswith("/storage/") for path in gets) == 2  # each revision's weights came once
    behaviour.asked.clear()
    assert fetch(endpoint, tmp_path / "cache", *models) == [new, new, old, old] and not behaviour.asked


def test_a_body_that_is_cut_goes_on_where_it_broke(hub: tuple[str, Behaviour], served: Path, tmp_path: Path) -> None:
    endpoint, behaviour = hub
    behaviour.cuts = 2
    calls = 1 if int(version("huggingface_hub").split(".")[0]) >= 1 else 3  # older clients go on when called again
    *cut, line = [fetch(endpoint, tmp_path, "hf-hub:someone/large")[0] for _ in range(calls)]
    assert all(told.startswith(f"error cannot fetch {WEIGHTS} of 'someone/large'") for told in cut), cut
    assert line.split()[:2] == [OLD, hashlib.sha256(bytes(range(256)) * 100_000).hexdigest()]
    ranges = [asked for method, path, asked in behaviour.asked if method == "GET" and path.endswith(WEIGHTS) and asked]
    assert behaviour.cuts == 0 and set(ranges) == {"bytes=10485760-"}, ranges


def test_what_cannot_be_had_is_told_in_one_message(hub: tuple[str, Behaviour], tmp_path: Path) -> None:
    endpoint, behaviour = hub
    behaviour.gated.add("someone/gated")
    models = ["someone/gated", "nobody/nothing", f"{hubtree.REPO}@v9", "someone/empty"]
    gated, unknown, revision, empty = fetch(endpoint, tmp_path, *(f"hf-hub:{name}" for name in models))
    assert gated.startswith("error 'someone/gated' is gated: ask for access at http") and "HF_TOKEN" in gated
    assert unknown.startswith("error the Hub has no repository 'nobody/nothing', or it is private")
    assert revision.startswith(f"error the Hub's repository {hubtree.REPO!r} has no revision 'v9'")
    assert empty == "error the Hub's repository 'someone/empty' has no open_clip_config.json"
    (opened,) = fetch(endpoint, tmp_path, "hf-hub:someone/gated", HF_TOKEN=behaviour.token)
    assert opened.startswith(hubtree.REVISION)


def test_an_outage_in_the_middle_loses_nothing(hub: tuple[str, Behaviour], served: Path, tmp_path: Path) -> None:
    endpoint, behaviour = hub
    behaviour.out = True
    (line,) = fetch(endpoint, tmp_path, f"hf-hub:{hubtree.REPO}")
    assert line.startswith(f"error cannot fetch {WEIGHTS} of {hubtree.REPO!r} from {endpoint}: ") and "503" in line
    assert "the same command fetches the rest" in line
    behaviour.out = False
    behaviour.asked.clear()
    assert fetch(endpoint, tmp_path, f"hf-hub:{hubtree.REPO}") == [expected(served, hubtree.REVISION)]
    assert not any("open_clip_config" in path for method, path, _ in behaviour.asked if method == "GET")


CODED = """
import sys
from clipstream.data.settings import TokenizerSettings
from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.models.pretrained import fetch, resolve
from clipstream.models.settings import ModelSettings
from clipstream.distributed.world import World
model = ModelSettings(name=sys.argv[1])
for trust in (False, True):
    chosen = TokenizerSettings.model_validate({"type": "hub", "name": "someone/coded", "trust_remote_code": trust})
    fetch(model, chosen, World())
    print(sorted(file.name for file in resolve(model, chosen).tokenizer.glob("*.py")))
print(build_tokenizer(chosen, None, 8).encode(["a photo"]).shape)
"""


def test_a_tokenizers_code_is_fetched_where_it_is_trusted(served: Path, tmp_path: Path) -> None:
    coded = served / "someone" / "coded" / OLD
    coded.mkdir(parents=True)
    (coded.parent / "main").symlink_to(OLD)
    hubtree.write_tokenizer(coded)
    write_code(coded, tmp_path / "ran")
    config = hubtree.write_named_config(tmp_path, "own")
    with serve(served) as (endpoint, _):
        own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
        out = python(CODED, str(config), **own, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_DISABLE_XET="1")
    assert out.splitlines() == ["[]", "['mine.py']", "(1, 8)"]
