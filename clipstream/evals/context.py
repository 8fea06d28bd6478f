"""The context of an evaluator: encodes images and texts without gradient, reads sources, collects what to show.

The towers' modes are restored after each use, and batches have no padding. `DryRun` is a context for a few samples.

What an evaluation used (weights, tokenizer, samples) has fingerprints: equal content has equal ones on any device and
number of ranks, in any order and packing into shards. They detect accidents, not forgery: they are 64-bit sums and
products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from statistics import fmean
from typing import ClassVar, Protocol

import numpy as np
import torch

from clipstream.data.batch import Batch
from clipstream.data.decode.captions import CaptionExtractor
from clipstream.data.decode.tokenizers import Tokenizer, build_tokenizer, mark_cut, readable
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.order.rng import GOLDEN, Keys, scramble
from clipstream.data.sequential_loader import EvalSource, evaluation_loader
from clipstream.data.settings import DataSettings, TokenizerSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.run_record import require_same
from clipstream.distributed.settings import RunSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, Interrupted, Stopped
from clipstream.losses.contrastive import ContrastiveLoss, build_loss
from clipstream.losses.settings import LossSettings
from clipstream.models.build import build_towers
from clipstream.models.precision import autocast, check_device, prepare_towers, resolve_precision
from clipstream.models.settings import ModelSettings, Precision
from clipstream.models.towers import Features, Towers
from clipstream.storage.shard_url import redact
from clipstream.text import Lines, listed
from clipstream.training.settings import TrainSettings
from clipstream.utils.logs import logger

PROMPTS = 256  # encoded at once
_tell_once = lru_cache(maxsize=256)(logger.info)
AT_ONCE = 1 << 18  # elements summed at once: fits a CPU's cache, which is five times as fast


@dataclass(frozen=True)
class Example:
    """An image with its texts."""

    pixels: torch.Tensor  # uint8 [3, H, W], on any device
    text: str  # its caption, as the model sees it, or its class name
    key: str = ""  # 'SHARD_BASENAME/KEY' of the sample
    guesses: tuple[tuple[str, float], ...] = ()  # (text, score) of the model's answers, best first
    group: str = ""  # heading that it is shown under, such as 'best'; '' for none
    note: str = ""  # a short remark, such as 'rank 17 of 1000'


@dataclass(frozen=True)
class Table:
    """A table of texts; each row has a cell per column of the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Reading:
    """The samples that were read from a source."""

    shards: str  # as in the settings, without credentials
    samples: int = 0  # used ones
    images: int = 0  # sum of their image numbers (see `of_samples`), modulo 2^64
    pairs: int = 0  # sum of their numbers of image and ids, modulo 2^64
    lost: list[float] = field(default_factory=list)  # shares of the first images' area that the centre crop left out

    def add(self, batch: Batch) -> None:
        images, pairs = of_samples(batch)
        self.samples += len(batch)
        self.images = (self.images + int(images.sum(dtype=np.uint64))) % (1 << 64)
        self.pairs = (self.pairs + int(pairs.sum(dtype=np.uint64))) % (1 << 64)

    def with_others(self, parts: list[Reading]) -> dict[str, object]:
        """The sum over the ranks' `parts`, for a record."""
        lost = [share for part in parts for share in part.lost]
        return {
            "shards": self.shards,
            "samples": sum(part.samples for part in parts),
            "pictures": f"{sum(part.images for part in parts) % (1 << 64):016x}",
            "pairs": f"{sum(part.pairs for part in parts) % (1 << 64):016x}",
            **({"measured": len(lost), "lost_area": round(fmean(lost), 4)} if lost else {}),
        }


@dataclass
class EvalContext:
    """What an evaluator is called with, on one rank."""

    towers: Towers  # the model, without DDP's wrapper
    tokenizer: Tokenizer  # of the model
    world: World  # the ranks
    # the run's settings of workers, cache, time limits and global batch size
    data: DataSettings = field(default_factory=lambda: DataSettings(workers=0))
    precision: Precision = "fp32"  # as in training
    loss: ContrastiveLoss | None = None  # the training loss; None if there is none
    examples_wanted: int = 0  # images that an evaluation should show; 0 for none
    name: str = "NAME"  # of the current evaluator, for messages
    # called between batches and while waiting for one; if it returns True on some rank, `Stopped` is raised on all
    interrupt: Callable[[], bool] = lambda: False
    dropped: int = field(default=0, init=False)  # samples that `batches` could not use on this rank, since the start
    # why this rank could use no sample of the last source; '' if it could
    complaint: str = field(default="", init=False)
    # images that the current evaluator showed; only those of rank 0 are used
    examples: list[Example] = field(default_factory=list, init=False)
    tables: list[Table] = field(default_factory=list, init=False)  # likewise
    readings: list[Reading] = field(default_factory=list, init=False)  # what `batches` read, one per call
    # metrics of the evaluators that already ran at this step with these weights, by name
    metrics: dict[str, dict[str, float]] = field(default_factory=dict, init=False)
    # fingerprint of the prompts of the current evaluator's classifier; None if it has none
    texts: str | None = field(default=None, init=False)
    # fingerprint of the towers' weights while they do not change; None if that is not known
    weights: str | None = field(default=None, init=False)
    _kept: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict, init=False)

    AT_MOST: ClassVar[int | None] = None  # limit on the samples of a source
    REMEMBERED: ClassVar[int] = 8  # classifiers; ImageNet's is 2 to 4 MB

    def batches(
        self,
        source: SourceSettings,
        batch_size: int,
        *,
        target: CaptionExtractor | None = None,
        tokenizer: Tokenizer | None = None,
        groups: str | None = None,
        max_samples: int | None = None,
        key: str = "data",
    ) -> Iterator[Batch]:
        """This rank's part of a source, without padding: each sample once over all ranks.

        If no rank gets a batch, the evaluator has to raise `unusable`.

        Args:
            batch_size: maximum samples per batch on this rank.
            target: extracts the text that becomes `ids`; the source's caption extractor by default.
            tokenizer: turns it into `ids`; the model's by default.
            groups: field with the group of a sample, for `Batch.groups`.
            max_samples: read only the first samples of the source.
            key: the source's key in the evaluator's settings, for messages.

        Raises DataError: a shard is missing or broken, or none of this rank's first 2,000 samples is usable.
        """
        most = min((n for n in (self.AT_MOST, max_samples) if n), default=None)
        loader = evaluation_loader(
            EvalSource(source, f"evals.{self.name}.{key}", target, most),
            ModelInputs(tokenizer or self.tokenizer, self.towers.image, groups=groups),
            batch_size=batch_size,
            world=self.world,
            data=self.data,
            interrupt=self.interrupt,
        )
        specs = [source.shards] if isinstance(source.shards, str) else source.shards
        reading = Reading(" ".join(map(redact, specs)))
        self.readings.append(reading)
        with loader:
            require_same(self.world, loader.source.sources[0].contents, "shards", "copy those of one host to all")
            try:
                for batch in map(Batch.without_padding, loader):
                    if self.interrupt():
                        raise Interrupted
                    reading.add(batch)
                    yield batch
            except Interrupted:
                raise Stopped(f"evaluation {self.name!r} was interrupted") from None
            self.dropped += sum(source.dropped.total() for source in loader.health.sources.values())
            self.complaint = loader.complaint()
            reading.lost = [share for one in loader.health.sources.values() for share, _ in one.lost.values()]

    def unusable(self, what: str) -> DataError:
        """The error for a source without a usable sample on any rank, with this rank's reason."""
        return DataError(Lines(": ".join(filter(None, (f"the source has no usable {what}", self.complaint)))))

    def tell_left_out(self, found: Mapping[str, Mapping[str, float]], images: int) -> None:
        """Log once how many of the images a language leaves out, given the metrics by language; not in a dry run."""
        left = [f"{language} {images - int(one['n']):,}" for language, one in found.items() if one["n"] < images]
        if left and self.world.is_main and self.AT_MOST is None:
            some = f"of {images:,} images some have no text in a language: {listed(left, 8)}"
            _tell_once(f"evaluation {self.name!r}: {some}")

    def stack(self, what: str, *features: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each list of this rank's features [n, D] as one tensor; [0, D] if it is empty. Collective.

        Raises DataError: no rank has any, see `unusable`.
        """
        width = max(self.world.gather_objects(features[0][0].shape[1] if features[0] else 0))
        if width == 0:
            raise self.unusable(what)
        nothing = torch.zeros((0, width), device=self.world.device)
        return [torch.cat([nothing, *rows]) for rows in features]

    def show(self, example: Example) -> None:
        """Show an image in the report; at most `examples_wanted` are kept."""
        if len(self.examples) < self.examples_wanted:
            self.examples.append(example)

    def label(self, caption: str | None, ids: torch.Tensor) -> str:
        """The first line of a caption, with a mark where the context cuts it; decoded from its ids [T] without one."""
        return mark_cut(self.tokenizer, caption.split("\n")[0]) if caption else readable(self.tokenizer, ids.tolist())

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, 3, H, W] -> L2-normalised float32 [n, D] on the world's device, without gradient."""
        device = self.world.device
        return self._encode(lambda rows: self.towers.encode_image(rows.to(device, non_blocking=True)), pixels)

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        """int [n, T] -> L2-normalised float32 [n, D] on the world's device, without gradient."""
        return self._encode(self.towers.encode_text, ids)

    def encode_prompts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Texts [n] -> L2-normalised float32 [n, D] on every rank; each rank encodes its share.

        Collective, with the same texts (at least one) on all ranks.
        """
        rank, size = self.world.rank, self.world.size
        mine = prompts[len(prompts) * rank // size : len(prompts) * (rank + 1) // size]
        texts = mine or prompts[:1]  # a rank without a share encodes one text to know D
        some = (texts[start : start + PROMPTS] for start in range(0, len(texts), PROMPTS))
        parts = [self.encode_text(torch.from_numpy(self.tokenizer.encode(part))) for part in some]
        return self.world.gather_rows(torch.cat(parts)[: len(mine)])

    @torch.no_grad()
    def with_scalars(self, images: torch.Tensor, texts: torch.Tensor) -> Features:
        """The input of a loss: features [n, D] with the model's logit scale and bias."""
        scale, bias = self.towers.scalars()
        return Features(images, texts, scale.to(images), None if bias is None else bias.to(images))

    def fingerprint(self) -> str:
        """Fingerprint of the towers' weights, from rank 0. Collective."""
        if self.weights is not None:
            return self.weights
        return str(self.world.broadcast_object(of_weights(self.towers.state_dict()) if self.world.is_main else None))

    def remember(self, texts: Sequence[str], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `make` for these texts and the current weights, from a cache of the last `REMEMBERED`.

        Collective, with the same texts on all ranks.
        """
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        key, self.texts = (self.fingerprint(), digest), digest[:16]
        self._kept[key] = made = self._kept.pop(key) if key in self._kept else make()
        while len(self._kept) > self.REMEMBERED:
            del self._kept[next(iter(self._kept))]
        return made

    def _encode(self, encode: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        device = self.world.device
        # no_grad, not inference_mode: tensors that a tower caches (masks, position tables) must work in training too.
        with evaluating(self.towers), torch.no_grad(), autocast(device, self.precision):
            return encode(rows).float()


class RunSections(Protocol):
    """The sections of a run's settings that decide how its model computes features."""

    @property
    def run(self) -> RunSettings: ...
    @property
    def data(self) -> DataSettings: ...
    @property
    def tokenizer(self) -> TokenizerSettings: ...
    @property
    def train(self) -> TrainSettings: ...
    @property
    def loss(self) -> LossSettings: ...


def context_for(settings: RunSections, model: ModelSettings, world: World, *, examples: int = 0) -> EvalContext:
    """A model with its tokenizer and loss, on this rank's device; downloads it if necessary. Collective.

    Features are computed as in training: in `train.precision`, a tower of its own precision in that one, and with
    `train.tf32` where the device is a GPU.
    """
    precision = resolve_precision(settings.train.precision, world)
    tf32 = settings.train.tf32 and world.device.startswith("cuda")
    check_device(world.device, precision, tf32=tf32)
    towers = build_towers(model, seed=settings.run.seed, tokenizer=settings.tokenizer, world=world)
    towers = towers.to(world.device).eval()
    if model.own_precisions:
        towers.requires_grad_(False)
    prepare_towers(towers, precision, model, world.device, tf32=tf32, keep=False)
    tokenizer = build_tokenizer(
        settings.tokenizer, towers.open_clip_tokenizer(), towers.context_length, cache_dir=model.cache_dir
    )
    loss = build_loss(settings.loss, towers.loss_type)
    return EvalContext(towers, tokenizer, world, settings.data, precision, loss, examples_wanted=examples)


class DryRun(EvalContext):
    """A context with few samples and constant features: an evaluator reads real data and yields meaningless metrics."""

    AT_MOST: ClassVar[int | None] = 64
    WIDTH: ClassVar[int] = 8

    @classmethod
    def of(cls, context: EvalContext, name: str) -> DryRun:
        kept = {item.name: getattr(context, item.name) for item in fields(context) if item.init}
        data = context.data.model_copy(update={"workers": 0})
        return cls(**{**kept, "data": data, "examples_wanted": 0, "name": name})

    def encode_prompts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Constant features [n, WIDTH]."""
        return self._unit(len(prompts))

    def with_scalars(self, images: torch.Tensor, texts: torch.Tensor) -> Features:
        """Features with a scale of 1 and a bias of 0."""
        return Features(images, texts, images.new_ones(()), images.new_zeros(()))

    def remember(self, texts: Sequence[str], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    def _encode(self, encode: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return self._unit(len(rows))

    def _unit(self, count: int) -> torch.Tensor:
        return torch.full((count, self.WIDTH), self.WIDTH**-0.5, device=self.world.device)


@contextmanager
def evaluating(towers: Towers) -> Iterator[None]:
    """Put the towers into eval mode; afterwards each module has its former mode."""
    training = [module for module in towers.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def of_weights(state: Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits for a state dict, as float32; the same on all devices.

    Of each tensor, the bits of its elements times different odd factors are summed modulo 2^64, so that any single
    change changes the sum.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        flat = state[name].detach().reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, len(flat), AT_ONCE):
            bits = flat[start : start + AT_ONCE].float().view(torch.int32).long()
            factors = (
                torch.arange(start, start + len(bits), device=flat.device).mul_(2).add_(1).mul_(GOLDEN - (1 << 64))
            )
            total += (bits * factors).sum()
        digest.update(f"{name} {tuple(state[name].shape)} {int(total) % (1 << 64)}\n".encode())
    return digest.hexdigest()[:16]


def of_tokenizer(tokenizer: Tokenizer) -> str:
    """16 hexadecimal digits for a tokenizer, from its ids of a sample text."""
    ids = tokenizer.encode(["A photo of 2 red-brown cats, isn't it?", "Tokenizers differ"]).astype(np.int64)
    return hashlib.sha256(f"{ids.shape}".encode() + ids.tobytes()).hexdigest()[:16]


def of_samples(batch: Batch) -> tuple[Keys, Keys]:
    """Two numbers per sample, uint64 [n] each: of its image file, and of that file with its ids."""
    images = torch.zeros(len(batch), dtype=torch.int64) if batch.checksums is None else batch.checksums
    files = scramble(images.numpy().astype(np.uint64))
    ids = batch.ids.numpy().astype(np.uint64)
    factors = np.arange(1, 2 * ids.shape[1], 2, dtype=np.uint64) * np.uint64(GOLDEN)
    return files, scramble(files + scramble((ids * factors).sum(axis=1, dtype=np.uint64)))
