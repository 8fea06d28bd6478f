"""`clipstream precompute` beside a bare loop of the same image tower over pictures in memory.

    python benchmarks/precompute.py                             # generated photographs of 512 px, ViT-B-32
    python benchmarks/precompute.py 'shards/{00000..00007}.tar' --model ViT-B-16 --device cuda --precision bf16

The loop has the decoded pictures of one batch and encodes it again and again, in batches of the same size, in the same
precision; the result is converted to the stored type and kept on the device. `precompute` reads, decodes, encodes and
writes. Both take the same number of batches in turns, in one process; the time of the first batch is not counted, as it
includes the start of the data workers. The ratio is the median over the rounds. Where the model is on the CPU, decoding
shares the cores with it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from made import make

from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.sequential_loader import ChunkPlan, chunk_loader
from clipstream.data.settings import DataSettings, TokenizerSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import expand, list_sources
from clipstream.features import CHUNK_ROWS
from clipstream.features.manifest import Manifest, PartInfo, ShardInfo, SourceInfo, encode_rows
from clipstream.features.writer import StoreWriter
from clipstream.models.build import build_towers
from clipstream.models.precision import autocast, prepare
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from clipstream.precompute.run import ChunkComputer, Pass

DTYPE = "float16"
Encode = Callable[[torch.Tensor], torch.Tensor]


class Work:
    """A tower, shards, and the two ways to compute their features."""

    def __init__(self, args: argparse.Namespace, shards: list[str]) -> None:
        self.args, self.shards = args, shards
        self.towers: Towers = build_towers(ModelSettings(name=args.model), seed=0)
        prepare(self.towers, args.precision)
        self.towers.to(args.device).eval()
        kind = TokenizerSettings.model_validate({"type": "model"})
        self.tokenizer = build_tokenizer(kind, self.towers.open_clip_tokenizer(), self.towers.context_length)
        self.width = int(self.towers.config.model_cfg["embed_dim"])

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """L2-normalised features of uint8 [n, 3, H, W]."""
        with torch.no_grad(), autocast(self.args.device, self.args.precision):
            return self.towers.encode_image(pixels)

    def bare(self, batches: int) -> float:
        """Samples/s of the loop."""
        args = self.args
        pixels = torch.randint(0, 256, (args.batch_size, *self.towers.image.size, 3), dtype=torch.uint8)
        pixels = pixels.permute(0, 3, 1, 2).to(args.device)
        kept, began = [], 0.0
        for number in range(batches):
            if number == 1:
                self.wait()
                began = time.perf_counter()
            kept.append(encode_rows(self.encode(pixels), DTYPE))
        self.wait()
        rate: float = (batches - 1) * args.batch_size / (time.perf_counter() - began)
        return rate

    def precompute(self, folder: Path) -> tuple[float, int]:
        """Samples/s of the verb's pass over the shards, and the number of batches."""
        args = self.args
        infos = {
            "image": PartInfo(self.width, DTYPE, "view"),
            "ids": PartInfo(self.tokenizer.context_length, "uint16", "caption"),
        }
        names = tuple(ShardInfo(shard) for shard in self.shards)
        writer = StoreWriter(folder, Manifest({"train": SourceInfo(names)}, infos))
        made = Pass(
            {"image": "image", "ids": "ids"}, self.encode, None, self.tokenizer.context_length, args.batch_size,
            args.device,
        )  # fmt: skip
        data = DataSettings(sources={"train": SourceSettings(shards=self.shards)}, workers=args.workers)
        lanes = min(args.workers, args.batch_size)
        plan = ChunkPlan(
            range(len(self.shards)), lambda shard, chunk: True, CHUNK_ROWS, args.batch_size, lanes, data.prefetch, None
        )
        batches = samples = first = 0
        began = 0.0
        loader = chunk_loader(
            data,
            "train",
            list_sources(data)["train"],
            plan,
            ModelInputs(self.tokenizer, self.towers.image),
            views=0,
            device=args.device,
        )
        with loader, ChunkComputer(writer, "train", made, key=None) as computer:
            for batch in loader:
                computer.add(batch, loader.parts)
                samples, batches = samples + len(batch), batches + 1
                if batches == 1:
                    self.wait()
                    began, first = time.perf_counter(), samples
        rate = (samples - first) / (time.perf_counter() - began)
        writer.finish()
        writer.close()
        return rate, batches

    def wait(self) -> None:
        """Wait for the device."""
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", help="with a txt member; pictures are made where none are given")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-precompute-") as name:
        work = Work(args, expand(args.shards) if args.shards else make("jpeg-512", Path(name) / "made"))
        work.bare(2)  # memory and kernels are chosen at the first batches
        ratios, rates, spent = [], [], []
        for number in range(args.rounds):
            before = cpu_seconds()
            ours, batches = work.precompute(Path(name) / f"store{number}")
            between = cpu_seconds()
            bare = work.bare(batches)
            spent.append((between - before, cpu_seconds() - between))
            ratios.append(ours / bare)
            rates.append((ours, bare))
    ours, bare = (statistics.median(values) for values in zip(*rates, strict=True))
    print(f"{args.model} in {args.precision} on {args.device}, batches of {args.batch_size}, {args.workers} workers")
    print(f"{'precompute':<12}{ours:10,.1f} samples/s")
    print(f"{'bare loop':<12}{bare:10,.1f} samples/s")
    print(f"precompute is {statistics.median(ratios):.1%} of the bare loop ({min(ratios):.1%} to {max(ratios):.1%})")
    ours, bare = (statistics.median(values) for values in zip(*spent, strict=True))
    print(f"CPU time {ours:.1f} s, of the bare loop {bare:.1f} s: {bare / ours:.1%}")


if __name__ == "__main__":
    main()
