"""Input path: ours beside webdataset with open_clip's own transform, and the floor.

    python benchmarks/input.py 'shards/{00000..00007}.tar' --size 224 --workers 2

They are measured in turn, several rounds in one run, and the medians are compared, because machines are shared and
noisy; CPU time a sample is less so than samples a second. `webdataset` is webdataset's pipeline (tarfile_to_samples,
shuffle, decoding with Pillow, open_clip's training transform, its tokenizer one caption at a time) behind torch's
DataLoader. `floor` is decoding, crop and resize of the same pictures with our transform, one process per worker and
nothing else. Memory is a worker's private dirty memory above that of a process that was forked and did nothing. The
last line is ours with a trainer that sleeps a batch as long as the data alone take for it.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
import webdataset as wds
from PIL import Image

from clipstream.batch import ImageSpec
from clipstream.data.crops import TrainTransform
from clipstream.data.fields import build_caption, image_bytes
from clipstream.data.loader import Loader
from clipstream.data.order import Draws
from clipstream.data.settings import AugmentSettings, CaptionSettings, DataSettings, TokenizerSettings
from clipstream.data.shards import expand
from clipstream.data.sources import training_loader
from clipstream.data.tarstream import Shard
from clipstream.data.text import build_tokenizer
from clipstream.errors import Dropped
from clipstream.world import World

IMAGES = "jpg;jpeg;png;webp"
SHUFFLE = 1000  # samples, of webdataset's buffer and of our windows
FORK = multiprocessing.get_context("fork")


@dataclass
class Measured:
    """One measurement.

    Attributes:
        rate: samples a second.
        cpu: seconds of CPU a sample, of the workers.
        first: seconds to the first batch.
        dirty: MiB of a worker's private dirty memory above an idle one's.
        size: bytes a sample from worker to trainer.
    """

    rate: float
    cpu: float
    first: float = float("nan")
    dirty: float = float("nan")
    size: float = float("nan")


def our_loader(args: argparse.Namespace) -> Loader:
    """clipstream's loader."""
    settings = DataSettings.model_validate(
        {
            "global_batch_size": args.batch_size,
            "lanes": min(48, args.batch_size),
            "workers": args.workers,
            "shuffle": {"window": SHUFFLE},
            "decoder": args.decoder,
            "sources": {"train": {"shards": args.shards, "caption": {"type": "json", "path": args.caption}}},
        }
    )
    tokenizer = build_tokenizer(TokenizerSettings.model_validate({}), open_clip.get_tokenizer("ViT-B-32"), 77)
    return training_loader(
        settings, world=World(), seed=0, tokenizer=tokenizer, image=ImageSpec((args.size, args.size))
    )


def ours(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Batches of clipstream's loader: samples and bytes of each."""
    with our_loader(args) as loader:
        for batch in loader:
            yield len(batch), sum(tensor.nbytes for tensor in batch.moving())


def webdataset(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Batches of webdataset behind a DataLoader, as open_clip's trainer arranges them."""
    transform = open_clip.image_transform(args.size, is_train=True)
    tokenize = open_clip.get_tokenizer("ViT-B-32")
    caption = build_caption(CaptionSettings.model_validate({"type": "json", "path": args.caption}))

    def usable(sample: dict[str, Any]) -> Any:
        try:
            picture = Image.open(io.BytesIO(image_bytes(sample, IMAGES)))
            return transform(picture), tokenize([caption(sample, None)])[0]
        except Dropped:
            return None

    data = wds.DataPipeline(
        wds.ResampledShards(expand(args.shards)),
        wds.tarfile_to_samples(),
        wds.shuffle(SHUFFLE, initial=SHUFFLE // 10),
        wds.map(usable),
        wds.select(lambda sample: sample is not None),
        wds.batched(args.batch_size),
    )
    for images, ids in wds.WebLoader(data, batch_size=None, num_workers=args.workers):
        yield len(images), images.nbytes + ids.nbytes


def _floor_worker(shards: list[str], args: argparse.Namespace, counter: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    transform = TrainTransform(ImageSpec((args.size, args.size)), AugmentSettings(), "white", decoder=args.decoder)
    pictures = []
    for path in shards:
        shard = Shard(path)
        for ref in shard.index.samples:
            try:
                pictures.append(image_bytes(shard.load(ref, tuple(IMAGES.split(";"))), IMAGES))
            except Dropped:
                continue
    i = 0
    while not stop.is_set():
        transform(pictures[i % len(pictures)], Draws(i))
        i += 1
        if i % 8 == 0:
            with counter.get_lock():
                counter.value += 8


def floor(args: argparse.Namespace) -> Measured:
    """Decoding, crop and resize alone."""
    counter, stop = FORK.Value("q", 0), FORK.Event()
    shards = expand(args.shards)
    workers = [
        FORK.Process(target=_floor_worker, args=(shards[i :: args.workers] or shards, args, counter, stop))
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    while counter.value == 0:
        time.sleep(0.01)
    pids = [worker.pid for worker in workers if worker.pid is not None]
    first, cpu, began = counter.value, cpu_seconds(pids), time.perf_counter()
    time.sleep(args.seconds)
    count = counter.value - first
    result = Measured(count / (time.perf_counter() - began), (cpu_seconds(pids) - cpu) / count)
    stop.set()
    for worker in workers:
        worker.join()
    return result


def stream(make: Callable[[argparse.Namespace], Iterator[tuple[int, int]]], args: argparse.Namespace) -> Measured:
    """A stream of batches, after two of warming up."""
    before = {process.pid for process in multiprocessing.active_children()}
    batches, began = make(args), time.perf_counter()
    samples, size = next(batches)
    first = time.perf_counter() - began
    next(batches)
    pids = [p.pid for p in multiprocessing.active_children() if p.pid is not None and p.pid not in before]
    count, cpu, began = 0, cpu_seconds(pids), time.perf_counter()
    while time.perf_counter() - began < args.seconds:
        count += next(batches)[0]
    took = time.perf_counter() - began
    dirty = statistics.mean(private_dirty(pid) for pid in pids) - idle_dirty()
    result = Measured(count / took, (cpu_seconds(pids) - cpu) / count, first, dirty, size / samples)
    batches.close()  # type: ignore[attr-defined]
    return result


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # utime, stime
    return total / os.sysconf("SC_CLK_TCK")


def private_dirty(pid: int) -> float:
    """MiB of memory that a process has written and shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def idle_dirty() -> float:
    """The same of a process that was forked and waits."""
    process = FORK.Process(target=time.sleep, args=(60,))
    process.start()
    assert process.pid is not None
    time.sleep(0.2)
    found = private_dirty(process.pid)
    process.terminate()
    process.join()
    return found


def waiting(args: argparse.Namespace, rate: float) -> float:
    """Share of the time that a trainer waits which sleeps as long as the data alone take at `rate`."""
    with our_loader(args) as loader:
        next(loader), next(loader)
        waited, began = loader.wait_seconds, time.perf_counter()
        while time.perf_counter() - began < 2 * args.seconds:
            time.sleep(len(next(loader)) / rate)
        return (loader.wait_seconds - waited) / (time.perf_counter() - began)


def report(found: dict[str, list[Measured]]) -> None:
    """Print medians, and ratios of medians to webdataset's."""

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(measured, field) for measured in found[name])

    print("           samples/s      ratio  CPU ms  ratio  first s  ratio  dirty MiB  ratio  bytes/sample  ratio")
    for name in found:
        line = f"{name:<11}"
        for field, width, digits, factor in (
            ("rate", 8, 0, 1), ("cpu", 13, 2, 1000), ("first", 8, 2, 1), ("dirty", 10, 1, 1), ("size", 13, 0, 1)
        ):  # fmt: skip
            value = median(name, field)
            line += f"{value * factor:{width}.{digits}f}  {value / median('webdataset', field):5.2f}"
        spread = [measured.rate for measured in found[name]]
        print(f"{line}   ({min(spread):.0f} to {max(spread):.0f} samples/s)")
    print(f"share of the floor: {median('ours', 'rate') / median('floor', 'rate'):.0%} of its samples/s, ", end="")
    print(f"{median('floor', 'cpu') / median('ours', 'cpu'):.0%} of ours in CPU time", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--caption", default="caption", help="path into the JSON member")
    parser.add_argument("--decoder", choices=["fast", "exact"], default="fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    measures: dict[str, Callable[[], Measured]] = {
        "ours": lambda: stream(ours, args),
        "webdataset": lambda: stream(webdataset, args),
        "floor": lambda: floor(args),
    }
    found: dict[str, list[Measured]] = {name: [] for name in measures}
    for _ in range(args.rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    report(found)
    rate = statistics.median(measured.rate for measured in found["ours"])
    print(f"data_wait with a trainer of the same speed: {waiting(args, rate):.1%}")


if __name__ == "__main__":
    main()
