"""Settings of a source of samples: its shards, and where captions and images are in them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from clipstream.data.json_path import parse_text
from clipstream.storage.shard_url import parts_of, redact, table_format
from clipstream.utils.plugins import is_plugin, load_function
from clipstream.utils.section import PathText, PluginSection, builtin_parts, part

CSV_CAPTION = "title;txt"  # columns of a CSV with the caption: open_clip's default, or that of other tables
IMAGE_KEY = "jpg;jpeg;png;webp;gif;avif;bmp;tif;tiff;heic;heif;jxl;jp2;j2k;ppm;pgm;image;filepath;image_path;file_name"
AUTO = "auto"  # the type of a source follows from the names of its shards
SWAP = "swap"  # in place of a path to hard negatives
SENTENCE = "sentence"  # in place of a path to short texts
LANG = "{lang}"  # stands for a language in the settings of an evaluator


class CaptionSettings(PluginSection):
    """Where the caption of a sample is. `type` may be a user's own `package.module:Name`."""

    type: str = "text"


class SeveralTexts(CaptionSettings):
    """Texts of a sample that take part in a step."""

    per_image: int = Field(
        1,
        ge=1,
        le=64,
        description="different captions of an image in a training step, drawn from those that it has, all positives; "
        "of an image with fewer, all",
    )
    negatives: str | None = Field(
        None,
        min_length=1,
        description="a hard negative text of the image in each training step: swap (the drawn caption with two words "
        "swapped, as NegCLIP), or for type json a path to texts, of which one is drawn",
    )

    short: str | None = Field(
        None,
        min_length=1,
        description="a short text of the image beside a long caption, as Long-CLIP: sentence (the first one of the "
        "drawn caption), or for type json a path; the loss compares it with the principal components of images",
    )

    @property
    def texts(self) -> int:
        """The most captions and negatives of a sample in a step."""
        return self.per_image + (self.negatives is not None)


@part(CaptionSettings, "text")
class TextCaption(SeveralTexts):
    """A text member holds the caption."""

    type: Literal["text"] = "text"
    key: str = Field(
        "txt",
        min_length=1,
        description="suffix of the text member; of several, separated by ';', the first that exists is used",
    )

    @field_validator("key")
    @classmethod
    def _no_template(cls, value: str) -> str:
        if "{" in value.replace(LANG, ""):
            raise ValueError("a text of several fields is a caption of type json: --caption-json '{title} by {brand}'")
        return value

    lines: Literal["all", "first", "random"] = Field(
        "all",
        description="of a text of several lines: all, the first, or a random one in training and the first in "
        "evaluation",
    )

    @field_validator("negatives", "short")
    @classmethod
    def _no_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        only = SWAP if info.field_name == "negatives" else SENTENCE
        if value not in (None, only):
            raise ValueError(f"a text member has no paths: write {only}, or use a caption of type json")
        return value


@part(CaptionSettings, "json")
class JsonCaption(SeveralTexts):
    """A field of the JSON member holds the caption.

    A path is names and list positions joined by dots (`texts.1.t`), `*` for all elements (`texts.*.t`), and filters
    (`texts[lang=en].t`); `{title} by {brand}` is a text of several, in which lists (`{tags}`) are joined. Several are
    tried in order, or drawn by `weights`. A path that leads to several strings, or to
    a list of them, gives one, drawn in training, the first in evaluation.
    """

    type: Literal["json"] = "json"
    path: str | list[str] = Field(
        description="path into the JSON member, e.g. caption.en or texts.*.t, or a text of fields, e.g. "
        "'{title} by {brand}'; several are tried in order"
    )
    key: str = Field("json", min_length=1, description="suffix of the JSON member")
    fallback: str | None = Field(None, description="suffix of a text member used when no path gives a caption")
    weights: list[float] | None = Field(
        None,
        description="sampling weight of each path, instead of using the first path with text; paths with weight 0 are "
        "fallbacks",
    )

    @property
    def paths(self) -> list[str]:
        """The paths as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @field_validator("negatives", "short")
    @classmethod
    def _path(cls, value: str | None) -> str | None:
        if value not in (None, SWAP, SENTENCE):
            parse_text(value or "")
        return value

    @field_validator("path")
    @classmethod
    def _well_formed(cls, value: str | list[str]) -> str | list[str]:
        paths = [value] if isinstance(value, str) else value
        if not paths:
            raise ValueError("name at least one path, e.g. caption.en or texts.*.t")
        for path in paths:
            parse_text(path)
        return value

    @field_validator("weights")
    @classmethod
    def _weights_fit(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and (any(w < 0 for w in value) or sum(value) <= 0):
            raise ValueError("weights must be non-negative, at least one of them positive")
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys of several paths."""
        if self.weights and len(self.weights) != len(self.paths):
            yield "weights", f"{len(self.weights)} weights for {len(self.paths)} paths: set one weight per path"


@part(CaptionSettings, "label")
class LabelCaption(CaptionSettings):
    """The name of the sample's class in a template is the caption."""

    type: Literal["label"] = "label"
    label: str = Field(
        "class;cls",
        min_length=1,
        description="the class of a sample: suffix of a member, or column of a table, or json:PATH; of several, "
        "separated by ';', the first that exists is used",
    )
    classes: PathText | list[str] | None = Field(
        None,
        description="names of the classes in the order of their numbers, where labels are numbers: a list, a file, or "
        "imagenet; default: the labels are names, with _ as a space",
    )
    templates: PathText | list[str] = Field(
        "openai",
        description="templates with {c} or {}, of which training draws one: a list, a file, openai or imagenet (80), "
        "simple (7) or plain (1)",
    )


class ImageTransformSettings(PluginSection):
    """How an image becomes pixels of the model's size. `type` may be a user's own `package.module:Name`."""

    type: str = "default"


@part(ImageTransformSettings, "default")
class DefaultImageTransform(ImageTransformSettings):
    """The random crop of data.augment in training, the model's own preprocessing in evaluation."""

    type: Literal["default"] = "default"


def rgb(name: str) -> tuple[int, int, int]:
    """The colour of a name or #rrggbb, each part 0 to 255.

    Raises ValueError: there is no such colour.
    """
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(name)[:3]
    except ValueError as error:
        raise ValueError(f"invalid color {name!r}: use a name such as white, or #rrggbb") from error
    return red, green, blue


class SourceSettings(PluginSection):
    """One named source of image-text pairs: its shards and how to read them. `type` may be your own `module:Name`."""

    home: ClassVar[str] = "clipstream.data.sources"

    type: str = AUTO
    shards: str | list[str] = Field(
        description="tars: braces, lists, '::', globs, pipe:, http(s):, s3:, gs:, az:, hf:; tables: .csv, .tsv, "
        ".jsonl, .json, .parquet, .arrow; a local folder, read by what it holds: tars, tables, images with a text "
        "beside each, or one folder per class; benchmark:ROOT (CLIP_benchmark's layout); "
        "toy:SPLIT (toy data); synthetic: (speed tests)"
    )
    weight: float = Field(1.0, gt=0, description="sampling weight relative to other sources")
    upsampling_factors: list[float] | None = Field(
        None,
        description="one factor per part of shards (separated by '::', or list items): relative sampling frequency of "
        "the part's shards; mode resampled only",
    )
    image_key: str = Field(
        IMAGE_KEY,
        min_length=1,
        description="suffixes of the image member, or columns of a table with its path, separated by ';'; the first "
        "that exists is used",
    )
    folder: PathText | None = Field(
        None, description="base folder of relative image paths in a table; default: the table's folder"
    )
    separator: str | None = Field(
        None, min_length=1, max_length=1, description="delimiter of a CSV; default: detected from its header"
    )
    quoting: bool = Field(True, description="parse quoted fields of a CSV; false: quotes are literal")
    caption: SerializeAsAny[CaptionSettings] = Field(
        default_factory=TextCaption,
        description="caption extractor: {type: text, key: txt}, {type: json, path: …} or {type: label}; default: txt; "
        "for a CSV title, then txt",
    )
    index: PathText | None = Field(
        None,
        description="sample counts of the shards for mode indexed: a folder written by `clipstream index`, or a wids "
        "index (JSON); default: index files beside the shards",
    )
    keep: PathText | None = Field(
        None,
        description="file listing the samples to use, as written by `clipstream search`: lines KEY or SHARD/KEY, or a "
        ".csv or .parquet with the columns key, shard and source; other samples are dropped as not_kept (in mode "
        "indexed their slots stay empty)",
    )
    drop: PathText | None = Field(None, description="file listing samples to exclude, in the format of keep")
    probability: PathText | None = Field(
        None,
        min_length=1,
        description="with which a sample is drawn in training, 0 to 1: a .parquet or .csv with the columns shard, key "
        "and probability, or a field as of loss.positives.by, e.g. json:p; samples without one are dropped",
    )
    transform: str | None = Field(
        None,
        description="function sample -> sample or None (drop), as package.module:fn; runs before the caption is "
        "extracted",
    )
    image_transform: SerializeAsAny[ImageTransformSettings] = Field(
        default_factory=DefaultImageTransform,
        description="converts a decoded image to pixels: {type: default} or {type: package.module:Name}",
    )
    background: str = Field("white", description="background color of transparent pixels: a name or #rrggbb")
    orientation: Literal["auto", "exif", "stored"] = Field(
        "auto",
        description="exif: apply the EXIF orientation; stored: ignore it; auto: exif in training, stored in evaluation",
    )

    @field_validator("shards")
    @classmethod
    def _some_shards(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and not all(value)):
            raise ValueError("name at least one shard")
        return value

    @model_validator(mode="before")
    @classmethod
    def _caption_of_csv(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        caption = value.get("caption") or {}
        if not isinstance(caption, Mapping) or caption.keys() - {"lines", "per_image", "negatives", "short"}:
            return value
        is_csv = _which_are_csv(value.get("shards"), value.get("type", AUTO))
        of_csv = {"type": "text", "key": CSV_CAPTION, **caption}
        return {**value, "caption": of_csv} if is_csv and all(is_csv.values()) else value

    @property
    def parts(self) -> list[str]:
        """The parts of `shards`, with their braces and globs; the items for a `module:Name`."""
        if is_plugin(self.type):
            return [self.shards] if isinstance(self.shards, str) else self.shards
        return parts_of(self.shards)

    @property
    def typed_parts(self) -> list[str]:
        """The parts as a verb takes them: `TYPE:PATH`, where the type was set and the name does not tell it."""
        if self.type in (AUTO, "tar", "table") or is_plugin(self.type):
            return self.parts
        types = builtin_parts(SourceSettings)
        return [part if part.partition(":")[0] in types else f"{self.type}:{part}" for part in self.parts]

    @property
    def reading(self) -> dict[str, object]:
        """The settings that captions and images depend on, as JSON values; shards are not among them.

        Stored features keep them beside the names of the shards.
        """
        keys = {"image_key", "caption", "transform", "image_transform", "background", "orientation"}
        found: dict[str, Any] = json.loads(self.model_dump_json(include={*keys, "separator", "quoting"}))
        if found["caption"].get("lines") == "all":  # stores that were made before there was this setting are the same
            del found["caption"]["lines"]
        if isinstance(self.caption, TextCaption | JsonCaption):  # what a step draws of the texts, not what they are
            for key in SeveralTexts.model_fields.keys() - CaptionSettings.model_fields:
                del found["caption"][key]
        return found

    @field_validator("upsampling_factors", mode="before")
    @classmethod
    def _between_colons(cls, value: object) -> object:
        if not isinstance(value, str | int | float):
            return value
        try:
            return [float(word) for word in str(value).split("::")]
        except ValueError:
            raise ValueError(f"expected numbers separated by '::', not {value!r}") from None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Factors for other parts than there are; CSVs beside other shards, where no column or member is named."""
        if (factors := self.upsampling_factors) is not None and len(factors) != len(self.parts):
            text = f"{len(factors)} factors for {len(self.parts)} parts of shards: set one per part, separated by '::'"
            yield "upsampling_factors", text
        elif factors is not None and min(factors) <= 0:
            yield "upsampling_factors", "factors must be positive: remove a part instead of setting its factor to 0"
        is_csv = _which_are_csv(self.shards, self.type)
        if "caption" not in self.model_fields_set and len(set(is_csv.values())) > 1:
            table, other = (next(name for name, csv in is_csv.items() if csv is kind) for kind in (True, False))
            named = f"a CSV ({redact(table)}) and other shards ({redact(other)}) have different default captions"
            how = f"such as {{type: text, key: {CSV_CAPTION}}} (--caption-key '{CSV_CAPTION}'), or use two sources"
            yield "shards", f"{named}: set the caption, {how}"

    @field_validator("separator", mode="before")
    @classmethod
    def _tab(cls, value: object) -> object:
        return "\t" if value == "\\t" else value  # as a shell hands it on

    @field_validator("transform")
    @classmethod
    def _a_function(cls, value: str | None) -> str | None:
        if value is not None:
            load_function(value)
        return value

    @field_validator("background")
    @classmethod
    def _a_colour(cls, value: str) -> str:
        rgb(value)
        return value


part(SourceSettings, AUTO)(SourceSettings)


def _which_are_csv(shards: object, type: object) -> dict[str, bool]:
    """The parts of `shards`, and whether each is a CSV by its name; empty where names do not decide it."""
    listed = isinstance(shards, list) and all(isinstance(item, str) for item in shards)
    if type not in (AUTO, "table") or not (listed or isinstance(shards, str)):
        return {}
    return {part: table_format(part) == "csv" for part in parts_of(shards)}  # type: ignore[arg-type]
