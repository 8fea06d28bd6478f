"""Settings of the losses. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from clipstream.models.settings import ModelSettings
from clipstream.utils.section import SET, Conflict, PathText, PluginSection, Section

Duplicates = Literal["negatives", "mask", "positives"]
_DUPLICATES = "how samples that are equal count for each other: negatives, mask (ignored), positives"
_GATHER = (
    "GiB that the texts of all ranks may take to be gathered at once, with as much for their gradients; larger batches "
    "pass them from rank to rank; 1 on a GPU and 0 on the CPU unless set"
)
_BY = "what makes samples duplicates: captions (equal token ids; default) or pictures (equal image files)"


class LossSettings(PluginSection):
    """The contrastive loss. `type` may be a user's own `package.module:Name`."""

    type: str = Field("auto", description="auto (the model's own), clip, siglip, or package.module:Name")


class _BuiltinLoss(LossSettings):
    """Settings that the built-in losses share."""

    duplicates: Duplicates = Field("negatives", description=_DUPLICATES)
    duplicates_by: Literal["captions", "pictures"] | None = Field(None, description=_BY)
    gather_gib: float | None = Field(None, ge=0, description=_GATHER)

    pairs: ClassVar[tuple[Conflict, ...]] = (
        Conflict({"duplicates_by": SET, "duplicates": "negatives"},
                 "loss.duplicates_by requires loss.duplicates mask or positives"),
    )  # fmt: skip

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Limits of the logit scale in the wrong order."""
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


class DistillSettings(Section):
    """Training towards the features of a teacher, beside the contrastive loss.

    A live teacher is named by `model`; the features of stored ones are read from data.teacher_features. The loss is
    `contrastive` times the contrastive loss, `weight` times the relational loss that `type` names, and `features` times
    the mean squared difference of the features; each is the mean over the teachers.
    """

    model: PathText | None = Field(
        None, description="live teacher: open_clip's name, a path to a JSON config, hf-hub:ORG/NAME or local-dir:PATH"
    )
    pretrained: PathText | None = Field(
        None, description="its weights: a tag, a weights file, hf-hub:ORG/NAME or local-dir:PATH"
    )
    type: Literal["logits", "affinity", "relational"] = Field(
        "logits",
        description="relational loss between the softmax of the teacher's and the student's logits: logits (cross "
        "entropy, open_clip), affinity (divergence, mean of rows and columns, MobileCLIP), relational (the same: "
        "CLIP-KD's CRD)",
    )
    weight: float = Field(1.0, ge=0, description="of the relational loss; 0 for none")
    features: float = Field(
        0.0,
        ge=0,
        description="weight of the mean squared difference of features of equal width (CLIP-KD's FD: 2000); 0 for none",
    )
    contrastive: float = Field(1.0, ge=0, description="weight of the contrastive loss; 0 for none")
    temperature: float | None = Field(
        None, gt=0, description="of the student's logits in the relational loss; its learned scale unless set"
    )
    teacher_temperature: float | None = Field(
        None, gt=0, description="of the teacher's logits; the teacher's own scale unless set"
    )

    def teacher(self, cache_dir: str | None) -> ModelSettings | None:
        """The model of the live teacher; None without one."""
        if self.model is None:
            return None
        return ModelSettings(name=self.model, pretrained=self.pretrained, cache_dir=cache_dir)

    pairs = (
        Conflict({"pretrained": SET, "model": None}, "distill.pretrained requires --distill-model"),
        Conflict({"weight": 0, "features": 0}, "weight and features are both 0: nothing is learned from the teacher"),
    )  # fmt: skip
