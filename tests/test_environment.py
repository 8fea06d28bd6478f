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
from tests.support.forks import ROOT
from tests.support.ranks import TIMEOUT, run_ranks

# Each of these changes what clipstream or a library does.
HOSTILE = {
    "https_proxy": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1", "CLIPSTREAM_CACHE": "/nowhere", "WDS_SECURE": "1",
    "XDG_CACHE_HOME": "/nowhere", "RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "OMP_NUM_THREADS": "7",
    "TZ": "Asia/Kathmandu", "LC_ALL": "C", "NO_COLOR": "1", "COLUMNS": "20",
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


@pytest.mark.parametrize("flags", [(), pytest.param(("-n", "1", "--wds-secure"), marks=pytest.mark.ci)])
def test_a_hostile_environment_is_hidden_from_tests_and_their_children(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "home/.cache/clipstream").mkdir(parents=True)
    (tmp_path / "test_inner.py").write_text(TESTS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    home = {"HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *flags]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "test_inner.py"],
        cwd=tmp_path, env={**kept, **HOSTILE, **home}, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    secure = {"WDS_SECURE": "1"} if flags else {}
    of_python = ("HOME", "PYTHONUSERBASE", "LC_CTYPE")
    homes = set()
    for who in ("test", "child", "server"):
        seen = json.loads((tmp_path / f"{who}.json").read_text())
        homes.add(seen["HOME"])
        more = {name: value for name, value in seen.items() if not name.startswith(KEPT_PREFIXES)}
        assert {name: more[name] for name in more.keys() - KEPT - {*of_python}} == FIXED | secure
    assert len(homes) == 1 and not Path(*homes).exists(), "a home folder is left behind"
    told = done.stdout.splitlines()
    assert told[-2] == "skipped 3: there is no GPU here (2), there is no Chromium here (1)"
    assert re.match(r"1 passed, 3 skipped in ", told[-1])


DRAWS = """
import others
from hypothesis import given, settings, strategies as st

@given(st.text(), st.integers(), st.binary(), st.floats(allow_nan=False))
@settings(max_examples=200)
def test_draws(text, number, data, share):
    with open("drawn", "a") as file:
        file.write(f"{text!r} {number} {data!r} {share}\\n")
"""


def drawn_in(folder: Path, constant: int, *flags: str) -> str:
    """The examples of a property test in a folder, beside a module with constants."""
    folder.mkdir()
    (folder / "test_inner.py").write_text(DRAWS)
    (folder / "others.py").write_text(f"FOUND = {[*range(constant, constant + 500)]}, 'text {constant}', b'{constant}'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", *flags]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "CI": "true"}
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "test_inner.py"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "drawn").read_text()


@pytest.mark.ci
def test_examples_are_the_same_in_every_run(tmp_path: Path) -> None:
    """Whatever modules are loaded: Hypothesis 6.170 draws numbers and texts that occur in them."""
    assert drawn_in(tmp_path / "one", 1_000_000) == drawn_in(tmp_path / "two", 2_000_000)


@pytest.mark.ci
def test_fuzz_draws_by_its_seed(tmp_path: Path) -> None:
    fuzz = "--hypothesis-profile=fuzz"
    first = drawn_in(tmp_path / "fuzz", 1_000_000, fuzz, "--hypothesis-seed=1")
    assert first == drawn_in(tmp_path / "again", 1_000_000, fuzz, "--hypothesis-seed=1")
    assert first != drawn_in(tmp_path / "other", 1_000_000, fuzz, "--hypothesis-seed=2")


def of_rank(world: World) -> tuple[Path, Path, str]:
    """The home folder and the cache of a rank, and how many threads it is told to have."""
    return Path.home(), cache_root(), os.environ["OMP_NUM_THREADS"]


def test_ranks_have_the_home_of_the_test() -> None:
    home = Path(os.environ["HOME"])
    assert run_ranks(2, of_rank) == [(home, home / ".cache/clipstream", "1")] * 2


def test_windows_is_refused_with_one_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import clipstream"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("On Windows, use WSL")
