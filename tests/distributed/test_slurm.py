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
    torchrun: bool
    tasks: int
    id: str = ""
    ids: list[str] = field(default_factory=list)

    def submit(self, *more: str, text: str | None = None) -> None:
        """Put the script into the queue, with `hold` set."""
        (self.folder / "hold").touch()
        (self.folder / "job.sh").write_text(self.text if text is None else text)
        self.id = self.call("sbatch", "--parsable", "--output=%j.out", *more, "job.sh").strip()
        self.ids.append(self.id)

    def call(self, *command: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, name: str) -> str:
        """What Slurm says of the job: JobState, Restarts, ExitCode."""
        time.sleep(0.2)
        (value,) = re.findall(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", self.id))
        return str(value)

    def wait_for(self, name: str, *values: str) -> None:
        """Wait until Slurm says so."""
        wait_until(lambda: self.shown(name) in values)

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has reached a step; the job runs then."""
        path = self.folder / "runs/mine/metrics.jsonl"
        wait_until(lambda: (path.exists() and f'"step": {step},' in path.read_text()) or self.over())
        assert not self.over(), self.said()

    def over(self) -> bool:
        return self.shown("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def ends(self, state: str, code: str) -> None:
        """The job ends, in this state and with this exit code."""
        wait_until(self.over)
        assert (self.shown("JobState"), self.shown("ExitCode")) == (state, code), self.said()

    def said(self) -> str:
        """What the job has printed."""
        return (self.folder / f"{self.id}.out").read_text()

    def free(self) -> None:
        """Let the run's steps take no more time."""
        (self.folder / "hold").unlink()

    def reached(self) -> int:
        return int(lines(self.folder, "mine")[-1]["step"])

    def starts(self) -> list[int]:
        """The steps at which the run began, each time with two ranks."""
        found = lines(self.folder, "mine", "start")
        assert {line["start"]["ranks"] for line in found} == {2}
        return [line["step"] for line in found]


@pytest.fixture(params=["python on 2 nodes", "torchrun on 2 nodes"])
def job(conf: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job of a page's script, with an earlier step."""
    launcher, _, nodes, _ = request.param.split()
    torchrun = launcher == "torchrun"
    tasks = int(nodes) if torchrun else 2
    with reserved_port() as port:
        text, count = re.subn(
            r"^#SBATCH --nodes=4 .*$",
            f"#SBATCH --nodes={nodes} --ntasks-per-node={tasks // int(nodes)}",
            script(f"srun --wait=60 {launcher}"),
            flags=re.M,
        )
        assert count == 1
        text = text.replace("--nproc-per-node 8", f"--nproc-per-node {2 // tasks}").replace(":29500", f":{port}")
        text = text.replace("srun --wait", "srun hostname\nsrun --wait")
        text = text.replace("--time=24:00:00", "--time=2").replace("USR1@300", "USR1@30")
        env = {**furnish_job(tmp_path, steps=300), "SLURM_CONF": conf}
        made = Job(tmp_path, env, text, torchrun, tasks)
        yield made
        for number in made.ids:
            subprocess.run(["scancel", number], env=env, check=False)


def test_a_job_at_its_time_limit_and_a_cancelled_one_continue(job: Job) -> None:
    job.submit()
    job.wait_for("Restarts", "1")
    limited = job.reached()
    assert f"step {limited} is saved" in job.said()
    job.wait_for_step(limited + 2)
    job.call("scancel", job.id)
    job.ends("CANCELLED", "0:15")
    wait_until(lambda: f"step {job.reached()} is saved" in job.said())
    reached = job.reached()
    job.submit("--time=20")
    job.wait_for_step(reached + 2)
    job.free()
    job.ends("COMPLETED", "0:0")
    assert limited > 0 and job.starts() == [0, limited, reached] and job.reached() == 300
