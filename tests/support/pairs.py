"""A covering array over the settings of training: each pair of values of two factors occurs in one of its runs.

`FACTORS` says which flags a value stands for, `REFUSALS` which values do not go together. `rows` are runs without such
values; `Place` has the shards, models and stores that they name. `plain` is the run whose figures a run must have.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import random
import signal
from dataclasses import dataclass
from functools import partialmethod
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pyarrow as pa
import pytest
import torch
from filelock import FileLock
from pyarrow import parquet
from pydantic import Field
from safetensors.torch import load_file

from clipstream.cli.verbs.precompute import main
from clipstream.distributed.world import World
from clipstream.report.records import Record
from clipstream.report.settings import SinkSettings
from clipstream.report.sinks import RunInfo, Sink
from tests.support import hubtree, model_files
from tests.support.model_files import TEXT, VIT
from tests.support.pictures import picture
from tests.support.ranks import end_ranks
from tests.support.runs import lines, train_on, weights
from tests.support.tars import write_tar

STEPS, BATCH = 4, 12
BACKEND = "eager"  # of compilation: Dynamo's part of it, without AOTAutograd's, which takes most of the time
SPREAD = 1.7  # of the weights, so that features differ
CANDIDATES = 20  # for each run of the array
Row = dict[str, str]
Item = tuple[str, str]  # a factor and its value

SMALL = {**TEXT, "vocab_size": 64}
VISION: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "resnet": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8},
    "convnext": {"timm_model_name": "test_convnext", "image_size": 32, "timm_pool": "avg", "timm_proj": "linear"},
    "siglip": {**VIT, "pool_type": "avg"},
    "hf": VIT,
    "teacher": {**VIT, "image_size": 16, "layers": 1},
}

TARS = "--train-data {place}/pairs/{{00000..00002}}.tar"
FACTORS: dict[str, dict[str, str]] = {
    "model": {kind: f"--model {{place}}/{kind}.json --pretrained local-dir:{{place}}/{kind}" for kind in VISION},
    "world": {"1": "", "2 ddp": "", "2 fsdp": "--train.parallel fsdp"},
    "loss": {"clip": "--loss.type clip", "siglip": "--loss.type siglip"},
    "precision": {value: f"--precision {value}" for value in ("fp32", "bf16", "fp16", "pure_bf16", "fp64")},
    "checkpointing": {"off": "", "all": "--grad-checkpointing", "matmuls": "--model.grad-checkpointing matmuls",
                      "0.5": "--model.grad-checkpointing 0.5",
                      "text": "--model.text.grad-checkpointing all"},
    "micro": {"off": "", "5": "--train.micro-batch-size 5", "2": "--train.micro-batch-size 2"},
    "kept": {"1": "", "0": "--train.kept-micro-batches 0", "2": "--train.kept-micro-batches 2"},
    "texts": {value: f"--model.text-buckets {value}" for value in ("off", "auto", "packed", "2")},
    "patch dropout": {"off": "", "0.5": "--model.patch-dropout 0.5"},
    "lock image": {"off": "", "all": "--lock-image", "last": "--lock-image --model.unlocked-groups 1",
                   "until": "--lock-image --model.unlock-image-at 2"},
    "lock text": {"off": "", "all": "--lock-text", "last": "--lock-text --model.unlocked-layers 1",
                  "until": "--lock-text --model.unlock-text-at 3"},
    "adapters": {"off": "", "lora": "--lora 4", "text": "--model.text.lora.rank 8 --model.text.lora.alpha 4",
                 "all": "--model.image.lora.targets all --model.text.lora.rank 3 "
                        "--model.text.lora.tokens {place}/pairs.csv"},
    "own precision": {"off": "", "bf16": "--model.{tower}.precision bf16", "fp16": "--model.{tower}.precision fp16",
                      "fp32": "--model.{tower}.precision fp32"},
    "cache": {"off": "", "on": "--model.{tower}.cache-gib 0.01"},
    "ema": {"off": "", "0.9": "--train.ema 0.9", "warm": "--train.ema 0.99 --train.ema-warmup true"},
    "compile": {"off": "", **{kind: f"--train.compile {kind} --train.compile-backend {{backend}}"
                              for kind in ("blocks", "towers", "step")}},
    "workers": {value: f"--workers {value}" for value in ("0", "1", "2")},
    "mode": {"resampled": "", "split": "--data.sampling.shards split --data.sampling.replacement false",
             "epoch": "--data.sampling.mode epoch",
             **{kind: f"--data.sampling.mode indexed --data.sampling.remainder {kind}" for kind in ("pad", "wrap")},
             "groups": "--data.sampling.mode indexed --data.sampling.remainder pad --data.groups.by cls "
             "--data.groups.samples 3",
             "hard": "--data.sampling.mode indexed --data.sampling.remainder wrap --data.hard-negatives "
             "{place}/hard.parquet"},
    "probability": {"off": "", "file": "--data.sources.train.probability {place}/chances.csv"},
    "optimizer": {"adamw": "", "nadamw": "--optim.type nadamw", "lamb": "--optim.type timm --optim.name lamb",
                  "muon": "--optim.type timm --optim.name nadamuon --optim.fallback [\"*_embedding*\"]",
                  "pull": "--optim.l2-start 30",
                  "layer decay": "--optim.image-layer-decay 0.7 --optim.text-lr 2e-3"},
    "schedule": {"cosine": "--warmup 2", "constant": "--schedule.type constant", "linear": "--schedule.type linear",
                 "cooldown": "--schedule.type const-cooldown --schedule.cooldown 2"},
    "clipping": {"off": "", "0.1": "--grad-clip-norm 0.1"},
    "duplicates": {"negatives": "", "mask": "--loss.duplicates mask", "positives": "--loss.duplicates positives",
                   "terms": "--loss.duplicates positives --loss.image-image 0.2 --loss.text-text 0.1",
                   "mask pictures": "--loss.duplicates mask --loss.duplicates-by pictures",
                   "groups": "--loss.positives.by cls --loss.image-image 0.2"},
    "distillation": {"off": "", "start": "--distill.model start --distill.type affinity",
                     "live": "--distill.model local-dir:{place}/teacher --distill.features 0.5",
                     "live alike": "--distill.model local-dir:{place}/{model} --distill.type relational",
                     "stored": "--data.teacher-features [{store}] --distill.type affinity",
                     "stored alone": "--data.teacher-features [{store}] --distill.contrastive 0"},
    "stored": {"off": "", "image": "--data.image-features {store}", "text": "--data.text-features {store}",
               "both": "--data.image-features {store} --data.text-features {store}"},
    "audit": {"off": "", "audit": "--log.audit-precision true", "profile": "--log.profile 2-3"},
    "evaluator": {"off": "", "retrieval": "--evals.e.type retrieval", "loss": "--evals.e.type loss",
                  "zero shot": "--evals.e.type zero_shot --evals.e.classes [red,green,dog] "
                  "--evals.e.templates plain",
                  "knn": "--evals.e.type knn --evals.e.train-shards {place}/val.tar"},
    "augmentation": {"off": "--data.augment.enabled false",
                     "whole": "--data.augment.scale [1,1] --data.augment.ratio [1,1]",
                     "crops": "--data.augment.scale [0.4,0.9] --data.augment.flip 0.5 --data.augment.color-jitter "
                     "[0.2,0.2,0.2,0.1] --data.augment.color-jitter-prob 0.5"},
    "decoder": {"fast": "", "exact": "--data.decoder exact"},
    "batches": {"equal": "", "growing": "--data.batch-schedule [[1,10],[3,14]]"},
    "source": {"tars": TARS, "table": "--train-data {place}/pairs.csv",
               "drawn": f"{TARS} --data.sources.train.caption.type json --data.sources.train.caption.path [en,more] "
               "--data.sources.train.caption.weights [1,2]",
               "classes": f"{TARS} --data.sources.train.caption.type label --data.sources.train.caption.templates "
               "simple --data.sources.train.caption.classes [red,green,dog]",
               "several": f"{TARS} --data.sources.train.caption.type json --data.sources.train.caption.path [en,more] "
               "--data.sources.train.caption.weights [1,2] --data.sources.train.caption.per-image 2 "
               "--data.sources.train.caption.negatives swap",
               "short": f"{TARS} --data.sources.train.caption.type json --data.sources.train.caption.path [en,more] "
               "--data.sources.train.caption.weights [1,2] --data.sources.train.caption.short en --loss.short 0.7",
               "mixed": f"{TARS} --data.sources.more.shards {{place}}/pairs.csv --data.sources.more.weight 0.5"},
    "channels": {value: f"--model.channels-last {value}" for value in ("auto", "on", "off")},
    "deterministic": {"off": "", "on": "--run.deterministic true"},
    "custom text": {"off": "", "on": "--model.custom-text true"},
    "resume": {"off": "", "checkpoint": "", "signal": "", "kill": "", "other ranks": ""},
}  # fmt: skip
del FACTORS["model"]["teacher"]

# What decides the figures of a run; the rest must not.
SAME = ("model", "loss", "patch dropout", "lock image", "lock text", "adapters", "ema", "mode", "probability",
        "optimizer", "schedule", "clipping", "duplicates", "distillation", "evaluator", "augmentation", "decoder",
        "batches", "source", "custom text")  # fmt: skip
# Masks of patch dropout depend on how many samples pass at once, and on the rank; stored views differ from crops.
MASKS, VIEWS = ("world", "micro", "kept", "texts", "cache", "stored"), ("stored",)
# New pairs that a value must add to be worth its time.
COSTS = {"2 ddp": 2, "2 fsdp": 3, "blocks": 3, "towers": 3, "step": 3, "checkpoint": 2, "other ranks": 2, "signal": 3,
         "kill": 4, "profile": 3}  # fmt: skip
OF_STORES = ("model", "augmentation", "decoder", "source", "custom text")
LOCKED = {"lock image": "all", "lock text": "all", "augmentation": "off", "micro": "5"}
STORED = {"off": (), "image": ("image",), "text": ("text",), "both": ("image", "text")}
# A stored teacher, live.
LIVE = {"stored": "--distill.model local-dir:{place}/teacher --distill.type affinity",
        "stored alone": "--distill.model local-dir:{place}/teacher --distill.contrastive 0"}  # fmt: skip
COMMON = (
    "--model.allow-mismatch true --device cpu --run.threads 1 "
    "--data.lanes 6 --data.shuffle.window 7 --log.every 1 --checkpoint.every 2 --log.tensorboard false "
    "--log.report false --log.pictures 0 --lr 1e-3 --eps 1e-4 --logs {place}/runs "
    "--data.stall-timeout 3600 --run.timeout 7200"
)


class Killer(Sink):
    """A destination of records that ends its process with a signal, once in a run, when a step is done."""

    class Settings(SinkSettings):
        """The signal and the step."""

        type: Literal["tests.support.pairs:Killer"] = "tests.support.pairs:Killer"
        signal: int = Field(description="number of the signal")
        step: int = Field(description="after which it is sent")

    def __init__(self, settings: Settings, run: RunInfo) -> None:
        self.settings, self.alive = settings, run.resume_step is None

    def write(self, record: Record) -> None:
        """Send the signal."""
        if self.alive and "loss" in record and record["step"] == self.settings.step:
            os.kill(os.getpid(), self.settings.signal)


def simplest() -> Row:
    """The first value of each factor: the plain run."""
    return {factor: next(iter(values)) for factor, values in FACTORS.items()}


def plain(row: Row) -> tuple[Row, bool]:
    """The run whose figures this run must have: in float32, at once, with padded texts, on one rank.

    Returns: the row, and whether stored teachers are live in it.
    """
    masks = row["patch dropout"] != "off" and row["lock image"] != "all"
    views = row["augmentation"] == "crops"
    made = simplest() | {factor: row[factor] for factor in (*SAME, *(MASKS * masks), *(VIEWS * views))}
    for tower in STORED[row["stored"]]:
        if made["stored"] == "off":
            made[f"lock {tower}"] = "all"
    return made, made["stored"] == "off" and not views


def flags(place: Path, row: Row, name: str, *more: str, live: bool = False) -> list[str]:
    """The command line of a run; with `live`, stored teachers run."""
    towers = own_towers(row)
    # Dynamo alone recomputes selectively checkpointed blocks of FSDP2 with other casts than those of their pass.
    backend = "aot_eager" if row["world"] == "2 fsdp" else BACKEND
    known = {"place": place, "model": row["model"], "store": place / store_name(row), "backend": backend}
    given = [COMMON]
    for factor, value in row.items():
        text = LIVE.get(value, FACTORS[factor][value]) if live and factor == "distillation" else FACTORS[factor][value]
        given += [text.replace("{tower}", tower) for tower in towers] if "{tower}" in text else [text]
    if row["evaluator"] != "off":
        weights = "trained" if row["ema"] == "off" else "both"
        given.append("--evals.e.data.shards {place}/val.tar --evals.e.every 2 --evals.e.batch-size 5")
        given.append(f"--evals.e.weights {weights} --evals.e.on-error raise")
    words = [word.format(**known) for word in " ".join(given).split()]
    return [*words, "--name", name, "--steps", str(STEPS), "--data.global-batch-size", str(BATCH), *more]


# Values that do not go together, and words of the sentence that refuses them.
REFUSALS: list[tuple[dict[str, str], str]] = [
    ({"texts": "packed", "compile": "blocks|towers|step"}, "packed texts are not supported with train.compile"),
    ({"world": "2 fsdp", "precision": "fp16"}, "fsdp has no scaler"),
    ({"world": "2 fsdp", "compile": "towers|step"}, "use blocks"),
    ({"world": "2 fsdp", "cache": "on"}, "not supported with fsdp: use ddp"),
    ({"world": "2 fsdp", "model": "resnet"}, "without batch norm"),
    ({"model": "resnet", "micro": "5|2", "lock image": "off|last|until"}, "batch norm"),
    ({"model": "resnet", "patch dropout": "0.5"}, "no patches"),
    ({"patch dropout": "0.5", "stored": "image|both"}, "whole images"),
    ({"lock image": "last", "stored": "image|both"}, "can be trained"),
    ({"lock text": "last", "stored": "text|both"}, "can be trained"),
    ({"stored": "image|text|both", "distillation": "live|live alike|start"}, "a live teacher requires"),
    ({"adapters": "lora|text|all", "optimizer": "pull"}, "not supported with adapters"),
    ({"model": "resnet", "checkpointing": "all|matmuls|0.5"}, "no repeated blocks"),
    ({"model": "hf|siglip", "texts": "packed"}, "padd"),
    ({"model": "siglip", "texts": "2"}, "attends to padding"),
    ({"model": "convnext", "patch dropout": "0.5"}, "no patches"),
    ({"model": "resnet", "lock image": "last"}, "none to unlock"),
    ({"lock image": "until", "stored": "image|both"}, "can be trained"),
    ({"lock text": "until", "stored": "text|both"}, "can be trained"),
    ({"optimizer": "layer decay", "stored": "image|both"}, "no image tower"),
    ({"world": "2 fsdp", "optimizer": "lamb|muon"}, "requires unsharded weights"),
    ({"adapters": "lora|all", "lock image": "all|last|until"}, "model.lock_image freezes it"),
    ({"adapters": "lora|text|all", "lock text": "all|last|until"}, "model.lock_text freezes it"),
    ({"adapters": "lora|all", "stored": "image|both"}, "no adapters of the image tower can be trained"),
    ({"adapters": "lora|text|all", "stored": "text|both"}, "no adapters of the text tower can be trained"),
    ({"adapters": "lora", "model": "resnet|convnext"}, "no layer of the image tower matches attention"),
    ({"batches": "growing", "mode": "pad|wrap|groups|hard"}, "constant batch size"),
    ({"source": "mixed", "mode": "groups|hard"}, "not supported with several sources"),
    ({"probability": "file", "mode": "groups|hard"}, "whose epochs have each sample once"),
    ({"source": "several|short", "stored": "image|text|both"}, "which has one text of a sample in a step"),
    ({"source": "several|short", "distillation": "live|live alike|stored|stored alone|start"}, "one text of a sample"),
    ({"source": "several|short", "duplicates": "mask|mask pictures"}, "not supported with loss.duplicates mask"),
    ({"source": "several|short", "duplicates": "positives|terms"}, "as a sample has several texts"),
]


def refusal(row: Row) -> str | None:
    """Words of the sentence that refuses a run; None for a run that is possible. The row may lack factors."""
    for rule, words in REFUSALS:
        if all(row.get(factor) in values.split("|") for factor, values in rule.items()):
            return words
    complete = {"own precision", "cache", "lock image", "lock text", "stored", "augmentation"} <= row.keys()
    if complete and (row["own precision"] != "off" or row["cache"] != "off"):
        towers = own_towers(row)
        if not may_own(row, towers[0]):
            return "the (image|text) tower"
        if row["cache"] == "on" and towers[0] == "image" and row["augmentation"] != "off":
            return "features of augmented images"
        if row["cache"] == "on" and "text" in towers and row.get("source") in ("several", "short"):
            return "not supported with"
    return None


def may_own(row: Row, tower: str) -> bool:
    """Whether a tower runs and is locked for good."""
    return row[f"lock {tower}"] == "all" and tower not in STORED[row["stored"]]


def rows(seed: int) -> list[Row]:
    """Possible runs in which each pair of values occurs that may, chosen greedily (AETG).

    The next run is the best of CANDIDATES. One begins with a pair that has not occurred; each further factor takes the
    value that adds the most new pairs, less what it costs, and is possible. The simplest values complete it.
    """
    draw = random.Random(seed)
    items = [(factor, value) for factor in sorted(FACTORS) for value in FACTORS[factor]]
    left = {item: {other for other in items if other[0] != item[0]} for item in items}
    pairs = [pair for pair in combinations(items, 2) if pair[0][0] != pair[1][0]]
    made: list[Row] = []
    while pairs := [pair for pair in pairs if pair[1] in left[pair[0]]]:
        draw.shuffle(pairs)
        candidates: list[Row] = []
        while len(candidates) < min(CANDIDATES, len(pairs)):
            if (row := completed(dict(pairs[len(candidates)]), left, draw)) is not None:
                candidates.append(row)
            else:
                del pairs[len(candidates)]
        if candidates:
            made.append(max(candidates, key=lambda row: sum(len(left[item] & row.items()) for item in row.items())))
            for item in made[-1].items():
                left[item] -= made[-1].items()
    return made


def missing(made: list[Row]) -> list[Row]:
    """The pairs of values that occur in no run, and that nothing refuses where all else is simplest."""
    seen = {frozenset(pair) for row in made for pair in combinations(row.items(), 2)}
    pairs = [
        {a: one, b: other}
        for a, b in combinations(FACTORS, 2)
        for one, other in product(FACTORS[a], FACTORS[b])
        if frozenset([(a, one), (b, other)]) not in seen
    ]
    return [pair for pair in pairs if all(refusal(simplest() | base | pair) is None for base in ({}, LOCKED))]


def completed(row: Row, left: dict[Item, set[Item]], draw: random.Random) -> Row | None:
    """A possible run with these values; None if there is none."""
    for base in ({}, LOCKED):
        whole = simplest() | base | row
        if refusal(whole) is not None:
            continue
        for factor in draw.sample(sorted(FACTORS.keys() - row.keys()), len(FACTORS) - len(row)):
            values = draw.sample(sorted(FACTORS[factor]), len(FACTORS[factor]))
            values.sort(key=lambda value: COSTS.get(value, 0) - len(left[factor, value] & row.items()))
            possible = (value for value in values if refusal(whole | {factor: value}) is None)
            row = row | {factor: next(possible, whole[factor])}
            whole = whole | row
        return whole
    return None


def own_towers(row: Row) -> list[str]:
    """The towers that have a precision or a cache of their own; the image tower where none may."""
    towers = [tower for tower in ("image", "text") if may_own(row, tower)]
    if row["cache"] == "on" and row["augmentation"] != "off" and "text" in towers:
        return ["text"]
    return towers or ["image"]


def store_name(row: Row) -> str:
    """The store of a run's features."""
    return "store-" + "-".join(row[part].replace(" ", "_") for part in OF_STORES)


def furnish(place: Path) -> None:
    """Write shards, tables and models."""
    words = hubtree.WORDS
    draw = random.Random(5)
    samples: list[dict[str, Any]] = []
    for number in range(40):
        text = " ".join(draw.choice(words) for _ in range(draw.choice((1, 2, 3, 5, 8, 9))))
        repeats = number % 6 == 5  # the caption or the picture of another sample
        caption = samples[-2]["txt"] if repeats else text
        image = samples[-3]["jpg"] if repeats else picture(5 * number)
        more = [f"{caption} {word}" for word in words[number % 3 :: 7]]
        fields = {"caption": caption, "en": caption, "more": more}
        samples.append({"__key__": f"{number:04d}", "jpg": image, "txt": caption, "json": json.dumps(fields),
                        "cls": str(number % 3)})  # fmt: skip
    for shard, (start, stop) in enumerate([(0, 13), (13, 20), (20, 29)]):
        write_tar(place / "pairs" / f"{shard:05d}.tar", samples[start:stop])
    write_tar(place / "val.tar", samples[29:])
    rows = ["filepath,title,cls"]
    for sample in samples[::2]:
        (place / f"{sample['__key__']}.jpg").write_bytes(sample["jpg"])
        rows.append(f"{sample['__key__']}.jpg,{sample['txt']},{sample['cls']}")
    (place / "pairs.csv").write_text("\n".join(rows) + "\n")
    names = [[f"0000{(n > 12) + (n > 19)}.tar/{n:04d}" for n in range(29)], [f"pairs.csv/{n}" for n in range(20)]]
    chances = [f"{name.replace('/', ',')},{1 - i % 4 / 6}" for i, name in enumerate([*names[0], *names[1]])]
    (place / "chances.csv").write_text("\n".join(["shard,key,probability", *chances]) + "\n")
    near = {name: [some[n - 3], some[n - 7]] for some in names for n, name in enumerate(some)}
    columns = zip(*(name.split("/") for name in near), strict=True)
    table = dict(zip(("shard", "key"), map(list, columns), strict=True), neighbours=list(near.values()))
    parquet.write_table(pa.table(table), place / "hard.parquet")
    (place / "words").mkdir()
    hubtree.write_tokenizer(place / "words")
    for kind, vision in VISION.items():
        write_model(place, kind, vision)


def write_model(place: Path, kind: str, vision: dict[str, Any]) -> None:
    """A model's configuration, and weights whose features differ from sample to sample."""
    here = str(place / "words")
    config: dict[str, Any] = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": TEXT}
    if kind == "siglip":
        config = hubtree.tiny_config(here)["model_cfg"] | {"vision_cfg": vision}
        config["text_cfg"] |= {"context_length": 12}
    elif kind == "hf":
        from transformers import RobertaConfig, RobertaModel

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}
        with torch.random.fork_rng():
            torch.manual_seed(4)
            base = RobertaModel(RobertaConfig(**sizes, **none, vocab_size=64, max_position_embeddings=40))
        base.save_pretrained(place / "base")
        hubtree.write_tokenizer(place / "base")
        names = {"hf_model_name": str(place / "base"), "hf_tokenizer_name": str(place / "base")}
        config["text_cfg"] = {**names, "hf_pooler_type": "mean_pooler", "hf_proj_type": "linear", "context_length": 12}
    elif kind == "teacher":
        config["text_cfg"] = {**SMALL, "hf_tokenizer_name": here}
    (place / f"{kind}.json").write_text(json.dumps(config))
    towers = model_files.build(str(place / f"{kind}.json"), seed=3)
    with torch.no_grad():
        for parameter in towers.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(SPREAD)
    towers.save_pretrained(place / kind)


def furnish_store(place: Path, row: Row) -> None:
    """Write the store that a run names."""
    folder = place / store_name(row)
    with FileLock(f"{folder}.lock"):
        if (folder / "done").exists():
            return
        made = simplest() | {factor: row[factor] for factor in OF_STORES}
        argv = [str(folder), "--towers", "both", "--dtype", "float32", "--teacher", f"wise=local-dir:{place}/teacher"]
        argv += [] if row["augmentation"] == "off" else ["--views", "2"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*argv, *flags(place, made, "none")]) == 0
        (folder / "done").touch()


def train(world: World, argv: list[str]) -> int:
    """A rank's run, where fp16 begins with a scale that leaves no step out."""
    scaler = torch.amp.GradScaler
    with patch.object(scaler, "__init__", partialmethod(scaler.__init__, init_scale=2.0**10)):
        return train_on(world, argv)


# Relative to the plain run, of the loss and of the gradient's norm. A precision of a frozen tower's own counts alike.
# With pure_bf16 many steps move a weight by less than its last digit, which rounding then decides; Muon rounds the
# matrices of an update to bfloat16.
TOLERANCE = {"fp32": (1e-5, 3e-4), "fp64": (1e-5, 3e-4), "bf16": (4e-2, 0.25), "fp16": (2e-2, 0.1),
             "pure_bf16": (0.1, 0.25), "muon": (1e-3, 1e-2)}  # fmt: skip
FIGURES = ("step", "samples", "lr", "loss", "grad_norm", "logit_scale")


@dataclass
class Outcome:
    """How a run ended."""

    name: str
    code: int
    said: str  # on stderr
    lines: list[dict[str, Any]]  # of training

    def error(self) -> str:
        """The last sentence."""
        found = [line for line in self.said.splitlines() if "error: " in line]
        return found[-1] if found else self.said[-3000:]


def go(place: Path, row: Row, name: str, *more: str, live: bool = False) -> Outcome:
    """Take a run to its end."""
    if row["stored"] != "off" or (row["distillation"].startswith("stored") and not live):
        furnish_store(place, row)
    ends = end_ranks(int(row["world"][0]), train, flags(place, row, name, *more, live=live))
    path = place / "runs" / name / "metrics.jsonl"
    said = "".join(end.stderr for end in ends)  # of an error that all have, any one rank tells
    return Outcome(name, ends[0].code, said, lines(place, name) if path.exists() else [])


def plain_outcome(place: Path, row: Row) -> Outcome:
    """The plain run of a run, which several share."""
    made, live = plain(row)
    name = "plain-" + hashlib.sha256(json.dumps([made, live], sort_keys=True).encode()).hexdigest()[:12]
    path = place / f"{name}.pickle"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_bytes(pickle.dumps(go(place, made, name, live=live)))
        found: Outcome = pickle.loads(path.read_bytes())
    return found


def check(place: Path, row: Row, name: str) -> str:
    """Take a run, and compare it with its plain run, and a resumed one with the undisturbed one. How near it was.

    Raises AssertionError: it is not as it must be, or it is refused, which `REFUSALS` does not say.
    """
    whole = go(place, row, name)
    assert whole.code == 0, f"ends with {whole.code}: {whole.error()}"
    wanted = plain_outcome(place, row)
    assert wanted.code == 0, f"the plain run ends with {wanted.code}: {wanted.error()}"
    near = compare(row, whole, wanted)
    exact = row["precision"] in ("fp32", "fp64") and row["own precision"] in ("off", "fp32")
    if exact and row["optimizer"] != "muon":  # which makes a whole update of the rounding of gradients that are zero
        near += " " + compare_weights(place, row, name, wanted.name)
    if row["resume"] != "off":
        near += " " + check_resumed(place, row, whole)
    return near


def tolerance(row: Row) -> tuple[float, float]:
    """How far the loss and the gradient's norm may be from the plain run, relatively."""
    found = [TOLERANCE[row[key]] for key in ("precision", "own precision", "optimizer") if row[key] in TOLERANCE]
    return max(loss for loss, _ in found), max(norm for _, norm in found)


def compare(row: Row, run: Outcome, wanted: Outcome) -> str:
    """Compare the figures of training and of evaluations."""
    assert [line["step"] for line in run.lines] == list(range(1, STEPS + 1))
    of_loss, of_norm = tolerance(row)
    worst = [0.0, 0.0]
    for line, other in zip(run.lines, wanted.lines, strict=True):
        told = f"step {line['step']}: {[line[key] for key in FIGURES]} for {[other[key] for key in FIGURES]}"
        assert math.isfinite(line["loss"]), told
        assert all(line[key] == other[key] for key in ("samples", "lr")), told
        assert line["grad_norm"] is not None, f"a step is left out: {told}"
        for i, (key, most) in enumerate({"loss": of_loss, "grad_norm": of_norm, "logit_scale": of_norm}.items()):
            far = abs(line[key] - other[key]) / abs(other[key])
            worst[min(i, 1)] = max(worst[min(i, 1)], far)
            assert far <= most, f"{key} {far:.1e} at {told}"
    return "loss {:.0e} gradient {:.0e}".format(*worst)


def compare_weights(place: Path, row: Row, name: str, wanted: str) -> str:
    """Compare how far the weights have moved, the averaged ones too."""
    first = load_file(place / row["model"] / "open_clip_model.safetensors")
    worst = 0.0
    for file in ("open_clip_model", *(["averaged"] if row["ema"] != "off" else [])):
        ours, theirs = weights(place, name, STEPS, file), weights(place, wanted, STEPS, file)
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        moved, apart = 0.0, 0.0
        for key, tensor in theirs.items():
            moved += (tensor.double() - first.get(key, tensor).double()).square().sum().item()
            apart += (tensor.double() - ours[key].double()).square().sum().item()
        worst = max(worst, math.sqrt(apart / max(moved, 1e-30)))
    assert worst < 1e-2, f"weights have moved {worst:.1e} apart"
    return f"weights {worst:.0e}"


def check_resumed(place: Path, row: Row, whole: Outcome) -> str:
    """Disturb the run, resume it, and compare it with the undisturbed one, bit by bit on as many ranks."""
    name, kind, done = f"{whole.name}-again", row["resume"], STEPS // 2
    again = dict(row)
    if kind in ("signal", "kill"):
        number = signal.SIGTERM if kind == "signal" else signal.SIGKILL
        killer = f"{{type: tests.support.pairs:Killer, signal: {int(number)}, step: {done + (kind == 'kill')}}}"
        first = go(place, row, name, "--log.sinks.killer", killer)
        assert first.code == (75 if kind == "signal" else -9), f"ends with {first.code}: {first.error()}"
        # A kill may come before the checkpoint is whole, which is written beside the steps.
        start = ("--resume", "latest" if kind == "signal" else "auto")
    else:
        start = ("--checkpoint.resume", f"{place}/runs/{whole.name}/checkpoints/step_{done:08d}")
        if kind == "other ranks":
            sharded = refusal({**row, "world": "2 fsdp"}) is None
            again |= {"world": ("2 fsdp" if sharded else "2 ddp") if row["world"] == "1" else "1"}
    run = go(place, again, name, *start)
    assert run.code == 0, f"the resumed run ends with {run.code}: {run.error()}"
    ours, theirs = run.lines[-done:], whole.lines[-done:]
    if kind == "other ranks":
        if row["patch dropout"] == "off":
            for line, other in zip(ours, theirs, strict=True):
                most = tolerance(row)[0]
                assert abs(line["loss"] - other["loss"]) <= most * other["loss"], f"{line} for {other}"
        return "resumed"
    if row["cache"] == "on":  # the resumed run computes features anew, in passes of other samples
        assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
        return "resumed"
    assert ours == theirs, f"resumed: {ours} for {theirs}"
    for file in ("open_clip_model", *(["averaged"] if row["ema"] != "off" else [])):
        found, wanted = weights(place, name, STEPS, file), weights(place, whole.name, STEPS, file)
        different = [key for key, tensor in wanted.items() if not torch.equal(tensor, found[key])]
        assert not different, f"resumed: {different} differ"
    return "resumed bit-equal"


def shown(row: Row) -> str:
    """What differs from the simplest run."""
    plain = simplest()
    return ", ".join(f"{factor} {value}" for factor, value in row.items() if value != plain[factor])
