"""Contrastive losses of clipstream and open_clip, and chunked by hand: time and memory of forward and backward.

    make bench-loss                                    # a quarter of an hour on two cores
    python benchmarks/loss.py --sizes 1024 2048 4096   # a minute

`open_clip` is its loss on one process. `by hand` is the usual workaround for its memory: chunks of rows, each with
its own backward pass, as in GradCache's loss over cached features. Each measurement runs in its own process, forked
after all imports, so that peaks do not mix; cases alternate over the rounds, because machines are shared and noisy.
Above `--beside` samples only clipstream's loss runs, once: dense logits would need 30 GB at 65,536. Memory is the
peak of resident memory minus features and their gradients, MiB; time is the median over the rounds, s; the ratio is
open_clip's time divided by clipstream's.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip.loss
import torch
import torch.nn.functional as F

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.contrastive import SigmoidLoss, SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings, SiglipLossSettings
from clipstream.models.towers import Features

CHUNK = 1024
Pass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]  # forward and backward


def clipstream(kind: str) -> Pass:
    """clipstream's loss on one rank."""
    loss = SoftmaxLoss(ClipLossSettings()) if kind == "clip" else SigmoidLoss(SiglipLossSettings())

    def both(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> None:
        n = len(image)
        batch = Batch(None, torch.zeros(n, 1), torch.ones(n), ("",) * n, torch.zeros(n), step=0, global_size=n)
        torch.autograd.backward(loss(Features(image, text, scale, bias if kind == "siglip" else None), batch, World()))

    return both


def dense(kind: str) -> Pass:
    """open_clip's loss on one process."""

    def both(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> None:
        if kind == "clip":
            open_clip.loss.ClipLoss()(image, text, scale).backward()
        else:
            open_clip.loss.SigLipLoss()(image, text, scale, bias).backward()

    return both


def by_hand(kind: str) -> Pass:
    """Chunks of rows with a backward pass each."""

    def both(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> None:
        n = len(image)
        for start in range(0, n, CHUNK):
            rows = torch.arange(start, min(start + CHUNK, n))
            if kind == "clip":
                for mine, others in ((image, text), (text, image)):
                    loss = F.cross_entropy(scale * mine[rows] @ others.T, rows, reduction="sum") / (2 * n)
                    torch.autograd.backward(loss)
            else:
                signs = torch.full((len(rows), n), -1.0)
                signs.diagonal(start).fill_(1.0)
                torch.autograd.backward(-F.logsigmoid(signs * (scale * image[rows] @ text.T + bias)).sum() / n)

    return both


def _memory(name: str) -> float:
    """A line of /proc/self/status, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _measure(pipe: Any, both: Pass, size: int, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    leaves = [F.normalize(torch.randn(size, width, generator=draw), dim=1).requires_grad_() for _ in range(2)]
    scalars = [torch.tensor(20.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)]
    both(*[leaf.detach()[:64].clone().requires_grad_() for leaf in leaves], *scalars)  # what is loaded or made once
    ctypes.CDLL(None).malloc_trim(0)  # what that left behind would hide what is measured
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, began = _memory("VmRSS"), time.perf_counter()
    both(*leaves, *scalars)
    seconds = time.perf_counter() - began
    pipe.send((seconds, _memory("VmHWM") - before - 2 * size * width * 4 / 2**20))


def measure(both: Pass, size: int, width: int, threads: int) -> tuple[float, float]:
    """Seconds, and MiB above features and gradients, of one forward and backward pass."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, both, size, width, threads))
    process.start()
    theirs.close()
    found: tuple[float, float] = ours.recv()
    process.join()
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and memory against the batch, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, title in zip(
        axes, ("seconds", "mib"), ("time, s", "memory above features and gradients, MiB"), strict=True
    ):
        for kind, style in (("clip", "-o"), ("siglip", "--s")):
            for name in dict.fromkeys(row["implementation"] for row in rows):
                some = [row for row in rows if (row["loss"], row["implementation"]) == (kind, name)]
                axis.loglog([row["batch"] for row in some], [row[key] for row in some], style, label=f"{kind}, {name}")
        axis.set(title=title, xlabel="global batch")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Print the table; write it as CSV and as a plot where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**power for power in range(10, 17)])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=8192, help="the largest batch for the others")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="SVG or PNG; needs matplotlib")
    args = parser.parse_args()
    makers = {"clipstream": clipstream, "open_clip": dense, "by hand": by_hand}
    rows: list[dict[str, Any]] = []
    print(f"{'loss':8}{'batch':>8}  " + "".join(f"{name + ' s':>14}{'MiB':>7}" for name in makers) + "   ratio")
    for kind in ("clip", "siglip"):
        for size in args.sizes:
            alone = size > args.beside
            names = ["clipstream"] if alone else list(makers)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for _ in range(1 if alone else args.rounds):
                for name in names:
                    found[name].append(measure(makers[name](kind), size, args.width, args.threads))
            line, medians = f"{kind:8}{size:8}  ", {}
            for name, values in found.items():
                seconds, mib = (statistics.median(column) for column in zip(*values, strict=True))
                medians[name] = seconds
                rows.append(
                    dict(loss=kind, batch=size, width=args.width, implementation=name, seconds=seconds, mib=mib)
                )
                line += f"{seconds:14.2f}{mib:7.0f}"
            ratio = f"{medians['open_clip'] / medians['clipstream']:8.2f}" if "open_clip" in medians else ""
            print(line + ratio, flush=True)
    if args.csv is not None:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
