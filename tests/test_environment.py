"""The environment that tests see, and the suite's closing line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clipstream.distributed.world import World
from clipstream.storage.shard_cache import cache_root
from tests.support.environment import FIXED, KEPT, KEPT_PREFIXES
from tests.support.ranks import ROOT, TIMEOUT, run_ranks

# Each of these changes what clipstream or a library does.
HOSTILE = {
    "HTTP_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "*", "ALL_PROXY": "socks5://x",
    "HF_HOME": "/nowhere", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "secret", "HF_ENDPOINT": "http://127.0.0.1:9",
    "CLIPSTREAM_CACHE": "/nowhere", "CLIPSTREAM_EVAL_ROOT": "/nowhere", "XDG_CACHE_HOME": "/nowhere",
    "XDG_CONFIG_HOME": "/nowhere", "WDS_SECURE": "1", "WDS_CACHE": "/nowhere", "RANK": "1", "WORLD_SIZE": "2",
    "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7", "TZ": "Asia/Kathmandu",
    "AWS_PROFILE": "mine", "FSSPEC_CONFIG_DIR": "/nowhere", "LC_ALL": "C", "NO_COLOR": "1", "COLUMNS": "20",
}  # fmt: skip
TESTS = """
import json, multiprocessing, os, subprocess, sys
import pytest

def tell(path):
    with open(path, "w") as file:
        json.dump(dict(os.environ), file)

def test_tells():
    tell("test.json")
    subprocess.run([sys.executable, "-c", "import json, os; json.dump(dict(os.environ), open('child.json', 'w'))"])
    process = multiprocessing.get_context("forkserver").Process(target=tell, args=("server.json",))
    process.start()
    process.join()
    assert process.exitcode == 0

@pytest.mark.parametrize("number", [1, 2])
def test_of_gpus(number):
    pytest.skip("there is no GPU here")

@pytest.mark.skipif(True, reason="there is no Chromium here")
def test_of_pages():
    pass
"""


def inner(folder: Path, *flags: str) -> tuple[list[str], list[dict[str, str]]]:
    """The output of the suite's hooks over TESTS in a hostile environment, and the variables that the tests, their
    children and their fork server saw.
    """
    (folder / "home/.cache/clipstream").mkdir(parents=True)
    (folder / "test_inner.py").write_text(TESTS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    home = {"HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *flags]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "test_inner.py"],
        cwd=folder, env={**kept, **HOSTILE, **home}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((folder / f"{who}.json").read_text()) for who in ("test", "child", "server")]
    return done.stdout.splitlines(), seen


def check(seen: dict[str, str]) -> None:
    """Nothing is seen but what is meant to be."""
    assert {name: seen[name] for name in FIXED} == FIXED
    known = KEPT | FIXED.keys() | {"HOME", "PYTHONUSERBASE", "LC_CTYPE", "WDS_SECURE"}  # Python's own; --wds-secure
    more = [name for name in seen if name not in known and not name.startswith(KEPT_PREFIXES)]
    assert not more, more


@pytest.mark.parametrize("flags", [(), ("-n", "1"), ("--wds-secure",)])
def test_a_hostile_environment_is_hidden_from_tests_and_their_children(tmp_path: Path, flags: tuple[str, ...]) -> None:
    told, found = inner(tmp_path, *flags)
    for seen in found:
        check(seen)
        assert seen.get("WDS_SECURE") == ("1" if "--wds-secure" in flags else None)
        assert seen["HOME"] == found[0]["HOME"] != str(tmp_path / "home")
    assert not Path(found[0]["HOME"]).exists(), "a home folder is left behind"
    assert told[-2] == "skipped 3: there is no GPU here (2), there is no Chromium here (1)"
    assert re.match(r"1 passed, 3 skipped in ", told[-1])


def of_rank(world: World) -> tuple[Path, Path, str]:
    """The home folder and the cache of a rank, and how many threads it is told to have."""
    return Path.home(), cache_root(), os.environ["OMP_NUM_THREADS"]


def test_ranks_have_the_home_of_the_test() -> None:
    for home, cache, threads in run_ranks(2, of_rank):
        assert home == Path.home() == Path(os.environ["HOME"])
        assert cache == home / ".cache/clipstream" and threads == "1"


def test_windows_is_refused_with_one_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import clipstream"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("On Windows, use WSL")
