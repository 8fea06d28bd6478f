"""The cost of a save during training: wall time and CPU-seconds, relative to one step.

    python benchmarks/saving.py --model ViT-S-32-alt --batch 64

Rounds of steps alternate: with a checkpoint saved after the first step, and without. A round lasts until the save is
on disk, so that the writing thread's effect on the steps is included, and so is the removal of the previous
checkpoint. The cost of a save is the difference between the means of the rounds with and without, divided by a step's
mean. "The call" is the part during which training stands still: the copy.

On two otherwise idle cores of a server, which train as well: 97 MB (8 M parameters) with steps of 0.86 s: 0.108 ±
0.026 s per save, 12.6% of a step, in CPU time 0.191 ± 0.048 s, 11.3%; the call takes 0.025 s. The time depends on the
bytes (0.03 s for the copy, 0.045 s for CRC-32), so its share is smaller for longer steps: with steps of 3.4 s (768
samples) 0.148 ± 0.158 s, 4.4%, and 4.1% in CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from clipstream.checkpoint.async_writer import AsyncWriter, Content
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from clipstream.training.optim import AdamW
from clipstream.training.settings import CheckpointSettings, TrainSettings
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep


def batch_of(towers: Towers, size: int, step: int) -> Batch:
    """Noise in the model's shapes."""
    height, width = towers.image.size
    pixels = torch.randint(0, 256, (size, 3, height, width), dtype=torch.uint8)
    ids = torch.randint(1, towers.vocab_size, (size, towers.context_length), dtype=torch.int32)
    keys = tuple(map(str, range(size)))
    return Batch(pixels, ids, torch.ones(size), keys, torch.zeros(size), step=step, global_size=size)


class Training:
    """A model in training, and what saves it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.world = World(device=args.device)
        towers = build_towers(ModelSettings.model_validate({"name": args.model}), seed=0).to(args.device)
        towers.train()
        optimizer = AdamW.Settings().build(towers, "ViT")
        settings = TrainSettings(precision=args.precision, micro_batch_size=args.micro_batch)
        self.step = TrainStep(towers, SoftmaxLoss(ClipLossSettings()), optimizer, self.world, settings)
        self.saver = AsyncWriter(folder, self.world, CheckpointSettings(keep_last=1), Content(towers, optimizer))
        self.batch = batch_of(towers, args.batch, 0)
        self.parameters, self.saves = towers.n_parameters, 0

    def take(self) -> None:
        """A step, to its end."""
        self.step(self.batch, lr=1e-5)
        if self.world.device.startswith("cuda"):
            torch.cuda.synchronize()

    def save(self) -> float:
        """Begin a save; the seconds that training stood still."""
        began = time.perf_counter()
        self.saves += 1
        self.saver.save(TrainState(self.saves, samples=self.saves))
        return time.perf_counter() - began

    def round(self, steps: int, save: bool) -> tuple[float, float, float]:
        """Wall time and CPU-seconds of some steps, and of that the call, with or without a save after the first."""
        began, cpu, call = time.perf_counter(), time.process_time(), 0.0
        for number in range(steps):
            self.take()
            if save and number == 0:
                call = self.save()
        self.saver.finish()
        return time.perf_counter() - began, time.process_time() - cpu, call


def steps_of_a_round(training: Training) -> int:
    """As many as a save takes on the disk, and one more."""
    training.take()
    began = time.perf_counter()
    training.take()
    step = time.perf_counter() - began
    for _ in range(2):  # the first asks for memory
        training.save()
        began = time.perf_counter()
        training.saver.finish()
        written = time.perf_counter() - began
    return 2 + int(written / step)


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Print the table."""
    training = Training(args, folder)
    steps = steps_of_a_round(training)
    rounds: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for number in range(args.rounds):
        for save in (False, True) if number % 2 else (True, False):
            rounds[save].append(training.round(steps, save))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{args.model}, {training.parameters / 1e6:.0f} M parameters, batch {args.batch}, {args.precision}, "
          f"{size / 1e6:.0f} MB a checkpoint, {args.rounds} rounds of {steps} steps each")  # fmt: skip
    for place, name in enumerate(("wall", "CPU")):
        plain, saving = ([times[place] for times in rounds[save]] for save in (False, True))
        step = statistics.mean(plain) / steps
        differences = [b - a for a, b in zip(plain, saving, strict=True)]
        cost = statistics.mean(differences)
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        print(f"{name:<5} {step:7.3f} s a step, {cost:7.3f} ± {error:.3f} s a save: {cost / step:6.1%} of a step")
    call = statistics.median(times[2] for times in rounds[True])
    print(f"call  {call:7.3f} s")


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", help="where checkpoints are written; a temporary one unless given")
    args: Any = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
