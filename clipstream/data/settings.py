"""Settings of the data: order, augmentation, reading, tokenizers; `source_settings` has those of a source. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from clipstream.data.json_path import well_formed
from clipstream.data.source_settings import CaptionSettings as CaptionSettings
from clipstream.data.source_settings import ImageTransformSettings as ImageTransformSettings
from clipstream.data.source_settings import SeveralTexts
from clipstream.data.source_settings import SourceSettings as SourceSettings
from clipstream.storage.download import GIB, Fetcher
from clipstream.utils.section import SET, Conflict, PathText, PluginSection, Section, other_than, part

Share = Annotated[float, Field(ge=0, le=1)]
SPLIT_FILE = "val_split.txt"  # of a run's folder: the samples that data.val_split holds out
MAX_AUTO_WORKERS = 16  # of a rank
MAX_PIXELS = 178_956_970  # from which Pillow refuses an image as a decompression bomb (a quarter of 2 GiB of RGBX)
LARGE_PIXELS = MAX_PIXELS // 2  # from which `check` names an image, as Pillow warns of it


def split_counts(path: Path) -> tuple[int, int | None]:
    """The samples that a list of `data.val_split` holds out, and all usable ones, if the list has them in its head."""
    text = path.read_bytes()
    head = re.match(rb"# (\d+) of (\d+) usable samples\n", text)
    return (int(head[1]), int(head[2])) if head else (text.count(b"\n"), None)


class TokenizerSettings(PluginSection):
    """How a caption becomes token ids. `type` may be a user's own `package.module:Name`."""

    type: str = "model"
    context_length: int | None = Field(
        None,
        ge=1,
        le=1 << 16,
        description="tokens per caption; default: the model's; with more than the weights have, the first 20 positions "
        "are kept and the others stretched",
    )


class _HuggingFace(TokenizerSettings):
    """A tokenizer that may come from Hugging Face."""

    trust_remote_code: bool = Field(
        False, description="run Python code from the tokenizer's repository or folder (auto_map)"
    )


@part(TokenizerSettings, "model")
class ModelTokenizer(_HuggingFace):
    """The tokenizer that belongs to the model."""

    type: Literal["model"] = "model"


@part(TokenizerSettings, "hub")
class HubTokenizer(_HuggingFace):
    """A tokenizer of the Hugging Face Hub."""

    type: Literal["hub"] = "hub"
    name: str = Field(description="repository on the Hub, e.g. timm/ViT-B-16-SigLIP")


@part(TokenizerSettings, "path")
class PathTokenizer(_HuggingFace):
    """A tokenizer in a local folder (tokenizer.json, tokenizer_config.json)."""

    type: Literal["path"] = "path"
    name: PathText = Field(description="folder with tokenizer.json, or that file")


class AugmentSettings(Section):
    """Training's image transform: a random crop, resized to the model's size."""

    enabled: bool = Field(True, description="random augmentation; false: the preprocessing of evaluation")
    scale: tuple[float, float] = Field((0.9, 1.0), description="area of the crop relative to the image, min and max")
    ratio: tuple[float, float] = Field((0.75, 4 / 3), description="aspect ratio of the crop, min and max")
    interpolation: Literal["random", "bilinear", "bicubic"] = Field(
        "bicubic", description="interpolation of the resize"
    )
    flip: Share = Field(0.0, description="probability of a horizontal flip")
    color_jitter: tuple[Share, Share, Share, Share] | None = Field(
        None,
        description="strengths of brightness, contrast, saturation and hue (at most 0.5), as in torchvision; "
        "one number sets the first three",
    )
    color_jitter_prob: Share = Field(0.0, description="probability of color jitter")
    gray_scale_prob: Share = Field(0.0, description="probability of conversion to grayscale")

    @field_validator("scale", "ratio")
    @classmethod
    def _ordered(cls, value: tuple[float, float], info: ValidationInfo) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("min and max must be positive, and min <= max")
        if info.field_name == "scale" and value[1] > 1:
            raise ValueError("max must be at most 1")
        return value

    @field_validator("color_jitter", mode="before")
    @classmethod
    def _of_three(cls, value: Any) -> Any:
        """One strength is that of brightness, contrast and saturation; three leave hue as it is (as in timm)."""
        alike = isinstance(value, int | float) and not isinstance(value, bool)
        found = ([value] * 3 if value else None) if alike else value
        return [*found, 0] if isinstance(found, list | tuple) and len(found) == 3 else found

    @field_validator("color_jitter")
    @classmethod
    def _half_a_turn(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and value[3] > 0.5:
            raise ValueError("the strength of hue must be at most 0.5")
        return value

    pairs: ClassVar[tuple[Conflict, ...]] = (
        Conflict({"color_jitter_prob": SET, "color_jitter": None},
                 "requires data.augment.color_jitter, e.g. --data.augment.color-jitter '[0.4, 0.4, 0.4, 0.1]'"),
        Conflict({"color_jitter": SET, "color_jitter_prob": 0},
                 "requires data.augment.color_jitter_prob above 0"),
    )  # fmt: skip


AugmentSettings.pairs += tuple(
    Conflict({key: other_than(field.default), "enabled": False},
             "has no effect with data.augment.enabled false: remove one of them", notice=True)
    for key, field in AugmentSettings.model_fields.items()
    if key != "enabled"
)  # fmt: skip


class SamplingSettings(Section):
    """The order of samples."""

    mode: Literal["resampled", "epoch", "indexed"] = Field(
        "resampled",
        description="resampled: sample shards with replacement, endlessly; epoch: each shard once per epoch; indexed: "
        "each sample once per epoch (run `clipstream index` first)",
    )
    shards: Literal["shared", "split"] = Field(
        "shared",
        description="shared: every lane samples from all shards; split: each lane has its own subset of the shards",
    )
    replacement: bool = Field(
        True, description="in mode resampled: sample shards with replacement; false: without replacement"
    )
    remainder: Literal["drop", "pad", "wrap"] = Field(
        "drop",
        description="last batch of an epoch in mode indexed: drop it, pad it with samples of weight 0, or wrap "
        "around to samples of the same epoch",
    )

    pairs = (
        Conflict({"replacement": False, "mode": other_than("resampled")},
                 "has no effect in mode {1!r}, which samples without replacement: remove it", notice=True),
        Conflict(
            {"remainder": other_than("drop"), "mode": other_than("indexed")},
            "has no effect in mode {1!r}: remove it, or set --data.sampling.mode indexed",
            notice=True,
        ),
    )  # fmt: skip


class ShuffleSettings(Section):
    """How well samples are mixed. A window is `window` samples from `shards` shards that are open together."""

    window: int = Field(2000, ge=1, description="samples of a lane that are shuffled together")
    shards: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="open shards per lane; auto: 192 divided by the number of lanes, at least 1 (4 if the source "
        "has few shards)",
    )

    @property
    def open_shards(self) -> int | None:
        return None if self.shards == "auto" else self.shards


class GroupsSettings(Section):
    """Batches of several samples of each group, as `loss.positives` needs them."""

    by: str | None = Field(
        None, min_length=1, description="field with the group of a sample, as of loss.positives.by; mode indexed only"
    )
    samples: int = Field(2, ge=2, description="samples of a group that come together; divides the global batch")
    _paths = field_validator("by")(well_formed)


class DataSettings(Section):
    """The training data, and how samples are ordered and read."""

    global_batch_size: int = Field(512, ge=2, description="samples per step, over all ranks")
    batch_schedule: list[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=2)]]] = Field(
        default_factory=list, description="changes of the global batch size: [[step, samples], …]"
    )
    lanes: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="number of virtual lanes, which determine the data order; an upper limit of ranks x workers; auto: "
        "192 lanes, or 3 per 16 samples of the global batch from 2,048 up",
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="data worker processes per rank; 0: read in the training process; auto: the rank's cores minus "
        "one, or 2 if the model is on the CPU",
    )
    prefetch: int = Field(3, ge=1, description="batches to prepare ahead per rank")
    sources: dict[str, SourceSettings] = Field(default_factory=dict, description="named sources, mixed by weight")
    val_split: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the training samples to hold out for the evaluator val, by groups of the same "
        "caption or image file or nearly the same image; takes one pass over the data",
    )
    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    groups: GroupsSettings = Field(default_factory=GroupsSettings)
    hard_negatives: PathText | None = Field(
        None,
        description="Parquet file with the hard neighbours of samples, as written by `clipstream search neighbours "
        "--out`: batches are filled with seeds and their neighbours; mode indexed only",
    )
    shuffle: ShuffleSettings = Field(default_factory=ShuffleSettings)
    augment: AugmentSettings = Field(default_factory=AugmentSettings)
    decoder: Literal["fast", "exact", "gpu"] = Field(
        "fast",
        description="fast: decode training images at the reduced size that their crops need; exact: open_clip's "
        "pixels, bit for bit; gpu: as fast, but baseline JPEGs of up to 1,024 px by the GPU's hardware decoder "
        "(nvImageCodec); evaluation is always exact",
    )
    max_image_pixels: int = Field(
        MAX_PIXELS, ge=1, le=MAX_PIXELS, description="drop training images with more pixels (width x height)"
    )
    image_features: PathText | None = Field(
        None, description="feature store (`clipstream precompute`) that replaces images and the image tower"
    )
    text_features: PathText | None = Field(None, description="feature store that replaces captions and the text tower")
    teacher_features: list[PathText] = Field(
        default_factory=list, description="feature stores of teachers, for distillation"
    )
    cache: PathText | None = Field(None, description="folder for downloaded shards; default: temporary")
    cache_gib: float | None = Field(
        None,
        gt=0,
        description="size limit of data.cache in GiB: least recently used shards are evicted; default: no limit",
    )
    max_shard_gib: float = Field(64.0, gt=0, description="maximum size of a downloaded shard, in GiB")
    max_shard_failures: Share = Field(
        0.1,
        description="fraction of opened shards (at least one shard) that may fail before the run ends; 0: end at the "
        "first broken shard",
    )
    max_sample_failures: Share = Field(
        0.5, description="fraction of read samples that may be dropped before the run ends"
    )
    trace: int = Field(0, ge=0, description="number of samples for which to print the result of each stage")
    stall_timeout: float = Field(
        300.0,
        gt=0,
        allow_inf_nan=True,
        description="seconds without a batch before the run ends; downloads below 16 KiB/s count as stalled",
    )
    transfer_timeout: float = Field(
        60.0, gt=0, description="seconds without a byte before a download is aborted and retried"
    )

    @field_validator("batch_schedule")
    @classmethod
    def _steps_rise(cls, value: list[tuple[int, int]]) -> list[tuple[int, int]]:
        steps = [step for step, _ in value]
        if steps != sorted(set(steps)):
            raise ValueError("steps must be strictly increasing")
        return value

    pairs = (
        Conflict({"cache_gib": SET, "cache": None}, "data.cache_gib requires data.cache"),
        Conflict(
            {"decoder": ("exact", "gpu"), "augment.enabled": False},
            "has no effect with data.augment.enabled false, which is always exact: remove it",
            notice=True,
        ),
        *(
            Conflict({f"augment.{key}": SET, "decoder": "gpu"},
                     "not supported with data.decoder gpu, which decodes after the workers: remove one of them")
            for key in ("color_jitter_prob", "gray_scale_prob")
        ),
        *(
            Conflict({"sources.NAME.upsampling_factors": SET, f"sampling.{key}": value},
                     "upsampling_factors require data.sampling mode resampled, shards shared and replacement true; or "
                     "use one source per part, with weights")
            for key, value in (("mode", other_than("resampled")), ("shards", "split"), ("replacement", False))
        ),
        Conflict({"batch_schedule": SET, "sampling.mode": "indexed"},
                 "not supported in mode 'indexed', which requires a constant batch size: remove it, or set "
                 "--data.sampling.mode resampled"),
        *(
            pair for by in ("groups.by", "hard_negatives") for pair in (
                Conflict({by: SET, "sampling.mode": other_than("indexed")}, "requires --data.sampling.mode indexed"),
                Conflict({by: SET, "sampling.shards": "split"},
                         "not supported with data.sampling.shards split, as its order is over all shards: remove one "
                         "of them"),
                Conflict({"sources.NAME.probability": SET, by: SET},
                         f"not supported with data.{by}, whose epochs have each sample once: remove one of them"),
                *(
                    Conflict({f"shuffle.{key}": other_than(usual), by: SET},
                             f"has no effect with data.{by}, whose order is over all samples: remove it", notice=True)
                    for key, usual in (("window", 2000), ("shards", "auto"))
                ),
            )
        ),
        Conflict({"groups.by": SET, "hard_negatives": SET},
                 "not supported with data.hard_negatives, which fills batches, too: remove one of them"),
        Conflict({"groups.samples": other_than(2), "groups.by": None},
                 "requires data.groups.by, e.g. --data.groups.by json:product.sku"),
    )  # fmt: skip

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Groups or neighbours of several sources, groups that do not fill a batch, samples drawn of split shards."""
        together = {"groups": self.groups.by, "hard_negatives": self.hard_negatives}
        for key in (key for key, value in together.items() if value is not None):
            if len(self.sources) > 1:
                yield key, "not supported with several sources: use one source, whose shards are those of all"
            elif any(source.weight != 1 for source in self.sources.values()):
                yield key, "not supported with the weight of a source: remove it"
        split = self.sampling.mode == "indexed" and self.sampling.shards == "split"
        for name in (name for name, source in self.sources.items() if split and source.probability):
            said = "not supported in mode indexed with data.sampling.shards split, whose lanes have the same samples in"
            yield f"sources.{name}.probability", f"{said} every epoch: remove one of them"
        if self.groups.by is not None and self.global_batch_size % self.groups.samples:
            text = f"{self.groups.samples} samples of a group do not divide the global batch of"
            yield "groups", f"{text} {self.global_batch_size}: set another number"

    @property
    def fetcher(self) -> Fetcher:
        """Downloads shards within the limits of these settings."""
        return Fetcher(timeout=self.transfer_timeout, most=int(self.max_shard_gib * GIB))

    @property
    def texts(self) -> int:
        """The most texts of a sample in a training step, M."""
        captions = [source.caption for source in self.sources.values()]
        return max((one.texts for one in captions if isinstance(one, SeveralTexts)), default=1) + self.has_short

    @property
    def has_short(self) -> bool:
        """Whether the last text of a sample in a training step is its short one."""
        captions = [source.caption for source in self.sources.values()]
        return any(one.short is not None for one in captions if isinstance(one, SeveralTexts))

    @property
    def stored_towers(self) -> dict[str, str]:
        """Tower ('image', 'text') -> store of its features, where these take the tower's place."""
        stores = {"image": self.image_features, "text": self.text_features}
        return {tower: store for tower, store in stores.items() if store is not None}

    @property
    def batches(self) -> list[tuple[int, int]]:
        """(first step, samples) of each size of the global batch, in order."""
        return [(0, self.global_batch_size), *self.batch_schedule]

    @property
    def batch_sizes(self) -> list[int]:
        return [size for _, size in self.batches]

    def batch_size(self, step: int) -> int:
        """Samples of global batch number `step`."""
        return [size for start, size in self.batches if start <= step][-1]

    def samples_before(self, step: int) -> int:
        """Samples of the global batches before number `step`."""
        ends = [*(start for start, _ in self.batch_schedule), step]
        return sum(max(min(end, step) - start, 0) * size for (start, size), end in zip(self.batches, ends, strict=True))

    def steps_for(self, samples: int) -> int:
        """Number of steps that train on at least so many samples."""
        for (start, size), (end, _) in itertools.pairwise(self.batches):
            if samples <= (held := (end - start) * size):
                return start + -(-samples // size)
            samples -= held
        start, size = self.batches[-1]
        return start + -(-samples // size)
