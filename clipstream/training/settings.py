"""Owns the settings of the training room: run, optimiser, schedule, steps, checkpoints; imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from clipstream.errors import SettingsError
from clipstream.section import Section
from clipstream.training.metric import By, Metric, checked

Betas = tuple[float | None, float | None]  # None: the model's own


class RunSettings(Section):
    """Who and where a run is."""

    logs: str = Field("runs", min_length=1, description="folder of runs")
    name: str | None = Field(None, description="name of the run's folder; dated, with model and batch, unless set")
    seed: int = Field(0, ge=0, lt=2**63, description="fixes the order of samples, augmentation, weights and dropout")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a rank's arithmetic; its share of the cores unless set"
    )
    deterministic: bool = Field(False, description="torch's deterministic algorithms; slower, equal bits")
    timeout: float = Field(
        1800.0, gt=0, allow_inf_nan=False, description="seconds that a rank waits for the others before the run ends"
    )
    debug: bool = Field(False, description="show tracebacks with errors")

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"{value!r} is no device that clipstream trains on: give auto, cpu, cuda or cuda:N")
        return value


class OptimSettings(Section):
    """The optimiser: AdamW with decoupled weight decay on matrices only (gains, biases and scales have none)."""

    type: Literal["adamw"] = Field("adamw", description="adamw")
    lr: float = Field(5e-4, ge=0, allow_inf_nan=False, description="peak learning rate")
    wd: float = Field(0.2, ge=0, description="weight decay")
    betas: Betas | None = Field(
        None, description="0.9 0.98 for ViT and 0.9 0.999 for ResNet unless set, both or one of them"
    )
    eps: float | None = Field(None, gt=0, description="1e-6 for ViT and 1e-8 for ResNet unless set")
    grad_clip_norm: float | None = Field(None, gt=0, description="gradients with a larger norm are scaled down to it")

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: Betas | None) -> Betas | None:
        if value is not None and not all(beta is None or 0 <= beta < 1 for beta in value):
            raise ValueError("each beta must be at least 0 and below 1")
        return value


class ScheduleSettings(Section):
    """The learning rate over the steps."""

    type: Literal["cosine", "constant", "linear"] = Field("cosine", description="course after the warm-up")
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of cosine and linear")


class EarlyStopSettings(Section):
    """The end of a run before its last step, when an evaluation gets no better."""

    metric: str | None = Field(
        None, description="EVALUATOR/METRIC: the run ends when it gets no better; never before its last step unless set"
    )
    metric_by: By = Field(
        "auto", description="whether a large or a small metric is good; auto: a loss, error or rank is good if small"
    )
    patience: int = Field(3, ge=1, description="evaluations in a row that are no better, after which the run ends")
    min_delta: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="a value that is better by no more than this is no better"
    )

    _both = field_validator("metric")(checked)

    @property
    def watched(self) -> Metric | None:
        """The metric, if there is one."""
        return None if self.metric is None else Metric.of(self.metric, self.metric_by)


class TrainSettings(Section):
    """How long and in which arithmetic to train. One of steps, samples and epochs says how long."""

    steps: int | None = Field(None, ge=0, description="steps of the whole run")
    samples: int | None = Field(None, ge=1, description="samples of the whole run, rounded up to whole steps")
    epochs: float | None = Field(None, gt=0, description="passes over epoch_samples samples")
    epoch_samples: int | None = Field(None, ge=1, description="samples that make an epoch (--train-num-samples)")
    precision: Literal["auto", "fp32", "bf16", "fp16", "pure_bf16", "fp64"] = Field(
        "auto",
        description="bf16 and fp16 are autocast over float32 weights, fp16 with a scaled loss; pure_bf16 has weights "
        "and moments in bfloat16 as well; fp64 is for checks; auto is bf16 where the device computes it, else fp16 on "
        "a GPU and fp32 on a CPU",
    )
    micro_batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] | None = Field(
        None, description="samples a forward pass takes at once on a rank, auto for as many as fit; all unless set"
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="of several ranks: all hold the whole model (ddp), or each a part of it (fsdp, FSDP2)"
    )
    compile: bool = Field(False, description="torch.compile the towers")
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay of averaged weights, as 0.9999, saved beside the others; none unless set"
    )
    ema_warmup: bool = Field(False, description="let that decay rise with the steps: min(ema, 1 - t^(-2/3))")
    early_stop: EarlyStopSettings = Field(default_factory=EarlyStopSettings)
    max_nonfinite: int = Field(
        5,
        ge=1,
        description="steps in a row without a finite loss, after which the last good checkpoint's weights return",
    )
    max_rollbacks: int = Field(
        2, ge=0, description="how often they may, with no good checkpoint in between, before the run ends with code 4"
    )

    @field_validator("parallel")
    @classmethod
    def _shards_go_with(cls, value: str, info: ValidationInfo) -> str:
        if value == "fsdp" and info.data.get("precision") == "fp16":
            raise ValueError("fsdp has no scaler for fp16: use --precision bf16 or fp32, or ddp")
        if value == "fsdp" and info.data.get("micro_batch_size") == "auto":
            raise ValueError("fsdp does not find micro_batch_size by itself, as its ranks wait for each other: name it")
        return value

    @property
    def arithmetic(self) -> Literal["fp32", "bf16", "fp16", "pure_bf16", "fp64"]:
        """The precision, when `auto` is settled."""
        assert self.precision != "auto", "precision.settle comes first"
        return self.precision

    def total_steps(self, steps_for: Callable[[int], int]) -> int:
        """Steps of the whole run.

        Args:
            steps_for: samples -> steps.

        Raises:
            SettingsError: nothing says how long to train.
        """
        if self.steps is not None:
            return self.steps
        if self.samples is not None:
            return steps_for(self.samples)
        if self.epochs is None or self.epoch_samples is None:
            raise SettingsError(
                "how long to train is not set: give --steps, --train.samples, or --epochs with --train-num-samples"
            )
        return steps_for(math.ceil(self.epochs * self.epoch_samples))


class CheckpointSettings(Section):
    """When to save and from where to go on."""

    every: int = Field(1000, ge=0, description="steps between checkpoints; 0 saves at the end only")
    every_epochs: float | None = Field(None, gt=0, description="epochs between checkpoints, in place of every")
    keep_last: int = Field(3, ge=1, description="newest checkpoints that are kept")
    keep_every: int | None = Field(None, ge=1, description="steps between checkpoints that are kept for ever")
    keep_best: str | None = Field(
        None,
        description="EVALUATOR/METRIC: each checkpoint that is the best so far by it is saved, and kept until the "
        "next; that of train.early_stop unless set",
    )
    keep_best_by: By = Field(
        "auto", description="whether a large or a small metric is good; auto: a loss, error or rank is good if small"
    )
    remote_sync: str | None = Field(
        None,
        min_length=1,
        description="s3://…, gs://…, or any other folder that fsspec knows: NAME/ in it gets a copy of the checkpoints",
    )
    resume: str | None = Field(
        None, description="a checkpoint's path or address, latest (must exist) or auto (if there is one)"
    )
    resume_approximate: bool = Field(
        False, description="go on although settings of the data's order changed, with the data beginning anew"
    )

    _both = field_validator("keep_best")(checked)

    @property
    def best_by(self) -> Metric | None:
        """The metric of `keep_best`, if there is one."""
        return None if self.keep_best is None else Metric.of(self.keep_best, self.keep_best_by)
