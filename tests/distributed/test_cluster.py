"""Runs under torchrun: restarts, signals, other rank counts. The scripts of Slurm have a test of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch
from clipstream.distributed.launch import announce_waiting
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings, LossSettings
from tests.support.forks import ROOT, wait_until
from tests.support.ranks import TIMEOUT, command_ends, end_ranks, reserved_port
from tests.support.runs import flags, lines, same_weights, train_on, wait_for_step, weights
from tests.support.slurm import LOSS

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class Stopping:
    """The softmax loss, that takes its time, and at one step sends a signal to its own process, on the last rank."""

    class Settings(LossSettings):
        """When and what; how long a step takes at least, as long as a file is there."""

        at: int = -1
        signal: str | None = None
        seconds: float = 0.0
        hold: str = "/"

    def __init__(self, settings: Settings) -> None:
        self.settings, self.max_logit_scale = settings, 100.0
        self.clip = SoftmaxLoss(ClipLossSettings())

    def __call__(self, features: Any, batch: Batch, world: World) -> torch.Tensor:
        time.sleep(self.settings.seconds * Path(self.settings.hold).exists())
        if batch.step + 1 == self.settings.at and world.rank == world.size - 1 and self.settings.signal:
            os.kill(os.getpid(), signal.Signals[self.settings.signal])
        return self.clip(features, batch, world)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def stopping(**settings: Any) -> list[str]:
    return ["--loss", json.dumps({"type": LOSS, **settings})]


def held(file: Path) -> list[str]:
    """As `stopping`; the run takes its time until the file is removed, so that it is not over before it is ended."""
    file.touch()
    return stopping(seconds=1.0, hold=str(file))


def same_run(place: Path, one: str, other: str, rel: float | None = None) -> None:
    """Their lines, and without a tolerance their last weights, are the same."""
    assert len(lines(place, one)) == len(lines(place, other))
    for mine, theirs in zip(lines(place, one), lines(place, other), strict=True):
        assert mine == (theirs if rel is None else pytest.approx(theirs, rel=rel))
    if rel is None:
        last = lines(place, one)[-1]["step"]
        assert same_weights(weights(place, one, last), weights(place, other, last))


def test_who_is_waited_for_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipstream.distributed.launch.SILENT", 0.01)
    said = ""

    def told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.endswith("\n")

    with announce_waiting(World(rank=1, size=4, address="node1:5")):
        time.sleep(0.1)  # another rank would say it now
        with announce_waiting(World(rank=0, size=4, address="node1:5")):
            wait_until(told)
    assert said + capsys.readouterr().err == "rank 0 waits for 3 other ranks at node1:5\n"


def torchrun(argv: list[str], *launcher: str, ranks: int = 2, **env: str) -> subprocess.Popen[bytes]:
    """torchrun with a run's command line, but for `--logs`, which it takes for its own."""
    argv = ["--run.logs" if word == "--logs" else word for word in argv]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *launcher,
         "-m", "clipstream.train", *argv],
        cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def rank_of(launcher: subprocess.Popen[bytes], rank: int) -> int:
    """The process that is a rank of torchrun's."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = re.search(r"^PPid:\s+(\d+)", (folder / "status").read_text(), re.M)
            variables = (folder / "environ").read_bytes().split(b"\0")
            if parent is not None and int(parent[1]) == launcher.pid and b"RANK=%d" % rank in variables:
                return int(folder.name)
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.parametrize(
    ("ended", "by"),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.ci),
        pytest.param(1, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_torchrun_starts_again_when_a_rank_is_ended(place: Path, ended: int, by: signal.Signals) -> None:
    name, hold = f"restarted-{ended}-{by.name}", place / f"hold-{ended}-{by.name}"
    if not (place / "runs/undisturbed").exists():
        ends = end_ranks(2, train_on, flags(place, "undisturbed", *stopping(), steps=30))
        assert [end.code for end in ends] == [0, 0]
    argv = [*held(hold), "--resume", "auto"]
    launcher = torchrun(flags(place, name, *argv, steps=30), "--standalone", "--max-restarts", "2")
    wait_for_step(place, name, 5, launcher)
    os.kill(rank_of(launcher, ended), by)
    hold.unlink()
    _, error = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 0, error.decode()
    assert by == signal.SIGKILL or re.search(r"stopped by .*, step \d+ is saved", error.decode())
    starts = lines(place, name, "start")
    assert [line["start"]["ranks"] for line in starts] == [2, 2] and 4 <= starts[1]["step"] < 30
    same_run(place, name, "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "launcher_flags", "code"),
    [
        (signal.SIGTERM, [], 1),
        (signal.SIGUSR1, ["--signals-to-handle", SIGNALS], 1),
        (signal.SIGUSR1, [], -signal.SIGUSR1),  # torchrun dies of it
        (signal.SIGKILL, [], -signal.SIGKILL),
    ],
)
def test_a_signal_to_torchrun_saves_and_does_not_start_again(
    place: Path, signalled: signal.Signals, launcher_flags: list[str], code: int
) -> None:
    """Steps take longer than what a rank has to end by itself when the launcher, which holds the store, is gone."""
    name = f"{signalled.name}-{len(launcher_flags)}-torchrun"
    argv = flags(place, name, *stopping(seconds=4.0), "--checkpoint.every", "1000", steps=1000)
    launcher = torchrun(argv, "--standalone", "--max-restarts", "3", *launcher_flags)
    wait_for_step(place, name, 2, launcher)
    launcher.send_signal(signalled)
    launcher.communicate(timeout=TIMEOUT)
    command_ends(name)
    assert launcher.returncode == code
    step = int((place / "runs" / name / "checkpoints/latest").read_text().strip()[-8:])
    assert step == lines(place, name)[-1]["step"] >= 2
    assert len(lines(place, name, "start")) == 1


@pytest.mark.slow
def test_an_elastic_run_goes_on_when_a_node_comes_and_goes(place: Path, port: int) -> None:
    name = "elastic"
    hold = place / "hold"
    hold.touch()
    argv = [*stopping(seconds=2.0, hold=str(hold)), "--precision", "fp64", "--resume", "auto"]
    rendezvous = [
        "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7",
        "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--local-addr", "127.0.0.1", "--max-restarts", "3",
    ]  # fmt: skip
    # torchrun (torch 2.15) tells a node that comes later where to meet only if each round has a store of its own.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = torchrun(flags(place, name, *argv, steps=200), *rendezvous, ranks=1, **env)
    wait_for_step(place, name, 2, first)
    second = torchrun(flags(place, name, *argv, steps=200), *rendezvous, ranks=1, **env)
    wait_until(lambda: [line["start"]["ranks"] for line in lines(place, name, "start")] == [1, 2], first)
    wait_until(lambda: lines(place, name)[-1]["step"] >= lines(place, name, "start")[1]["step"] + 3, first)
    hold.unlink()
    second.kill()
    second.communicate()
    _, error = first.communicate(timeout=TIMEOUT)
    assert first.returncode == 0, error.decode()
    assert [line["start"]["ranks"] for line in lines(place, name, "start")] == [1, 2, 1]
    exact = flags(place, "inelastic", *stopping(), "--precision", "fp64", steps=200)
    assert [end.code for end in end_ranks(1, train_on, exact)] == [0]
    same_run(place, name, "inelastic", rel=1e-9)
