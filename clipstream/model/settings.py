"""Owns the settings of the model room: which model, its weights, its loss; imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from clipstream.section import PluginSection, Section

Level = Annotated[float, Field(ge=0, le=1)]
Deviation = Annotated[float, Field(gt=0, le=1)]
Duplicates = Literal["negatives", "mask", "positives"]
_DUPLICATES = "what samples that are the same are to each other: negatives, mask (not there), positives"
_BY = "what makes samples the same: captions (equal ids) unless set, or pictures (equal files)"


class ModelSettings(Section):
    """A CLIP-like model of open_clip."""

    name: str = Field(
        "ViT-B-32", description="open_clip's name, a path to a JSON config, hf-hub:ORG/NAME or local-dir:PATH"
    )
    pretrained: str | None = Field(
        None, description="a tag (webli, openai, …), a weights file, hf-hub:ORG/NAME or local-dir:PATH"
    )
    cache_dir: str | None = Field(None, description="the Hub's cache; $HF_HUB_CACHE unless set")
    image_size: int | None = Field(None, ge=1, description="pixels a side; the model's own unless set")
    image_mean: tuple[Level, Level, Level] | None = Field(
        None, description="mean of the channels, 0 to 1; the model's own unless set"
    )
    image_std: tuple[Deviation, Deviation, Deviation] | None = Field(
        None, description="deviation of the channels, 0 to 1; the model's own unless set"
    )
    image_interpolation: Literal["bilinear", "bicubic"] | None = Field(
        None, description="of the resize in evaluation; the model's own unless set"
    )
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = Field(
        None, description="how evaluation fits pictures to the model's size; the model's own unless set"
    )
    patch_dropout: float | None = Field(
        None, ge=0, lt=1, description="share of a ViT's patches left out in training (FLIP, arXiv:2212.00794)"
    )
    grad_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    lock_image: bool = Field(False, description="freeze the image tower")
    unlocked_groups: int = Field(0, ge=0, description="last groups of a locked image tower that train all the same")
    lock_text: bool = Field(False, description="freeze the text tower")
    unlocked_layers: int = Field(0, ge=0, description="last layers of a locked text tower that train all the same")
    allow_mismatch: bool = Field(
        False, description="let a model train with a loss or tokenizer that its weights were not made for"
    )

    @property
    def label(self) -> dict[str, str | None]:
        """What the model is called, for figures: its name, and what its weights began as."""
        return {"name": self.name, "pretrained": self.pretrained}


class LossSettings(PluginSection):
    """The contrastive loss. `type` may be a user's own `package.module:Name`."""

    type: str = Field("auto", description="auto (the model's own), clip, siglip, or package.module:Name")


class _BuiltinLoss(LossSettings):
    """What the losses of this package have in common."""

    duplicates: Duplicates = Field("negatives", description=_DUPLICATES)
    duplicates_by: Literal["captions", "pictures"] | None = Field(None, description=_BY)


class AutoLoss(_BuiltinLoss):
    """The loss that the model was made for: siglip where it has a logit bias, clip elsewhere."""

    type: Literal["auto"] = "auto"


class ClipLossSettings(_BuiltinLoss):
    """Softmax over the rows and columns of the global batch (CLIP, arXiv:2103.00020)."""

    type: Literal["clip"] = "clip"
    max_logit_scale: float | None = Field(100.0, gt=0, description="upper limit of exp(logit_scale); none to lift it")


class SiglipLossSettings(_BuiltinLoss):
    """A sigmoid on every pair of the global batch (SigLIP, arXiv:2303.15343)."""

    type: Literal["siglip"] = "siglip"
    max_logit_scale: float | None = Field(None, gt=0, description="upper limit of exp(logit_scale); none as published")


def chosen_loss_type(settings: LossSettings) -> str | None:
    """'clip' or 'siglip' where the user named one of them: what the model has to agree with; else None."""
    return settings.type if isinstance(settings, ClipLossSettings | SiglipLossSettings) else None


LossSettings.builtin = {"auto": AutoLoss, "clip": ClipLossSettings, "siglip": SiglipLossSettings}

LossField = SerializeAsAny[LossSettings]
