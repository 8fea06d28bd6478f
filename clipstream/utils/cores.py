"""The cores that this process may use, and what `CLIPSTREAM_CAPABILITIES` says of the machine.

The variable overrides what is found of the machine, as `bf16,cores=4` or `no-bf16`; what it does not name is as it was
found. A run can so be repeated as on another machine, and tests can have both answers.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from clipstream.errors import SettingsError

VARIABLE = "CLIPSTREAM_CAPABILITIES"


def cores() -> int:
    """Cores that this process may use: its affinity, and the limit of its control group (containers, Slurm)."""
    if (number := capabilities().get("cores")) is not None:
        return int(number)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota())))


def _quota() -> float:
    """The control group's limit in cores; cgroup v2 writes 'max 100000' or '200000 100000'."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def capabilities() -> dict[str, str]:
    """What the variable says, as name -> value. Raises SettingsError: it is not written as 'bf16,cores=4'."""
    text = os.environ.get(VARIABLE, "")
    parts = {part.strip() for part in text.split(",")}
    if {"bf16", "no-bf16"} <= parts or not all(re.fullmatch("|(no-)?bf16|cores=[1-9][0-9]*", part) for part in parts):
        raise SettingsError(f"{VARIABLE} is {text!r}: expected bf16 or no-bf16, and cores=N, separated by commas")
    return {name: value for name, _, value in (part.partition("=") for part in parts)}
