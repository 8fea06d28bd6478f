"""The cost of timing the stages of the data pipeline: the same batches with the stopwatch and without.

    PYTHONPATH=. python benchmarks/stages.py

Two loaders without workers fill the same batches of the same generated shards in turn: one times its stages as usual,
the other has a stopwatch that does nothing. The cost is the median over the rounds of the ratio of their CPU times.
Small images are the worst case.

On one core of a shared server: images of 64 px (240 µs per sample) +1.9% in the median of 18 comparisons, between
+1.4 and +2.7%, where two equal loaders differ by up to 1%; +0.6% for 256 and for 512 px.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import webdataset as wds
from PIL import Image

from clipstream.data import pipeline
from clipstream.data.batch import ImageSpec
from clipstream.data.loader import loader as loading
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.loader.stage_timing import Stopwatch
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from tests.support.pictures import ByteTokenizer

SAMPLES, SHARDS = 500, 4
BATCH = 64


class Silent(Stopwatch):
    """Measures nothing and tells nothing."""

    def name(self, names: Sequence[str]) -> None:
        """Nobody wants to know."""

    def at(self, stage: str, which: int) -> None:
        """A stage begins, and nobody minds."""


def make(folder: Path, pixels: int) -> str:
    """Shards of JPEGs of soft colours; their names."""
    draws = np.random.default_rng(0)
    for number in range(SHARDS):
        with wds.TarWriter(str(folder / f"{number}.tar")) as tar:
            for i in range(SAMPLES):
                coarse = draws.integers(0, 256, (-(-pixels // 8), -(-pixels // 8), 3), dtype=np.uint8)
                out = io.BytesIO()
                Image.fromarray(coarse).resize((pixels, pixels)).save(out, "JPEG", quality=90)
                tar.write({"__key__": f"{number}-{i:04d}", "jpg": out.getvalue(), "txt": f"picture number {i}"})
    return f"{folder}/{{0..{SHARDS - 1}}}.tar"


def make_loader(shards: str, pixels: int, stopwatch: type[Stopwatch]) -> Loader:
    """A loader whose stages are taken by this stopwatch."""
    setattr(loading, "Stopwatch", stopwatch)  # noqa: B010
    settings = DataSettings.model_validate(
        {"global_batch_size": BATCH, "lanes": 16, "workers": 0, "sources": {"train": {"shards": shards}}}
    )
    image = ImageSpec((min(pixels, 224),) * 2)
    return pipeline.training_loader(settings, ModelInputs(ByteTokenizer(), image), world=World(), seed=0)


def abba(one: Loader, other: Loader) -> tuple[float, float]:
    """CPU seconds of two batches of each; who is second finds the shards' bytes at hand, so both are once."""
    first, second = seconds(one), seconds(other)
    second += seconds(other)
    return first + seconds(one), second


def seconds(loader: Loader) -> float:
    """CPU time of a batch."""
    began = time.process_time()
    next(loader)
    return time.process_time() - began


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    for pixels in args.pixels:
        with tempfile.TemporaryDirectory() as folder:
            shards = make(Path(folder), pixels)
            loaders = [make_loader(shards, pixels, stopwatch) for stopwatch in (Stopwatch, Silent)]
            rounds = [abba(*loaders) for _ in range(args.rounds)]
        cost = statistics.median(with_ / without for with_, without in rounds) - 1
        each = statistics.median(without for _, without in rounds) / (2 * BATCH)
        print(f"{pixels:4d} px: {each * 1e6:6.0f} µs a sample without, {cost:+.2%} with the stopwatch")


if __name__ == "__main__":
    main()
