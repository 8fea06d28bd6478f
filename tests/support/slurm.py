"""Batch jobs: the page's scripts, the folder that they start in, and stand-ins for srun, scancel and scontrol."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support.doc_pages import blocks
from tests.support.ranks import ROOT
from tests.support.runs import furnish

LOSS = "tests.distributed.test_cluster:Stopping"

SRUN = """#!/bin/bash
# Plays srun: TASKS tasks of NODES nodes, all on this machine.
while [[ $1 == --* ]]; do shift; done
echo $$ >"${0%/*}/step.pid"
pids=()
trap 'for pid in "${pids[@]}"; do kill -KILL $(cat /proc/$pid/task/*/children) $pid; done' TERM
trap 'kill -TERM "${pids[@]}"' USR2
each=$((TASKS / NODES))
for ((task = 0; task < TASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % each)) SLURM_NODEID=$((task / each)) SLURM_STEP_ID=0 \\
        SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_NUM_NODES=$NODES SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST \\
        SLURM_STEP_TASKS_PER_NODE="$each(x$NODES)" "$@" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    wait $pid; code=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
    if ((code > worst)); then worst=$code; fi
done
exit $worst
"""
# Slurm ends a step whose srun is told to end; only scancel's signal reaches the tasks.
SCANCEL = """#!/bin/bash
[[ "$*" == "--signal=TERM $SLURM_JOB_ID" ]] && kill -USR2 $(cat "${0%/*}/step.pid")
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >>requeued; fi
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
    return with_tools(folder, {})


def with_tools(folder: Path, more: dict[str, str]) -> dict[str, str]:
    """The environment with `folder`/bin first in PATH: python and torchrun of this environment, and more scripts."""
    tools = {
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        **more,
    }
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in tools.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def slurm_environment(folder: Path, tasks: int = 2, nodes: int = 1) -> dict[str, str]:
    """The environment of a batch job, with srun, scontrol and scancel that stand in for Slurm's."""
    return with_tools(folder, {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}) | {
        "SLURM_JOB_ID": "4711", "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "localhost", "TASKS": str(tasks),
        "NODES": str(nodes),
    }  # fmt: skip
