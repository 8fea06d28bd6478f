"""Settings of the losses. Does not import torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from clipstream.data.json_path import well_formed
from clipstream.models.settings import ModelSettings
from clipstream.utils.section import SET, Conflict, PathText, PluginSection, Section, part

START = "start"  # as distill.model
Duplicates = Literal["negatives", "mask", "positives"]
_DUPLICATES = "treatment of duplicate samples in a batch: negatives, mask (ignored) or positives of each other"
_GATHER = (
    "maximum size in GiB of the text features of all ranks to gather at once; larger batches are passed from rank to "
    "rank; default: 1 on a GPU, 0 on the CPU"
)
_BY = "what makes samples duplicates: captions (equal token ids; default) or pictures (equal image files)"
_WITHIN = (
    "weight of a term that draws the {0} of samples that are positives of each other together, beside the pairs of "
    "image and text: SupCon (arXiv:2004.11362) or its sigmoid form; 0: none"
)


class PositivesSettings(Section):
    """Samples of a batch that share a group (a product, a class) are positives of each other."""

    by: str | None = Field(
        None,
        min_length=1,
        description="field with the group of a sample: json:PATH into the JSON member or row, or a member of a tar, a "
        "column of a table, or class (the folder of a class), of several, separated by ';', the first that exists; "
        "samples without it are groups of their own",
    )
    _paths = field_validator("by")(well_formed)


class LossSettings(PluginSection):
    """The contrastive loss. `type` may be a user's own `package.module:Name`."""

    type: str = "auto"


class _BuiltinLossSettings(LossSettings):
    """Settings that the built-in losses share."""

    duplicates: Duplicates = Field("negatives", description=_DUPLICATES)
    duplicates_by: Literal["captions", "pictures"] | None = Field(None, description=_BY)
    positives: PositivesSettings = Field(default_factory=PositivesSettings)
    gather_gib: float | None = Field(None, ge=0, description=_GATHER)
    image_image: float = Field(0.0, ge=0, description=_WITHIN.format("images"))
    text_text: float = Field(0.0, ge=0, description=_WITHIN.format("texts"))
    short: float = Field(
        1.0,
        gt=0,
        description="weight of the loss of short texts (caption.short) and the first 32 principal components of image "
        "features, beside that of captions (Long-CLIP)",
    )

    @property
    def treatment(self) -> tuple[Duplicates, str]:
        """What samples with the same label are, and what labels are: 'captions', 'pictures' or 'groups'."""
        if self.positives.by is not None:
            return "positives", "groups"
        return self.duplicates, self.duplicates_by or "captions"

    pairs: ClassVar[tuple[Conflict, ...]] = (
        *(Conflict({term: SET, "duplicates": ("negatives", "mask"), "positives.by": None},
                   f"loss.{term} requires positives: set loss.duplicates positives, or loss.positives.by")
          for term in ("image_image", "text_text")),
        Conflict({"duplicates_by": SET, "duplicates": "negatives"},
                 "loss.duplicates_by requires loss.duplicates mask or positives"),
        Conflict({"positives.by": SET, "duplicates": ("mask", "positives")},
                 "not supported with loss.duplicates, which says what samples are positives, too: remove one of them"),
    )  # fmt: skip


@part(LossSettings, "auto")
class AutoLoss(_BuiltinLossSettings):
    """The loss that the model was made for: siglip if it has a logit bias, else clip."""

    type: Literal["auto"] = "auto"


@part(LossSettings, "clip")
class ClipLossSettings(_BuiltinLossSettings):
    """Softmax over the rows and columns of the global batch (CLIP, arXiv:2103.00020)."""

    type: Literal["clip"] = "clip"
    max_logit_scale: float | None = Field(100.0, ge=1, description="upper limit of exp(logit_scale); null: no limit")


@part(LossSettings, "siglip")
class SiglipLossSettings(_BuiltinLossSettings):
    """A sigmoid on every pair of the global batch (SigLIP, arXiv:2303.15343)."""

    type: Literal["siglip"] = "siglip"
    max_logit_scale: float | None = Field(None, gt=0, description="upper limit of exp(logit_scale); default: no limit")


def group_field(settings: LossSettings) -> str | None:
    """The field that the groups of `loss.positives` are read from; None without groups."""
    return settings.positives.by if isinstance(settings, _BuiltinLossSettings) else None


def chosen_loss_type(settings: LossSettings) -> str | None:
    """'clip' or 'siglip' if the user chose one of them, which the model has to support; else None."""
    return settings.type if isinstance(settings, ClipLossSettings | SiglipLossSettings) else None


class DistillSettings(Section):
    """Training towards the features of a teacher, beside the contrastive loss.

    A live teacher is named by `model`; the features of stored ones are read from data.teacher_features. The loss is
    `contrastive` times the contrastive loss, `weight` times the relational loss that `type` names, and `features` times
    the mean squared difference of the features; each is the mean over the teachers.
    """

    model: PathText | None = Field(
        None,
        description="teacher to run beside the model; takes the values of model.name, or start: the weights that the "
        "run starts from",
    )
    pretrained: PathText | None = Field(None, description="teacher weights; takes the values of model.pretrained")
    type: Literal["logits", "affinity", "relational"] = Field(
        "logits",
        description="relational loss between the softmax of the teacher's and the student's logits: logits (cross "
        "entropy, open_clip), affinity (divergence, mean of rows and columns, MobileCLIP), relational (the same: "
        "CLIP-KD's CRD)",
    )
    weight: float = Field(1.0, ge=0, description="weight of the relational loss; 0: none")
    features: float = Field(
        0.0,
        ge=0,
        description="weight of the mean squared difference of features of equal width (CLIP-KD's FD: 2000); 0: none",
    )
    contrastive: float = Field(1.0, ge=0, description="weight of the contrastive loss; 0: none")
    temperature: float | None = Field(
        None, gt=0, description="temperature of the student's logits in the relational loss; default: its learned scale"
    )
    teacher_temperature: float | None = Field(
        None, gt=0, description="temperature of the teacher's logits; default: the scale of its weights"
    )

    def teacher(self, student: ModelSettings) -> ModelSettings | None:
        """The model of the live teacher; None without one."""
        if self.model is None:
            return None
        if self.model == START:
            return student.without_training()
        return ModelSettings(name=self.model, pretrained=self.pretrained, cache_dir=student.cache_dir)

    pairs = (
        Conflict({"pretrained": SET, "model": None}, "distill.pretrained requires --distill-model"),
        Conflict({"pretrained": SET, "model": START},
                 "not used with distill.model start, the weights of model.pretrained: remove it"),
        Conflict({"weight": 0, "features": 0}, "distill.weight and distill.features are both 0: set one of them"),
    )  # fmt: skip
