"""What all tests share: the same environment everywhere, markers, and the closing line about skipped tests.

Property tests draw the same examples in every run, and have no limit of time, as machines are shared and noisy. The
profile `fuzz` of `make fuzz` draws anew.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clipstream.distributed.signals import SIGNALS
from clipstream.utils.logs import on_terminal
from tests.support.environment import hide

if TYPE_CHECKING:
    from tests.support.s3 import S3

HOME = hide()  # before a test module imports torch or the Hub's client
# Python's own, whatever is ignored here, as SIGHUP is under nohup.
HANDLERS = {number: signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL for number in SIGNALS}

with suppress(ImportError):  # tests/gpu runs without
    from hypothesis import HealthCheck, settings

    # Of a function-scoped fixture, a folder is shared by all examples; "too slow" is a matter of the machine's load.
    profile = {
        "deadline": None,
        "database": None,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    }
    settings.register_profile("shared", **profile, derandomize=True)  # type: ignore[arg-type]
    # Where CI is set, Hypothesis derandomizes by default.
    settings.register_profile("fuzz", **profile, derandomize=False, print_blob=True)  # type: ignore[arg-type]
    settings.load_profile("shared")


def draw_without_constants_of_loaded_modules() -> None:
    """Keep Hypothesis from drawing numbers and texts that occur in the modules that are loaded.

    Hypothesis 6.131 and later do so, derandomized or not (`_get_local_constants` in
    hypothesis/internal/conjecture/providers.py): a test's examples would depend on which tests ran before it in the
    same process, and on the name of the folder that the project is in, as modules below `tests` are left out.
    """
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--wds-secure` instead of the variable, which is hidden as all others are."""
    parser.addoption("--wds-secure", action="store_true", help="run the tests with WDS_SECURE=1")
    parser.addoption("--gpu-device", choices=("cuda", "cpu"), default="cuda", help="device of tests/gpu")
    parser.addoption("--pairs-seed", default="1", help="seed of the slow test in tests/test_pairs.py")


def pytest_configure(config: pytest.Config) -> None:
    """Set what must be set before webdataset is imported, and know the markers wherever the tests' root folder is."""
    for marker in ("unit", "process"):
        config.addinivalue_line("markers", f"{marker}: see pyproject.toml")
    if config.getoption("--wds-secure"):
        os.environ["WDS_SECURE"] = "1"
    if "hypothesis" in sys.modules and not config.getoption("hypothesis_profile", None):
        draw_without_constants_of_loaded_modules()


def pytest_unconfigure() -> None:
    """Leave no home folder behind."""
    shutil.rmtree(HOME, ignore_errors=True)


PROCESSES = {
    "subprocess", "multiprocessing", "tests.support.commands", "tests.support.forks",
    "tests.support.loaders", "tests.support.ranks", "tests.support.runs",
}  # fmt: skip


@lru_cache
def starts_processes(path: Path) -> bool:
    """Whether a test module imports what starts processes: Python's modules, or the support for ranks and loaders."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return bool(PROCESSES & (names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test `process` or `unit` by what its module imports."""
    item.add_marker("process" if starts_processes(item.path) else "unit")


@lru_cache
def uses_fake_gpus(path: Path) -> bool:
    """Whether a test module makes fake tensors."""
    return "FakeTensorMode" in path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what uses fake GPUs last: autograd has threads afterwards, with which a process cannot fork."""
    items.sort(key=lambda item: uses_fake_gpus(item.path))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say in one line, the last but pytest's own, what was skipped and why."""
    yield
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        told = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped {reasons.total()}: {told}")
    else:
        terminalreporter.write_line("skipped 0")


@pytest.fixture(autouse=True)
def closed_loaders() -> Iterator[None]:
    """Leave no loader open."""
    yield
    if "tests.support.loaders" in sys.modules:
        sys.modules["tests.support.loaders"].close_loaders()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread again, as OMP_NUM_THREADS says: a verb called by a test takes all cores.

    The tests of two processes that share two cores would take ten times as long with two threads each.
    """
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Handle signals as Python does at its start: a verb that ends ignores SIGTERM, as would processes forked later."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    yield


@pytest.fixture(autouse=True)
def _messages_on_terminal() -> Iterator[None]:
    """Show the package's messages as the verbs do, also where a test calls a part of it."""
    with on_terminal():
        yield


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards may be named by commands, also where the suite runs with WDS_SECURE=1."""
    monkeypatch.delenv("WDS_SECURE", raising=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards of different sizes, one of a single sample; modules may have others by this name."""
    from tests.support.pictures import make_shards  # imports torch

    return make_shards(tmp_path_factory.mktemp("shards"), [13, 7, 20, 1, 16, 9])


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    """A server of `tests.support.s3`, whose module skips where its libraries are missing."""
    from tests.support.s3 import running

    with running() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server with nothing stored, which s3fs reaches, and asks once."""
    from tests.support.s3 import s3fs

    for name, text in s3_server.environment().items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3_server.clear()
    return s3_server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `tests.support.runs.flags` names; modules may have others by this name."""
    from tests.support.runs import furnish  # imports torch

    return furnish(tmp_path_factory.mktemp("place"))
