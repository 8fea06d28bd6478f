"""Owns what evaluators work with: the towers without gradient, batches of a source, what is kept and shown; no metric.

Towers are put back as they were, and a batch has no padding. The rehearsal of an evaluation is a context as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol

import torch
from torch import nn

from clipstream.batch import Batch, ImageSpec
from clipstream.data.crew import without_trial
from clipstream.data.fields import CaptionExtractor
from clipstream.data.settings import DataSettings, SourceSettings
from clipstream.data.shards import redact
from clipstream.data.sources import evaluation_loader
from clipstream.data.text import Tokenizer, readable
from clipstream.errors import DataError
from clipstream.evals.fingerprints import Reading, of_weights
from clipstream.example import Example, Table
from clipstream.model.losses import ContrastiveLoss
from clipstream.model.towers import Features
from clipstream.training.precision import Precision, autocast
from clipstream.world import World


class Encoder(Protocol):
    """What evaluators need of the towers: `clipstream.model.towers.Towers` is one.

    Attributes:
        image: how pictures become its pixels.
    """

    image: ImageSpec

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, 3, H, W] -> L2-normalised [n, D]."""

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        """int [n, T] -> L2-normalised [n, D]."""

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """exp(logit_scale), and the logits' bias where the model has one; scalars."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules, as nn.Module has it."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """All weights by name, as nn.Module has it."""


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
        loss: the one that is trained; None where nothing says.
        global_batch_size: of the training, where it begins.
        examples_wanted: pictures with words that an evaluation should show to people; 0 for none.
        name: of the evaluator that runs, for messages.
        dropped: samples that `batches` could not use on this rank, since the start.
        complaint: why this rank could use nothing of the last source that it read; '' where it could.
        examples: what the evaluator that runs has shown; rank 0's alone are looked at.
        tables: likewise, in words.
        readings: what `batches` read, one for each call.
        figures: metrics of the evaluators that have run at this step with these weights, by name.
        texts: fingerprint of the texts that the evaluator that runs has made a classifier of; None where of none.
        weights: fingerprint of the towers' weights, while they stay as they are; None where nobody vouches for that.
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
    loss: ContrastiveLoss | None = None
    global_batch_size: int = 0
    examples_wanted: int = 0
    name: str = "NAME"
    dropped: int = field(default=0, init=False)
    complaint: str = field(default="", init=False)
    examples: list[Example] = field(default_factory=list, init=False)
    tables: list[Table] = field(default_factory=list, init=False)
    readings: list[Reading] = field(default_factory=list, init=False)
    figures: dict[str, dict[str, float]] = field(default_factory=dict, init=False)
    texts: str | None = field(default=None, init=False)
    weights: str | None = field(default=None, init=False)
    _kept: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict, init=False)

    AT_MOST: ClassVar[int | None] = None  # samples of a source, whatever the evaluator asks for
    REMEMBERED: ClassVar[int] = 8  # classifiers; ImageNet's is 2 to 4 MB

    @classmethod
    def for_towers(
        cls,
        towers: Encoder,
        tokenizer: Tokenizer,
        world: World,
        *,
        data: DataSettings,
        precision: Precision,
        loss: ContrastiveLoss | None = None,
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
            loss=loss,
            global_batch_size=data.global_batch_size,
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
        key: str = "data",
    ) -> Iterator[Batch]:
        """This rank's part of a source: every sample once over all ranks, those of weight 0 left out.

        Args:
            source: what to read.
            batch_size: samples a batch on this rank, at most.
            target: what `ids` are made of; the source's caption unless set.
            tokenizer: what makes `ids` of it; the model's unless set.
            max_samples: only the first so many samples of the source.
            key: of the evaluator's settings, where the source stands; for messages.

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
            place=f"evals.{self.name}.{key}",
            cache=self.cache,
            cache_gib=self.cache_gib,
            stall_timeout=self.stall_timeout,
            transfer_timeout=self.transfer_timeout,
        )
        specs = [source.shards] if isinstance(source.shards, str) else source.shards
        reading = Reading(" ".join(map(redact, specs)))
        self.readings.append(reading)
        with loader:
            for batch in map(Batch.without_padding, loader):
                reading.add(batch)
                yield batch
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

    @torch.no_grad()
    def with_scalars(self, images: torch.Tensor, texts: torch.Tensor) -> Features:
        """What a loss takes: features [n, D] with the present scale and bias of the logits."""
        scale, bias = self.towers.scalars()
        return Features(images, texts, scale.to(images), None if bias is None else bias.to(images))

    def fingerprint(self) -> str:
        """Of the towers' weights. Collective: rank 0's, which are everyone's."""
        if self.weights is not None:
            return self.weights
        return str(self.world.broadcast_object(of_weights(self.towers.state_dict()) if self.world.is_main else None))

    def remember(self, texts: Sequence[str], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gives for these texts and the present weights: made once, and kept for evaluations to come.

        Every rank calls this, with the same texts. The last `REMEMBERED` are kept.
        """
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        key, self.texts = (self.fingerprint(), digest), digest[:16]
        self._kept[key] = made = self._kept.pop(key) if key in self._kept else make()
        while len(self._kept) > self.REMEMBERED:
            del self._kept[next(iter(self._kept))]
        return made

    def _encode(self, encode: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        device = self.world.device
        # no_grad, not inference_mode: a tensor that a tower keeps for later (a mask, a table of positions) has to
        # work in the next training step.
        with evaluating(self.towers), torch.no_grad(), autocast(device, self.precision):
            return encode(rows.to(device, non_blocking=True)).float()


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

    def with_scalars(self, images: torch.Tensor, texts: torch.Tensor) -> Features:
        """Features with a scale of 1 and a bias of 0."""
        return Features(images, texts, images.new_ones(()), images.new_zeros(()))

    def remember(self, texts: Sequence[str], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gives."""
        return make()

    def _encode(self, encode: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return self._unit(len(rows))

    def _unit(self, count: int) -> torch.Tensor:
        return torch.full((count, self.WIDTH), self.WIDTH**-0.5, device=self.world.device)


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
