"""The rungs of `clipstream bench train`: which settings each one changes. Imports no torch.

`SPEED` is a chain: each rung is added to those before it. The rungs of `VARIANTS` are each added alone to the settings
that the chain gave. All settings that no rung names are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from clipstream.config.config_sources import Node
from clipstream.config.error_messages import format_errors
from clipstream.config.settings import Settings
from clipstream.errors import SettingsError
from clipstream.training.settings import TrainSettings

Changes = Mapping[str, object]  # dotted keys of settings -> values

BASELINE, CHOSEN, SHARDS = "baseline", "settings to use", "shards"
PATCH_DROPOUT = 0.5  # share of the patches, where the settings have none
PARTS = (2, 4, 8)  # micro-batches of a rank's batch


@dataclass(frozen=True)
class Rung:
    """One more change of settings.

    Attributes:
        name: in tables.
        changes: added to the settings of the rung before.
        reason: why it cannot run here, if that is known before it is tried.
        same_loss: whether it computes the same loss as the baseline, up to rounding.
        from_shards: whether each batch is read from the shards when it is needed.
        open_clip: whether the step is that of open_clip's trainer.
        torchcompile: whether this step compiles the model, as its flag of this name does.
    """

    name: str
    changes: Changes = field(default_factory=dict)
    reason: str | None = None
    same_loss: bool = True
    from_shards: bool = False
    open_clip: bool = False
    torchcompile: bool = False


@dataclass(frozen=True)
class Machine:
    """What the rungs depend on besides the settings."""

    device: str  # torch's name
    precision: str  # of 16 bits: the user's, or what the device computes; fp32 where it computes none
    ranks: int
    batch: int  # samples of a rank's part of the first batch
    shards: bool  # whether the user gave data
    padded: str | None = None  # why texts cannot be cut by length


def _tf32(settings: Settings, machine: Machine) -> list[Rung]:
    reason = None if machine.device.startswith("cuda") else "no GPU"
    return [Rung("tf32", {"train.tf32": True}, reason)]


def _precision(settings: Settings, machine: Machine) -> list[Rung]:
    if machine.precision == "fp32":
        return [Rung("bf16", reason="this device computes no bfloat16")]
    return [Rung(machine.precision, {"train.precision": machine.precision})]


def _fused(settings: Settings, machine: Machine) -> list[Rung]:
    reason = None if _can_fuse(settings) else f"{settings.optim.type} has no setting optim.fused"
    return [Rung("fused", {"optim.fused": True}, reason)]


def _compile(settings: Settings, machine: Machine) -> list[Rung]:
    chosen = settings.train.compile
    options = _compile_options(settings.train)
    return [Rung("compile", {"train.compile": "blocks" if chosen == "off" else chosen, **options})]


def _buckets(settings: Settings, machine: Machine) -> list[Rung]:
    chosen = settings.model.text_buckets
    packed = {"model.text_buckets": "packed", "train.compile": "off", **_compile_options(TrainSettings())}
    return [
        Rung("buckets", {"model.text_buckets": chosen if isinstance(chosen, int) else "auto"}, machine.padded),
        Rung("packed", packed, machine.padded),
    ]


def _checkpointing(settings: Settings, machine: Machine) -> list[Rung]:
    return [Rung(f"checkpointing {kind}", {"model.grad_checkpointing": kind}) for kind in ("matmuls", "all")]


def _micro_batch(settings: Settings, machine: Machine) -> list[Rung]:
    sizes = dict.fromkeys(-(-machine.batch // parts) for parts in PARTS)
    kept = settings.train.kept_micro_batches
    return [
        Rung(f"micro-batch {size}", {"train.micro_batch_size": size, "train.kept_micro_batches": kept})
        for size in sizes
    ]


def _fsdp(settings: Settings, machine: Machine) -> list[Rung]:
    reason = "one rank: torchrun starts several" if machine.ranks == 1 else None
    return [Rung("fsdp", {"train.parallel": "fsdp"}, reason)]


def _patch_dropout(settings: Settings, machine: Machine) -> list[Rung]:
    share = settings.model.patch_dropout or PATCH_DROPOUT
    return [Rung("patch-dropout", {"model.patch_dropout": share}, same_loss=False)]


def _shards(settings: Settings, machine: Machine) -> list[Rung]:
    return [Rung(SHARDS, reason=None if machine.shards else "no --train-data", from_shards=True)]


Make = Callable[[Settings, Machine], list[Rung]]
# What the baseline has in place of the settings of each rung: float32, padded texts, nothing compiled or fused.
PLAIN: dict[str, Changes] = {
    "tf32": {"train.tf32": False},
    "precision": {"train.precision": "fp32"},
    "fused": {"optim.fused": False},
    "compile": {"train.compile": "off"},
    "buckets": {"model.text_buckets": "off"},
    "checkpointing": {
        "model.grad_checkpointing": "off",
        "model.image.grad_checkpointing": None,
        "model.text.grad_checkpointing": None,
    },
    "micro-batch": {"train.micro_batch_size": None, "train.kept_micro_batches": 1},  # `auto` needs a size
    "fsdp": {"train.parallel": "ddp"},
    "patch-dropout": {"model.patch_dropout": None},
    "shards": {},
}
SPEED: dict[str, Make] = {
    "tf32": _tf32,
    "precision": _precision,
    "fused": _fused,
    "compile": _compile,
    "buckets": _buckets,
}
VARIANTS: dict[str, Make] = {
    "checkpointing": _checkpointing,
    "micro-batch": _micro_batch,
    "fsdp": _fsdp,
    "patch-dropout": _patch_dropout,
    "shards": _shards,
}


def plain(settings: Settings, names: Collection[str]) -> dict[str, object]:
    """The baseline's changes, where these rungs are measured; the settings of others stay the user's."""
    found = {key: value for name in names for key, value in PLAIN[name].items()}
    if not _can_fuse(settings):
        found.pop("optim.fused", None)
    if "compile" in names:
        found |= _compile_options(TrainSettings())
    return found


def with_changes(settings: Settings, changes: Changes) -> Settings:
    """The settings with some keys changed. Raises SettingsError: they do not go together."""
    tree: dict[str, Any] = settings.model_dump()
    for key, value in changes.items():
        *above, name = key.split(".")
        section = tree
        for part in above:
            section = section[part]
        section[name] = value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError("; ".join(format_errors(Settings, tree, error, Node()))) from error


def nested(changes: Changes) -> dict[str, Any]:
    """The changes as a tree for YAML."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *above, name = key.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def _compile_options(train: TrainSettings) -> dict[str, object]:
    """The settings that go with `train.compile`, and conflict with its default."""
    names = [name for name in TrainSettings.model_fields if name.startswith("compile_")]
    return {f"train.{name}": getattr(train, name) for name in names}


def _can_fuse(settings: Settings) -> bool:
    return "fused" in type(settings.optim).model_fields
