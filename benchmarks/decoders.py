"""Training's image decoders: images per CPU-second, and how close their crops are to open_clip's (`exact`).

    python benchmarks/decoders.py                                          # images generated here
    python benchmarks/decoders.py 'shards/*.tar' --sizes 224 336 --image-key jpg

`fast` decodes a JPEG at a reduced scale with at least twice the target's pixels per side; rows with another number
show the cost and quality of other limits. All decoders make the same crops, alternating, and medians are reported.
Sharpness is the energy of the Laplacian of the grey crop relative to the exact one: median and 5th percentile,
without images that have no detail. PSNR is the mean and the minimum over the images.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
from made import KINDS, make

from clipstream.data.batch import ImageSpec
from clipstream.data.decode import train_transform
from clipstream.data.decode.captions import split_keys
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import AugmentSettings
from clipstream.data.sources import expand
from clipstream.storage.tar import Shard

SPARES = {
    "fast": train_transform.SPARE,
    "fast, 1x": 1,
    "fast, 4x": 4,
    "whole": 1 << 20,
}  # row -> least decoded pixels per target's


def pictures(shards: list[str], count: int, keys: tuple[str, ...]) -> list[bytes]:
    """Up to `count` pictures, spread over the shards."""
    opened = [Shard(path) for path in shards]
    refs = [(shard, ref) for shard in opened for ref in shard.index.samples]
    some = refs[:: max(1, len(refs) // count)][:count]
    return [next(iter(shard.load(ref, keys).values())) for shard, ref in some]


def sharpness(pixels: np.ndarray) -> float:
    """Energy of the Laplacian of the grey picture."""
    grey = pixels.astype(float).mean(axis=2)
    inside = 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    return float(np.mean(inside**2))


def run(name: str, data: list[bytes], size: int, rounds: int) -> None:
    """Measure all decoders on one set of pictures, and print their rows."""
    spec, augment = ImageSpec((size, size)), AugmentSettings()
    fast, exact = TrainTransform(spec, augment, "white"), TrainTransform(spec, augment, "white", decoder="exact")
    rows = ["exact", *SPARES]
    seconds: dict[str, list[float]] = {row: [] for row in rows}
    made: dict[str, list[np.ndarray]] = {}
    for _ in range(rounds):
        for row in rows:
            train_transform.SPARE = SPARES.get(row, train_transform.SPARE)
            began = time.process_time()
            made[row] = [(exact if row == "exact" else fast)(one, SampleRNG(key)) for key, one in enumerate(data)]
            seconds[row].append(time.process_time() - began)
    train_transform.SPARE = SPARES["fast"]
    detail = [sharpness(one) for one in made["exact"]]
    for row in rows:
        ratios = [sharpness(one) / have for one, have in zip(made[row], detail, strict=True) if have > 1]
        errors = [
            np.mean((one.astype(float) - other) ** 2) for one, other in zip(made[row], made["exact"], strict=True)
        ]
        decibels = 10 * np.log10(255**2 / np.maximum(errors, 1e-6))
        rate, near = len(data) / np.median(seconds[row]), np.percentile(ratios, 5)
        psnr = "" if row == "exact" else f"{decibels.mean():>8.1f}{decibels.min():>7.1f}"
        print(f"{name:<14}{size:>5}  {row:<10}{rate:>10.0f}{np.median(ratios):>10.3f}{near:>7.3f}{psnr}", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", help="pictures are made where none are given")
    parser.add_argument("--name", default="shards", help="of the pictures, for shards that are given")
    parser.add_argument("--image-key", default="jpg;jpeg;png;webp", help="suffixes of the image member, by ';'")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224])
    parser.add_argument("--count", type=int, default=100, help="of pictures")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, one core")
    columns = f"{'per CPU-s':>10}{'sharpness':>10}{'5%':>7}{'PSNR':>8}{'least':>7}"
    print(f"{'pictures':<14}{'size':>5}  {'decoder':<10}{columns}")
    with tempfile.TemporaryDirectory(prefix="bench-decoders-") as folder:
        if args.shards:
            works = {args.name: expand(args.shards)}
        else:
            works = {kind: make(kind, Path(folder) / kind) for kind in KINDS if kind.startswith("jpeg")}
        for name, shards in works.items():
            data = pictures(shards, args.count, split_keys(args.image_key))
            for size in args.sizes:
                run(name, data, size, args.rounds)


if __name__ == "__main__":
    main()
