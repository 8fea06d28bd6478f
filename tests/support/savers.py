"""Small models and the writers that save them; damaged files and full disks."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.checkpoint.async_writer import AsyncWriter, Content
from clipstream.checkpoint.remote_sync import RemoteSync
from clipstream.distributed.world import World
from clipstream.training.optim import AdamW
from clipstream.training.settings import CheckpointSettings
from clipstream.training.state import TrainState
from tests.support.steps import TinyTowers


def parts() -> tuple[TinyTowers, torch.optim.Optimizer]:
    """A model and its optimiser."""
    model = TinyTowers(dropout=0.2)
    return model, AdamW.Settings(lr=0.01, wd=0.1).build(model, "ViT")


def saver_of(
    folder: Path,
    world: World | None = None,
    *,
    model: tuple[Any, torch.optim.Optimizer] | None = None,
    sync: RemoteSync | None = None,
    recorded: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncWriter:
    """What saves a small model in a folder of a run's folder, which is made: a save waits for one that is away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    towers, optimizer = model or parts()
    section = CheckpointSettings(**settings)
    return AsyncWriter(
        folder, world or World(), section, Content(towers, optimizer, recorded or {}, tensors or {}), sync=sync
    )


def write(folder: Path, step: int, keep_last: int = 2, **state: Any) -> Path | None:
    """Save a checkpoint of `step`; where it lies, or None if it is not written."""
    saver = saver_of(folder, keep_last=keep_last)
    saver.save(TrainState(step, **state))
    return folder / f"step_{step:08d}" if saver.finish() else None


def names(folder: Path) -> list[str]:
    """What is in the folder."""
    return sorted(path.name for path in folder.iterdir())


def damage(file: Path) -> None:
    """Change a byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of that size at the folder; skips the test where it may not be made."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let no file of this process and its children become larger than that, in bytes: a write ends with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(folder: Path, left: int) -> Path:
    """A file that leaves so many bytes of the disk."""
    ballast = folder / "ballast"
    with suppress(OSError):  # a run in it takes room as well
        ballast.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - left)))
    return ballast
