"""Input path, samples per second: ours beside webdataset with open_clip's own transform, and the floor.

    python benchmarks/input.py 'shards/{00000..00007}.tar' --size 224 --workers 2

The three are measured in turn, several rounds in one run, and the medians are compared, because machines are shared
and noisy. `webdataset` is webdataset's pipeline (tarfile_to_samples, decoding with Pillow, open_clip's training
transform, its tokenizer one caption at a time) behind torch's DataLoader. `floor` is decoding, crop and resize of the
same pictures with our transform, one process per worker and nothing else.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import open_clip
import torch
import webdataset as wds
from PIL import Image

from clipstream.batch import ImageSpec
from clipstream.data.crops import TrainTransform
from clipstream.data.fields import image_bytes
from clipstream.data.order import Draws
from clipstream.data.settings import AugmentSettings, DataSettings, TokenizerSettings
from clipstream.data.shards import expand
from clipstream.data.sources import training_loader
from clipstream.data.tarstream import Shard
from clipstream.data.text import build_tokenizer
from clipstream.errors import Dropped
from clipstream.world import World

IMAGES = "jpg;jpeg;png;webp"


def ours(args: argparse.Namespace) -> Iterator[int]:
    """Batches of clipstream's loader."""
    settings = DataSettings.model_validate(
        {
            "global_batch_size": args.batch_size,
            "lanes": min(48, args.batch_size),
            "workers": args.workers,
            "sources": {"train": {"shards": args.shards, "caption": {"type": "json", "path": args.caption}}},
        }
    )
    tokenizer = build_tokenizer(TokenizerSettings.model_validate({}), open_clip.get_tokenizer("ViT-B-32"), 77)
    image = ImageSpec((args.size, args.size))
    with training_loader(settings, world=World(), seed=0, tokenizer=tokenizer, image=image) as loader:
        for batch in loader:
            yield len(batch)


def webdataset(args: argparse.Namespace) -> Iterator[int]:
    """Batches of webdataset behind a DataLoader, as open_clip's trainer arranges them."""
    from clipstream.data.fields import build_caption
    from clipstream.data.settings import CaptionSettings

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
        wds.shuffle(1000, initial=100),
        wds.map(usable),
        wds.select(lambda sample: sample is not None),
        wds.batched(args.batch_size),
    )
    for images, _ in wds.WebLoader(data, batch_size=None, num_workers=args.workers):
        yield len(images)


def _floor_worker(shards: list[str], size: int, counter: Any, stop: Any) -> None:
    torch.set_num_threads(1)
    transform = TrainTransform(ImageSpec((size, size)), AugmentSettings(), "white")
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


def floor_rate(args: argparse.Namespace) -> float:
    """Samples per second of decoding, crop and resize alone."""
    context = multiprocessing.get_context("fork")
    counter, stop = context.Value("q", 0), context.Event()
    shards = expand(args.shards)
    workers = [
        context.Process(target=_floor_worker, args=(shards[i :: args.workers] or shards, args.size, counter, stop))
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    while counter.value == 0:
        time.sleep(0.01)
    first, began = counter.value, time.perf_counter()
    time.sleep(args.seconds)
    rate = (counter.value - first) / (time.perf_counter() - began)
    stop.set()
    for worker in workers:
        worker.join()
    return float(rate)


def stream_rate(make: Callable[[argparse.Namespace], Iterator[int]], args: argparse.Namespace) -> float:
    """Samples per second of a stream, after two batches of warming up."""
    stream = make(args)
    next(stream), next(stream)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < args.seconds:
        count += next(stream)
    rate = count / (time.perf_counter() - began)
    stream.close()  # type: ignore[attr-defined]
    return rate


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--caption", default="caption", help="path into the JSON member")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    measures: dict[str, Callable[[], float]] = {
        "ours": lambda: stream_rate(ours, args),
        "webdataset": lambda: stream_rate(webdataset, args),
        "floor": lambda: floor_rate(args),
    }
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(args.rounds):
        for name, measure in measures.items():
            rates[name].append(measure())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, median in medians.items():
        spread = f"{min(rates[name]):.0f} to {max(rates[name]):.0f}"
        print(f"{name:<11} {median:8.0f} samples/s  ({spread})  {median / medians['webdataset']:.2f} x webdataset")


if __name__ == "__main__":
    main()
