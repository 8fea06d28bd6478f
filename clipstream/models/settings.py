"""Settings of the model. Does not import torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import Self

from clipstream.utils.section import GIVEN, SET, Conflict, Is, ModelText, PathText, Section

Tower = Literal["image", "text"]
TOWERS: tuple[Tower, ...] = ("image", "text")
Precision = Literal["fp32", "bf16", "fp16", "pure_bf16", "fp64"]
FrozenPrecision = Literal["fp32", "bf16", "fp16"]
Level = Annotated[float, Field(ge=0, le=1)]
Deviation = Annotated[float, Field(gt=0, le=1)]


def _memory(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(GiB|MiB)", text):
        policies = "off, all, matmuls, an integer >= 2, a fraction between 0 and 1, or memory such as 12GiB or 500MiB"
        raise ValueError(f"expected {policies}")
    return text


# true and false: as settings were before there were policies, and YAML's reading of `off`
Recomputed = Annotated[
    Literal["off", "all", "matmuls"]
    | Annotated[int, Field(ge=2)]
    | Annotated[float, Field(gt=0, lt=1)]
    | Annotated[str, AfterValidator(_memory)],
    BeforeValidator(lambda value: ("all" if value else "off") if isinstance(value, bool) else value),
]


# true and false: YAML's reading of `on` and `off`
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("on" if value else "off") if isinstance(value, bool) else value),
]
_UNLOCKING = {"image": ("unlocked_groups", "unlock_image_at"), "text": ("unlocked_layers", "unlock_text_at")}
_OF_LOCKED = {"precision": "requires weights in train.precision", "cache_gib": "changes its features at each step"}
_WITH_WEIGHTS = Is("hf-hub:… or local-dir:…", lambda name: name.startswith(("hf-hub:", "local-dir:")))
# What the model shows, once it is built.
NO_BLOCKS = Conflict({"grad_checkpointing": Is("set"), "a tower": Is("without repeated blocks")},
                     "{1} has no repeated blocks to recompute")  # fmt: skip
RECOMPUTED_NORMS = Conflict(
    {"grad_checkpointing": Is("set"), "a tower": Is("with batch norm in its blocks")},
    "{1} has batch norm, which recomputation would update twice: set it to off for this tower",
)
NO_PATCHES = Conflict(
    {"patch_dropout": Is("set"), "the image tower": Is("without patches that it can leave out")},
    "the image tower of {1} is not a ViT and has no patches to drop: remove the setting",
)
PADDING_COUNTS = Conflict(
    {"text_buckets": Is("a number, or packed"), "a text tower that depends on padding": Is("(SigLIP)")},
    "{1}: use auto or off",
)
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of inductor that record CUDA graphs
NOTHING_COMPILED = Conflict(  # of TrainSettings
    {"compile": Is("blocks"), "the model": Is("without repeated blocks")},
    "no tower has repeated blocks: use towers or off",
)


class LoraSettings(Section):
    """Low-rank adapters of a tower's layers, in the format of peft: the only weights of the tower that are trained."""

    rank: int = Field(16, ge=1, description="rank of the matrices that are added to each layer's")
    alpha: float | None = Field(
        None, gt=0, description="their product is multiplied by alpha / rank; default: twice the rank"
    )
    targets: Literal["attention", "all"] | list[str] = Field(
        "attention",
        description="layers with an adapter: attention, all (attention and MLP layers, and convolutions), or patterns "
        "of layer names as in open_clip, such as '*.mlp.*'",
    )
    tokens: PathText | None = Field(
        None,
        description="text file, such as a table of the training data, whose words' rows of the embedding of tokens are "
        "trained, too; only of the text tower; default: none",
    )
    dora: bool = Field(
        False,
        description="train the length of each row apart from its direction (DoRA); not for open_clip's attention and "
        "convolutions",
    )

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class TowerSettings(Section):
    """Settings of one tower, where they differ from those of the model or of training."""

    precision: FrozenPrecision | None = Field(
        None,
        description="precision of a locked tower's weights and passes (checkpoints keep the loaded weights); default: "
        "train.precision",
    )
    grad_checkpointing: Recomputed | None = Field(None, description="model.grad_checkpointing of this tower")
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="memory per rank, in GiB, to cache the features of a locked tower; the image tower requires "
        "data.augment.enabled false; default: no cache",
    )
    lora: LoraSettings | None = Field(
        None,
        description="adapters of this tower; all other weights of both towers are frozen, except those that lock_image "
        "and lock_text leave unlocked, and new heads",
    )


class ModelSettings(Section):
    """A CLIP-like model of open_clip."""

    name: ModelText = Field(
        "ViT-B-32",
        description="model name of open_clip, small or small-vit (to train in minutes), a JSON config, a run's or "
        "checkpoint's folder, ORG/NAME of the Hub, or "
        "local-dir:PATH; if only pretrained is set, the model of these weights",
    )
    config: dict[str, Any] | None = Field(
        None, description="content of the JSON config named by name; written to a run's config.yaml"
    )
    pretrained: PathText | None = Field(
        None,
        description="a tag (webli, openai, …), a weights file, a run's or checkpoint's folder, ORG/NAME of the Hub, or "
        "local-dir:PATH",
    )
    image_pretrained: PathText | None = Field(
        None,
        description="weights of the timm image tower: a file with timm's names, a timm tag (in1k, …), or default "
        "(timm's default tag); mean and standard deviation are timm's unless the model config has them",
    )
    text_model: PathText | None = Field(
        None,
        description="folder with the model config's Hugging Face text tower (config.json, weights, tokenizer); "
        "default: from the Hub",
    )
    cache_dir: PathText | None = Field(None, description="cache of the Hugging Face Hub; default: $HF_HUB_CACHE")
    image_size: int | None = Field(None, ge=1, le=1 << 14, description="image size in pixels; default: the model's")
    image_mean: tuple[Level, Level, Level] | None = Field(
        None, description="channel means, 0 to 1; default: the model's"
    )
    image_std: tuple[Deviation, Deviation, Deviation] | None = Field(
        None, description="channel standard deviations, 0 to 1; default: the model's"
    )
    image_interpolation: Literal["bilinear", "bicubic"] | None = Field(
        None, description="interpolation of the resize in evaluation; default: the model's"
    )
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = Field(
        None, description="how evaluation resizes images to the model's size; default: the model's"
    )
    quick_gelu: bool = Field(False, description="use QuickGELU in open_clip's own towers")
    custom_text: bool = Field(
        False, description="build the text tower as a separate module (open_clip's CustomTextCLIP)"
    )
    patch_dropout: float | None = Field(
        None, ge=0, lt=1, description="fraction of a ViT's patches to drop in training (FLIP, arXiv:2212.00794)"
    )
    text_buckets: Literal["auto", "off", "packed"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="skip the padding of texts: N: sort by length into at most N buckets; packed: concatenate the "
        "tokens of all texts (open_clip's own text towers, not compiled); auto: packed on the CPU and in 16 bits on "
        "GPUs with torch's variable-length attention, else buckets; off for towers that attend to padding (SigLIP)",
    )
    channels_last: Switch = Field(
        "auto",
        description="torch's channels_last memory format for images; auto: for convolutional image towers, on the CPU "
        "and on GPUs in bf16 or fp16",
    )
    grad_checkpointing: Recomputed = Field(
        "off",
        description="blocks that recompute activations in the backward pass to save memory: all, N (every N-th), "
        "matmuls (all, keeping the results of matrix products and attention) or off; or a memory budget: 0.5 (half of "
        "the activations of a tower's blocks) or 12GiB (per forward pass)",
    )
    image: TowerSettings = Field(default_factory=TowerSettings, description="settings of the image tower")
    text: TowerSettings = Field(default_factory=TowerSettings, description="settings of the text tower")
    lock_image: bool = Field(False, description="freeze the image tower")
    unlocked_groups: int = Field(0, ge=0, description="number of last groups of a locked image tower to train")
    unlock_image_at: int | None = Field(
        None, ge=1, description="step from which a locked image tower is trained as a whole; default: never"
    )
    lock_text: bool = Field(False, description="freeze the text tower")
    unlocked_layers: int = Field(0, ge=0, description="number of last layers of a locked text tower to train")
    unlock_text_at: int | None = Field(
        None, ge=1, description="step from which a locked text tower is trained as a whole; default: never"
    )
    allow_mismatch: bool = Field(False, description="allow a loss or tokenizer that the weights were not trained with")

    pairs = (
        *(
            Conflict({key: SET, f"lock_{tower}": False}, f"requires --lock-{tower}")
            for tower, keys in _UNLOCKING.items()
            for key in keys
        ),
        *(
            Conflict({f"{tower}.{key}": SET, f"lock_{tower}": False},
                     f"requires --lock-{tower}: training the {tower} tower {why}")
            for tower in _UNLOCKING
            for key, why in _OF_LOCKED.items()
        ),
        *(
            Conflict({f"{tower}.{key}": SET, other: SET},
                     f"not supported with model.{other}, which trains the {tower} tower and {why}: remove one of them")
            for tower, others in _UNLOCKING.items()
            for other in others
            for key, why in _OF_LOCKED.items()
        ),
        *(
            Conflict({"image_pretrained": SET, key: has_weights},
                     "{1} has the weights of both towers: set only one of them")
            for key, has_weights in (("pretrained", SET), ("name", _WITH_WEIGHTS))
        ),
        *(
            Conflict({f"{tower}.lora": GIVEN, f"lock_{tower}": True},
                     f"trains the {tower} tower by adapters, and model.lock_{tower} freezes it: remove one of them")
            for tower in _UNLOCKING
        ),
        *(
            Conflict({f"{tower}.lora.dora": True, f"{other}.lora.dora": False},
                     "the files of peft have DoRA in both towers or in none: set it for both")
            for tower, other in (("image", "text"), ("text", "image"))
        ),
        Conflict({"patch_dropout": SET, "lock_image": True, "unlocked_groups": 0, "unlock_image_at": None},
                 "has no effect with a locked image tower: remove it", notice=True),
        NO_BLOCKS,
        RECOMPUTED_NORMS,
        NO_PATCHES,
        PADDING_COUNTS,
    )  # fmt: skip

    def checkpointing_of(self, tower: Tower) -> Recomputed:
        """grad_checkpointing of a tower."""
        own: TowerSettings = getattr(self, tower)
        return self.grad_checkpointing if own.grad_checkpointing is None else own.grad_checkpointing

    @property
    def own_precisions(self) -> dict[Tower, FrozenPrecision]:
        wanted = {tower: getattr(self, tower).precision for tower in TOWERS}
        return {tower: precision for tower, precision in wanted.items() if precision is not None}

    @property
    def adapters(self) -> dict[Tower, LoraSettings]:
        wanted: dict[Tower, LoraSettings | None] = {tower: getattr(self, tower).lora for tower in TOWERS}
        return {tower: lora for tower, lora in wanted.items() if lora is not None}

    def without_training(self) -> Self:
        """The same model without the settings of its training."""
        whole = type(self).model_fields
        keys = ("grad_checkpointing", "image", "text", "lock_image", "lock_text", "patch_dropout")
        return self.model_copy(update={key: whole[key].get_default(call_default_factory=True) for key in keys})

    @property
    def is_fresh(self) -> bool:
        """Whether training starts without weights of both towers."""
        return self.pretrained is None and not self.name.startswith(("hf-hub:", "local-dir:"))

    @property
    def label(self) -> dict[str, str | None]:
        """Name and initial weights of the model, for reports."""
        return {"name": self.name, "pretrained": self.pretrained}
