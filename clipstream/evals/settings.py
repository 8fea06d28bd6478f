"""Owns the settings of evaluators; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SerializeAsAny

from clipstream.data.settings import SourceSettings
from clipstream.section import PluginSection

Weights = Literal["trained", "averaged"]


class EvalSettings(PluginSection):
    """One evaluator: every `every` steps and at the end. `type` may be a user's own `package.module:Name`."""

    type: str = Field("retrieval", description="retrieval, zero_shot, or package.module:Name")
    every: int = Field(0, ge=0, description="steps between evaluations; 0 evaluates at the end only")
    every_epochs: float | None = Field(None, gt=0, description="epochs between evaluations, in place of every")
    data: SourceSettings | None = Field(None, description="the source that is evaluated")
    batch_size: int = Field(256, ge=1, description="samples encoded at once on a rank")
    weights: Literal["trained", "averaged", "both"] = Field(
        "trained", description="which weights it evaluates: with averaged ones (train.ema) it is called NAME_averaged"
    )

    @property
    def kinds(self) -> tuple[Weights, ...]:
        """The kinds of weights that it evaluates."""
        return ("trained", "averaged") if self.weights == "both" else (self.weights,)


class RetrievalSettings(EvalSettings):
    """Image-text retrieval, R@1/5/10 both ways, over all pairs of `data`."""

    type: Literal["retrieval"] = "retrieval"
    max_samples: int | None = Field(None, ge=1, description="evaluate the first so many pairs only")


class ZeroShotSettings(EvalSettings):
    """Zero-shot classification of `data`: a member (`cls`) or a JSON field has the label, prompts the classes."""

    type: Literal["zero_shot"] = "zero_shot"
    label: str = Field(
        "cls", min_length=1, description="member with the class (number or name), or json:PATH into the JSON member"
    )
    classes: str | list[str] = Field(description="class names: a list, a file with one a line, or imagenet")
    templates: str | list[str] = Field(
        "openai", description="prompts with {c} or {}: a list, a file, openai (80), simple (7) or plain (1)"
    )


def eval_name(name: str, weights: Weights) -> str:
    """What the evaluations of an evaluator with these weights are called."""
    return name if weights == "trained" else f"{name}_averaged"


EvalSettings.builtin = {"retrieval": RetrievalSettings, "zero_shot": ZeroShotSettings}

EvalField = SerializeAsAny[EvalSettings]
