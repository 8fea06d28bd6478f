"""The records of how a process of a run began and ended, as lines of metrics.jsonl; nothing is written here.

A start record has what is needed to repeat the process: command line, git state, hardware, versions. An end record has
its status, exit code and error.

`require_same` compares between the ranks what all of them must have alike, such as their software: a rank whose code,
weights or shards are others would train on them without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clipstream import __version__
from clipstream.distributed.world import World
from clipstream.errors import INTERRUPTED, CopyError, DivergedError, SettingsError, Stopped
from clipstream.text import listed, shortened
from clipstream.utils.atomic_write import checksum
from clipstream.utils.plugins import OURS, is_library, is_plugin
from clipstream.utils.processes import cores

GIT_SECONDS = 10.0  # limit for one git command: a work tree may be on a slow network disk
PACKAGES = (
    "open_clip_torch", "timm", "transformers", "webdataset", "huggingface_hub", "numpy", "pillow",
    "nvidia-nvimgcodec-cu12", "nvidia-nvimgcodec-cu13",
)  # fmt: skip
_STATUS = {
    0: "done", CopyError.exit_code: "done", Stopped.exit_code: "stopped", INTERRUPTED: "stopped",
    DivergedError.exit_code: "diverged",
}  # fmt: skip


def now() -> str:
    """The time in the format of the records: `2026-11-21 10:30:00 UTC`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def end_record(step: int, code: int, error: str | None, **more: Any) -> dict[str, object]:
    """How a process of a run ended.

    Args:
        code: the exit code; it decides the status: done, stopped (by a signal), diverged or failed.
        error: the message; None where there was no error.
    """
    end = {"status": _STATUS.get(code, "failed"), "code": code, "error": error, **more}
    return {"step": step, "time": now(), "end": end}


def start_record(step: int, ranks: int, device: str, command: list[str]) -> dict[str, object]:
    """How a process of a run began, on rank 0's machine.

    Args:
        step: of the checkpoint that it resumes from, or 0.
        device: torch's name of rank 0's device.
        command: the command line, without credentials.
    """
    import torch

    gpu = device.startswith("cuda")
    return {
        "step": step,
        "start": {
            "time": now(),
            "ranks": ranks,
            "device": torch.cuda.get_device_name(device) if gpu else f"{device} ({platform.machine()})",
            "command": shlex.join(command),
            "folder": str(Path.cwd()),
            "git": git_state(Path.cwd()),
            "hardware": hardware(),
            "versions": versions(),
        },
    }


def git_state(folder: Path) -> dict[str, str | bool | None] | None:
    """Commit of the git work tree around `folder`, and whether tracked files differ from it; None without one."""

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, object]:
    """Host, processor, cores that this process may use, memory in GiB, and the GPUs that torch sees."""
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    try:
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        cpus = []
    names = (line.partition(":")[2].strip() for line in cpus if line.startswith("model name"))
    cpu = next(names, platform.processor() or platform.machine())
    try:
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError):
        memory = None
    return {"host": socket.gethostname(), "cpu": cpu, "cores": cores(), "memory_gib": memory, "gpus": gpus}


def command_line() -> list[str]:
    """The command line of this process, with the module's name for `python -m`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def versions() -> dict[str, str]:
    """Package -> version; torch's with its build. Packages that are not installed are left out."""
    import torch

    own = {"clipstream": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return own | _installed_packages()


@cache
def _installed_packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


SHOWN = 200  # characters of a value in a message


def require_same(
    world: World,
    own: Callable[[], Mapping[str, object]],
    what: str,
    advice: str,
    shown: Callable[[object], str] = str,
) -> None:
    """Check that `own` gives the same values on all ranks. Collective; with one rank, `own` is not called.

    Raises SettingsError: they differ; names the first of them, with rank, host and both values.
    """
    if world.size == 1:
        return
    values = own()
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    found = world.gather_objects((digest, socket.gethostname()))
    other = next((rank for rank, (theirs, _) in enumerate(found) if theirs != found[0][0]), None)
    if other is None:
        return
    trees = world.gather_objects(values)
    first, second = ({key: shortened(shown(one), SHOWN) for key, one in trees[rank].items()} for rank in (0, other))
    different = [
        f"{key} is {first.get(key, 'absent')} on rank 0 and {second.get(key, 'absent')} on rank {other}"
        for key in dict.fromkeys((*first, *second))
        if trees[0].get(key) != trees[other].get(key) or (key in first) != (key in second)
    ]
    hosts = f"rank 0 is on {found[0][1]}, rank {other} on {found[other][1]}"
    raise SettingsError(f"ranks have different {what}: {listed(different)}; {hosts}: {advice}")


def software(values: Iterable[object] = ()) -> dict[str, str]:
    """The versions of packages, and the checksums of the source of clipstream and of plug-ins.

    Args:
        values: settings; those `module:Name` of which the module is loaded are plug-ins. Nothing is imported here. A
            plug-in counts with the loaded modules of its folder; one in an installed package by its file alone.
    """
    files = {f"clipstream/{path.relative_to(OURS)}": str(path) for path in sorted(Path(OURS).rglob("*.py"))}
    for plugin in filter(is_plugin, map(str, values)):
        name = plugin.partition(":")[0]
        if file := getattr(sys.modules.get(name), "__file__", None):
            folder = os.path.join(os.path.dirname(file), "")
            loaded = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
            near = (one for one in loaded if one.startswith(folder) and not is_library(one, installed=True))
            files |= {f"{name}: {os.path.relpath(one, folder)}": one for one in sorted({file, *near})}
    packages = {f"the version of {name}": found for name, found in versions().items() if name != "python"}
    return packages | {f"the source {name}": checksum(Path(file)) for name, file in files.items()}
