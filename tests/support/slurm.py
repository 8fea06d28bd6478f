"""Batch jobs: the page's scripts, the folder that they start in, and a stand-in for srun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support.doc_pages import blocks
from tests.support.forks import ROOT
from tests.support.runs import furnish

LOSS = "tests.distributed.test_cluster:Stopping"

SRUN = """#!/bin/bash
# Plays srun: two tasks on this machine.
pids=()
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 \\
        SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_STEP_TASKS_PER_NODE=2 "$@" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    wait $pid; code=$?
    if ((code > worst)); then worst=$code; fi
done
exit $worst
"""


def script(launcher: str) -> str:
    """The script of a batch job in docs/distributed.md that has a word in it."""
    found = [block.text for block in blocks(ROOT / "docs" / "distributed.md") if block.text.startswith("#!/bin/bash")]
    (text,) = [text for text in found if launcher in text]
    return text


def furnish_job(folder: Path, steps: int = 40) -> dict[str, str]:
    """Give a folder what the page's reader has: my.yaml, shards, python and torchrun; the environment to start it in.

    Each step takes its time while `folder`/hold is there.
    """
    furnish(folder)
    settings = {
        "run": {"device": "cpu", "threads": 1},
        "data": {
            "sources": {"train": {"shards": f"{folder}/pairs/{{00000..00003}}.tar"}},
            "global_batch_size": 24, "workers": 1,
        },
        "model": {"name": f"{folder}/model.json"},
        "train": {"steps": steps},
        "loss": {"type": LOSS, "seconds": 1.0, "hold": f"{folder}/hold"},
        "checkpoint": {"every": 1000},
        "log": {"every": 1, "tensorboard": False},
    }  # fmt: skip
    (folder / "my.yaml").write_text(json.dumps(settings))
    env = with_tools(folder)
    (folder / "bin" / "srun").unlink()  # the real one
    return env


def with_tools(folder: Path) -> dict[str, str]:
    """The environment with `folder`/bin first in PATH: python and torchrun of this environment, and the stand-in."""
    tools = {
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
    }
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in tools.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def slurm_environment(folder: Path) -> dict[str, str]:
    """The environment of a batch job of two tasks on one node, with an srun that stands in for Slurm's."""
    return with_tools(folder) | {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}
