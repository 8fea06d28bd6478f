"""Memory of a training process over many steps, with padded, bucketed and packed texts in each precision.

    python benchmarks/soak.py DIR/{00000..00002}.tar --caption caption.en --steps 5000 --csv build/soak.csv

Each case is a process of its own that trains the small ViT on batches drawn from the captions, so that the lengths of
texts differ in each step; pixels are random. Cases run one after the other. Printed are the resident memory in MiB at
a few steps, the memory above that of padded texts of the same precision, and CPU seconds of 100 steps.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from text_buckets import build, read_captions

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings
from clipstream.training.precision import Precision, prepare
from clipstream.training.step import TrainStep


def train(captions: list[str], options: argparse.Namespace) -> None:
    """Train, and print `step,MiB,CPU s` every hundredth step."""
    torch.manual_seed(0)
    setting = int(options.texts) if options.texts.isdigit() else options.texts
    towers = build(options.model, setting)
    precision: Precision = options.precision
    prepare(towers, precision)
    ids = towers.open_clip_tokenizer()(captions).int()
    optimizer = torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], fused=True)
    step = TrainStep(towers, SoftmaxLoss(ClipLossSettings()), optimizer, World(), precision=precision)
    pixels = torch.randint(0, 256, (options.batch, 3, *towers.image.size), dtype=torch.uint8)
    n, process = options.batch, psutil.Process()
    for number in range(options.steps + 1):
        if number % options.every == 0:
            resident = process.memory_info().rss / 2**20
            print(number, round(resident, 1), round(time.process_time(), 2), sep=",", flush=True)
        texts = ids[torch.randint(0, len(ids), (n,))]
        lengths = None if towers.text_buckets is None else towers.text_buckets.lengths(texts)
        batch = Batch(pixels, texts, torch.ones(n), ("",) * n, torch.zeros(n), step=number, global_size=n)
        step(batch, lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--caption", help="path in the json member, as caption.en; the txt member unless given")
    parser.add_argument("--model", default="configs/models/small-vit.json")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--precision")
    parser.add_argument("--texts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(read_captions(options.shards, 4000, options.caption), options)


if __name__ == "__main__":
    main()
