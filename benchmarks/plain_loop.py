"""`clipstream.build_loader` inside a plain training loop, beside webdataset's usual pipeline: samples/s, memory.

    python benchmarks/plain_loop.py 'shards/{00000..00007}.tar'

Both feed the same model of open_clip in the same loop (forward, open_clip's loss, backward, AdamW), or none with
`--no-model`, each in a process of its own; the processes alternate, and medians are compared, because machines are
shared and noisy. Memory is the private memory of the process and its workers together (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 128, "head_width": 32, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 2},
}
WARM = 2  # batches before the clock


def webdataset_batches(shards: str, size: int, batch: int, workers: int) -> Iterator[Any]:
    """webdataset's pipeline, as open_clip's users write it."""
    import open_clip
    import torch
    import webdataset as wds

    transform, tokenizer = open_clip.image_transform(size, is_train=True), open_clip.get_tokenizer("ViT-B-32")
    torch.set_num_threads(max(1, (os.cpu_count() or 1)))
    dataset = (
        wds.WebDataset(shards, resampled=True, nodesplitter=wds.split_by_node)
        .shuffle(200)
        .decode("pilrgb", handler=wds.warn_and_continue)
        .to_tuple("jpg;png;webp", "txt")
        .map_tuple(transform, lambda text: tokenizer(text)[0])
        .batched(batch, partial=False)
    )
    yield from wds.WebLoader(dataset, batch_size=None, num_workers=workers)


def clipstream_batches(shards: str, size: int, batch: int, workers: int) -> Iterator[Any]:
    """`build_loader`."""
    import clipstream

    loader = clipstream.build_loader(shards, size, batch_size=batch, workers=workers, device="cpu")
    while True:
        yield from loader


def private_mib() -> float:
    """Private memory of this process and its children, MiB."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    total = 0
    for pid in ("self", *children):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return total / 1024


def measure(stream: str, args: argparse.Namespace) -> dict[str, float]:
    """One measurement, in this process."""
    import open_clip
    import torch

    make = clipstream_batches if stream == "clipstream" else webdataset_batches
    model = open_clip.CLIP(**MODEL)
    optimizer, loss = torch.optim.AdamW(model.parameters(), 1e-4), open_clip.loss.ClipLoss()
    began, samples = 0.0, 0
    for number, (images, texts) in enumerate(make(args.shards, 224, args.batch_size, args.workers)):
        if number == WARM:
            began = time.perf_counter()
        if args.model:
            features = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
            optimizer.zero_grad()
            loss(*features, model.logit_scale.exp()).backward()
            optimizer.step()
        if number >= WARM:
            samples += len(texts)
            if time.perf_counter() - began > args.seconds:
                break
    return {"samples_per_s": samples / (time.perf_counter() - began), "mib": private_mib()}


def main() -> None:
    """Measure both streams in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="tars with pictures and txt members; braces")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args)), flush=True)
        os._exit(0)  # endless streams
    found: dict[str, list[dict[str, float]]] = {"clipstream": [], "webdataset": []}
    for _ in range(args.rounds):
        for stream, results in found.items():
            done = subprocess.run(
                [sys.executable, *sys.argv, "--one", stream], capture_output=True, text=True, check=True
            )
            results.append(json.loads(done.stdout.splitlines()[-1]))
    for stream, results in found.items():
        rate, mib = (statistics.median(one[key] for one in results) for key in ("samples_per_s", "mib"))
        print(f"{stream:<12}{rate:>8.0f} samples/s{mib:>8.0f} MiB")


if __name__ == "__main__":
    main()
