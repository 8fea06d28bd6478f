"""Settings of evaluators. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import ClassVar, Literal

from braceexpand import braceexpand
from pydantic import Field, field_validator, model_validator

from clipstream.data.json_path import well_formed
from clipstream.data.source_settings import LANG, SourceSettings
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import parts_of
from clipstream.utils.section import SET, Conflict, PathText, PluginSection, other_than, part, with_home

Weights = Literal["trained", "averaged"]
ROOT = "CLIPSTREAM_EVALS"  # variable with the folder or URL of suites' data sets
_BENCHMARK = re.compile(rf"benchmark:\$\{{{ROOT}\}}/(wds_[\w-]+)")


class EvalSettings(PluginSection):
    """One evaluator: every `every` steps and at the end. `type` may be a user's own `package.module:Name`."""

    home: ClassVar[str] = "clipstream.evals.evaluators"

    type: str = "retrieval"
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only at the end")
    every_epochs: float | None = Field(None, gt=0, description="epochs between evaluations, instead of every")
    data: SourceSettings | None = Field(None, description="source to evaluate on")
    fetch: str | None = Field(
        None,
        description="command that downloads the data, shown in the error if they are missing, or ORG/NAME of a set "
        "on the Hub; default: that of CLIP_benchmark's sets in a suite",
    )
    batch_size: int = Field(256, ge=1, description="samples per forward pass on a rank")
    weights: Literal["trained", "averaged", "both"] = Field(
        "trained",
        description="weights to evaluate; evaluations of averaged weights (train.ema) are named NAME_averaged",
    )

    role: Literal["target", "guard"] = Field(
        "target",
        description="for `clipstream interpolate`: target: what is to improve; guard: what must not be lost",
    )

    reads: ClassVar[bool] = True  # whether a built-in one takes data
    best_metric: ClassVar[str | None] = None  # by which the best checkpoint is kept by default, if it always has it

    @property
    def kinds(self) -> tuple[Weights, ...]:
        return ("trained", "averaged") if self.weights == "both" else (self.weights,)

    @property
    def download(self) -> str | None:
        """The command that downloads the data, if it is known; of a set of the Hub without its training set."""
        public = None if self.data is None else _BENCHMARK.fullmatch(str(self.data.shards))
        name = f"clip-benchmark/{public[1]}" if public is not None and self.fetch is None else self.fetch
        if name is None or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            return name
        place = f"'${{{ROOT}}}/{name.rpartition('/')[2]}'"
        return f"hf download {name} --repo-type dataset --exclude 'train/*' --local-dir {place}"

    on_error: Literal["report", "raise"] = Field(
        "report", description="on failure, report: print a warning and continue; raise: end the run"
    )

    pairs: ClassVar[tuple[Conflict, ...]] = (
        Conflict({"every": other_than(0), "every_epochs": SET},
                 "every and every_epochs are mutually exclusive"),
        *(
            Conflict({f"data.{key}": SET},
                     "has no effect in an evaluation, which reads each sample once: remove it", notice=True)
            for key in ("upsampling_factors", "probability")
        ),
    )  # fmt: skip


class PromptedSettings(EvalSettings):
    """What evaluators have in common that show which images match the user's own texts."""

    prompts: list[str] = Field(
        default_factory=list,
        description="texts; the report shows the best matching images of each",
    )


class LanguageSettings(PromptedSettings):
    """What evaluators have in common whose texts may be in several languages, with {lang} in the places of texts."""

    languages: list[str] = Field(
        default_factory=list,
        description="codes that take the place of {lang} in the path, key or column of the caption, or in the files of "
        "classes and templates; metrics of each language, and their means",
    )

    @field_validator("languages")
    @classmethod
    def _codes(cls, value: list[str]) -> list[str]:
        for code in value:
            if not re.fullmatch(r"[A-Za-z][\w-]*", code) or code in ("mean", "chance"):
                raise ValueError(f"{code!r} is no code of a language, such as de or zh-TW")
            if value.count(code) > 1:
                raise ValueError(f"{code} is given {value.count(code)} times")
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Languages without {lang}, and {lang} without languages; see Section."""
        yield from super().conflicts()
        places = self.texts()
        marked = [key for key, text in places.items() if LANG in text]
        if self.languages and places and not marked:
            yield "languages", f"requires {LANG}, which stands for the language, in {' or '.join(places)}"
        for key in () if self.languages else marked:
            # Where it is a word of several, it is a field of the sample: '{title} in {lang}'.
            if not re.search(r"\s", places[key]):
                yield key, f"has {LANG}: set languages to the codes that it stands for"

    def texts(self) -> dict[str, str]:
        """The settings that may have {lang}, by key; none where they are not known yet."""
        return {}


@part(EvalSettings, "retrieval")
class RetrievalSettings(LanguageSettings):
    """Image-text retrieval, R@1/5/10 and median rank both ways, over all images and captions of `data`."""

    type: Literal["retrieval"] = "retrieval"
    captions: Literal["one", "all"] | None = Field(
        None,
        description="all: each line of the text member, and each string of a JSON list, is a caption of the image; "
        "default: one, or all in CLIP_benchmark's layout",
    )
    max_samples: int | None = Field(None, ge=1, description="number of images to evaluate; default: all")

    best_metric: ClassVar[str | None] = "image_to_text_R@1"

    def texts(self) -> dict[str, str]:
        if self.data is None:
            return {}
        texts = {key: getattr(self.data.caption, key, None) for key in ("path", "key", "fallback", "classes")}
        return {f"data.caption.{key}": str(text) for key, text in texts.items() if text} or {"data.caption.path": ""}


class LabelledSettings(EvalSettings):
    """What evaluators of labelled images have in common."""

    label: str = Field(
        "cls;npy",
        min_length=1,
        description="members with the class (number or name; npy: an array), or json:PATH into the JSON member",
    )
    classes: PathText | list[str] | None = Field(
        None,
        description="class names: a list, a file (one per line, JSON, or a table), or imagenet; default: those of a "
        "benchmark: source",
    )

    _paths = field_validator("label")(well_formed)


@part(EvalSettings, "zero_shot")
class ZeroShotSettings(LabelledSettings, LanguageSettings):
    """Zero-shot classification of `data`: a member (`cls`) or a JSON field has the label, prompts the classes."""

    type: Literal["zero_shot"] = "zero_shot"
    labels: Literal["one", "list", "multi_hot"] | None = Field(
        None,
        description="labels per image: one; list: several; multi_hot: a 0 or 1 per class; default: one, or those of a "
        "benchmark: source",
    )
    templates: PathText | list[str] | None = Field(
        None,
        description="prompts with {c} or {}: a list, a file, openai (80), simple (7) or plain (1); default: openai, or "
        "those of a benchmark: source",
    )
    against: PathText | list[str] | None = Field(
        None,
        description="with several labels per image: prompts of the opposite, as templates: a photo without a {c}; "
        "their cosine is subtracted",
    )
    tune_shards: str | list[str] | None = Field(
        None,
        description="with several labels per image: shards to choose the thresholds on, read as data; default: half "
        "of the images of data, and F1 is that of the other half",
    )

    @model_validator(mode="after")
    def _other_images(self) -> ZeroShotSettings:
        test, tune = (
            {os.path.realpath(with_home(name)): name for part in parts_of(shards) for name in braceexpand(part)}
            for shards in ([] if self.data is None else self.data.shards, self.tune_shards or [])
        )
        if both := test.keys() & tune.keys():
            raise ValueError(
                f"tune_shards has {tune[min(both)]}, as data: F1 would be measured on the images that its thresholds "
                "are chosen on: name other shards, or remove tune_shards, and half of the images choose"
            )
        return self

    @property
    def tune(self) -> SourceSettings | None:
        """The source to choose thresholds on; None for a part of `data`."""
        return None if self.tune_shards is None else _other_shards(self, self.tune_shards)

    def texts(self) -> dict[str, str]:
        files = {"classes": self.classes, "templates": self.templates}
        return {key: value if isinstance(value, str) else "" for key, value in files.items()}

    def in_language(self, language: str) -> ZeroShotSettings:
        """The settings with the files of class names and templates of a language."""
        files = {key: value.replace(LANG, language) for key, value in self.texts().items() if LANG in value}
        return self.model_copy(update={**files, "languages": []})


def eval_name(name: str, weights: Weights) -> str:
    """What the evaluations of an evaluator with these weights are called."""
    return name if weights == "trained" else f"{name}_averaged"


@part(EvalSettings, "loss")
class LossEvalSettings(EvalSettings):
    """The loss that is trained, on `data`, in fixed batches of the training's global size."""

    type: Literal["loss"] = "loss"
    best_metric: ClassVar[str | None] = "val_loss"
    global_batch_size: int | None = Field(None, ge=2, description="pairs per batch; default: data.global_batch_size")
    max_samples: int | None = Field(None, ge=1, description="number of pairs to evaluate; default: all")


@part(EvalSettings, "choice")
class ChoiceSettings(EvalSettings):
    """The right one of an image's own texts; with `group`, Winoground's scores of two images and their captions."""

    type: Literal["choice"] = "choice"
    wrong: str | list[str] = Field(
        default_factory=list,
        description="members or json:PATH with the wrong texts (with answer: all); default: all captions but the first",
    )
    answer: str | None = Field(None, description="member or json:PATH with the number of the right text, from 0")
    category: str | None = Field(None, description="member or json:PATH; each category has an accuracy of its own")
    group: str | None = Field(
        None,
        description="member or json:PATH that two samples share, each with its caption; {n} in image_key and caption "
        "stands for 0 and 1, the two of a row",
    )

    @field_validator("wrong")
    @classmethod
    def _list(cls, value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    _paths = field_validator("answer", "category", "group", "wrong")(well_formed)

    @model_validator(mode="after")
    def _fits(self) -> ChoiceSettings:
        for key in ("wrong", "answer", "category"):
            if self.group and getattr(self, key):
                raise ValueError(f"group compares the captions of two samples: remove {key}")
        if self.answer and not self.wrong:
            raise ValueError("answer requires wrong: the fields of all texts")
        return self


@part(EvalSettings, "groups")
class GroupsSettings(EvalSettings):
    """Retrieval of the images of a group (a product, a class), by its other images and by its captions."""

    type: Literal["groups"] = "groups"
    group: str | None = Field(
        None, min_length=1, description="field with the group of a sample, as loss.positives.by, which is the default"
    )

    _paths = field_validator("group")(well_formed)

    best_metric: ClassVar[str | None] = "text_to_image_mAP"


class FrozenSettings(LabelledSettings):
    """What evaluators have in common that learn from the features of labelled images."""

    train_shards: str | list[str] = Field(
        description="shards to train on, read with the settings of data (the test set) except index, keep and drop"
    )

    @property
    def train(self) -> SourceSettings:
        """The source to train on. Raises SettingsError: `data` is not set."""
        return _other_shards(self, self.train_shards)


@part(EvalSettings, "linear_probe")
class LinearProbeSettings(FrozenSettings):
    """Logistic regression on the features of `train_shards`, tested on `data`."""

    type: Literal["linear_probe"] = "linear_probe"
    c: float = Field(0.316, gt=0, description="inverse strength of the L2 penalty (scikit-learn's C)")


@part(EvalSettings, "knn")
class NeighboursSettings(FrozenSettings):
    """The vote of the k nearest images of `train_shards` on those of `data`."""

    type: Literal["knn"] = "knn"
    k: int = Field(20, ge=1, description="number of neighbours")


def source_of(settings: EvalSettings) -> SourceSettings:
    """The data source of an evaluator that needs one. Raises SettingsError: none is set."""
    if settings.data is None:
        raise SettingsError("the evaluator requires data.shards")
    return settings.data


def _other_shards(settings: EvalSettings, shards: str | list[str]) -> SourceSettings:
    """The source `shards`, read as the data of an evaluator. Raises SettingsError: it has none."""
    return source_of(settings).model_copy(update={"shards": shards, "index": None, "keep": None, "drop": None})


def sources_of(settings: EvalSettings) -> dict[str, SourceSettings]:
    """The sources that an evaluator reads, by the keys of their shards."""
    values = {key: getattr(settings, key) for key in type(settings).model_fields}
    found = {f"{key}.shards": value for key, value in values.items() if isinstance(value, SourceSettings)}
    if found and isinstance(settings, FrozenSettings):
        found["train_shards"] = settings.train
    if found and isinstance(settings, ZeroShotSettings) and settings.tune is not None:
        found["tune_shards"] = settings.tune
    return found
