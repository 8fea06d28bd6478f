"""The cost of more lanes: time to the first batch, memory, open shards, speed; and how well batches mix shards.

    PYTHONPATH=. python benchmarks/lanes.py [FOLDER]

The data set is 1,000 shards of 1,000 small images without side indexes: one tar under 1,000 names. Each row is measured
in its own process with two workers. On two cores of an AMD EPYC server, beside other work:

    batch lanes shards  open shards  first batch/s  samples/s  workers/MiB  pairs/ideal
      512    48      4          178            6.0      5,567           26          5.9
      512   192      4          547           14.9      8,170           57          1.7
      512   192      1          169            3.2      8,249           27          4.8
     4096    48      4          178            6.9      6,403           27          6.1
     4096   192      4          547           13.3     10,169           59          2.2
     4096  1024      1          632           12.2     10,761           76          1.8
     4096   768      1          524            7.1     11,385           63          2.1

Many lanes with one shard each mix a batch better than fewer lanes with four shards each, at the same number of open
shards and without extra cost.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHARDS, SIZE, SECONDS = 1000, 1000, 4.0
# Global batch, lanes, shards a lane; the last of each batch size is the default.
CHOICES = [(512, 48, 4), (512, 192, 4), (512, 192, 1), (4096, 48, 4), (4096, 192, 4), (4096, 1024, 1), (4096, 768, 1)]


def make(folder: Path) -> None:
    """The shards."""
    from PIL import Image
    from webdataset import TarWriter

    out = io.BytesIO()
    Image.effect_noise((32, 32), 64).convert("RGB").save(out, "JPEG")
    with TarWriter(str(folder / "0000.tar")) as tar:
        for i in range(SIZE):
            tar.write({"__key__": f"{i:06d}", "jpg": out.getvalue(), "txt": f"picture {i}"})
    for i in range(1, SHARDS):
        os.link(folder / "0000.tar", folder / f"{i:04d}.tar")


def measure(folder: str, batch: int, lanes: int, group: int) -> None:
    """Print a row."""
    from clipstream.data.batch import ImageSpec
    from clipstream.data.loader.reading_recipe import ModelInputs
    from clipstream.data.pipeline import training_loader
    from clipstream.data.settings import DataSettings
    from clipstream.distributed.world import World
    from tests.support.pictures import ByteTokenizer
    from tests.support.watched import private_bytes

    shards = f"{folder}/{{0000..{SHARDS - 1:04d}}}.tar"
    data = DataSettings.model_validate(
        {"global_batch_size": batch, "lanes": lanes, "workers": 2, "sources": {"train": {"shards": shards}},
         "shuffle": {"shards": group}}
    )  # fmt: skip
    began = time.monotonic()
    image = ImageSpec((32, 32))
    with training_loader(data, ModelInputs(ByteTokenizer(), image), world=World(), seed=0) as loader:
        held = Counter(key.partition("/")[0] for key in next(loader).keys)
        first = time.monotonic() - began
        opened = len(loader.health.sources["train"].shards)
        for _ in range(4):  # what was filled ahead
            next(loader)
        count, began = 0, time.monotonic()
        while time.monotonic() - began < SECONDS:
            count += len(next(loader))
        rate = count / (time.monotonic() - began)
        memory = sum(map(private_bytes, loader.worker_pids())) / 2**20
    pairs = sum(n * (n - 1) for n in held.values()) / (batch * (batch - 1) / SHARDS)
    print(
        f"{batch:>5} {lanes:>5} {group:>6} {opened:>12} {first:>13.1f} {rate:>11,.0f} {memory:>11,.0f} {pairs:>12.1f}"
    )


def main() -> None:
    if len(sys.argv) > 2:
        measure(sys.argv[1], *map(int, sys.argv[2:]))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made)
        if not (folder / "0000.tar").exists():
            make(folder)
        print("batch lanes shards  open shards  first batch/s  samples/s  workers/MiB  pairs/ideal", flush=True)
        for choice in CHOICES:
            subprocess.run([sys.executable, __file__, str(folder), *map(str, choice)], check=True)


if __name__ == "__main__":
    main()
