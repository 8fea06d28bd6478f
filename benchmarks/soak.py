"""Memory of a training process over many steps, with padded, bucketed and packed texts in each precision.

    python benchmarks/soak.py DIR/{00000..00002}.tar --caption caption.en --steps 5000 --csv build/soak.csv

Each case is a process of its own that trains a small ViT on batches drawn from the captions, so that the lengths of
texts differ in each step; pixels are random. Cases run one after the other. Printed are the resident memory in MiB and
the CPU seconds of the process at every hundredth step.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
from text_buckets import build, read_captions

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings
from clipstream.models.precision import prepare
from clipstream.models.settings import Precision
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep

Row = tuple[str, str, int, float, float]  # precision, texts, step, MiB, CPU seconds


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(precision: Precision, texts: str, captions: list[str], options: argparse.Namespace, rows: Any) -> None:
    """Train, and put a row at every hundredth step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    towers = build(options.model, int(texts) if texts.isdigit() else texts)
    prepare(towers, precision)
    ids = towers.open_clip_tokenizer()(captions).int()
    optimizer = torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], fused=True)
    step = TrainStep(towers, SoftmaxLoss(ClipLossSettings()), optimizer, World(), TrainSettings(precision=precision))
    n = options.batch
    pixels = torch.randint(0, 256, (n, 3, *towers.image.size), dtype=torch.uint8)
    for number in range(options.steps + 1):
        if number % options.every == 0:
            rows.put((precision, texts, number, round(resident(), 1), round(time.process_time(), 1)))
        drawn = ids[torch.randint(0, len(ids), (n,))]
        step(Batch(pixels, drawn, torch.ones(n), ("",) * n, torch.zeros(n), step=number, global_size=n), lr=1e-4)
    rows.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--caption", help="path in the json member, as caption.en; the txt member unless given")
    parser.add_argument("--model", default="small-vit")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--texts", nargs="+", default=["off", "4", "packed"])
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    captions = read_captions(options.shards, 4000, options.caption)
    context, found = multiprocessing.get_context("spawn"), list[Row]()
    for precision in options.precisions:
        for texts in options.texts:
            rows = context.Queue()
            process = context.Process(target=train, args=(precision, texts, captions, options, rows))
            process.start()
            while (row := rows.get()) is not None:
                print(*row, flush=True)
                found.append(row)
            process.join()
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("precision", "texts", "step", "MiB", "CPU s"), *found])


if __name__ == "__main__":
    main()
