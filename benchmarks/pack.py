"""`clipstream pack` with a global shuffle, and webdataset's ShardWriter behind its shuffle buffer: time and memory.

    python benchmarks/pack.py [SHARDS] [--samples 100000] [--rounds 3]

Both write new shards of 10,000 samples from the same ones (generated unless given: images of 10 to 40 kB), each in a
process of its own, in turns; ratios are those of medians. Memory is the largest sum of the resident memory of a process
and its children, in which pages that they share count several times.

On two cores of a busy server (load 14), 40,000 samples: 1,346 samples/s, webdataset 1.0.2 315, ratio 4.3, 3.8 in CPU
time; 187 MB and 755 MB at most. With 100,000 images of 0.8 kB: 2,900 and 907, ratio 3.2, 3.3 in CPU time, 197 MB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import webdataset as wds

from clipstream.storage.tar import scan

LOOP = """
import sys, webdataset as wds
data = wds.WebDataset(sys.argv[2:], shardshuffle=len(sys.argv) - 2, empty_check=False).shuffle(5000)
with wds.ShardWriter(sys.argv[1] + "/%05d.tar", maxcount=10000, verbose=0) as writer:
    for sample in data:
        writer.write({key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")})
"""


def make(folder: Path, samples: int) -> list[str]:
    """Shards of 5,000 samples with images, texts and JSON."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.pictures import picture

    images = [picture(seed) for seed in range(64)]
    paths = []
    for first in range(0, samples, 5000):
        paths.append(str(folder / f"{first // 5000:05d}.tar"))
        with wds.TarWriter(paths[-1]) as tar:
            for n in range(first, min(first + 5000, samples)):
                image = images[n % 64] + bytes(10_000 + n * 7919 % 30_000)
                tar.write({"__key__": f"{n:07d}", "jpg": image, "txt": f"image {n}", "json": {"n": n, "width": 24}})
    return paths


def resident(root: int) -> int:
    """Bytes of a process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                continue
    total, wanted = 0, {root}
    while wanted:
        total += sum(parents[pid][1] for pid in wanted if pid in parents)
        wanted = {pid for pid, (parent, _) in parents.items() if parent in wanted}
    return total


def run(command: list[str]) -> tuple[float, float, int]:
    """Seconds, CPU seconds and peak resident bytes of a command."""
    began, before, most = time.perf_counter(), os.times(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        most = max(most, resident(process.pid))
        time.sleep(0.05)
    assert process.returncode == 0, command
    seconds, after = time.perf_counter() - began, os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4]), most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, int]]] = {"webdataset": [], "pack": []}
    with tempfile.TemporaryDirectory() as home:
        (source := Path(home) / "source").mkdir()
        shards = options.shards or make(source, options.samples)
        count = sum(len(scan(shard).samples) for shard in shards)
        for _ in range(options.rounds):
            for name, rows in found.items():
                (out := Path(home) / name).mkdir()
                pack = [sys.executable, "-m", "clipstream", "pack", str(out), *shards]
                rows.append(run([sys.executable, "-c", LOOP, str(out), *shards] if name == "webdataset" else pack))
                assert sum(len(scan(path).samples) for path in out.glob("*.tar")) == count
                shutil.rmtree(out)
    for name, rows in found.items():
        wall, cpu, most = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name}: {count / wall:,.0f} samples/s, {count / cpu:,.0f} per CPU second, {most / 1e6:,.0f} MB at most")
    ratios = (statistics.median(r[i] for r in found["webdataset"]) / statistics.median(r[i] for r in found["pack"])
              for i in (0, 1))  # fmt: skip
    print("ratio: {:.1f} in time, {:.1f} in CPU time".format(*ratios))


if __name__ == "__main__":
    main()
