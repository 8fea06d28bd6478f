"""`clipstream.build_loader` inside a plain training loop, beside webdataset's usual pipeline: samples/s, CPU, memory.

    python benchmarks/plain_loop.py 'shards/{00000..00007}.tar'

Both feed the same model of open_clip in the same loop (forward, open_clip's loss, backward, AdamW), or none with
`--no-model`, each in a process of its own. The processes alternate, and medians are compared, because machines are
shared and noisy. The model is so small that the loop waits for its data. CPU time and memory are those of the process
and its workers together (Linux): proportional set size of anonymous and shared memory.

Medians of 3 rounds of 20 seconds, 800 JPEG photos of 512 pixels in 8 shards, batches of 64, 2 workers,
webdataset 1.0.2, on 2 cores that other programs shared (load above 10).
Samples/s are noise there: they vary by half between rounds, and
in one round webdataset was faster. CPU time varies by 5%; it includes the model's step, the same on both sides.

                 samples/s   CPU-ms/sample   MiB
    clipstream        40.9             5.8   780
    webdataset        28.8            10.6   977
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
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

MODEL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 224, "layers": 1, "width": 64, "head_width": 32, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1},
}
WARM = 8  # batches before the clock, so that those that were prefetched meanwhile are used up


def webdataset_batches(shards: str, size: int, batch: int, workers: int) -> Iterator[Any]:
    """webdataset's pipeline, as open_clip's users write it."""
    import open_clip
    import webdataset as wds

    transform, tokenizer = open_clip.image_transform(size, is_train=True), open_clip.get_tokenizer("ViT-B-32")
    dataset = (
        wds.WebDataset(shards, resampled=True, shardshuffle=False, nodesplitter=wds.split_by_node)
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


def processes(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            found += [below for child in path.read_text().split() for below in processes(int(child))]
    return found


def mib() -> float:
    """Memory of this process and its descendants, MiB; files that are mapped are left out."""
    total = 0
    for pid in processes(os.getpid()):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return total / 1024


def cpu_seconds() -> float:
    """CPU time of this process and its descendants so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes(os.getpid())]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def measure(stream: str, args: argparse.Namespace) -> dict[str, float]:
    """One measurement, in this process."""
    import open_clip
    import torch

    make = clipstream_batches if stream == "clipstream" else webdataset_batches
    torch.set_num_threads(1)  # the other cores are for the workers
    model = open_clip.CLIP(**MODEL)
    optimizer, loss = torch.optim.AdamW(model.parameters(), 1e-4), open_clip.loss.ClipLoss()

    def step(images: torch.Tensor, texts: torch.Tensor) -> int:
        if args.model:
            features = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
            optimizer.zero_grad()
            loss(*features, model.logit_scale.exp()).backward()
            optimizer.step()
        return len(texts)

    batches = make(args.shards, 224, args.batch_size, args.workers)
    for images, texts in islice(batches, WARM):
        step(images, texts)
    began, spent, samples = time.perf_counter(), cpu_seconds(), 0
    while (seconds := time.perf_counter() - began) < args.seconds:
        samples += step(*next(batches))
    return {
        "samples/s": samples / seconds,
        "CPU-ms/sample": (cpu_seconds() - spent) / samples * 1000,
        "MiB": mib(),
    }


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
            print(stream, results[-1], file=sys.stderr, flush=True)
    for stream, results in found.items():
        shown = (f"{statistics.median(one[key] for one in results):>9.1f} {key}" for key in results[0])
        print(f"{stream:<12}{''.join(shown)}")


if __name__ == "__main__":
    main()
