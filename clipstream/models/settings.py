"""Settings of the model. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import Self

from clipstream.utils.section import SET, ConfigPathText, Conflict, Is, PathText, Section

Level = Annotated[float, Field(ge=0, le=1)]
Deviation = Annotated[float, Field(gt=0, le=1)]


def _memory(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(GiB|MiB)", text):
        policies = "off, all, matmuls, a whole number from 2 on, a share between 0 and 1, or memory as 12GiB or 500MiB"
        raise ValueError(f"expected {policies}")
    return text


def _folder(text: str) -> str:
    """'local-dir:PATH' for the path of a folder with a model, such as a checkpoint."""
    return f"local-dir:{text}" if (Path(text) / "open_clip_config.json").is_file() else text


_Folder = AfterValidator(_folder)
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
_OF_LOCKED = {
    "precision": "training needs the weights in the precision of train.precision",
    "cache_gib": "features of weights that change are computed again each time",
}
_WITH_WEIGHTS = Is("hf-hub:… or local-dir:…", lambda name: name.startswith(("hf-hub:", "local-dir:")))
# What the model shows, once it is built.
NO_BLOCKS = Conflict({"grad_checkpointing": Is("set"), "a tower": Is("without repeated blocks")},
                     "{1} cannot recompute, as it has no repeated blocks")  # fmt: skip
RECOMPUTED_NORMS = Conflict(
    {"grad_checkpointing": Is("set"), "a tower": Is("with batch norm in its blocks")},
    "{1} cannot recompute, as its batch norm would count the statistics of a batch twice: set off for this tower",
)
NO_PATCHES = Conflict(
    {"patch_dropout": Is("set"), "the image tower": Is("without patches that it can leave out")},
    "the image tower of {1} has no patches that it can leave out, as a ViT has: leave the setting out",
)
PADDING_COUNTS = Conflict(
    {"text_buckets": Is("a number, or packed"), "a text tower that depends on padding": Is("(SigLIP)")},
    "{1}: give auto or off",
)
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of inductor that record CUDA graphs
NOTHING_COMPILED = Conflict(  # of TrainSettings
    {"compile": Is("blocks"), "the model": Is("without repeated blocks")},
    "no tower has repeated blocks: give towers, or off",
)


class TowerSettings(Section):
    """Settings of one tower, where they differ from those of the model or of training."""

    precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        None,
        description="of a locked tower, its weights included; checkpoints keep the weights as they were loaded; that "
        "of train.precision unless set",
    )
    grad_checkpointing: Recomputed | None = Field(None, description="model.grad_checkpointing of this tower alone")
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of memory on each rank for the features of a locked tower, which are computed once for each "
        "sample; of the image tower, with data.augment.enabled false; none unless set",
    )


class ModelSettings(Section):
    """A CLIP-like model of open_clip."""

    name: Annotated[ConfigPathText, _Folder] = Field(
        "ViT-B-32", description="open_clip's name, a path to a JSON config, hf-hub:ORG/NAME or local-dir:PATH"
    )
    config: dict[str, Any] | None = Field(
        None,
        description="content of the JSON config, in place of the file that name is the path of; a run's config.yaml "
        "has it",
    )
    pretrained: Annotated[PathText, _Folder] | None = Field(
        None, description="a tag (webli, openai, …), a weights file, hf-hub:ORG/NAME or local-dir:PATH"
    )
    image_pretrained: PathText | None = Field(
        None,
        description="weights of a timm image tower alone: a file of timm's names, a tag of timm (in1k, …), or default "
        "for timm's own choice of tag; mean and deviation are timm's unless the model's config has them",
    )
    text_model: PathText | None = Field(
        None,
        description="folder with the Hugging Face text tower (config.json, weights, tokenizer) that the model's config "
        "names; from the Hub unless set",
    )
    cache_dir: PathText | None = Field(None, description="the Hub's cache; $HF_HUB_CACHE unless set")
    image_size: int | None = Field(None, ge=1, description="pixels per side; the model's own unless set")
    image_mean: tuple[Level, Level, Level] | None = Field(
        None, description="mean of the channels, 0 to 1; the model's own unless set"
    )
    image_std: tuple[Deviation, Deviation, Deviation] | None = Field(
        None, description="standard deviation of the channels, 0 to 1; the model's own unless set"
    )
    image_interpolation: Literal["bilinear", "bicubic"] | None = Field(
        None, description="of the resize in evaluation; the model's own unless set"
    )
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = Field(
        None, description="how evaluation fits images to the model's size; the model's own unless set"
    )
    quick_gelu: bool = Field(False, description="QuickGELU for GELU in open_clip's own towers, whatever the config has")
    custom_text: bool = Field(False, description="the text tower as a module of its own (open_clip's CustomTextCLIP)")
    patch_dropout: float | None = Field(
        None, ge=0, lt=1, description="share of a ViT's patches dropped in training (FLIP, arXiv:2212.00794)"
    )
    text_buckets: Literal["auto", "off", "packed"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="how texts run without the padding behind them: sorted by length in at most this many buckets; "
        "packed, all true tokens of a pass in one row, in open_clip's own text towers that are not compiled; auto "
        "packs on the CPU, takes as many buckets as are worth their cost elsewhere, and is off where the "
        "tower attends to padding (SigLIP)",
    )
    channels_last: Switch = Field(
        "auto",
        description="lay images out in torch's channels_last format, which convolutions compute faster in: on or "
        "off; auto for a convolutional image tower, on the CPU and on GPUs in bf16 or fp16",
    )
    grad_checkpointing: Recomputed = Field(
        "off",
        description="blocks that recompute activations in the backward pass to save memory: all, N for every N-th, "
        "matmuls for all but the results of matrix products and attention, or off; or a budget, which chooses "
        "blocks and policy: 0.5 for half of the activations of a tower's blocks, 12GiB for so much in a forward pass",
    )
    image: TowerSettings = Field(default_factory=TowerSettings, description="the image tower's own settings")
    text: TowerSettings = Field(default_factory=TowerSettings, description="the text tower's own settings")
    lock_image: bool = Field(False, description="freeze the image tower")
    unlocked_groups: int = Field(0, ge=0, description="last groups of a locked image tower that stay trainable")
    unlock_image_at: int | None = Field(
        None, ge=1, description="steps after which a locked image tower is trained, all of it; never unless set"
    )
    lock_text: bool = Field(False, description="freeze the text tower")
    unlocked_layers: int = Field(0, ge=0, description="last layers of a locked text tower that stay trainable")
    unlock_text_at: int | None = Field(
        None, ge=1, description="steps after which a locked text tower is trained, all of it; never unless set"
    )
    allow_mismatch: bool = Field(False, description="allow a loss or tokenizer that the weights were not trained with")

    pairs = (
        *(
            Conflict(
                {key: SET, f"lock_{tower}": False}, f"nothing is locked: give --lock-{tower} as well, or leave it out"
            )
            for tower, keys in _UNLOCKING.items()
            for key in keys
        ),
        *(
            Conflict({f"{tower}.{key}": SET, f"lock_{tower}": False},
                     f"the {tower} tower is trained, and {why}: give --lock-{tower}, or leave it out")
            for tower in _UNLOCKING
            for key, why in _OF_LOCKED.items()
        ),
        *(
            Conflict({f"{tower}.{key}": SET, other: SET},
                     f"model.{other} trains weights of the {tower} tower, and {why}: leave one out")
            for tower, others in _UNLOCKING.items()
            for other in others
            for key, why in _OF_LOCKED.items()
        ),
        *(
            Conflict({"image_pretrained": SET, key: has_weights},
                     "{1} has the weights of both towers, and these are the image tower's alone: give one of the two")
            for key, has_weights in (("pretrained", SET), ("name", _WITH_WEIGHTS))
        ),
        Conflict({"patch_dropout": SET, "lock_image": True, "unlocked_groups": 0, "unlock_image_at": None},
                 "has no effect, as a locked image tower drops no patches: leave it out", notice=True),
        NO_BLOCKS,
        RECOMPUTED_NORMS,
        NO_PATCHES,
        PADDING_COUNTS,
    )  # fmt: skip

    def recomputed(self, tower: Literal["image", "text"]) -> Recomputed:
        """grad_checkpointing of a tower."""
        own: TowerSettings = getattr(self, tower)
        return self.grad_checkpointing if own.grad_checkpointing is None else own.grad_checkpointing

    @property
    def own_precisions(self) -> dict[Literal["image", "text"], Literal["fp32", "bf16", "fp16"]]:
        """The precision of each tower that has its own."""
        towers: tuple[Literal["image", "text"], ...] = ("image", "text")
        wanted = {tower: getattr(self, tower).precision for tower in towers}
        return {tower: precision for tower, precision in wanted.items() if precision is not None}

    def not_trained(self) -> Self:
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
