"""Settings of texts: tokenizers, and where the captions of samples are. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from clipstream.data.json_path import parse_text
from clipstream.utils.section import PathText, PluginSection, part

SWAP = "swap"  # in place of a path to hard negatives
SENTENCE = "sentence"  # in place of a path to short texts


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
        if "{" in value:
            raise ValueError("a text of several fields is a caption of type json: --caption-json '{title} by {brand}'")
        return value

    lines: Literal["all", "first", "random"] = Field(
        "all",
        description="of a text of several lines: all, the first, or a random one in training and the first in "
        "evaluation",
    )

    @field_validator("negatives")
    @classmethod
    def _swapped(cls, value: str | None) -> str | None:
        if value not in (None, SWAP):
            raise ValueError("a text member has no paths: write swap, or use a caption of type json")
        return value

    @field_validator("short")
    @classmethod
    def _of_caption(cls, value: str | None) -> str | None:
        if value not in (None, SENTENCE):
            raise ValueError("a text member has no paths: write sentence, or use a caption of type json")
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
