"""Owns what an evaluator is, what it may use, and when evaluators run; knows no metric.

An evaluator is a class that is constructed with its settings and yields (name, value) when called with an EvalContext.
Every rank calls it. It sees its rank's part of the data and has to sum over the ranks itself, so that all ranks yield
the same values. Training goes on with the same bits whether evaluations run or not: random states and the towers'
modes are put back, and no gradient is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from clipstream.batch import Batch, ImageSpec
from clipstream.data.crew import without_trial
from clipstream.data.fields import CaptionExtractor
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.sources import evaluation_loader
from clipstream.data.text import Tokenizer, readable
from clipstream.errors import DataError, SettingsError
from clipstream.evals.settings import EvalSettings, Weights, eval_name
from clipstream.example import Example
from clipstream.plugins import load_plugin
from clipstream.training.passes import is_out_of_memory
from clipstream.training.precision import Precision, autocast, same_randomness
from clipstream.world import World

Record = dict[str, Any]


class Encoder(Protocol):
    """What evaluators need of the towers, as `clipstream.model.towers.Towers`; `image`: how pictures become pixels."""

    image: ImageSpec

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, 3, H, W] -> L2-normalised [n, D]."""

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        """int [n, T] -> L2-normalised [n, D]."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules, as nn.Module has it."""


@dataclass
class EvalContext:
    """What an evaluator works with, on one rank.

    Attributes:
        towers: the model, without DDP's wrapper.
        tokenizer: of the model's texts.
        world: this rank among the others.
        image: how pictures become pixels.
        workers: reading processes a rank.
        precision: 'fp32', 'bf16' (autocast) or 'fp64', as in training.
        cache: folder for spooled remote shards; None for a temporary one an evaluation.
        cache_gib: what it may hold; None for no limit.
        stall_timeout: seconds without a batch before an evaluation ends.
        transfer_timeout: seconds without a byte of a remote shard before its transfer is given up.
        examples_wanted: pictures with words that an evaluation should show to people; 0 for none.
        name: of the evaluator that runs, for messages.
        dropped: samples that `batches` could not use on this rank, since the start.
        complaint: why this rank could use nothing of the last source that it read; '' where it could.
        examples: what the evaluator that runs has shown; rank 0's alone are looked at.
    """

    towers: Encoder
    tokenizer: Tokenizer
    world: World
    image: ImageSpec
    workers: int = 0
    precision: Precision = "fp32"
    cache: str | None = None
    cache_gib: float | None = None
    stall_timeout: float = 300.0
    transfer_timeout: float = 60.0
    examples_wanted: int = 0
    name: str = "NAME"
    dropped: int = field(default=0, init=False)
    complaint: str = field(default="", init=False)
    examples: list[Example] = field(default_factory=list, init=False)

    AT_MOST: ClassVar[int | None] = None  # samples of a source, whatever the evaluator asks for

    @classmethod
    def for_towers(
        cls,
        towers: Encoder,
        tokenizer: Tokenizer,
        world: World,
        *,
        data: DataSettings,
        precision: Precision,
        examples: int = 0,
    ) -> EvalContext:
        """The context that reads as the run's settings say."""
        return cls(
            towers,
            tokenizer,
            world,
            towers.image,
            workers=without_trial(world) if data.workers == "auto" else data.workers,
            precision=precision,
            cache=data.cache,
            cache_gib=data.cache_gib,
            stall_timeout=data.stall_timeout,
            transfer_timeout=data.transfer_timeout,
            examples_wanted=examples,
        )

    def batches(
        self,
        source: SourceSettings,
        batch_size: int,
        *,
        target: CaptionExtractor | None = None,
        tokenizer: Tokenizer | None = None,
        max_samples: int | None = None,
    ) -> Iterator[Batch]:
        """This rank's part of a source: every sample once over all ranks, those of weight 0 left out.

        Args:
            source: what to read.
            batch_size: samples a batch on this rank, at most.
            target: what `ids` are made of; the source's caption unless set.
            tokenizer: what makes `ids` of it; the model's unless set.
            max_samples: only the first so many samples of the source.

        Where no rank gets a batch, the evaluator has to say so: with `unusable`.

        Raises:
            DataError: a shard is missing or broken, or the first 2,000 samples of this rank give nothing.
        """
        loader = evaluation_loader(
            source,
            batch_size=batch_size,
            world=self.world,
            tokenizer=tokenizer or self.tokenizer,
            image=self.image,
            workers=self.workers,
            target=target,
            max_samples=min((n for n in (self.AT_MOST, max_samples) if n), default=None),
            place=f"evals.{self.name}.data",
            cache=self.cache,
            cache_gib=self.cache_gib,
            stall_timeout=self.stall_timeout,
            transfer_timeout=self.transfer_timeout,
        )
        with loader:
            for batch in loader:
                yield batch.without_padding()
            self.dropped += sum(source.dropped.total() for source in loader.health.sources.values())
            self.complaint = loader.complaint()

    def unusable(self, what: str) -> DataError:
        """The error of a source that gave no rank anything usable, with what this rank saw of it."""
        return DataError(f"the source has no usable {what}" + (f": {self.complaint}" if self.complaint else ""))

    def show(self, example: Example) -> None:
        """Show a picture with words to people; never more than `examples_wanted` are kept."""
        if len(self.examples) < self.examples_wanted:
            self.examples.append(example)

    def decode(self, ids: torch.Tensor) -> str:
        """The text of ids [T], as the model sees it."""
        return readable(self.tokenizer, ids.tolist())

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, 3, H, W] -> L2-normalised float32 [n, D] on the world's device, without gradient."""
        return self._encode(self.towers.encode_image, pixels)

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        """int [n, T] -> L2-normalised float32 [n, D] on the world's device, without gradient."""
        return self._encode(self.towers.encode_text, ids)

    def encode_prompts(self, prompts: Sequence[str], batch_size: int = 256) -> torch.Tensor:
        """Texts [n] -> L2-normalised float32 [n, D] on every rank; each rank encodes its share of them.

        Every rank calls this, with the same texts (at least one).
        """
        rank, size = self.world.rank, self.world.size
        mine = prompts[len(prompts) * rank // size : len(prompts) * (rank + 1) // size]
        # A rank without a share encodes one text all the same: only so it knows D.
        parts = [
            self.encode_text(torch.from_numpy(self.tokenizer.encode(some)))
            for some in _chunks(mine or prompts[:1], batch_size)
        ]
        return self.world.gather_rows(torch.cat(parts)[: len(mine)])

    def _encode(self, encode: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        device = self.world.device
        # no_grad, not inference_mode: a tensor that a tower keeps for later (a mask, a table of positions) has to
        # work in the next training step.
        with evaluating(self.towers), torch.no_grad(), autocast(device, self.precision):
            return encode(rows.to(device, non_blocking=True)).float()


class Evaluator(Protocol):
    """Yields (metric, value) of one model and one source. Constructed as `Name(settings)`."""

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate, on all ranks at once; the values are the same on every rank."""


def source_of(settings: EvalSettings) -> SourceSettings:
    """The data of an evaluator that cannot do without.

    Raises:
        SettingsError: none are set.
    """
    if settings.data is None:
        raise SettingsError("the evaluator has no data: give data.shards")
    return settings.data


def build_evaluators(settings: Mapping[str, EvalSettings]) -> dict[str, Evaluator]:
    """The evaluators that the settings name, in their order.

    Raises:
        SettingsError: a class is not found, or a file that the settings name is not there or wrong.
    """
    from clipstream.evals.retrieval import Retrieval
    from clipstream.evals.zero_shot import ZeroShot

    builtin: dict[str, Callable[[Any], Evaluator]] = {"retrieval": Retrieval, "zero_shot": ZeroShot}
    evaluators = {}
    for name, section in settings.items():
        try:
            make = builtin.get(section.type) or load_plugin(section.type)
            evaluators[name] = make(section)
        except (SettingsError, ValueError) as error:
            raise SettingsError(f"evals.{name}: {error}") from error
    return evaluators


class EvalRunner:
    """Runs a run's evaluators when they are due.

    Args:
        settings: name -> settings of an evaluator.
        context: what they work with.
        emit: takes the record of each evaluation; called on rank 0 only.
        show: called as show(step, name, examples) before that, where an evaluator has shown some; on rank 0 only.
        weights: gives the context in which the towers have weights of this kind; entered where something is due.

    An error of an evaluator ends the run.
    """

    def __init__(
        self,
        settings: Mapping[str, EvalSettings],
        context: EvalContext,
        emit: Callable[[Record], None],
        show: Callable[[int, str, Sequence[Example]], None] | None = None,
        weights: Mapping[Weights, Callable[[], AbstractContextManager[object]]] | None = None,
    ) -> None:
        self.settings, self.context = settings, context
        self.emit, self.show = emit, show
        asked = {kind for section in settings.values() for kind in section.kinds}
        self.weights = {kind: enter for kind, enter in (weights or {"trained": nullcontext}).items() if kind in asked}
        self.evaluators = build_evaluators(settings)

    def due(self, step: int, last: bool = False) -> list[str]:
        """Names of the evaluators to run after `step` steps; all of them after the last one."""
        return [name for name, s in self.settings.items() if last or (s.every and step and step % s.every == 0)]

    def rehearse(self) -> dict[str, list[str]]:
        """Run evaluators on a few samples and made-up features, so that their data's faults show before training.

        Every rank calls this. Users' own are left out: they may do with features what they like.

        Returns:
            Of each that ran, the names of its metrics.

        Raises:
            DataError, SettingsError: what the evaluator or its data raised.
        """
        self._have_room()
        metrics = {}
        for name, evaluator in self.evaluators.items():
            if self.settings[name].type not in EvalSettings.builtin:
                continue
            with _named(name):
                metrics[name] = [metric for metric, _ in evaluator(Rehearsal.of(self.context, name))]
        return metrics

    def __call__(self, step: int, last: bool = False) -> list[Record]:
        """Run what is due; on every rank, at the same step.

        Returns:
            A record an evaluation: step, eval (see `eval_name`), its metrics, dropped (samples that could not be used,
            over all ranks) and seconds.

        Raises:
            ClipstreamError: what the evaluator or its data raised.
        """
        records = []
        for kind, weights in self.weights.items():
            names = [name for name in self.due(step, last) if kind in self.settings[name].kinds]
            with weights() if names else nullcontext():
                for name in names:
                    record = self._run(step, name, eval_name(name, kind))
                    records.append(record)
                    if self.context.world.is_main:
                        if self.show is not None and self.context.examples:
                            self.show(step, record["eval"], self.context.examples)
                        self.emit(record)
        return records

    def _have_room(self) -> None:
        """Take the weights out once, which sharded ones need memory for."""
        try:
            for weights in self.weights.values():
                with weights():
                    pass
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise SettingsError(
                "evals: there is no memory for the whole model beside its shards: evaluate its checkpoints elsewhere "
                f"(python -m clipstream.evaluate), or take more GPUs ({str(error).splitlines()[0]})"
            ) from error

    def _run(self, step: int, name: str, called: str) -> Record:
        context = self.context
        context.name, context.examples = name, []
        began, dropped = time.perf_counter(), context.dropped
        with _named(name), evaluating(context.towers), same_randomness(context.world.device):
            metrics = dict(self.evaluators[name](context))
        dropped = sum(context.world.gather_objects(context.dropped - dropped))
        seconds = round(time.perf_counter() - began, 3)
        return {"step": step, "eval": called, **metrics, "dropped": dropped, "seconds": seconds}


class Rehearsal(EvalContext):
    """A context of few samples, whose features are constant: what an evaluator reads is real, what it yields is not."""

    AT_MOST: ClassVar[int | None] = 64
    WIDTH: ClassVar[int] = 8

    @classmethod
    def of(cls, context: EvalContext, name: str) -> Rehearsal:
        """The rehearsal of an evaluation in this context."""
        kept = {item.name: getattr(context, item.name) for item in fields(context) if item.init}
        return cls(**{**kept, "workers": 0, "examples_wanted": 0, "name": name})

    def encode_prompts(self, prompts: Sequence[str], batch_size: int = 256) -> torch.Tensor:
        """Made-up features [n, WIDTH]; nothing is tokenized."""
        return self._unit(len(prompts))

    def _encode(self, encode: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return self._unit(len(rows))

    def _unit(self, count: int) -> torch.Tensor:
        return torch.full((count, self.WIDTH), self.WIDTH**-0.5, device=self.world.device)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of an evaluator say whose they are."""
    try:
        yield
    except (DataError, SettingsError) as error:
        raise type(error)(f"evals.{name}: {error}") from error


@contextmanager
def evaluating(towers: Encoder) -> Iterator[None]:
    """The towers in eval mode; afterwards each module has its former mode (a frozen tower may have been in another)."""
    training = [module for module in towers.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _chunks(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]
