"""Retrieval over many pictures and captions: memory beyond the features, time, and the time of a larger one from tiles.

    python benchmarks/retrieval.py                             # 100,000 x 500,000 at width 512, in full
    python benchmarks/retrieval.py --pictures 5000 --captions 25000      # a few seconds

Features are random: pictures of length 1, captions near theirs, five a picture. Memory is the peak of resident memory
above the features, MiB. Scores are counted for both ways at once; `dense` is what the matrix of scores alone would
take in float32. The time of 1,000,000 x 5,000,000 is that of its tiles, each the median of what `--tiles` of them took.

Two cores of a server, 2 threads, torch 2.15:

    a tile of 2048 x 4096 at width 512: 0.126 s
    1,000,000 x 5,000,000: 598,290 tiles, 21.0 h on 2 threads
    100,000 x 500,000: 3046 s, 165 MiB above 1172 MiB of features
    dense: 190,735 MiB; R@1 0.581 and 0.266

The tiles were timed while the cores were free, the rest beside other work: by the former, its 6,125 tiles take 13
minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from clipstream.distributed.world import World
from clipstream.evals.metrics import COLUMNS, ROWS, ScoreTile
from clipstream.evals.retrieval_and_loss import recalls

LARGE = (1_000_000, 5_000_000)


def features(pictures: int, captions: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures [n, D], captions [m, D], and the picture of each caption, made in parts that take little memory."""
    draw = torch.Generator().manual_seed(0)
    images, texts = torch.empty(pictures, width), torch.empty(captions, width)
    owners = torch.arange(captions) * pictures // captions
    for rows in torch.split(images, 4096):
        torch.nn.functional.normalize(rows.normal_(generator=draw), dim=1, out=rows)
    for rows, of in zip(torch.split(texts, 4096), torch.split(owners, 4096), strict=True):
        rows.normal_(generator=draw).mul_(6 / width**0.5).add_(images[of])
        torch.nn.functional.normalize(rows, dim=1, out=rows)
    return images, texts, owners


def memory(name: str) -> float:
    """A line of /proc/self/status, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def seconds_a_tile(images: torch.Tensor, texts: torch.Tensor, owners: torch.Tensor, count: int) -> float:
    """The median over some tiles away from the diagonal, counted for both ways."""
    images, texts = images[-COLUMNS:], texts[:ROWS]
    limits = torch.full((ROWS,), 0.1, dtype=torch.float64), torch.full((COLUMNS,), 0.1, dtype=torch.float64)
    counts = torch.zeros((2, ROWS), dtype=torch.int64), torch.zeros((2, COLUMNS), dtype=torch.int64)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        ScoreTile(texts, images).count(*limits, *counts)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--captions", type=int, default=500_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiles", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    images, texts, owners = features(args.pictures, args.captions, args.width)
    dict(recalls(images[:64], texts[:64], World()))  # what is loaded or made once
    tile = seconds_a_tile(images, texts, owners, args.tiles)
    tiles = -(-LARGE[0] // COLUMNS) * -(-LARGE[1] // ROWS)
    print(f"a tile of {ROWS} x {COLUMNS} at width {args.width}: {tile:.3f} s", flush=True)
    print(f"{LARGE[0]:,} x {LARGE[1]:,}: {tiles:,} tiles, {tiles * tile / 3600:.1f} h on {args.threads} threads")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, began = memory("VmRSS"), time.perf_counter()
    found = dict(recalls(images, texts, World(), owners=owners))
    seconds, peak = time.perf_counter() - began, memory("VmHWM") - before
    held = (images.nbytes + texts.nbytes) / 2**20
    dense = args.pictures * args.captions * 4 / 2**20
    print(f"{args.pictures:,} x {args.captions:,}: {seconds:.0f} s, {peak:.0f} MiB above {held:.0f} MiB of features")
    print(f"dense: {dense:,.0f} MiB; R@1 {found['image_to_text_R@1']:.3f} and {found['text_to_image_R@1']:.3f}")


if __name__ == "__main__":
    main()
