"""The page's batch scripts on a real Slurm of this test's own: `make test-cluster`."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.forks import wait_until
from tests.support.ranks import reserved_port
from tests.support.runs import lines
from tests.support.slurm import furnish_job, script

SBIN = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(tool, path=SBIN) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: install Debian's slurm-wlm and munge"),
]
# Two nodes on this machine. The ranks' ports follow from job ids, which those of a Slurm beside it must not have.
# A requeued job waits until its credentials have expired.
CONF = """
ClusterName=test
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8
"""


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The configuration of a Slurm that runs while the tests of this module do."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)  # munge refuses a socket that others cannot reach
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    files = {"key-file": "key", "socket": "munge", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        told = {
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "cpus": os.cpu_count(),
            "first": 10 * os.getpid(),
        }
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports, **told))
        env = {**os.environ, "PATH": SBIN, "SLURM_CONF": f"{folder}/slurm.conf"}
        log = stack.enter_context((folder / "daemons.log").open("w"))
        for command in (
            ["munged", "--foreground", "--force", *(f"--{name}={folder}/{file}" for name, file in files.items())],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "127.0.0.1"],
            ["slurmd", "-D", "-N", "127.0.0.2"],
        ):
            command = ["setpriv", "--pdeathsig", "TERM", *command]
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            if "munged" in command:
                wait_until((folder / "munge").exists, daemon)

        def idle() -> bool:
            asked = subprocess.run(["sinfo", "-ho%D %t"], env=env, capture_output=True, text=True, check=False)
            return asked.stdout == "2 idle\n"

        try:
            wait_until(idle, daemon)
            yield env["SLURM_CONF"]
            wait_until(idle, daemon)
        finally:
            print((folder / "daemons.log").read_text())


@dataclass
class Job:
    """A script of the page as a job of two ranks."""

    folder: Path
    env: dict[str, str]
    text: str
    ids: list[str] = field(default_factory=list)

    def submit(self, *more: str) -> None:
        """Put the script into the queue; the run's steps take their time while `hold` is there."""
        (self.folder / "hold").touch()
        (self.folder / "job.sh").write_text(self.text)
        self.ids.append(self.call("sbatch", "--parsable", "--output=%j.out", *more, "job.sh").strip())

    def call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, name: str) -> str:
        """What Slurm says of the job: JobState, Restarts, ExitCode."""
        time.sleep(0.2)
        (value,) = re.findall(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", self.ids[-1]))
        return str(value)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has reached a step; the job runs then."""
        path = self.folder / "runs/mine/metrics.jsonl"
        wait_until(lambda: (path.exists() and f'"step": {step},' in path.read_text()) or self.over())
        assert not self.over(), self.said()

    def over(self) -> bool:
        return self.shown("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def ends(self, state: str, code: str) -> None:
        wait_until(self.over)
        assert (self.shown("JobState"), self.shown("ExitCode")) == (state, code), self.said()

    def said(self) -> str:
        return (self.folder / f"{self.ids[-1]}.out").read_text()

    def reached(self) -> int:
        return int(lines(self.folder, "mine")[-1]["step"])


@pytest.fixture(params=["python", "torchrun"])
def job(conf: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job of a page's script on two nodes."""
    nodes = "#SBATCH --nodes=2 --ntasks-per-node=1"
    with reserved_port() as port:
        text, count = re.subn(r"^#SBATCH --nodes=4 .*$", nodes, script(f"srun --wait=60 {request.param}"), flags=re.M)
        assert count == 1
        text = text.replace("--nproc-per-node 8", "--nproc-per-node 1").replace(":29500", f":{port}")
        text = text.replace("srun --wait", "srun hostname\nsrun --wait")
        text = text.replace("--time=24:00:00", "--time=2").replace("USR1@300", "USR1@30")
        made = Job(tmp_path, {**furnish_job(tmp_path, steps=300), "SLURM_CONF": conf}, text)
        yield made
        for number in made.ids:
            subprocess.run(["scancel", number], env=made.env, check=False)


def test_a_job_at_its_time_limit_and_a_cancelled_one_continue(job: Job, tmp_path: Path) -> None:
    job.submit()
    wait_until(lambda: job.shown("Restarts") == "1")
    limited = job.reached()
    assert f"step {limited} is saved" in job.said()
    job.wait_for_step(limited + 2)
    job.call("scancel", job.ids[-1])
    job.ends("CANCELLED", "0:15")
    wait_until(lambda: f"step {job.reached()} is saved" in job.said())
    reached = job.reached()
    job.submit("--time=20")
    job.wait_for_step(reached + 2)
    (tmp_path / "hold").unlink()
    job.ends("COMPLETED", "0:0")
    starts = [(line["step"], line["start"]["ranks"]) for line in lines(tmp_path, "mine", "start")]
    assert limited > 0 and starts == [(0, 2), (limited, 2), (reached, 2)] and job.reached() == 300
