"""Settings of the training loop: length, precision, early stopping, checkpoints. Does not import torch.

A `Metric` is one that a run acts on (`train.early_stop`, `checkpoint.keep_best`). `EarlyStop` counts evaluations, which
are the same on all ranks; its state is saved with the run, so a resumed run stops at the same step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from clipstream.errors import SettingsError, did_you_mean
from clipstream.models.settings import CUDA_GRAPHS, NOTHING_COMPILED, Precision
from clipstream.utils.section import GIVEN, SET, UNSET, Conflict, Is, PathText, Section, flat, other_than

# true and false: YAML's reading of `on` and `off`
Compiled = Annotated[
    Literal["off", "blocks", "towers", "step"],
    BeforeValidator(lambda value: ("blocks" if value else "off") if isinstance(value, bool) else value),
]
FP16_SHARDS = Conflict({"parallel": "fsdp", "precision": "fp16"},
                       "fp16 is not supported with fsdp, as fsdp has no scaler: use bf16, fp32 or ddp")  # fmt: skip
# What the model or the machine show.
_NORMS = {"the model": Is("with batch norm")}
MICRO_NORMS = Conflict(
    {"micro_batch_size": Is("set"), **_NORMS},
    "not supported for models with batch norm, whose statistics would be those of a micro-batch: unset it, or use "
    "a model without batch norm (a ViT)",
)
SHARDED_NORMS = Conflict({"parallel": Is("fsdp"), **_NORMS},
                         "fsdp requires a model without batch norm (a ViT): use ddp")  # fmt: skip
AUTO_ON_CPU = Conflict({"micro_batch_size": Is("auto"), "the device": Is("a CPU")}, "auto requires a GPU: set a number")


By = Literal["auto", "max", "min"]
EvalRecord = Mapping[str, str | float]  # step, eval (the evaluator's name) and its metrics

SMALL_IS_GOOD = {"loss", "error", "rank", "perplexity"}  # words of metrics' names
METRIC_BY = "whether larger or smaller values are better; auto: losses, errors and ranks are better if smaller"


def check_metric_name(text: str | None) -> str | None:
    """The value of a setting that names a metric. Raises ValueError: it is not EVALUATOR/METRIC."""
    if text is not None and not all(text.partition("/")):
        raise ValueError("expected EVALUATOR/METRIC as in metrics.jsonl, e.g. val/image_to_text_R@1")
    return text


STAGED = (  # keys that may change between stages; * stands for a name
    "model.image_size", "model.patch_dropout", "tokenizer.context_length", "data.augment.*", "data.sources.*.shards",
    "data.sources.*.weight", "optim.lr", "optim.image_lr", "optim.text_lr", "train.precision", "train.micro_batch_size",
)  # fmt: skip
ELSEWHERE = {
    "data.global_batch_size": "data.batch_schedule",
    "data.batch_schedule": "data.batch_schedule",
    "model.lock_image": "model.unlock_image_at",
    "model.lock_text": "model.unlock_text_at",
}


class StageSettings(Section):
    """A stage of a run: settings in the place of the run's own, up to a step."""

    until: int = Field(ge=1, description="step at which the stage ends")
    set: dict[str, Any] = Field(
        min_length=1, description=f"dotted keys and their values in the stage: of {', '.join(STAGED)}"
    )

    @field_validator("set")
    @classmethod
    def _staged(cls, value: dict[str, Any]) -> dict[str, Any]:
        value = flat(value, separator=".")  # `--stages.NAME.set.model.image_size 112` nests
        known = re.compile("|".join(re.escape(key).replace(r"\*", "[^.]+") for key in STAGED))
        for key in value:
            if not known.fullmatch(key):
                hint = f": set {ELSEWHERE[key]}" if key in ELSEWHERE else did_you_mean(key, STAGED)
                raise ValueError(f"{key} cannot change between stages{hint}")
        return value


@dataclass(frozen=True)
class Metric:
    evaluator: str  # name of the evaluation, NAME or NAME_averaged
    name: str  # of the metric
    lower: bool  # whether smaller values are better

    @classmethod
    def of(cls, text: str | None, by: By) -> Metric | None:
        """The metric of EVALUATOR/METRIC, if set; with 'auto', losses, errors and ranks are better if smaller."""
        if text is None:
            return None
        evaluator, _, name = text.partition("/")
        small = bool(SMALL_IS_GOOD & {*re.findall(r"[a-z]+", name.lower())})
        return cls(evaluator, name, by == "min" or (by == "auto" and small))

    def __str__(self) -> str:
        return f"{self.evaluator}/{self.name}"

    def is_better(self, value: float, than: float | None, margin: float = 0.0) -> bool:
        """Whether a value is better than another by more than a margin; NaN and infinity never are."""
        gain = 0.0 if than is None else than - value if self.lower else value - than
        return math.isfinite(value) and (than is None or gain > margin)

    def value(self, record: EvalRecord) -> float | None:
        """Its value in a record; None if the record is another evaluator's, or lacks it."""
        given = record.get(self.name) if record["eval"] == self.evaluator else None
        return None if given is None else float(given)

    def expect(self, key: str, metrics: Mapping[str, Sequence[str]]) -> None:
        """Raises SettingsError: its evaluator has no such metric, by the names of metrics of evaluators, if known."""
        known = metrics.get(self.evaluator, [self.name])
        if self.name not in known:
            choices = f"choose from {', '.join(known)}{did_you_mean(self.name, known)}"
            raise SettingsError(f"{key}: {self.evaluator} has no metric {self.name!r}; {choices}")


class EarlyStopSettings(Section):
    """Early stopping: end the run when a metric no longer improves."""

    metric: str | None = Field(
        None, description="EVALUATOR/METRIC that must keep improving; default: no early stopping"
    )
    metric_by: By = Field("auto", description=METRIC_BY)
    patience: int = Field(3, ge=1, description="evaluations without improvement after which the run ends")
    min_delta: float = Field(0.0, ge=0, description="smallest improvement that counts")

    _both = field_validator("metric")(check_metric_name)

    pairs = tuple(
        Conflict({key: changed, "metric": UNSET}, "requires --train.early-stop.metric EVALUATOR/METRIC")
        for key, changed in (("metric_by", other_than("auto")), ("patience", other_than(3)), ("min_delta", SET))
    )

    @property
    def watched(self) -> Metric | None:
        return Metric.of(self.metric, self.metric_by)


@dataclass
class EarlyStopState:
    """Owned by `EarlyStop`."""

    metric: str | None = None  # EVALUATOR/METRIC that the other values belong to
    stale: int = 0  # evaluations since the best one
    best: float | None = None  # best value; None before the first finite one
    best_step: int | None = None  # its step
    last_step: int = -1  # step of the last evaluation that was counted; -1 for none


class EarlyStop:
    """Listens to evaluations: the best value of a metric, and the number of evaluations since. Without a metric the run
    never stops early; the state of a resumed run is ignored if it belongs to another metric.
    """

    def __init__(self, settings: EarlyStopSettings, state: EarlyStopState | None = None) -> None:
        self.settings, self.metric = settings, settings.watched
        same = state is not None and state.metric == settings.metric
        self.state = state if state is not None and same else EarlyStopState(settings.metric)

    @property
    def should_stop(self) -> bool:
        """Whether to end the run; the same on all ranks."""
        return self.state.stale >= self.settings.patience

    def on_eval(self, records: Iterable[EvalRecord]) -> None:
        """Count evaluations; failed ones are ignored."""
        for record in records:
            step, value = int(record["step"]), None if self.metric is None else self.metric.value(record)
            # A run that is resumed at its last step evaluates it again.
            if self.metric is None or value is None or step <= self.state.last_step:
                continue
            self.state.last_step = step
            if self.metric.is_better(value, self.state.best, self.settings.min_delta):
                self.state.best, self.state.best_step, self.state.stale = value, step, 0
            else:
                self.state.stale += 1

    def summary(self) -> dict[str, str | float | None]:
        """Why the run stopped, for its last record; best and best_step are None if no value was finite."""
        state = self.state
        return {"metric": state.metric, "evaluations": state.stale, "best": state.best, "best_step": state.best_step}


AUDIT_FILE = "precision_audit.json"  # what an audit of a run found, in its folder


class TrainSettings(Section):
    """Length and numerics of the training. Give one of steps, samples and epochs."""

    steps: int | None = Field(None, ge=0, description="training steps in total")
    samples: int | None = Field(None, ge=1, description="training samples in total, rounded up to full steps")
    epochs: float | None = Field(None, gt=0, description="passes over epoch_samples samples")
    epoch_samples: int | None = Field(None, ge=1, description="samples per epoch (--train-num-samples)")
    precision: Literal["auto", Precision] = Field(
        "auto",
        description="bf16, fp16: autocast with float32 weights (fp16 with a gradient scaler); pure_bf16: weights and "
        "moments in bfloat16; fp64: for checks; auto: bf16 if the device supports it, else fp16 on a GPU and fp32 on a "
        "CPU",
    )
    tf32: bool = Field(
        False,
        description="allow TF32 in float32 matrix products on GPUs: faster, with a mantissa of 10 bits; applies to "
        "fp32, and to the float32 parts of bf16 and fp16",
    )
    micro_batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] | None = Field(
        None, description="samples per forward pass on a rank; auto: as many as fit; default: all"
    )
    kept_micro_batches: int = Field(
        1,
        ge=0,
        description="number of micro-batches that keep their activations from the first pass: no second forward pass, "
        "more memory",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="ddp: each rank holds the model; fsdp: shard the model over ranks (FSDP2)"
    )
    ddp_bucket_mib: int | None = Field(
        None, ge=1, description="with ddp: bucket size of the gradient all-reduce in MiB; default: torch's 25"
    )
    ddp_hook: Literal["off", "bf16"] = Field(
        "off",
        description="with ddp: bf16: all-reduce gradients in bfloat16, with half the traffic and 8 significant bits",
    )
    reshard_after_forward: bool = Field(
        True,
        description="with fsdp: free the gathered weights of a block between its forward and backward pass; "
        "false: more memory",
    )
    fsdp_replicas: int = Field(
        1,
        ge=1,
        description="with fsdp: copies of the sharded model (HSDP), each over as many ranks in a row; with 2, no shard "
        "is lost with a rank",
    )
    compile: Compiled = Field(
        "off",
        description="apply torch.compile to each repeated block of the towers (blocks), each tower (towers), or the "
        "forward pass of a step (step)",
    )
    compile_backend: str = Field("inductor", description="backend of torch.compile")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None, description="mode of torch.compile, with inductor"
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of the exponential moving average of the weights, e.g. 0.9999; default: no average",
    )
    ema_warmup: bool = Field(False, description="warm up the decay of train.ema: min(ema, 1 - t^(-2/3))")
    early_stop: EarlyStopSettings = Field(default_factory=EarlyStopSettings)
    rescue_seconds: float = Field(
        60.0,
        ge=0,
        description="where a rank dies, the others save the last whole step within this time, and end with code 75; "
        "0: they save nothing",
    )
    max_nonfinite: int = Field(
        5,
        ge=1,
        description="consecutive steps with a non-finite loss or gradient before the last good checkpoint is restored",
    )
    max_rollbacks: int = Field(
        2,
        ge=0,
        description="consecutive rollbacks, without a newer good checkpoint, before the run ends with exit code 4",
    )

    pairs = (
        *(
            Conflict({one: GIVEN, other: GIVEN}, f"{other} and {one} are mutually exclusive: set one of them")
            for other, one in (("steps", "samples"), ("steps", "epochs"), ("samples", "epochs"))
        ),
        FP16_SHARDS,
        MICRO_NORMS,
        SHARDED_NORMS,
        NOTHING_COMPILED,
        AUTO_ON_CPU,
        Conflict({"parallel": "fsdp", "micro_batch_size": "auto"},
                 "auto is not supported with fsdp: set a number"),
        Conflict({"kept_micro_batches": Is("0, or more than 1", lambda n: n != 1), "micro_batch_size": None},
                 "has no effect without micro-batches: remove it, or set --train.micro-batch-size", notice=True),
        Conflict(
            {"kept_micro_batches": Is("more than 1", lambda n: n > 1), "micro_batch_size": "auto"},
            "not supported with micro_batch_size auto, which leaves no memory for more than one: set one of the two",
        ),
        *(
            Conflict({key: changed, "parallel": "fsdp"}, "has no effect with fsdp: remove it", notice=True)
            for key, changed in (("ddp_bucket_mib", SET), ("ddp_hook", "bf16"))
        ),
        Conflict({"fsdp_replicas": Is("more than 1", lambda n: n > 1), "parallel": "ddp"},
                 "ddp holds the model on each rank: remove it, or set --train.parallel fsdp"),
        Conflict({"compile": ("towers", "step"), "parallel": "fsdp"},
                 "not supported with fsdp: use blocks"),
        Conflict({"compile_mode": SET, "compile_backend": other_than("inductor")},
                 "requires train.compile_backend inductor: remove one of them"),
        Conflict({"compile_mode": CUDA_GRAPHS, "compile": "blocks"},
                 "{0} uses CUDA graphs, which are not supported with train.compile blocks (pytorch #152887): use "
                 "--train.compile towers or step, or the mode default or max-autotune-no-cudagraphs"),
        Conflict({"compile_mode": CUDA_GRAPHS, "micro_batch_size": GIVEN},
                 "{0} uses CUDA graphs, which are not supported with micro-batches (pytorch #169545): remove "
                 "micro_batch_size, or use the mode default or max-autotune-no-cudagraphs"),
        *(
            Conflict({key: changed, "compile": "off"},
                     "has no effect without --torchcompile: remove it, or set --torchcompile", notice=True)
            for key, changed in (("compile_backend", other_than("inductor")), ("compile_mode", SET))
        ),
        Conflict({"ema_warmup": SET, "ema": None}, "train.ema_warmup requires train.ema, e.g. 0.9999"),
    )  # fmt: skip

    @property
    def arithmetic(self) -> Precision:
        """The precision, once `auto` is resolved."""
        assert self.precision != "auto", "resolve_precision comes first"
        return self.precision

    def total_steps(self, steps_for: Callable[[int], int]) -> int:
        """Steps of the whole run.

        Raises SettingsError: no length is set.
        """
        if self.steps is not None:
            return self.steps
        if self.samples is not None:
            return steps_for(self.samples)
        if self.epochs is None or self.epoch_samples is None:
            advice = "set --steps, --train.samples, or --epochs with --train-num-samples"
            raise SettingsError(f"the length of the run is not set: {advice}")
        return steps_for(math.ceil(self.epochs * self.epoch_samples))


class CheckpointSettings(Section):
    """When to save checkpoints, and which one to resume from."""

    every: int = Field(1000, ge=0, description="steps between checkpoints; 0: only at the end")
    every_epochs: float | None = Field(None, gt=0, description="epochs between checkpoints, instead of every")
    keep_last: int = Field(3, ge=1, description="number of newest checkpoints to keep")
    keep_every: int | None = Field(None, ge=1, description="steps between checkpoints that are kept permanently")
    keep_best: str | None = Field(
        None,
        description="EVALUATOR/METRIC by which the best checkpoint is saved and kept; default: the metric of "
        "train.early_stop, or that of val if it is evaluated during the run (image_to_text_R@1 or val_loss)",
    )
    keep_best_by: By = Field("auto", description=METRIC_BY)
    remote_sync: PathText | None = Field(
        None,
        min_length=1,
        description="URL of any fsspec file system (s3://…, gs://…): checkpoints are copied to URL/NAME",
    )
    resume: PathText | None = Field(
        None, description="path or URL of a checkpoint, latest (must exist) or auto (if one exists)"
    )
    resume_approximate: bool = Field(
        False, description="resume with changed settings of the data order; the data start anew"
    )

    _both = field_validator("keep_best")(check_metric_name)

    pairs = (
        Conflict({"every": other_than(1000), "every_epochs": SET},
                 "every and every_epochs are mutually exclusive"),
    )  # fmt: skip

    @property
    def best_by(self) -> Metric | None:
        return Metric.of(self.keep_best, self.keep_best_by)
