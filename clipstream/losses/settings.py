"""Settings of the losses. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from clipstream.config.section import PluginSection

Duplicates = Literal["negatives", "mask", "positives"]
_DUPLICATES = "how samples that are equal count for each other: negatives, mask (ignored), positives"
_BY = "which samples are equal: captions (equal ids) unless set, or pictures (equal files)"


class LossSettings(PluginSection):
    """The contrastive loss. `type` may be a user's own `package.module:Name`."""

    type: str = Field("auto", description="auto (the model's own), clip, siglip, or package.module:Name")


class _BuiltinLoss(LossSettings):
    """Settings that the built-in losses share."""

    duplicates: Duplicates = Field("negatives", description=_DUPLICATES)
    duplicates_by: Literal["captions", "pictures"] | None = Field(None, description=_BY)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys of duplicates and of the logit scale."""
        if self.duplicates_by and self.duplicates == "negatives":
            yield "duplicates_by", "what becomes of duplicates? Give --loss.duplicates mask or positives as well"
        if isinstance(self, ClipLossSettings | SiglipLossSettings):
            low, high = self.min_logit_scale, self.max_logit_scale
            if low is not None and high is not None and low > high:
                yield "min_logit_scale", f"{low:g} is above max_logit_scale, {high:g}"


class AutoLoss(_BuiltinLoss):
    """The loss that the model was made for: siglip if it has a logit bias, else clip."""

    type: Literal["auto"] = "auto"


class ClipLossSettings(_BuiltinLoss):
    """Softmax over the rows and columns of the global batch (CLIP, arXiv:2103.00020)."""

    type: Literal["clip"] = "clip"
    max_logit_scale: float | None = Field(100.0, gt=0, description="upper limit of exp(logit_scale); none to lift it")
    min_logit_scale: float | None = Field(1.0, gt=0, description="lower limit of exp(logit_scale); none to lift it")


class SiglipLossSettings(_BuiltinLoss):
    """A sigmoid on every pair of the global batch (SigLIP, arXiv:2303.15343)."""

    type: Literal["siglip"] = "siglip"
    max_logit_scale: float | None = Field(None, gt=0, description="upper limit of exp(logit_scale); none as published")
    min_logit_scale: float | None = Field(None, gt=0, description="lower limit of exp(logit_scale); none as published")


def chosen_loss_type(settings: LossSettings) -> str | None:
    """'clip' or 'siglip' if the user chose one of them, which the model has to support; else None."""
    return settings.type if isinstance(settings, ClipLossSettings | SiglipLossSettings) else None


LossSettings.builtin = {"auto": AutoLoss, "clip": ClipLossSettings, "siglip": SiglipLossSettings}
