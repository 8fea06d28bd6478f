"""Raw samples per CPU-second from local tars: clipstream's verifying reader and webdataset's.

    python benchmarks/reading.py

Both yield every sample's key and the bytes of its three members (jpg, txt, json) from the same generated shards,
which are in the page cache: `small` has images of 2 kB, `photos` of 20 to 120 kB. They alternate over several rounds
in one run; the ratio is the median over the rounds. CPU time is measured, because machines are shared.

On two cores of a shared server: small 15,043 samples per CPU-second, webdataset 1.0.2 2,436, ratio 5.8 (4.9 to 7.3 over
the rounds); photos 12,426 and 2,571, ratio 5.5 (4.5 to 6.3).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import webdataset as wds

from clipstream.storage.tar import Shard

KINDS = {"small": (2_000, 2_000, 10_000), "photos": (20_000, 120_000, 1_000)}  # bytes of a picture, samples of a shard


def make(folder: Path, kind: str, shards: int) -> list[str]:
    """Shards of one kind; their paths."""
    least, most, count = KINDS[kind]
    draws, paths = random.Random(0), []
    for number in range(shards):
        paths.append(str(folder / f"{kind}-{number:05d}.tar"))
        with wds.TarWriter(paths[-1]) as tar:
            for i in range(count):
                caption = f"a picture of number {i}"
                about = {"caption": caption, "url": f"https://example.org/{i}.jpg", "width": 640, "height": 427}
                sample = {"__key__": f"{number:05d}{i:04d}", "jpg": draws.randbytes(draws.randint(least, most))}
                tar.write({**sample, "txt": caption, "json": json.dumps(about).encode()})
    return paths


def ours(paths: list[str]) -> Iterator[int]:
    """Bytes of each sample, by the verified reader."""
    for path in paths:
        shard = Shard(path)
        for ref in shard.index.samples:
            sample = {"__key__": ref.key, "__url__": path, **shard.load(ref)}
            yield len(sample["jpg"]) + len(sample["txt"]) + len(sample["json"])
        assert shard.index.fault is None
        shard.close()


def webdataset(paths: list[str]) -> Iterator[int]:
    """Bytes of each sample, by webdataset's."""
    for sample in wds.DataPipeline(wds.SimpleShardList(paths), wds.tarfile_to_samples()):
        yield len(sample["jpg"]) + len(sample["txt"]) + len(sample["json"])


def rate(read: Callable[[list[str]], Iterator[int]], paths: list[str]) -> tuple[float, int]:
    """Samples per CPU-second, and the bytes of all."""
    began = time.process_time()
    sizes = list(read(paths))
    return len(sizes) / (time.process_time() - began), sum(sizes)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            paths = make(Path(folder), kind, args.shards)
            rounds = []
            for _ in range(args.rounds):
                (first, size), (second, other) = rate(ours, paths), rate(webdataset, paths)
                assert size == other, "both read the same"
                rounds.append((first, second))
        mine, theirs = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratios = [first / second for first, second in rounds]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(
            f"{kind:<7} clipstream {mine:9,.0f}  webdataset {wds.__version__} {theirs:9,.0f} samples/CPU-s"
            f"  ratio {statistics.median(ratios):.1f} ({spread})"
        )


if __name__ == "__main__":
    main()
