"""The restart lines of docs/distributed.md: the fields of its manifests."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.doc_pages import blocks
from tests.support.forks import ROOT


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
