"""The restart lines of docs/distributed.md: torchrun goes on by itself after a killed rank, and the manifests load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.doc_pages import blocks
from tests.support.forks import ROOT, TIMEOUT
from tests.support.runs import flags, furnish, go, lines, same_weights, weights

DYING = '''"""Kills rank 1 once, in the middle of a step."""
import os, pathlib, signal

seen = [0]


def once(sample):
    seen[0] += 1
    mark = pathlib.Path(__file__).with_name("died")
    if os.environ.get("RANK") == "1" and seen[0] == 60 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
'''


@pytest.mark.ci  # seven interpreters start
def test_torchrun_alone_goes_on_after_a_killed_rank(tmp_path: Path) -> None:
    furnish(tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    more = ["--resume", "auto", "--data.sources.train.transform", "dying:once"]
    argv = ["--run.logs" if word == "--logs" else word for word in flags(tmp_path, "killed", *more)]
    argv[argv.index("--workers") + 1] = "0"  # the rank itself reads
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m clipstream.train"
    done = subprocess.run(
        [sys.executable, *launcher.split(), *argv],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=2 * TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    starts = [line["start"]["ranks"] for line in lines(tmp_path, "killed", "start")]
    assert starts == [2, 2], "it began twice"
    go(flags(tmp_path, "whole"), ranks=2)
    assert lines(tmp_path, "killed") == lines(tmp_path, "whole")
    assert same_weights(weights(tmp_path, "killed", 8), weights(tmp_path, "whole", 8))


def manifests() -> dict[str, dict[str, Any]]:
    """The manifests of the page, by kind."""
    page = blocks(ROOT / "docs/distributed.md")
    found = [one for block in page if block.language == "yaml" for one in yaml.safe_load_all(block.text)]
    return {one["kind"]: one["spec"] for one in found}


def test_the_manifests_start_again() -> None:
    """Fields as in the references of Kubernetes 1.31, JobSet 0.10 (v1alpha2) and Kubeflow Trainer 2.2 (v1alpha1)."""
    found = manifests()
    rules = found["Job"]["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]}
    assert codes == {2: "FailJob", 3: "FailJob", 4: "FailJob", 75: "Ignore"}
    assert found["Job"]["completionMode"] == "Indexed" and found["Job"]["backoffLimit"] > found["Job"]["completions"]
    jobset = found["JobSet"]
    (inner,) = [one["template"]["spec"] for one in jobset["replicatedJobs"]]
    assert jobset["failurePolicy"]["maxRestarts"] > 0 == inner["backoffLimit"]
    assert jobset["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert inner["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    runtime = found["TrainingRuntime"]["template"]["spec"]
    assert (
        runtime["failurePolicy"]["maxRestarts"] > 0 == runtime["replicatedJobs"][0]["template"]["spec"]["backoffLimit"]
    )
    command = found["TrainJob"]["trainer"]["command"]
    assert {"--max-restarts", "--resume"} <= {*command} and all(isinstance(word, str) for word in command)
    for pods in (found["Job"]["template"]["spec"], inner["template"]["spec"]):
        assert pods["restartPolicy"] == "Never", "podFailurePolicy requires it"
        env = {one["name"]: one["value"] for one in pods["containers"][0]["env"]}
        assert env["WORLD_SIZE"] == str(found["Job"]["completions"])
        assert "RANK=$JOB_COMPLETION_INDEX exec" in pods["containers"][0]["command"][2]
