"""`clipstream.train` in a Jupyter kernel: its progress, the report inline, and the interrupt button."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import ROOT
from tests.support.ranks import TIMEOUT

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")


class Kernel:
    """A kernel, and the messages of the cells that it runs."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self.manager, self.client = manager.start_new_kernel(cwd=str(folder), env=env, startup_timeout=TIMEOUT)

    def run(self, code: str) -> dict[str, Any]:
        """A cell's error name ('' for none), text of standard output and error, its last displayed data, and the states
        of each output that is redrawn."""
        found: dict[str, Any] = {"stdout": "", "stderr": "", "data": {}, "redrawn": {}}

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                found[content["name"]] += content["text"]
            if (shown := content.get("transient", {}).get("display_id")) is not None:
                assert (message["msg_type"] == "display_data") == (shown not in found["redrawn"])
                found["redrawn"].setdefault(shown, []).append(content["data"])
            found["data"] = content.get("data", found["data"])

        reply = self.client.execute_interactive(code, output_hook=hook, timeout=TIMEOUT)["content"]
        return {**found, "error": reply.get("ename", ""), "message": reply.get("evalue", "")}


@pytest.fixture(scope="module")
def kernel(place: Path) -> Iterator[Kernel]:
    """A kernel in a folder with shards and a model."""
    kernel = Kernel(place)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


TRAIN = """
import clipstream
settings = {
    "run": {"device": "cpu", "threads": 1}, "model.name": "model.json", "train.precision": "fp32",
    "data": {"global_batch_size": 24, "workers": 2}, "log": {"every": 1, "tensorboard": False},
}
"""


def test_a_cell_trains_and_the_run_shows_its_report(kernel: Kernel, place: Path) -> None:
    more = "train_data='pairs/*.tar', val_data='val/*.tar', steps=3, name='cell'"
    cell = kernel.run(TRAIN + f"run = clipstream.train(settings, {more})\nrun")
    assert cell["error"] == "", cell
    # The bar is one output, redrawn in place; evaluations and notes are lines below it.
    (states,) = cell["redrawn"].values()
    assert " 0/3 " in states[0]["text/html"] and " 3/3 " in states[-1]["text/html"]
    assert "samples/s" in states[-1]["text/html"] and states[-1]["text/html"].startswith("<pre ")
    assert re.search("^val at step 3:", cell["stdout"], re.M) and "step 3/3" not in cell["stdout"]
    assert "\x1b" not in cell["stdout"] and "\r" not in cell["stdout"]
    assert cell["data"]["text/plain"] == "Run('runs/cell')" and cell["data"]["text/html"].startswith("<iframe ")
    log = (place / "runs/cell/out.log").read_text()
    assert [f"step {step}/3" in log for step in (1, 2, 3)] == [True] * 3 and log.count(" val at step 3:") == 1
    lines = "{'log.progress': 'lines'}, train_data='pairs/*.tar', steps=2, name='lines'"
    cell = kernel.run(TRAIN + f"run = clipstream.train(settings, {lines})")
    assert cell["error"] == "" and not cell["redrawn"], cell
    assert [line.split()[1] for line in cell["stdout"].splitlines() if line.startswith("step ")] == ["1/2", "2/2"]


def test_the_interrupt_button_saves_and_raises(kernel: Kernel, place: Path) -> None:
    metrics = place / "runs/stopped/metrics.jsonl"

    def interrupt() -> None:
        until = time.monotonic() + TIMEOUT
        while time.monotonic() < until and not (metrics.exists() and '"step": 2,' in metrics.read_text()):
            time.sleep(0.02)
        kernel.manager.interrupt_kernel()

    thread = threading.Thread(target=interrupt)
    thread.start()
    cell = kernel.run(TRAIN + "clipstream.train(settings, train_data='pairs/*.tar', steps=100_000, name='stopped')")
    thread.join()
    assert cell["error"] == "KeyboardInterrupt" and "stopped by SIGINT" in cell["message"], cell
    cell = kernel.run(
        "run = clipstream.Run.open('runs/stopped')\n"
        "assert run.status == 'stopped' and run.latest.name == f'step_{run.step:08d}' and run.step >= 2\n"
        "print(clipstream.train(run.settings, resume='latest', steps=run.step + 2).status)"
    )
    assert cell["error"] == "" and cell["stdout"].splitlines()[-1] == "done", cell
