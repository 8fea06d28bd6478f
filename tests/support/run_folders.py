"""Folders of runs with metrics."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from clipstream.evals.context import Example, Table
from clipstream.report.sinks import ImageFiles, MetricsFile

DROPS = {"no_caption": 39, "image_truncated": 1}
EXAMPLES = {"no_caption": "00001.tar/12: has json, png", "image_truncated": "00003.tar/7: cut after 90 bytes"}


def picture(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 48, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def step_times(step: int) -> dict[str, float]:
    """Seconds of a step by part; the first one is slow."""
    times = {"data": 0.01, "image_forward": 0.06, "text_forward": 0.02, "loss": 0.01, "backward": 0.18}
    return {**times, "optimizer": 30.0} if step == 10 else {**times, "communication": 0.02}


def make_run(folder: Path, *, lr: float = 5e-4, steps: int = 2000) -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir(parents=True)
    versions = {"clipstream": "0.1", "torch": "2.15.0"}
    sink = MetricsFile(folder)
    for step in (0, 500):
        start = {"time": "2026-11-21 10:00 UTC", "ranks": 2, "device": "cpu (x86_64)", "versions": versions}
        sink.write({"step": step, "start": start})
    for step in range(10, steps + 1, 10):
        loss = math.nan if step == 300 else 5.5 / (1 + step / 400)
        sink.write({"step": step, "samples": 64 * step, "loss": loss, "lr": lr, "grad_norm": 1.0, "logit_scale": 14.3,
                    "samples_per_s": 800 + step % 7, "data_wait": 0.02, "time": step_times(step),
                    "gpu": {"utilization": 0.9, "memory_allocated_gib": 4.0, "memory_peak_gib": 20.0}})  # fmt: skip
        if step % 500 == 0:
            values = {"top1": 0.5 if step == 1000 else 0.4, "top5": 0.9, "n": 120, "chance": 0.05, "dropped": 3}
            sink.write({"step": step, "eval": "animals", **values, "seconds": 2.5})
    operation = {"name": "void at::native::" + "vectorized_elementwise_kernel<4, " * 6, "calls": 48,
                 "self_device": 0.25, "device": 0.25, "self_cpu": 0.001, "cpu": 0.003}  # fmt: skip
    profile = {"steps": [6, 8], "device": "cuda", "trace": "profile/steps_6-8.json.gz", "operations": [operation] * 3}
    sink.write({"step": 8, "profile": profile})
    health = {"read": 9000, "used": 8960, "dropped": DROPS, "examples": EXAMPLES, "shards": 12, "shard_faults": 1,
              "fault_reasons": {"missing_end": 1}}  # fmt: skip
    sink.write({"step": steps, "health": {"train": health}})
    sink.close()
    (folder / "config.yaml").write_text(f"run:\n  name: {folder.name}\noptim:\n  lr: {lr}\n  wd: null\n")
    album = ImageFiles(folder)
    album.show(0, "train", [Example(picture(i), f"a <b>small</b> cat {i}", f"00000/{i}") for i in range(5)])
    guesses = (("dog & bone", 0.31), ("cat", 0.29))
    shown = [Example(picture(i), "cat", f"1/{i}", guesses, group) for group in ("wrong", "right") for i in range(3)]
    shown += [Example(picture(i), "dog", f"2/{i}", group="“a <red> cat”", note="match 0.312") for i in range(2)]
    confused = Table(
        "the worst classes", ("class", "right", "taken for"), (("cat & co", "3 of 9", "dog (4), a fox (2)"),)
    )
    album.show(steps, "animals", shown, [confused])
    return folder
