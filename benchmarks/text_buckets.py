"""Arithmetic on padding: a model with padded, bucketed and packed texts, and gradient caching against one pass.

    python benchmarks/text_buckets.py DIR/{00000..00003}.tar --caption caption.en   # a few minutes on two cores

Captions are those of the shards, in the `txt` member or at a path of the `json` member; pictures are random. Cases of a
part alternate over the rounds, because machines are shared and noisy. Times are medians in seconds, and CPU seconds of
the process beside them; a ratio is the median of the first case by that of another. Parts:

    tower       the text tower, forward and backward
    step        a training step with AdamW, and one of open_clip_train on the same tensors where it is installed
    gradcache   a training step at once, and in chunks of which 1, half and all but one keep their graph; with a
                frozen image tower, also the time of that tower alone
    pass        a bucket of texts in one pass and in several: the cost of a pass in tokens (`PASS_TOKENS`)
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tarfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from clipstream.cli.verbs.bench.open_clip_step import OpenClipStep
from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses.contrastive import SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings
from clipstream.models.build import build_towers
from clipstream.models.execution.text_buckets import STEP, Setting, TextBuckets, _causal, why_unpackable
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from clipstream.training.optim import OptimSettings
from clipstream.training.settings import TrainSettings
from clipstream.training.step import TrainStep
from clipstream.utils.timing import IMAGE_FORWARD, StepTimer

MOST = 99  # as many buckets as the cost model finds; `auto` packs texts on the CPU
Cases = dict[str, Callable[[], object]]


def read_captions(shards: list[str], count: int, path: str | None) -> list[str]:
    """The first captions of the shards."""
    found: list[str] = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                if len(found) == count:
                    return found
                if not member.name.endswith(".txt" if path is None else ".json"):
                    continue
                file = tar.extractfile(member)
                assert file is not None
                value: Any = file.read().decode()
                if path is not None:
                    value = json.loads(value)
                    for key in path.split("."):
                        value = value[key]
                found.append(str(value))
    return found


def build(name: str, buckets: int | str, **settings: Any) -> Towers:
    """The model with these buckets, for training."""
    chosen = {"name": name, "text_buckets": buckets, **settings}
    return build_towers(ModelSettings.model_validate(chosen), seed=0).train()


def tower_pass(towers: Towers, ids: torch.Tensor) -> None:
    """Forward and backward pass of the text tower."""
    towers.zero_grad(set_to_none=True)
    torch.autograd.backward(towers.encode_text(ids).sum())


def with_texts(towers: Towers, case: Callable[[], object]) -> Cases:
    """A case with texts in each way of the same model, whose weights and moments are in memory once."""

    def run(buckets: TextBuckets | None) -> None:
        towers.text_buckets = buckets
        case()

    ways: dict[str, Setting] = {"padded": "off", "one bucket": 1, "buckets": MOST}
    if why_unpackable(getattr(towers.clip, "text", towers.clip)) is None:
        ways["packed (auto)"] = "packed"
    return {name: partial(run, TextBuckets.of(towers.clip, way)) for name, way in ways.items()}


def optimizer_of(towers: Towers) -> torch.optim.Optimizer:
    """One for all cases of a model: its moments are twice the weights."""
    return torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], fused=True)


def step_of(
    towers: Towers, optimizer: torch.optim.Optimizer, batch: Batch, chunks: int = 1, kept: int = 1
) -> Callable[[], object]:
    """A training step that changes the weights little."""
    size = None if chunks == 1 else -(-len(batch) // chunks)
    settings = TrainSettings(precision="fp32", micro_batch_size=size, kept_micro_batches=kept)
    step = TrainStep(towers, SoftmaxLoss(ClipLossSettings()), optimizer, World(), settings)
    return partial(step, batch, lr=1e-6)


def open_clip_step(towers: Towers, batch: Batch, name: str) -> Callable[[], object] | None:
    """A step of open_clip_train with a copy of the model; None where it is not installed."""
    optim = OptimSettings.model_validate({})
    try:
        step = OpenClipStep(copy.deepcopy(towers), "cpu", "fp32", optim, name)
    except SettingsError as error:
        print(error)
        return None
    prepared = step.prepare(batch)
    return lambda: step.start(prepared, 1e-6)()


def image_seconds(case: Callable[[], object]) -> float:
    """Wall time of the image tower's forward passes in a step, in seconds."""
    timer = StepTimer("cpu")
    with timer.active():
        case()
        timer.end_step()
    return timer.take()[0][IMAGE_FORWARD]


def split_pass(towers: Towers, ids: torch.Tensor, parts: int) -> None:
    """Forward and backward pass in equal parts, with one look-up of the embeddings."""
    towers.zero_grad(set_to_none=True)
    torch.autograd.backward(_causal(towers.clip, list(ids[:, : 2 * STEP].chunk(parts))).sum())


def compare(title: str, cases: Cases, rounds: int) -> list[float]:
    """Print the medians of the cases, which alternate, and return them."""
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            began, used = time.perf_counter(), time.process_time()
            case()
            if number:  # the first is for what is made once
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
    medians = [statistics.median(times) for times in wall.values()]
    used_medians = [statistics.median(times) for times in cpu.values()]
    print(f"{title}\n  {'':34}{'s':>8}{'ratio':>8}{'CPU s':>9}{'ratio':>8}")
    for name, seconds, used in zip(cases, medians, used_medians, strict=True):
        ratios = f"{medians[0] / seconds:>8.2f}{used:>9.3f}{used_medians[0] / used:>8.2f}"
        print(f"  {name:34}{seconds:>8.3f}{ratios}", flush=True)
    return used_medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--caption", help="path in the json member, as caption.en; the txt member unless given")
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--kept", nargs="+", type=int, help="chunks that keep their graph; 0, 1, half and all but one")
    parser.add_argument("--parts", nargs="+", default=["tower", "step", "gradcache", "pass"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    towers = build(options.model, MOST)
    captions = read_captions(options.shards, options.batch, options.caption)
    ids = towers.open_clip_tokenizer()(captions).int()
    buckets, n = towers.text_buckets, len(ids)
    if buckets is None:
        raise SystemExit(f"{options.model}: its text tower attends to padding")
    lengths = buckets.lengths(ids)
    assert lengths is not None
    cut = buckets.plan(lengths, ids.shape[1], "cpu")
    shapes = ", ".join(f"{bucket.rows} x {bucket.length}" for bucket in cut)
    print(f"{n} captions, {sum(lengths) / ids.numel():.1%} of {ids.numel()} tokens are text; buckets: {shapes}")
    pixels = torch.randint(0, 256, (n, 3, *towers.image.size), dtype=torch.uint8)
    batch = Batch(pixels, ids, torch.ones(n), ("",) * n, torch.zeros(n), step=0, global_size=n)
    if "tower" in options.parts:
        compare("text tower", with_texts(towers, partial(tower_pass, towers, ids)), options.rounds)
    if "step" in options.parts:
        theirs = open_clip_step(towers, batch, options.model)
        cases = {} if theirs is None else {"open_clip_train": theirs}
        ours = with_texts(towers, step_of(towers, optimizer_of(towers), batch))
        compare("step", cases | ours, options.rounds)
    towers.text_buckets = TextBuckets.of(towers.clip, "auto")
    if "gradcache" in options.parts and not towers.has_batch_norm:
        k = min(options.chunks, n)
        optimizer = optimizer_of(towers)
        cases = {"at once": step_of(towers, optimizer, batch)}
        for kept in sorted({0, 1, k // 2, k - 1}) if options.kept is None else options.kept:
            cases[f"{k} chunks, {kept} kept"] = step_of(towers, optimizer, batch, k, kept)
        compare("step", cases, options.rounds)
        locked = build(options.model, "auto", lock_image=True)
        optimizer = optimizer_of(locked)
        cases = {
            "at once": step_of(locked, optimizer, batch),
            f"{k} chunks, 1 kept": step_of(locked, optimizer, batch, k),
        }
        compare("step, image tower frozen", cases, options.rounds)
        rounds = [[image_seconds(case) for case in cases.values()] for _ in range(options.rounds)]
        alone, cut_up = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
        print(f"  image tower: {alone:.3f} s at once, {cut_up:.3f} s in chunks, {cut_up / alone:.2f} x the time")
    if "pass" in options.parts and buckets.rule != "padding":
        most = min(8, n)
        cases = {f"{k} x {n // k} texts": partial(split_pass, towers, ids, k) for k in (1, most)}
        once, split = compare("text tower, 16 tokens a text", cases, options.rounds)
        tokens = n * min(2 * STEP, ids.shape[1])
        print(f"  a pass costs as much as {max(split - once, 0) / (most - 1) / (once / tokens):.0f} tokens")


if __name__ == "__main__":
    main()
