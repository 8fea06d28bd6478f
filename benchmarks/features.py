"""Stores of features: rows a second from the page cache, memory to open a large store, size and error of each type.

    taskset -c 0 python benchmarks/features.py

The rows of a batch are drawn at random over a whole store and gathered into one buffer, in rounds that alternate with a
plain copy (memcpy) of as many bytes from a buffer as large as the store; rates are per second of a core's time. The
large store consists of sparse files that are never read: it is opened in a process of its own, and the growth of that
process's memory (RSS) is printed. Errors are those of normalised random rows, and of their inner products.

On one core of a busy two-core server (AMD EPYC, 32 MB of L3): 2.8 million rows of 768 float16 per second, 4.3 GB/s,
38% of memcpy: copies of random rows wait for memory, where memcpy reads ahead. Opening 10 million rows takes 0.7 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.labels import LabelEncoder
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.loader.stored import StoredData
from clipstream.data.order import default_lanes
from clipstream.data.pipeline import training_loader
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.features.manifest import (
    FEATURE_DTYPES,
    IDS,
    STORE,
    Manifest,
    PartInfo,
    ShardInfo,
    SourceInfo,
    decode_rows,
    encode_rows,
    sample_dtype,
)
from clipstream.features.store import FeatureStore, Numbers, StoredSource
from clipstream.features.writer import Chunk, StoreWriter, Texts
from clipstream.utils import atomic_write

BAR = 200_000  # rows/s
TOKENS = 77  # ids of a caption
SHARD = 10_000  # samples


def write_store(path: Path, rows: int, width: int, dtype: str, zstd: bool = False, ids: bool = False) -> None:
    """A store of random rows and one caption a sample, with its token ids where `ids`."""
    sizes = [min(SHARD, rows - first) for first in range(0, rows, SHARD)]
    shards = tuple(ShardInfo(f"{number:05d}.tar") for number in range(len(sizes)))
    parts = {"image": PartInfo(width, dtype, "view", zstd=zstd)}
    parts |= {IDS: PartInfo(TOKENS, "uint16", "caption")} if ids else {}
    draft = Manifest({"train": SourceInfo(shards)}, parts)
    with StoreWriter(path, draft) as writer:
        for shard, size in enumerate(sizes):
            for chunk in range(ShardInfo("", size).chunks(draft.chunk_rows)):
                count = draft.chunk_samples(size, chunk)
                features = torch.nn.functional.normalize(torch.randn(count, width), dim=1)
                samples, made = np.zeros(count, sample_dtype(0, 1)), {"image": encode_rows(features, dtype)}
                samples["used"], samples["counts"], samples["start"] = 1, 1, np.arange(count)
                if ids:
                    made[IDS] = torch.randint(0, 49408, (count, TOKENS)).to(torch.uint16)
                keys = [f"{shard:05d}{number:05d}" for number in range(count)]
                texts = Texts(keys, [["a"]] * count, [""] * count)
                writer.write(Chunk("train", shard, chunk, size), {**made, "samples": samples}, texts)
        writer.finish()


def hold_all(source: StoredSource) -> Numbers:
    """Hold every shard; the numbers of all samples."""
    found = []
    for shard in range(len(source.shards)):
        source.hold(shard)
        found.append(source.base(shard) + np.arange(source.samples_of(shard)))
    return np.concatenate(found)


def measure_gather(path: Path, args: argparse.Namespace) -> None:
    """Print rows/s of gathering, and of copying as many bytes."""
    write_store(path, args.rows, args.width, args.dtype)
    source = FeatureStore(path).source("train")
    began = time.perf_counter()
    numbers = hold_all(source)
    verified = time.perf_counter() - began
    random = np.random.default_rng(0)
    out = source.gather("image", numbers[: args.batch])
    plain = torch.ones(max(len(numbers), args.batch), out.shape[1], dtype=out.dtype)
    starts = torch.linspace(0, len(plain) - args.batch, args.batches).long().tolist()
    rates: dict[str, list[float]] = {"gather": [], "memcpy": []}
    for number in range(args.rounds):
        batches = [random.choice(numbers, args.batch) for _ in range(args.batches)]
        for name in ("gather", "memcpy") if number % 2 else ("memcpy", "gather"):
            began = time.thread_time()
            for batch, start in zip(batches, starts, strict=True):
                if name == "gather":
                    source.gather("image", batch, out)
                else:
                    ctypes.memmove(out.data_ptr(), plain[start].data_ptr(), out.nbytes)
            rates[name].append(args.batches * args.batch / (time.thread_time() - began))
    gather, memcpy = (statistics.median(rates[name]) for name in ("gather", "memcpy"))
    ratio = statistics.median(a / b for a, b in zip(rates["gather"], rates["memcpy"], strict=True))
    size = out.nbytes / args.batch
    print(f"{args.rows:,} rows of {args.width} {args.dtype}, batches of {args.batch:,}, {args.rounds} rounds")
    print(f"{'':8}{'rows/s':>14}{'GB/s':>8}")
    for name, rate in (("gather", gather), ("memcpy", memcpy), ("bar", BAR)):
        print(f"{name:<8}{rate:14,.0f}{rate * size / 1e9:8.2f}")
    print(f"gather is {ratio:.0%} of memcpy, and {gather / BAR:.1f} times the bar")
    print(f"first hold, with CRC-32: {args.rows * size / verified / 1e9:.2f} GB/s\n")


def measure_loader(path: Path, args: argparse.Namespace) -> None:
    """Print samples/s of training's batches of features and token ids, with the thread that fills them."""
    write_store(path, args.rows, args.width, args.dtype, ids=True)
    shards = f"/nowhere/{{00000..{-(-args.rows // SHARD) - 1:05d}}}.tar"
    lanes = default_lanes(args.batch)
    settings = DataSettings.model_validate(
        {"global_batch_size": args.batch, "lanes": lanes, "workers": 0, "sources": {"train": {"shards": shards}}}
    )
    tokenizer, features = LabelEncoder(None), StoredData.open(image=str(path))
    tokenizer.context_length = TOKENS
    with training_loader(
        settings, ModelInputs(tokenizer, ImageSpec((224, 224)), stores=features), world=World(), seed=0, zero_copy=True
    ) as loader:
        for _ in range(args.batches):  # opens the shards
            next(loader)
        rates = []
        for _ in range(args.rounds):
            began = time.perf_counter()
            for _ in range(args.batches):
                next(loader)
            rates.append(args.batches * args.batch / (time.perf_counter() - began))
    rate = statistics.median(rates)
    print(f"loader, {lanes} lanes, with {TOKENS} ids: {rate:,.0f} samples/s, {rate / BAR:.1f} times the bar\n")


def write_sparse(path: Path, rows: int, width: int) -> None:
    """A store whose rows take no space on the disk: files with a header and a hole."""
    sizes = [min(SHARD, rows - first) for first in range(0, rows, SHARD)]
    draft = Manifest({"train": SourceInfo(())}, {"image": PartInfo(width, "float16", "view")})
    shards = []
    for shard, size in enumerate(sizes):
        count = ShardInfo("", size).chunks(draft.chunk_rows)
        shards.append(ShardInfo(f"{shard:05d}.tar", size, "", (0,) * count))
    manifest = replace(draft, sources={"train": SourceInfo(tuple(shards))}, complete=True)
    for shard, size in enumerate(sizes):
        for chunk in range(shards[shard].chunks(draft.chunk_rows)):
            for part, item in (("image", 2 * width), ("samples", sample_dtype(0, 1).itemsize), ("texts", 0)):
                file = path / manifest.chunk_path(part, "train", shard, chunk)
                file.parent.mkdir(parents=True, exist_ok=True)
                with open(file, "wb") as out:
                    out.truncate(atomic_write.BLOCK + draft.chunk_samples(size, chunk) * item)
    (path / STORE).write_bytes(manifest.to_bytes())


def measure_open(path: str) -> None:
    """Print how much this process grows by opening a store."""
    before = resident()
    began = time.perf_counter()
    store = FeatureStore(path)
    source = store.source("train")
    opened, took = resident() - before, time.perf_counter() - began
    samples = sum(shard.samples for shard in source.shards)
    print(f"opening {samples:,} rows: {opened / 1e6:.1f} MB in {took:.2f} s (process: {resident() / 1e6:.0f} MB)")


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def print_types(path: Path, width: int, rows: int) -> None:
    """Print bytes a row, plain and by zstd, and the errors of each type."""
    features = torch.nn.functional.normalize(torch.randn(rows, width), dim=1)
    others = torch.nn.functional.normalize(torch.randn(64, width), dim=1)
    exact = features.double() @ others.double().T
    print(f"\n{'type':<10}{'bytes':>7}{'zstd':>7}{'max error':>12}{'max error of a cosine':>24}")
    for dtype in FEATURE_DTYPES:
        sizes = []
        for zstd in (False, True):
            folder = path / f"{dtype}-{zstd}"
            write_store(folder, rows, width, dtype, zstd)
            files = (folder / "image").rglob("*.*")
            sizes.append((sum(file.stat().st_size for file in files) - (not zstd) * atomic_write.BLOCK) / rows)
        decoded = decode_rows(encode_rows(features, dtype))
        error = (decoded - features).abs().max().item()
        cosine = (decoded.double() @ others.double().T - exact).abs().max().item()
        print(f"{dtype:<10}{sizes[0]:7.0f}{sizes[1]:7.0f}{error:12.1e}{cosine:24.1e}")


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000, help="of the store that is gathered from")
    parser.add_argument("--large", type=int, default=10_000_000, help="rows of the sparse store that is opened")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dtype", default="float16", choices=list(FEATURE_DTYPES))
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=16, help="batches of a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", help="where stores are written; a temporary one unless given")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.open:
        return measure_open(args.open)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        measure_gather(folder / "gathered", args)
        measure_loader(folder / "loaded", args)
        write_sparse(folder / "large", args.large, args.width)
        subprocess.run([sys.executable, __file__, "--open", str(folder / "large")], check=True)
        print_types(folder, args.width, min(args.rows, 8000))


if __name__ == "__main__":
    main()
