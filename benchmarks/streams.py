"""Streams of training batches to measure side by side; each runs in a process of its own, started by `input.py`.

    python benchmarks/streams.py NAME OPTIONS-AS-JSON

reads `go` from its standard input, measures once, and answers with a JSON line. Each measurement starts the stream
anew, imports and the making of the tokenizer excluded: the first batch is timed, some batches are let through (what was
prefetched meanwhile), and then samples and CPU time of the whole tree of processes are counted.

    clipstream    this package's loader
    open_clip     open_clip_train's `get_wds_dataset`, as its trainer calls it; needs webdataset 0.2.86 (`make peers`)
    webdataset    the installed webdataset with the same transform and tokenizer; and with more and more steps of
                  clipstream's in it (see `steps.py`)
    spdl          spdl's threads and FFmpeg, where `make peers` found it to run (it needs FFmpeg's libraries)
    floor         decoding, crop and resize of the same bytes by clipstream's transform, and nothing else
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset as wds
from PIL import Image
from steps import IMAGES, STEPS, piped, samples, tokenize

SETTLING = 8  # batches that are let through before the measurement


@dataclass(frozen=True)
class Options:
    """What is read, and how. `captioned` are the same shards with a `txt` member, which the peers need."""

    shards: list[str]
    captioned: list[str]
    caption: str | None
    size: int
    workers: int
    batch_size: int
    seconds: float


@dataclass(frozen=True)
class Batch:
    """Samples of a batch, and the bytes that a worker handed over for it."""

    samples: int
    size: int


def clipstream(options: Options) -> Iterator[Batch]:
    """Batches of clipstream's loader."""
    from clipstream.data.batch import ImageSpec
    from clipstream.data.decode.tokenizers import build_tokenizer
    from clipstream.data.loader.reading_recipe import ModelInputs
    from clipstream.data.order import default_lanes
    from clipstream.data.pipeline import training_loader
    from clipstream.data.settings import DataSettings, TokenizerSettings
    from clipstream.distributed.world import World

    caption = {"type": "json", "path": options.caption} if options.caption else {"type": "text"}
    settings = DataSettings.model_validate(
        {
            "global_batch_size": options.batch_size,
            "lanes": default_lanes(options.batch_size),
            "workers": options.workers,
            "sources": {"train": {"shards": options.shards, "caption": caption}},
        }
    )
    tokenizer = build_tokenizer(TokenizerSettings.model_validate({}), tokenize(), 77)
    image = ImageSpec((options.size, options.size))
    with training_loader(settings, ModelInputs(tokenizer, image), world=World(), seed=0, zero_copy=True) as loader:
        for batch in loader:
            yield Batch(len(batch), sum(plane.nbytes for plane in batch.tensors()))


def open_clip_train(options: Options) -> Iterator[Batch]:
    """Batches of open_clip's trainer."""
    from open_clip_train.data import get_wds_dataset
    from open_clip_train.params import parse_args

    flags = f"--dataset-type webdataset --dataset-resampled --train-num-samples 1000000000 --workers {options.workers}"
    words = [*flags.split(), "--batch-size", str(options.batch_size), "--train-data", "::".join(options.captioned)]
    args = parse_args(words)
    args.world_size, args.distributed = 1, False
    transform = open_clip.image_transform(options.size, is_train=True)
    data = get_wds_dataset(args, transform, is_train=True, tokenizer=tokenize())
    yield from _tensors(data.dataloader)


def webdataset(options: Options, step: str) -> Iterator[Batch]:
    """Batches of webdataset's pipeline, with some steps of ours."""
    make, encode = STEPS[step](options.size)
    yield from _tensors(piped(options.captioned, options.batch_size, options.workers, make, encode))


def spdl(options: Options) -> Iterator[Batch]:
    """Batches of spdl's pipeline of threads, with FFmpeg's decoder and filters, over webdataset's samples."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    crop = open_clip.image_transform(options.size, is_train=True).transforms[0]
    size = f"scale={options.size}:{options.size}:flags=bicubic,format=rgb24"

    def decoded(pair: tuple[bytes, str]) -> tuple[Any, str]:
        data, caption = pair
        top, left, height, width = crop.get_params(Image.open(io.BytesIO(data)), crop.scale, crop.ratio)
        filters = f"crop={width}:{height}:{left}:{top},{size}"
        frames = spdl.io.decode_packets(spdl.io.demux_image(data), filter_desc=filters)
        return spdl.io.to_numpy(spdl.io.convert_frames(frames)), caption

    def batched(pairs: list[tuple[Any, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        pictures, captions = zip(*pairs, strict=True)
        return torch.from_numpy(np.stack(pictures)), tokenize()(list(captions))

    source = wds.DataPipeline(*samples(options.captioned))
    builder = PipelineBuilder().add_source(source).pipe(decoded, concurrency=options.workers)
    builder = builder.aggregate(options.batch_size).pipe(batched).add_sink(4)
    pipeline = builder.build(num_threads=options.workers)
    with pipeline.auto_stop():
        yield from _tensors(pipeline)


def _tensors(loader: Any) -> Iterator[Batch]:
    for images, texts in loader:
        yield Batch(len(images), images.nbytes + texts.nbytes)


def floor(options: Options) -> Iterator[Batch]:
    """Counts of samples that processes made of bytes in memory."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    made = [
        context.Process(target=_floor, args=(options, number, theirs), daemon=True)
        for number in range(max(1, options.workers))
    ]
    for process in made:
        process.start()
    try:
        while True:
            if ended := set(wait([ours, *(process.sentinel for process in made)])) - {ours}:
                raise SystemExit(f"{len(ended)} processes of the floor ended: see above")
            yield Batch(ours.recv(), 0)
    finally:
        for process in made:
            process.kill()
            process.join()


def _floor(options: Options, number: int, counts: Connection) -> None:
    from clipstream.data.batch import ImageSpec
    from clipstream.data.decode.captions import image_bytes
    from clipstream.data.decode.train_transform import TrainTransform
    from clipstream.data.order.rng import SampleRNG
    from clipstream.data.settings import AugmentSettings
    from clipstream.errors import Dropped
    from clipstream.storage.tar import Shard

    torch.set_num_threads(1)
    transform = TrainTransform(ImageSpec((options.size, options.size)), AugmentSettings(), "white")
    pictures = []
    for path in options.shards[number :: options.workers] or options.shards:
        shard = Shard(path)
        for ref in shard.index.samples:
            try:
                pictures.append(image_bytes(shard.load(ref, IMAGES), ";".join(IMAGES)))
            except Dropped:
                continue
    count = 0
    while True:
        transform(pictures[count % len(pictures)], SampleRNG(count))
        count += 1
        if count % 8 == 0:
            counts.send(8)  # far less than a pipe takes at once, so processes never mix theirs


STREAMS: dict[str, Callable[[Options], Iterator[Batch]]] = {
    "clipstream": clipstream,
    "open_clip": open_clip_train,
    "spdl": spdl,
    "floor": floor,
    **{step: partial(webdataset, step=step) for step in STEPS},
}


def measure(name: str, options: Options) -> dict[str, float]:
    """One measurement: rate, first batch, CPU, bytes and memory."""
    began = time.perf_counter()
    stream = STREAMS[name](options)
    next(stream)
    first = time.perf_counter() - began
    for _ in range(SETTLING):
        next(stream)
    samples, size, busy, began = 0, 0, _cpu_seconds(), time.perf_counter()
    while (took := time.perf_counter() - began) < options.seconds or not samples:
        batch = next(stream)
        samples += batch.samples
        size += batch.size
    busy = _cpu_seconds() - busy
    workers = [process.pid for process in multiprocessing.active_children() if process.pid]
    dirty = [_private_dirty(pid) for pid in workers or [os.getpid()]]  # spdl's are threads
    stream.close()  # type: ignore[attr-defined]
    return {
        "samples_per_s": samples / took,
        "first_batch_s": first,
        "cpu_ms_per_sample": 1e3 * busy / samples,
        "bytes_per_sample": size / samples,
        "worker_dirty_mib": sum(dirty) / max(1, len(dirty)) / (1 << 20),
    }


def idle(workers: int) -> float:
    """Private dirty memory, MiB, of a forked process that does nothing."""
    context = multiprocessing.get_context("fork")
    made = [context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(max(1, workers))]
    for process in made:
        process.start()
    time.sleep(1)
    dirty = [_private_dirty(process.pid) for process in made if process.pid]
    for process in made:
        process.kill()
        process.join()
    return sum(dirty) / len(dirty) / (1 << 20)


def _cpu_seconds() -> float:
    """Of this process and its living children."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in (os.getpid(), *(process.pid for process in multiprocessing.active_children())):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _private_dirty(pid: int) -> int:
    """Bytes that a process has written and shares with nobody."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_Dirty"))


def main() -> None:
    """Measure as often as asked."""
    name, options = sys.argv[1], Options(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if name == "clipstream":
        import clipstream.data.sequential_loader  # noqa: F401  # imports are not the first batch
    elif name == "open_clip":
        import open_clip_train.data  # noqa: F401
    tokenize()
    base = idle(options.workers)
    for _ in sys.stdin:
        found = measure(name, options)
        found["worker_dirty_mib"] = max(0.0, found["worker_dirty_mib"] - base)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
