"""Memory and time of the policies of activation checkpointing, and of budgets.

    python benchmarks/checkpointing.py   # a minute or two on two cores

For each tower: bytes that its blocks hold of a sample for the backward pass, and CPU seconds of a forward and backward
pass on one thread. Policies alternate over the rounds, because machines are shared and noisy; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from clipstream.models.build import build_towers
from clipstream.models.execution.checkpointing import LEVELS, choose_levels, fit_budgets, measure, set_policy
from clipstream.models.layers import blocks
from clipstream.models.settings import TOWERS, ModelSettings, Tower
from clipstream.models.towers import Towers


def encode(towers: Towers, tower: Tower, samples: int) -> torch.Tensor:
    """Features of pictures or texts of zeros."""
    pixels, ids = towers.zeros(samples, "cpu")
    return towers.encode_image(pixels) if tower == "image" else towers.encode_text(ids)


def set_all(found: list[nn.Module], levels: list[str]) -> None:
    """Give each block its policy."""
    for block, level in zip(found, levels, strict=True):
        set_policy(block, level)  # type: ignore[arg-type]


def seconds_of(run: Callable[[], torch.Tensor]) -> float:
    """CPU seconds of a forward and backward pass."""
    began = time.process_time()
    torch.autograd.backward(run().sum())
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.85, 0.5, 0.25])
    options = parser.parse_args()
    torch.set_num_threads(1)
    towers = build_towers(ModelSettings(name=options.model, text_buckets="off"), seed=0).train()
    for share in options.shares:
        settings = ModelSettings(name=options.model, grad_checkpointing=share)
        print("\n".join(fit_budgets(towers, settings, options.batch, nullcontext)))
    for tower in TOWERS:
        found = blocks(towers.tower(tower))
        held = measure(found, partial(encode, towers, tower))
        policies: dict[str, list[str]] = {level: [level] * len(found) for level in LEVELS}
        for share in options.shares:
            levels = choose_levels(held, share * sum(held["off"]))
            if levels is not None:
                policies[str(share)] = list(levels)
        times: dict[str, list[float]] = {name: [] for name in policies}
        for number in range(options.rounds + 1):
            for name, each in policies.items():
                set_all(found, each)
                seconds = seconds_of(partial(encode, towers, tower, options.batch))
                if number:  # the first is for what is made once
                    times[name].append(seconds)
        print(f"{tower} tower\n  {'policy':12}{'MiB a sample':>14}{'share':>8}{'CPU s':>9}{'ratio':>8}")
        whole, at_once = sum(held["off"]), statistics.median(times["off"])
        for name, each in policies.items():
            total = sum(held[level][block] for block, level in enumerate(each))  # type: ignore[index, misc]
            seconds = statistics.median(times[name])
            row = f"{total / 2**20:>14.2f}{total / whole:>8.2f}{seconds:>9.2f}{seconds / at_once:>8.2f}"
            print(f"  {name:12}{row}", flush=True)


if __name__ == "__main__":
    main()
