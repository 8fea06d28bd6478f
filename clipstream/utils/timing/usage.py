"""Use of the device by a rank: utilisation, power and memory of its GPU, else processor time and memory of processes.

GPU memory is that of torch's allocator. Utilisation and power come from NVML, by way of torch, where the package
`nvidia-ml-py` is installed (`clipstream[gpu]`); without it, or where NVML does not offer them, they are left out.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from clipstream.utils.logs import logger

GIB = 1 << 30
Figures = dict[str, float]


class Usage:
    """Reads the use of a device.

    Args:
        device: torch's name of it.
        workers: returns the process ids of this rank's data workers.

    Attributes:
        kind: 'gpu' or 'cpu', the key of the figures in a training line.
    """

    def __init__(self, device: str, workers: Callable[[], Sequence[int]] = lambda: ()) -> None:
        self._device, self._workers = torch.device(device), workers
        self.kind = "gpu" if self._device.type == "cuda" else "cpu"
        # Of NVML, those that work here: key, function, its value for 1.
        self._nvml: list[tuple[str, Callable[[torch.device], int], float]] = [
            ("utilization", torch.cuda.utilization, 100),
            ("power_w", torch.cuda.power_draw, 1e3),
        ]
        self._began, self._spent = time.perf_counter(), _processor_seconds(())

    def read(self) -> Figures:
        """The figures of this rank since the last call; see `over_ranks`. Waits for nothing on the device."""
        return self._gpu() if self.kind == "gpu" else self._cpu()

    def _gpu(self) -> Figures:
        found: Figures = {}
        for one in list(self._nvml):
            key, read, unit = one
            try:
                found[key] = read(self._device) / unit
            except Exception as error:  # no nvidia-ml-py, no driver, or a GPU without this figure
                self._nvml.remove(one)
                logger.debug(f"training lines have no gpu.{key}: {error}")
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for name, key in (("allocated", "allocated_bytes.all.current"), ("reserved", "reserved_bytes.all.current"),
                          ("peak", "allocated_bytes.all.peak")):  # fmt: skip
            found[f"memory_{name}_gib"] = stats.get(key, 0) / GIB
        return found

    def _cpu(self) -> Figures:
        found: Figures = {}
        workers = self._workers()
        now, spent = time.perf_counter(), _processor_seconds(workers)
        if now > self._began:
            # A worker that began meanwhile counts from its beginning.
            new = sum(seconds - self._spent.get(pid, 0.0) for pid, seconds in spent.items())
            found["cores"] = new / (now - self._began)
        self._began, self._spent = now, spent
        own = memory_of(os.getpid())
        if "VmRSS" in own:
            found["memory_gib"] = own["VmRSS"] / GIB
            found["memory_peak_gib"] = own["VmHWM"] / GIB
        if rows := [memory["VmRSS"] for memory in map(memory_of, workers) if "VmRSS" in memory]:
            found["workers_memory_gib"] = sum(rows) / GIB
        return found


class PeakMemory:
    """Peak of a device's memory: CUDA's allocator, or on the CPU resident memory of the process (Linux).

    Its construction frees what is not used, and begins a new peak.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        with suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # not permitted: the peak is that of the process's life
            Path("/proc/self/clear_refs").write_text("5")
        self._before = memory_of("self").get("VmRSS", 0)

    def peak(self) -> int:
        """Most bytes in use since the construction, above those that were in use then."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device) - self._before)
        return memory_of("self").get("VmHWM", 0) - self._before


def over_ranks(figures: Iterable[Mapping[str, float]]) -> Figures:
    """Figures of all ranks as one: the largest of memory, the mean of the others."""
    by_key: dict[str, list[float]] = {}
    for of_rank in figures:
        for key, value in of_rank.items():
            by_key.setdefault(key, []).append(value)
    return {
        key: round(max(values) if "memory" in key else sum(values) / len(values), 3) for key, values in by_key.items()
    }


def _processor_seconds(pids: Sequence[int]) -> dict[int, float]:
    """Processor time of this process, all threads, and of others that are there."""
    found = {os.getpid(): time.process_time()}
    for pid in pids:
        try:
            # Behind the name, which may contain spaces: fields 14 and 15 of proc(5) are user and system time.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):  # not Linux, or it has ended
            continue
    return found


def memory_of(pid: int | str) -> dict[str, int]:
    """Resident memory of a process in bytes, now (VmRSS) and at most (VmHWM); empty where Linux's /proc is not."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    rows = [line.split() for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:"))]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}
