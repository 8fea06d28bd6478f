"""LiT from stored image features beside LiT with the image tower live, in turns within one run.

    python benchmarks/lit.py SHARDS… [--model ViT-B-32] [--batch-size 32] [--rounds 5]

Prints the median time of a step of both, data included, and of their parts: the forward pass of the image tower, and
the step of the text tower on ids in memory. With image forward I and text step T, stored features can make a step at
most (I + T) / T times as fast; `share` is the part of this bound that was reached.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from clipstream.cli import main as cli
from clipstream.config.plan import agree, survey
from clipstream.config.settings import Settings, load
from clipstream.data.loader.loader import Loader
from clipstream.distributed.world import World
from clipstream.train import build_loader, build_model, build_plan, build_step
from clipstream.training.step import TrainStep


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="1")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--train-data", "::".join(args.shards), "--model", args.model, "--lock-image", "--steps", "1000000"]
        flags += ["--data.global-batch-size", str(args.batch_size), "--workers", args.workers, "--name", "lit"]
        flags += ["--precision", args.precision, "--logs", folder]
        store = str(Path(folder) / "store")
        cli.main(["precompute", store, "--towers", "image", *flags[:4], "--precision", args.precision])
        report(flags, store, args.rounds)


def report(flags: list[str], store: str, rounds: int) -> None:
    """Time the steps in turns and print the table."""
    world = World.from_env()
    live, loader = prepared(load(flags), world)
    stored, stored_loader = prepared(load([*flags, "--image-features", store]), world)
    with closing(loader), closing(stored_loader):
        pixels, features = next(loader).clone(), next(stored_loader).clone()
        timed: dict[str, Callable[[], Any]] = {
            "live step": lambda: live(next(loader), 1e-4),
            "stored step": lambda: stored(next(stored_loader), 1e-4),
            "image forward": lambda: forward(live, pixels.images),
            "text step": lambda: stored(features, 1e-4),
        }
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for round_ in range(rounds + 1):
            for name, function in timed.items():
                began = time.perf_counter()
                function()
                if round_:  # the first one warms up
                    seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        print(f"{name:<14} {value * 1000:10.1f} ms")
    bound = (median["image forward"] + median["text step"]) / median["text step"]
    gain = median["live step"] / median["stored step"]
    print(f"gain {gain:.2f} x, bound {bound:.2f} x, share {gain / bound:.0%}")


def prepared(settings: Settings, world: World) -> tuple[TrainStep, Loader]:
    """The step and the loader of a run."""
    made = build_plan(agree(survey(settings), world), world)
    model = build_model(made, world)
    loader = build_loader(made, world, model)
    return build_step(made.settings, world, model), loader


@torch.no_grad()
def forward(step: TrainStep, pixels: torch.Tensor) -> torch.Tensor:
    """The forward pass of the image tower."""
    features: torch.Tensor = step.towers.encode_image(pixels)
    return features


if __name__ == "__main__":
    main()
