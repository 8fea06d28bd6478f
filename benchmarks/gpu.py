"""Training on one GPU: samples/s, MFU and memory of B/32, B/16, L/14 and SigLIP B/16, beside open_clip's step.

    python benchmarks/gpu.py 'shards/{00000..00007}.tar' --csv build/gpu.csv --write docs/performance.md  # 8 minutes
    python benchmarks/gpu.py --device cpu --small SHARDS   # the same on tiny models, to try the script

Four rows of each model take turns: batches in memory, the same with packed texts and without compilation, batches read
from the shards (generated pictures unless given), and `open_clip_train`'s step with amp_bf16 on the same tensors.
clipstream trains in bf16 with a fused optimizer, text buckets where the tower allows them, and compiled blocks. SigLIP
has CLIP's tokenizer, which needs no download; its token table is larger so, and its arithmetic the same. `--write FILE`
puts the table between the markers of that file. Models for which no time is left are named.

No figures yet: they were not measured on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from made import make

from clipstream.bench.ladder import Ladder
from clipstream.bench.options import Options
from clipstream.bench.results import COLUMNS, GIB, Row
from clipstream.bench.rungs import Rung
from clipstream.config.settings import load
from clipstream.distributed.world import World
from clipstream.models.model_config import builtin
from clipstream.utils.logs import on_terminal

BEGIN, END = "<!-- benchmarks/gpu.py: table -->", "<!-- benchmarks/gpu.py: end -->"
HEAD = (
    "| model | batch | | samples/s | range | ratio | MFU | TFLOP/s | peak memory, GiB | |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


class Model(NamedTuple):
    """A model and the batch that it is measured with."""

    name: str  # open_clip's
    batch: int


MODELS = (Model("ViT-B-32", 1024), Model("ViT-B-16", 512), Model("ViT-L-14", 256), Model("ViT-B-16-SigLIP", 512))


def model_file(name: str, folder: Path, small: bool) -> str:
    """What `--model` takes: the name, or a JSON file of a model that needs no tokenizer of the Hub, or is tiny."""
    cfg: dict[str, Any] = builtin(name)
    if small:
        cfg |= {"embed_dim": 16}
        cfg["vision_cfg"] |= {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
        cfg["text_cfg"] |= {"layers": 2, "width": 32, "heads": 2, "context_length": 16}
        if "timm_model_name" in cfg["vision_cfg"]:
            cfg["vision_cfg"] = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
    if cfg["text_cfg"].pop("hf_tokenizer_name", None) is not None:
        cfg["text_cfg"].pop("tokenizer_kwargs", None)
        cfg["text_cfg"]["vocab_size"] = 49408
    elif not small:
        return name
    path = folder / f"{name}.json"
    path.write_text(json.dumps(cfg))
    return str(path)


def measure(model: Model, shards: str, folder: Path, args: argparse.Namespace) -> list[Row]:
    """The rows of a model: in memory, packed, open_clip, from shards."""
    batch = args.batch or (8 if args.small else model.batch)
    cpu = args.device == "cpu"
    flags = [
        "--train-data", shards, "--model", model_file(model.name, folder, args.small), "--device", args.device,
        "--data.global-batch-size", str(batch), "--precision", "fp32" if cpu else "bf16",
        "--train.compile", "off" if cpu else "blocks", "--train.tf32", json.dumps(not cpu),
        "--workers", str(args.workers),
    ]  # fmt: skip
    options = Options(
        rungs=("shards",), rounds=args.rounds, steps=args.steps, warmup_steps=args.warmup, loss_steps=args.warmup + 1
    )
    ladder = Ladder(load(flags, ranks=1), options, World(device="cpu" if cpu else "cuda:0"))
    packed = {"model.text_buckets": "packed", "train.compile": "off"}
    others = [
        Rung("packed", packed),
        Rung("open_clip", same_loss=False, open_clip=True),
        Rung("from shards", from_shards=True),
    ]
    return ladder.in_turns([Row(Rung("clipstream"), ladder.plain, 1)], others, cumulative=False)


def lines(model: Model, rows: list[Row]) -> list[str]:
    """Rows of the Markdown table; the ratio is that of samples/s to the model's first row."""
    found = []
    for row in rows:
        cells = [""] * 6
        if row.rates:
            gain = row.gain(rows[0])
            cells = [
                f"{row.rate:,.0f}",
                f"{min(row.rates):,.0f}-{max(row.rates):,.0f}",
                "" if gain is None else f"{gain:.2f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                "" if row.tflops is None else f"{row.tflops:.3g}",
                f"{row.memory / GIB:.2f}",
            ]
        found.append("| " + " | ".join([model.name, str(row.batch), row.rung.name, *cells, row.note()]) + " |")
    return found


def page(path: Path) -> str:
    """The file that the table is for, which has the markers."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise SystemExit(f"--write: {path} lacks the markers {BEGIN} and {END}")
    return text


def write_table(path: Path, table: str) -> None:
    """Put the table between the markers of a file."""
    before, _, rest = page(path).partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


def positive(text: str) -> int:
    """A whole number of at least 1. Raises ValueError: it is none."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="?", help="as --train-data takes them; generated unless given")
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and batches")
    parser.add_argument("--batch", type=positive, help="of every model; its own unless given")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--warmup", type=positive, default=3)
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further model is begun")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu --small tries the script on tiny models")
    if args.write is not None:  # before the minutes of measuring
        page(args.write)
    if args.csv is not None:
        args.csv.open("a").close()
    began = time.monotonic()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, float32"
    measured: list[tuple[Model, list[Row]]] = []
    left: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name, on_terminal():
        folder = Path(name)
        shards = args.shards or "::".join(make("jpeg-512", folder / "made"))
        for model in MODELS:
            if model.name not in args.models:
                continue
            if time.monotonic() - began > 60 * args.minutes:
                left.append(model.name)
                continue
            measured.append((model, measure(model, shards, folder, args)))
    title = f"{device}, torch {torch.__version__}, medians of {args.rounds} rounds of {args.steps} steps:\n\n"
    table = title + HEAD + "\n".join(line for model, rows in measured for line in lines(model, rows)) + "\n"
    if left:
        table += f"\nNot measured, as {args.minutes:g} minutes were over: {', '.join(left)}.\n"
    print(table)
    if args.csv is not None:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ("model", *COLUMNS))
            writer.writeheader()
            writer.writerows({"model": model.name, **row.record()} for model, rows in measured for row in rows)
    if args.write is not None:
        write_table(args.write, table)


if __name__ == "__main__":
    main()
