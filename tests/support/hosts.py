"""Two hosts on this machine: network namespaces with a link between them, ranks on them, and the faults of hosts.

Each host has a name and an address of its own, and shares files with the other. Needs Linux and root. A link that loses
packets is a program of the kernel's classifier, which works where netem is not built in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forks import ROOT, TIMEOUT, Fork, wait_until

SPACES = {"net": 0x4000_0000, "uts": 0x0400_0000, "mnt": 0x0002_0000}  # CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS
UNSHARE = ("unshare", "--net", "--uts", "--mount")
PORT = 29_400
LINK = "wire0"
WEB = "10.73.0."  # addresses of the hosts, which nothing outside of the namespaces sees
# Classic BPF, an instruction each: load a random number; go on if it is at least the limit; drop (TC_ACT_SHOT); pass.
LOSSY = "4,32 0 0 4294963256,53 1 0 {limit},6 0 0 2,6 0 0 0"


def missing() -> str:
    """Why there can be no hosts on this machine; '' if there can be."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "network namespaces need Linux and root"
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"no {', '.join(tools)}: install Debian's iproute2 and util-linux"
    made = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "unshare makes no network namespace here"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)


@dataclass
class Host:
    """A network namespace, which lives as long as the process `pid` and those within."""

    name: str
    address: str
    pid: int

    def call(self, *command: str) -> None:
        run(*self.within(), *command)

    def within(self) -> list[str]:
        """What stands before a command that is to run on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount"]

    def processes(self) -> list[int]:
        """The processes on this host, without the one that keeps it."""
        here, found = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/net") == here and int(folder.name) != self.pid:
                    found.append(int(folder.name))
        return found

    def lose_power(self) -> None:
        """Cut it off, and kill what runs on it: no connection is closed for the other side to see."""
        self.call("ip", "link", "set", "dev", LINK, "down")
        for _ in range(3):  # torchrun's children are no children of one that is killed before them
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass
class Rank:
    """A rank and where it runs."""

    number: int
    host: Host
    process: Fork


@dataclass
class Cluster:
    """Two hosts."""

    hosts: tuple[Host, Host]
    started: list[Fork | subprocess.Popen[bytes]] = field(default_factory=list)

    def set_link(self, up: bool) -> None:
        self.hosts[1].call("ip", "link", "set", "dev", LINK, "up" if up else "down")

    def lose_packets(self, share: float) -> None:
        """Let each host drop this share of the packets that it sends, drawn at random; 0 for none."""
        for host in self.hosts:
            with contextlib.suppress(AssertionError):
                host.call("tc", "qdisc", "del", "dev", LINK, "clsact")
            if share:
                program = LOSSY.format(limit=int(share * 2**32))
                host.call("tc", "qdisc", "add", "dev", LINK, "clsact")
                host.call("tc", "filter", "add", "dev", LINK, "egress", "bpf", "da", "bytecode", program)

    def mend(self) -> None:
        """Bring the network back."""
        for host in self.hosts:
            host.call("ip", "link", "set", "dev", LINK, "up")
        self.lose_packets(0)

    def environment(self, **more: str) -> dict[str, str]:
        hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        kept = {name: text for name, text in os.environ.items() if name not in hidden}
        return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, **more}

    def start(self, argv: Sequence[str], ranks: int, module: str = "clipstream.train", **more: str) -> list[Rank]:
        """A run of plain ranks, as srun starts them, half of them on each host."""
        first = -(-ranks // 2)
        found = []
        for number in range(ranks):
            host = self.hosts[number >= first]
            here = first if number < first else ranks - first
            env = self.environment(
                RANK=str(number), WORLD_SIZE=str(ranks), LOCAL_RANK=str(number if number < first else number - first),
                LOCAL_WORLD_SIZE=str(here), MASTER_ADDR=self.hosts[0].address, MASTER_PORT=str(PORT), **more,
            )  # fmt: skip
            command = ["-m", "tests.support.hosts", str(host.pid), module, *argv]
            found.append(Rank(number, host, Fork(command, env=env)))
        self.started += [rank.process for rank in found]
        return found

    def end(self) -> None:
        """Kill everything on both hosts."""
        for host in self.hosts:
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(TIMEOUT)
        self.started.clear()


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[Cluster]:
    """Two hosts, `north` and `south`, with a link between them; everything on them is killed in the end."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, name in enumerate(("north", "south"), 1):
            holder = stack.enter_context(subprocess.Popen([*UNSHARE, "sleep", "infinity"]))
            stack.callback(holder.kill)
            hosts.append(Host(name, f"{WEB}{number}", holder.pid))
            wait_until(lambda pid=holder.pid: command_of(pid).startswith("sleep"), holder)  # type: ignore[misc]
        cluster = Cluster((hosts[0], hosts[1]))
        at = [("name", LINK, "netns", str(host.pid)) for host in hosts]
        run("ip", "link", "add", *at[0], "type", "veth", "peer", *at[1])
        names = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        names.write("".join(f"{host.address} {host.name}\n" for host in hosts) + "127.0.0.1 localhost\n")
        names.flush()
        for host in hosts:
            host.call("mount", "--bind", names.name, "/etc/hosts")
            host.call("hostname", host.name)
            host.call("ip", "addr", "add", f"{host.address}/24", "dev", LINK)
            host.call("ip", "link", "set", "dev", "lo", "up")
            host.call("ip", "link", "set", "dev", LINK, "up")
        stack.callback(cluster.end)
        yield cluster


def seconds_until(done: Callable[[], bool], limit: float) -> float | None:
    """The time until it is so; None if it is not within `limit` seconds."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > limit:
            return None
        time.sleep(0.02)
    return time.monotonic() - began


def enter(pid: int) -> None:
    """Move this process, which has one thread, to the host of a process."""
    folder = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in SPACES.items():
        number = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if libc.setns(number, flag):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(number)
    os.chdir(folder)


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
