"""One turn of a rung: a model is built, takes some steps, and is removed again.

Settings and batches enter; speed, memory and losses leave. Nothing stays on the device between turns, so that the
memory of a rung is its own, and each turn of a rung begins with the same weights.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from clipstream.cli.verbs.bench.open_clip_step import OpenClipStep
from clipstream.cli.verbs.bench.rungs import Rung
from clipstream.config.settings import Settings
from clipstream.data.batch import Batch
from clipstream.data.loader.stage_timing import HAND_OVER, IDLE
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError
from clipstream.models.execution.flops import ModelFlops, Work, count_flops
from clipstream.models.execution.text_buckets import TextBuckets, why_inexact
from clipstream.text import shortened
from clipstream.train.run import build_loader, build_model, build_step, build_teacher
from clipstream.utils.matmul_precision import restored_matmul_precision

if TYPE_CHECKING:
    from clipstream.data.loader.loader import Loader
    from clipstream.data.loader.stored import StoredData
    from clipstream.models.towers import Towers

MOST_BYTES = 1 << 30  # of the batches that are kept; where more are needed, they are repeated
REASON_SHOWN = 120  # characters of an error


@dataclass(frozen=True)
class Turn:
    """The measurements of a turn, the same on all ranks.

    Attributes:
        rate: samples/s of all ranks together, over the measured steps.
        memory: most bytes in use above those in use before, of the rank with most: CUDA's, or resident memory.
        losses: of each step, before its update.
        first_step: seconds of the first step, in which kernels are compiled.
        input_ms: milliseconds of a data worker for a sample; None where no data are read.
    """

    rate: float
    memory: int
    losses: tuple[float, ...]
    first_step: float
    input_ms: float | None


class UnableError(Exception):
    """A rung cannot run here; the text is the reason."""


@dataclass(frozen=True)
class Parts:
    """What a turn runs."""

    # (prepared batch, learning rate) -> function that waits for the loss, which the trainer calls a step later
    step: Callable[[Any, float], Callable[[], float]]
    prepare: Callable[[Batch], Any]  # not measured
    batches: Iterator[Batch]
    loader: Loader | None = None  # of `batches`, where they are not in memory


class Turns:
    """Takes turns. Methods are collective.

    Args:
        settings: of the baseline, resolved.
        stored: feature stores that the settings name.
        count: steps of the longest turn.
        peak_lr_at: steps in which the learning rate rises linearly to `optim.lr`.

    Attributes:
        batches: this rank's first batches, on its device, with the true lengths of their texts.
        padded: why texts cannot be cut by length; None if they can.
        packs: whether `model.text_buckets: auto` packs texts here, in towers that are not compiled.
    """

    def __init__(
        self, settings: Settings, world: World, stored: StoredData | None, *, count: int, peak_lr_at: int
    ) -> None:
        self.world, self.stored, self.peak_lr_at = world, stored, peak_lr_at
        towers, tokenizer = build_model(settings, world, stored)
        teacher = build_teacher(settings, world)
        known = None if "text" in towers.stored else TextBuckets.of(towers.clip, "auto")
        self.padded = None if known is not None else _why_padded(towers)
        self.packs = known is not None and known.packed == torch.device(world.device).type
        self.batches: list[Batch] = []
        with build_loader(settings, world, towers, tokenizer, None, teacher, stored) as loader:
            for batch in itertools.islice(loader, count):
                lengths = None if known is None else known.lengths(batch.ids.cpu())
                self.batches.append(replace(batch.clone(), lengths=lengths).to(world.device))
                size = sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors())
                if size * (len(self.batches) + 1) > MOST_BYTES:
                    break
        self._frozen = towers.unchanging()
        self._flops: dict[float | None, ModelFlops | None] = {settings.model.patch_dropout: count_flops(towers)}

    def tflops(self, settings: Settings, rate: float) -> float | None:
        """TFLOP/s of a device at `rate` samples/s of all ranks; None where the model's FLOPs cannot be counted."""
        dropped = settings.model.patch_dropout
        if dropped not in self._flops:
            self._flops[dropped] = count_flops(build_model(settings, self.world, self.stored)[0])
        if (flops := self._flops[dropped]) is None:
            return None
        work = Work()
        for batch in self.batches:
            work.add(batch, flops)
        a_sample = work.flops(flops, self._frozen) / sum(map(len, self.batches))
        return a_sample * rate / self.world.size / 1e12

    def take(self, settings: Settings, rung: Rung, warmup: int, steps: int) -> Turn:
        """A turn of `warmup` steps and `steps` measured ones.

        Raises:
            UnableError: the rung cannot run here.
            ClipstreamError: a step failed on one of several ranks.
        """
        memory = PeakMemory(self.world.device)
        try:
            with ExitStack() as stack:
                parts, reason = None, None
                try:
                    parts = self.build(settings, rung, stack)
                except (ClipstreamError, RuntimeError) as error:
                    reason = explained(error)
                reasons = [text for text in self.world.gather_objects(reason) if text is not None]
                if parts is None or reasons:
                    raise UnableError(reasons[0])
                return self._measure(parts, warmup, steps, memory, settings.optim.lr)
        except RuntimeError as error:  # of a step: the memory is full, there is no compiler
            if self.world.size > 1:  # the others may wait in a collective
                text = f"{rung.name} cannot run ({explained(error)}): leave it out by --rungs"
                raise ClipstreamError(text) from error
            raise UnableError(explained(error)) from error

    def build(self, settings: Settings, rung: Rung, stack: ExitStack) -> Parts:
        """Build the model and the step of a rung, which the stack's end removes again.

        Raises ClipstreamError, RuntimeError: the rung cannot run here.
        """
        towers, tokenizer = build_model(settings, self.world, self.stored)
        in_memory = itertools.cycle(self.batches)
        if rung.open_clip:
            stack.enter_context(restored_matmul_precision())  # open_clip's step sets this, and the next
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            precision, name = settings.train.arithmetic, settings.model.name
            compiler = settings.train.compile_backend if rung.torchcompile else None
            theirs = OpenClipStep(towers, self.world.device, precision, settings.optim, name, compiler)
            stack.callback(torch._dynamo.reset)
            return Parts(theirs.start, theirs.prepare, in_memory)
        teacher = build_teacher(settings, self.world)
        loader = None
        if rung.from_shards:
            loader = build_loader(settings, self.world, towers, tokenizer, None, teacher, self.stored)
            stack.enter_context(closing(loader))
        _, step = build_step(settings, self.world, towers, teacher, self.stored)
        if step.compilation is not None:
            stack.callback(torch._dynamo.reset)  # the compiled code holds the model
            step.compilation.strict = True  # what runs eagerly would be measured as compiled

        def start(batch: Batch, lr: float) -> Callable[[], float]:
            result = step.start(batch, lr)
            return lambda: result().loss

        return Parts(start, lambda batch: batch, loader or in_memory, loader)

    def _measure(self, parts: Parts, warmup: int, steps: int, memory: PeakMemory, lr: float) -> Turn:
        seconds: list[float] = []
        started: list[Callable[[], float]] = []
        losses: list[float] = []
        samples = 0
        for number in range(warmup + steps):
            if number == warmup:
                synchronize(self.world.device)
            began = time.perf_counter()
            batch = next(parts.batches)
            waited = time.perf_counter() - began
            prepared = parts.prepare(batch)
            began = time.perf_counter()
            started.append(parts.step(prepared, lr * min(1.0, (number + 1) / self.peak_lr_at)))
            if number:
                losses.append(started.pop(0)())
            if number == warmup + steps - 1:
                synchronize(self.world.device)
            seconds.append(waited + time.perf_counter() - began)
            samples += batch.global_size * (number >= warmup)
        losses.append(started.pop()())
        found = self.world.gather_objects((sum(seconds[warmup:]), memory.peak(), seconds[0]))
        slowest, most, first_step = (max(column) for column in zip(*found, strict=True))
        input_ms = None if parts.loader is None else _worker_ms(parts.loader)
        return Turn(samples / slowest, int(most), tuple(losses), first_step, input_ms)


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
        if sys.platform == "linux":
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
            with suppress(OSError):  # not permitted: the peak is that of the process's life
                Path("/proc/self/clear_refs").write_text("5")
        self._before = _resident("VmRSS")

    def peak(self) -> int:
        """Most bytes in use since the construction, above those that were in use then."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device) - self._before)
        return _resident("VmHWM") - self._before


def _resident(name: str) -> int:
    """Bytes of a line of /proc/self/status; 0 where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def explained(error: Exception) -> str:
    """The reason for a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return shortened(text, REASON_SHOWN)


def _why_padded(towers: Towers) -> str | None:
    if "text" in towers.stored:
        return "features of texts come from a store"
    return why_inexact(getattr(towers.clip, "text", towers.clip))


def _worker_ms(loader: Loader) -> float | None:
    """Milliseconds of a worker for a sample, since the loader was made."""
    times = loader.take_times()
    decoded = times.buckets["decode"].total() if "decode" in times.buckets else 0
    work = sum(seconds for stage, seconds in times.seconds.items() if stage not in (IDLE, HAND_OVER))
    return 1e3 * work / decoded if decoded else None


def synchronize(device: str) -> None:
    """Wait for the device's kernels."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
