"""What a run of `time_to_accuracy.py` measures in its process: training seconds, CPU seconds and R@1 at some steps.

    evaluator Clock       in a run of clipstream, as `--evals.clock.type clock:Clock`
    python clock.py …     a run of open_clip_train with the words that follow; OUT, EVERY and LEVEL come first

Both evaluate the same pairs by the same metric, each with images as it reads those of training, outside of the clock:
meanwhile the workers of data are stopped, so that they do not work ahead for free.
"""

from __future__ import annotations

import csv
import io
import os
import resource
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from plain_loop import processes

from clipstream.data.batch import hash_rows
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext
from clipstream.evals.metrics import EqualCaptions
from clipstream.evals.retrieval_and_loss import recalls
from clipstream.evals.settings import EvalSettings, source_of

COLUMNS = ("step", "samples", "wall_s", "cpu_s", "image_to_text", "text_to_image")
TICKS = os.sysconf("SC_CLK_TCK")
BATCH = 256  # pairs that are encoded at once


def cpu_of(pid: int) -> float:
    """CPU seconds of a living process, with those of its children that have ended; 0 for one that has gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS
    return 0.0


def cpu_seconds() -> float:
    """CPU seconds of this process and of its descendants."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(cpu_of, processes(os.getpid())[1:]))


class Stopwatch:
    """Training seconds since it was made, without those inside of `measure`; rows of a CSV file.

    Args:
        out: the CSV file.
        level: mean R@1 of both directions at which the run ends.
    """

    def __init__(self, out: Path, level: float) -> None:
        self.level, self.file = level, out.open("w", newline="", buffering=1)
        self.writer = csv.writer(self.file)
        self.writer.writerow(COLUMNS)
        self.rows = 0
        self.wall = self.cpu = 0.0  # of the pauses
        self.began, self.cpu_began = time.perf_counter(), cpu_seconds()

    def measure(self, step: int, samples: int, recall: Callable[[], tuple[float, float]]) -> bool:
        """Write a row with what `recall` finds, outside of the clock; whether the level is reached."""
        wall, cpu, workers = time.perf_counter(), cpu_seconds(), processes(os.getpid())[1:]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            found = recall()
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
        spent = wall - self.began - self.wall, cpu - self.cpu_began - self.cpu
        self.writer.writerow([step, samples, *(f"{value:.3f}" for value in spent), *(f"{one:.6f}" for one in found)])
        self.rows += 1
        self.wall += time.perf_counter() - wall
        self.cpu += cpu_seconds() - cpu
        return sum(found) / 2 >= self.level


running = cache(Stopwatch)  # that of the process: a run has an evaluator for each of its stages


def recall_of(images: torch.Tensor, texts: torch.Tensor, ids: torch.Tensor) -> tuple[float, float]:
    """R@1 image to text and text to image of features [n, D]; a text that several images have is right for each.

    Args:
        ids: the texts' token ids, int [n, T].
    """
    world, owners = World(), torch.arange(len(images))
    equal = EqualCaptions.find(hash_rows(ids), owners, world)
    texts = texts if equal is None else texts[equal.first]
    found = dict(recalls(images, texts, world, owners=owners, equal=equal))
    return found["image_to_text_R@1"], found["text_to_image_R@1"]


class Clock:
    """The evaluator of a run of clipstream; ends the run at the level."""

    class Settings(EvalSettings):
        out: str  # CSV file
        level: float

    def __init__(self, settings: Settings) -> None:
        self.settings, self.source, self.reached = settings, source_of(settings), False
        self.watch = running(Path(settings.out), settings.level)
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Measure, and end the run where the level is reached."""
        if self.reached:  # the last evaluation of a run that is being ended
            return
        step = (self.watch.rows + 1) * self.settings.every

        def recall() -> tuple[float, float]:
            if not self.held:
                batches = context.batches(self.source, BATCH)
                self.held = [(batch.images.clone(), batch.ids.clone()) for batch in batches]
            images = torch.cat([context.encode_image(pixels) for pixels, _ in self.held])
            texts = torch.cat([context.encode_text(ids) for _, ids in self.held])
            return recall_of(images, texts, torch.cat([ids for _, ids in self.held]))

        self.reached = self.watch.measure(step, context.data.samples_before(step), recall)
        if self.reached:
            os.kill(os.getpid(), signal.SIGTERM)
        yield "steps", float(step)


def open_clip(out: Path, every: int, level: float, shards: Sequence[str], words: Sequence[str]) -> None:
    """Train with open_clip_train's own program; its schedule, called before each step, is where it is measured."""
    import open_clip as library
    import open_clip_train.main as program

    library.add_model_config(Path(__file__).parent.parent / "configs" / "models")
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    schedule, epoch, watches = program.cosine_lr, program.train_one_epoch, list[Stopwatch]()
    models: list[Any] = []

    @torch.no_grad()
    def recall() -> tuple[float, float]:
        model = models[0]
        model.eval()
        images = torch.cat([model.encode_image(pixels, normalize=True) for pixels, _ in held])
        texts = torch.cat([model.encode_text(ids, normalize=True) for _, ids in held])
        model.train()
        return recall_of(images.float(), texts.float(), torch.cat([ids for _, ids in held]))

    def measured_schedule(optimizer: Any, *rest: Any) -> Callable[[int], object]:
        adjust = schedule(optimizer, *rest)

        def before_step(step: int) -> object:
            if step and step % every == 0:
                measure(step)
            return adjust(step)

        return before_step

    def measure(step: int) -> None:
        if watches[0].measure(step, step * options.batch_size, recall):
            raise SystemExit

    def measured_epoch(model: Any, data: Any, *rest: Any, **more: Any) -> None:
        models.append(model)
        held.extend(pairs(shards, model))
        watches.append(Stopwatch(out, level))
        epoch(model, data, *rest, **more)
        measure(data["train"].dataloader.num_batches)

    options = program.parse_args(words)
    program.cosine_lr, program.train_one_epoch = measured_schedule, measured_epoch
    program.main(words)


def pairs(shards: Sequence[str], model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs of shards with txt members, as open_clip_train reads them: images [n, 3, H, W] and ids [n, T]."""
    import open_clip as library

    visual = model.visual
    prepare = library.image_transform(visual.image_size, is_train=False, mean=visual.image_mean, std=visual.image_std)
    tokenize = library.get_tokenizer("ViT-B-32", context_length=model.context_length)
    images, texts = [], []
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                data, suffix = tar.extractfile(member), member.name.rpartition(".")[2]
                assert data is not None
                if suffix == "txt":
                    texts.append(data.read().decode())
                elif suffix in ("jpg", "png", "jpeg", "webp"):
                    images.append(prepare(Image.open(io.BytesIO(data.read())).convert("RGB")))
    return list(zip(torch.split(torch.stack(images), BATCH), torch.split(tokenize(texts), BATCH), strict=True))


if __name__ == "__main__":
    open_clip(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4].split("::"), sys.argv[5:])
