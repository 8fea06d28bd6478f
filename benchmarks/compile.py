"""A training step without padding of texts, with channels-last pictures and compilation, beside one without; and their
loss curves.

    python benchmarks/compile.py DIR/{00000..00002}.tar --caption caption.en   # configs/emoji.yaml's model and batch

Pictures and captions are those of the shards. Parts:

    step      times of the cases, which alternate over the rounds: medians in seconds of wall and CPU time; before them
              the time of the first step of each compiled case. Compilation takes texts in buckets, where the others
              pack them
    loss      times of the loss with its gradients, as it is and compiled, for features of 512 numbers; what a compiled
              loss would save is little, and a training step leaves it as it is
    curve     losses of the first steps with AdamW in float64, plain, and with packed texts and channels-last pictures:
              the largest relative difference
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from text_buckets import MOST, Cases, build, compare

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses import tiled
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.ring import Ring
from clipstream.losses.settings import ClipLossSettings
from clipstream.models.execution.compile import Parts
from clipstream.models.precision import prepare
from clipstream.models.towers import Towers
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
PLAIN: dict[str, Any] = {"buckets": "off", "channels_last": "off"}
FAST: dict[str, Any] = {"buckets": "auto", "channels_last": "auto"}


def read_pairs(
    shards: list[str], count: int, path: str | None, size: tuple[int, int]
) -> tuple[torch.Tensor, list[str]]:
    """uint8 pixels [n, 3, H, W], resized, and captions of the first samples."""
    pixels: dict[str, torch.Tensor] = {}
    captions: dict[str, str] = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                key, suffix = f"{shard}/{Path(member.name).stem}", Path(member.name).suffix
                if file is not None and suffix in IMAGES:
                    picture = Image.open(io.BytesIO(file.read())).convert("RGBA")
                    white = Image.new("RGBA", picture.size, "white")
                    found = Image.alpha_composite(white, picture).convert("RGB").resize(size[::-1])
                    pixels[key] = torch.from_numpy(np.array(found)).permute(2, 0, 1)
                elif file is not None and suffix == (".txt" if path is None else ".json"):
                    value: Any = file.read().decode()
                    for part in () if path is None else ("", *path.split(".")):
                        value = value[part] if part else json.loads(value)
                    captions[key] = str(value)
    keys = [key for key in pixels if key in captions][:count]
    return torch.stack([pixels[key] for key in keys]), [captions[key] for key in keys]


def part_of(pixels: torch.Tensor, ids: torch.Tensor, start: int, size: int) -> Batch:
    """A batch of samples from a place on, round and round."""
    rows = torch.arange(start, start + size) % len(ids)
    return Batch(pixels[rows], ids[rows], torch.ones(size), ("",) * size, torch.zeros(size), step=0, global_size=size)


def step_of(towers: Towers, parts: Parts | None = None, lr: float = 1e-6, backend: str = "inductor") -> TrainStep:
    """A training step with AdamW on this process."""
    optimizer = torch.optim.AdamW(towers.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-6, fused=True)
    settings = TrainSettings(precision="fp32", compile=parts or "off", compile_backend=backend)
    return TrainStep(towers, SoftmaxLoss(ClipLossSettings()), optimizer, World(), settings, clip_norm=1.0)


def losses(model: str, settings: dict[str, Any], pixels: torch.Tensor, ids: torch.Tensor, steps: int, n: int) -> Any:
    """Losses [steps] in float64 at a learning rate of 2e-3, after a warm-up."""
    towers = build(model, **settings)
    prepare(towers, "fp64")
    step = step_of(towers, lr=2e-3)
    rates = [2e-3 * min(1, (number + 1) / 20) for number in range(steps)]
    found = [step(part_of(pixels, ids, number * n, n), lr).loss for number, lr in enumerate(rates)]
    return torch.tensor(found, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--caption", help="path in the json member, as caption.en; the txt member unless given")
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50, help="of the curve")
    parser.add_argument("--curve-batch", type=int, default=64)
    parser.add_argument("--parts", nargs="+", default=["step", "loss", "curve"])
    parser.add_argument("--compile", nargs="*", default=["blocks", "towers", "step"])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--loss-samples", nargs="+", type=int, default=[256, 1024, 2048])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = build(options.model, **PLAIN)
    many = options.steps * options.curve_batch if "curve" in options.parts else 0
    pixels, captions = read_pairs(options.shards, max(options.batch, many), options.caption, plain.image.size)
    ids = plain.open_clip_tokenizer()(captions).int()
    print(f"torch {torch.__version__}, {options.threads} threads, {len(ids)} samples", flush=True)
    if "step" in options.parts:
        batch = part_of(pixels, ids, 0, options.batch)
        steps = {"plain": step_of(plain)}
        steps["buckets"] = step_of(build(options.model, MOST, channels_last="off"))
        steps["packed (auto)"] = step_of(build(options.model, "auto", channels_last="off"))
        steps["auto, channels-last"] = step_of(build(options.model, **FAST))
        for parts in options.compile:
            steps[f"the same, compile {parts}, buckets"] = step = step_of(
                build(options.model, **FAST), parts, backend=options.backend
            )
            began = time.perf_counter()
            step(batch, 1e-6)
            assert step.compilation is not None
            print(f"first step, compile {parts}: {time.perf_counter() - began:.1f} s, {step.compilation.graphs} graphs")
        cases: Cases = {name: partial(step, batch, 1e-6) for name, step in steps.items()}
        compare(f"step, {options.batch} samples", cases, options.rounds)
    for n in options.loss_samples if "loss" in options.parts else ():
        images, texts = (torch.nn.functional.normalize(torch.randn(n, 512), dim=-1) for _ in range(2))
        pairs = tiled.Pairs(images, texts, torch.tensor(10.0), None, torch.ones(n), Ring.of(n, World(), 0))
        eager = partial(tiled.softmax, pairs, gradients=True)
        compiled = partial(torch.compile(tiled.softmax, dynamic=False, backend=options.backend), pairs, gradients=True)
        began = time.perf_counter()
        compiled()
        print(f"first compiled loss: {time.perf_counter() - began:.1f} s")
        compare(f"loss, {n} samples", {"eager": eager, "compiled": compiled}, options.rounds)
    if "curve" in options.parts:
        run = partial(losses, options.model, pixels=pixels, ids=ids, steps=options.steps, n=options.curve_batch)
        first, second = run(PLAIN), run(FAST)
        print(
            f"curve, {options.steps} steps of {options.curve_batch} samples in float64, loss {float(first[0]):.4f} to",
            end=" ",
        )
        print(f"{float(first[-1]):.4f}; largest relative difference {float((second / first - 1).abs().max()):.1e}")


if __name__ == "__main__":
    main()
