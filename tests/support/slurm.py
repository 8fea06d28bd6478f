"""srun, scancel and scontrol as shell scripts: the tasks of a batch job, all on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.ranks import ROOT

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
[[ "$*" == "--signal=TERM $SLURM_JOB_ID.0" ]] && kill -USR2 $(cat "${0%/*}/step.pid")
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >>requeued; fi
"""


def slurm_environment(folder: Path, tasks: int = 2, nodes: int = 1) -> dict[str, str]:
    """The variables of a batch job, with `folder`/bin first in PATH, which has srun, scontrol, python and torchrun."""
    tools = {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "scancel": SCANCEL,
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    (folder / "bin").mkdir()
    for name, text in tools.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "4711", "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "localhost", "TASKS": str(tasks),
        "NODES": str(nodes),
    }  # fmt: skip
