"""Whole training runs in processes: flags, starting, waiting, reading weights and metrics."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from tests.support.forks import TIMEOUT, Fork, wait_until
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks, launched

# Time limits beyond that of a test: a run that ends has noticed what is wrong by itself.
NO_LIMITS = ["--data.stall-timeout", str(4 * TIMEOUT), "--run.timeout", str(8 * TIMEOUT)]
MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def furnish(folder: Path, model: dict[str, Any] = MODEL) -> Path:
    """Give a folder shards and a small model's configuration, which `flags` name."""
    make_shards(folder / "pairs", [21, 17, 19, 5])
    make_shards(folder / "val", [11, 9], start=100)
    (folder / "model.json").write_text(json.dumps(model))
    return folder


def flags(place: Path, name: str, *more: str, steps: int = 8) -> list[str]:
    """A small run's command line, without workers, in a precision that does not depend on the processor."""
    return [
        "--train-data", f"{place}/pairs/{{00000..00003}}.tar", "--model", f"{place}/model.json", "--logs",
        f"{place}/runs", "--name", name, "--steps", str(steps), "--data.global-batch-size", "24", "--workers", "0",
        "--lr", "1e-3", "--device", "cpu", "--run.threads", "1", "--log.every", "1", "--checkpoint.every", "2",
        "--log.tensorboard", "false", "--precision", "fp32", *more,
    ]  # fmt: skip


def lines(place: Path, name: str, key: str = "loss") -> list[dict[str, Any]]:
    """The lines of a kind in a run's metrics, without what the clock makes, name, settings and ranks."""
    records = [json.loads(line) for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    clock = ("samples_per_s", "tokens_per_s", "tflops", "mfu", "data_wait", "bottleneck", "seconds", "time",
             "cpu", "run", "ranks", "settings")  # fmt: skip
    return [{k: v for k, v in record.items() if k not in clock} for record in records if key in record]


def weights(place: Path, name: str, step: int, file: str = "open_clip_model") -> dict[str, torch.Tensor]:
    checkpoint = place / "runs" / name / "checkpoints" / f"step_{step:08d}"
    return load_file(checkpoint / f"{file}.safetensors")


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def wait_for_step(place: Path, name: str, step: int, process: Fork | subprocess.Popen[Any]) -> None:
    """Wait until a run has written a step's line."""
    path = place / "runs" / name / "metrics.jsonl"
    wait_until(lambda: path.exists() and f'"step": {step},' in path.read_text(), process)


def start(argv: list[str], ranks: int = 1, port: int = 0, *, merged: bool = False, **env: str) -> list[Fork]:
    """The command on some ranks, each a process of its own; several meet on a port that the caller has reserved."""
    env = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port), **env}  # fmt: skip
    command = ["-m", "clipstream.train", *argv]
    return [Fork(command, env={**env, "RANK": str(n), "LOCAL_RANK": str(n)}, merged=merged) for n in range(ranks)]


def train_on(world: World, argv: list[str]) -> int:
    """A rank's run, as a launcher starts it."""
    return launched(world, main, argv)


def go(argv: list[str], ranks: int = 1) -> None:
    """Take a run to its end, on some ranks."""
    if ranks == 1:
        assert main(argv) == 0
    else:
        ends = end_ranks(ranks, train_on, argv)
        assert [end.code for end in ends] == [0] * ranks, ends[0].stderr
