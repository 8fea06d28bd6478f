"""`build_loader`: clipstream's input path in a training loop of one's own, of torch, Lightning or Accelerate.

Shards enter; batches of images and token ids leave, on the device of the rank. Order, decoding, workers and copies to
the GPU are those of `clipstream.train`, and so is the position that `state_dict` holds.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from pydantic import TypeAdapter, ValidationError
from timm.layers import to_2tuple

from clipstream.api.model import Model, Preprocess, TextTokenizer, usable_device
from clipstream.config.plan import Plan, draft, hold_out, with_lanes
from clipstream.config.settings import Config, Overrides, Settings, settings_from
from clipstream.config.validate import validate_sources
from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.decode.tokenizers import Ids, Tokenizer, build_tokenizer, wrap
from clipstream.data.loader.loader import Loader
from clipstream.data.loader.reading_recipe import ModelInputs
from clipstream.data.order.lanes import DataState
from clipstream.data.order_plan import resolve_workers
from clipstream.data.pipeline import training_loader
from clipstream.data.sources.indexes import count_samples
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, each, errors_as
from clipstream.models.build import build_towers
from clipstream.utils.logs import on_terminal
from clipstream.utils.processes import many_files

Size: TypeAlias = "int | tuple[int, int]"
CLIP_CONTEXT = 77  # tokens of a text, where nothing else says how many
FORMAT = 1  # of state_dict
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


class _Pair(NamedTuple):
    images: torch.Tensor
    texts: torch.Tensor


class ImageTextBatch(_Pair):
    """A batch: `images, texts = batch`.

    Attributes:
        images: [n, 3, H, W], channels_last in memory, normalised or uint8.
        texts: int64 [n, T], token ids.
        keys: n strings 'SHARD_BASENAME/KEY', which name the samples.
        step: number of the batch, from 0 on, through all epochs.
    """

    keys: tuple[str, ...]
    step: int

    def __new__(
        cls, images: torch.Tensor, texts: torch.Tensor, keys: Sequence[str] = (), step: int = 0
    ) -> ImageTextBatch:
        self = super().__new__(cls, images, texts)
        self.keys, self.step = tuple(keys), step
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ImageTextBatch:
        """The batch on a device."""
        images, texts = (tensor.to(device, non_blocking=non_blocking) for tensor in self)
        return ImageTextBatch(images, texts, self.keys, self.step)


class BatchLoader:
    """Batches of one rank, an epoch at each `for`; made by `build_loader`.

    Workers start with the first batch and end with `close`, with the program, or when nobody holds the loader. A loop
    that is left early goes on where it was. Where the number of samples is not known, an epoch has no end, and `len`
    raises TypeError.

    Attributes:
        settings: all settings; those of the section `data` matter.
        preprocess: size, mean and standard deviation of the images.
        tokenizer: texts -> ids.
        world: the ranks that share the data.
    """

    def __init__(
        self, plan: Plan, world: World, preprocess: Preprocess, tokenizer: Tokenizer, dtype: torch.dtype
    ) -> None:
        self.settings: Settings = plan.settings
        self.world: World = world
        self.preprocess: Preprocess = preprocess
        self.tokenizer: TextTokenizer = TextTokenizer(tokenizer)
        self._ids, self._dtype = tokenizer, dtype
        self._start: DataState | None = None
        self._loader: Loader | None = None
        self._closing = ExitStack()
        self._sources = plan.survey.sources
        self._batches = _batches_in_epoch(plan)
        shape = (1, 3, 1, 1)
        self._mean, self._std = (
            torch.tensor(values, device=world.device).view(shape) for values in (preprocess.mean, preprocess.std)
        )

    def __len__(self) -> int:
        """Batches of an epoch. Raises TypeError: the number of samples is not known."""
        if self._batches is None:
            raise TypeError(
                "the number of samples is unknown, so an epoch has no length: set train_num_samples=, or run "
                "`clipstream index` on the shards"
            )
        return self._batches

    def __iter__(self) -> Iterator[ImageTextBatch]:
        while True:
            batch = self._convert(next(self._start_loader()))
            yield batch
            if self._batches is not None and (batch.step + 1) % self._batches == 0:
                return

    def _start_loader(self) -> Loader:
        if self._loader is None:
            self._closing.enter_context(many_files())
            with on_terminal():
                self._loader = training_loader(
                    self.settings.data,
                    ModelInputs(self._ids, self.preprocess.image),
                    sources=self._sources,
                    world=self.world,
                    seed=self.settings.run.seed,
                    start=self._start,
                    zero_copy=self._dtype != torch.uint8,  # else the pixels are handed out as they are
                )
            self._closing.callback(self._loader.close)
            weakref.finalize(self, self._closing.close)
        return self._loader

    def _convert(self, batch: Batch) -> ImageTextBatch:
        data = self.settings.data
        if data.sampling.mode == "indexed" or data.decoder == "gpu":  # others have no empty slots
            batch = batch.without_padding()
        images, texts = batch.images, batch.texts.long()
        if self._dtype != torch.uint8:
            images = images.float().div_(255).sub_(self._mean).div_(self._std).to(self._dtype)
        return ImageTextBatch(images, texts, batch.keys, batch.step)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out, of all ranks; JSON can hold it.

        Collective where the program has made a process group: every rank calls it and gets the same.
        """
        state = self._start or DataState()
        if self._loader is not None:
            state = DataState.merge(World.of_group(self.world.device).gather_objects(self._loader.state()))
        return {"format": FORMAT, "data": asdict(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, also on another number of ranks or workers.

        Raises:
            ValueError: it is no state of this format.
            SettingsError: at the next batch: the state belongs to other shards, another seed or another global batch.
        """
        if not isinstance(state, Mapping) or "format" not in state:
            raise ValueError("not a state_dict of a BatchLoader: 'format' is missing")
        if state["format"] != FORMAT:
            raise ValueError(f"state_dict has format {state['format']!r}, but this version reads {FORMAT}")
        with errors_as(ValueError, "not a state_dict of a BatchLoader", ValidationError, KeyError):
            start = TypeAdapter(DataState).validate_python(state["data"])
        self.close()
        self._start = start if start.lanes or start.step else None

    def close(self) -> None:
        """End the workers; the next batch starts them again, at the same position."""
        if self._loader is not None:
            own, before = self._loader.state(), self._start or DataState()
            self._start = replace(own, lanes={**before.lanes, **own.lanes})  # those of other ranks are where they began
            self._loader = None
        self._closing.close()
        self._closing = ExitStack()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_loader(
    data: Config,
    preprocess: Model | Preprocess | torch.nn.Module | Size | None = None,
    tokenizer: TextTokenizer | Tokenizer | Callable[..., Any] | None = None,
    overrides: Overrides = None,
    /,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype | Literal["float32", "float16", "bfloat16", "uint8"] = "float32",
    **flags: Any,
) -> BatchLoader:
    """An iterable of batches of image-text pairs, for a training loop of one's own.

    The ranks are those of the process group that the program has made, else of torchrun's or Slurm's variables: each
    reads its part of every global batch. The order of samples depends on shards, seed and global batch alone.

    Args:
        data: shards, as `--train-data` takes them (one text or a list), a YAML file, a mapping of sections, or
            `Settings`.
        preprocess: what says how images are resized and normalised: a `Model` or `Preprocess` of `load_model`, a
            model of open_clip, or a plain size, an int or (H, W). By default the model that the settings name.
        tokenizer: texts -> ids: of `load_model`, of `open_clip.get_tokenizer`, or any function from a list of texts to
            ids [n, T]. By default that of `preprocess`, and CLIP's with 77 tokens for a plain size.
        overrides: keys of the settings and their values, such as `{"data.sampling.mode": "indexed"}` for epochs that
            have each sample once.
        mean: of each channel, 0 to 1; that of `preprocess`, and CLIP's for a plain size, unless set.
        std: standard deviation of each channel, likewise.
        dtype: of the images: a floating type for normalised ones, 'uint8' for 0 to 255.
        flags: short flags of the command line, with underscores: `batch_size` (of a rank), `workers`, `seed`,
            `caption_key`, `caption_json`, `image_key`, `train_num_samples` (of an epoch), `device` (of the batches:
            torch's name or torch.device, by default this rank's GPU if there is one), …

    Returns:
        The loader: `for images, texts in loader` is an epoch, `len(loader)` its batches.

    Raises:
        SettingsError: the settings are wrong, or shards cannot be listed.
        DataError: while it is iterated: the data have no usable sample, fail too often or stall.

    Examples:
        >>> import clipstream
        >>> loader = clipstream.build_loader("shards/*.tar", 32, batch_size=6, workers=1, device="cpu")
        >>> len(loader)
        4
        >>> batch = next(iter(loader))
        >>> batch.images.shape, batch.images.dtype, batch.texts.shape
        (torch.Size([6, 3, 32, 32]), torch.float32, torch.Size([6, 77]))
        >>> state = loader.state_dict()
        >>> sum(len(texts) for images, texts in loader)
        18
        >>> loader.load_state_dict(state)
        >>> sum(len(texts) for images, texts in loader)
        18
        >>> loader.close()
    """
    device = usable_device(flags.pop("device", "auto"))
    world = World.of_group(device)
    world = World.from_env(device) if world.size == 1 else world
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None:
        raise SettingsError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    with on_terminal():
        written = settings_from(*_source(data, overrides, flags), ranks=world.size)
        seen = validate_sources(written)
        if written.settings.data.texts > 1:
            raise SettingsError(
                "data.sources: build_loader gives one text of a sample: remove caption.per_image, caption.negatives "
                "and caption.short"
            )
        seen = hold_out(seen, world)
        plan = draft(seen, world.size)
        laned = with_lanes(plan.settings.data)
        workers, _ = resolve_workers(laned, world)
        settings = plan.settings.model_copy(update={"data": laned.model_copy(update={"workers": workers})})
        fitted, ids = _inputs(preprocess, tokenizer, settings, world)
    own = Preprocess(fitted.image, _of_channels("mean", mean, fitted.mean), _of_channels("std", std, fitted.std))
    return BatchLoader(replace(plan, settings=settings), world, own, ids, chosen)


def _of_channels(name: str, values: Any, default: tuple[float, ...]) -> tuple[float, ...]:
    """Three numbers, one for each channel. Raises SettingsError: they are something else, or a deviation is not > 0."""
    if values is None:
        return default
    values = values.tolist() if isinstance(values, torch.Tensor) else values
    found = tuple(map(float, each(name, "three numbers", values, (int, float, np.integer, np.floating))))
    if len(found) != 3 or (name == "std" and not all(value > 0 for value in found)):
        raise SettingsError(f"{name}: expected three {'positive ' if name == 'std' else ''}numbers, not {found}")
    return found


def _source(data: Config, overrides: Overrides, flags: dict[str, Any]) -> tuple[Config, Overrides, dict[str, Any]]:
    """The arguments of `settings_from`: `data` that is no YAML file is the training source's shards."""
    for name in ("preprocess", "tokenizer", "overrides"):
        section = name == "tokenizer" and isinstance(flags.get(name), Mapping)
        if name in flags and not section:
            raise SettingsError(
                f"{name} is a positional argument: build_loader(data, preprocess, tokenizer, overrides, batch_size=…)"
            )
    if data is None or isinstance(data, Settings | Mapping):
        return data, overrides, flags
    expected = "shards, a YAML file, a mapping of sections, or Settings"
    names = [os.fspath(name) for name in each("data", expected, data, (str, os.PathLike))]
    if all(name.endswith((".yaml", ".yml")) for name in names):
        return names, overrides, flags
    return None, overrides, {"train_data": names, **flags}


def _inputs(preprocess: Any, tokenizer: Any, settings: Settings, world: World) -> tuple[Preprocess, Tokenizer]:
    """How images and texts are prepared."""
    ids: Tokenizer | None = None
    if isinstance(preprocess, Model):
        found, ids = preprocess.preprocess, preprocess.context.tokenizer
    elif isinstance(preprocess, Preprocess):
        found = preprocess
    elif isinstance(preprocess, int) or (isinstance(preprocess, tuple) and len(preprocess) == 2):
        size = (preprocess, preprocess) if isinstance(preprocess, int) else preprocess
        if not all(isinstance(side, int) and side > 0 for side in size):
            raise SettingsError(f"preprocess: expected a size in pixels, an int or (H, W), not {preprocess!r}")
        found = Preprocess(ImageSpec(size), OPENAI_DATASET_MEAN, OPENAI_DATASET_STD)
        if tokenizer is None:
            ids = wrap(SimpleTokenizer(), CLIP_CONTEXT)
    elif (config := getattr(getattr(preprocess, "visual", None), "preprocess_cfg", None)) is not None:
        fill = config.get("fill_color", 0)
        spec = ImageSpec(to_2tuple(config["size"]), config["interpolation"], config["resize_mode"], fill)
        found = Preprocess(spec, config["mean"], config["std"])
    elif preprocess is None:
        model = settings.model
        towers = build_towers(model, seed=settings.run.seed, tokenizer=settings.tokenizer, world=world)
        found = Preprocess(towers.image, *(values.flatten().tolist() for values in (towers.mean, towers.std)))
        own = towers.open_clip_tokenizer()
        ids = build_tokenizer(settings.tokenizer, own, towers.context_length, cache_dir=model.cache_dir)
    else:
        raise SettingsError(
            f"preprocess: expected a model or preprocessing of clipstream.load_model, a model of open_clip, or a size, "
            f"not {type(preprocess).__name__}"
        )
    if tokenizer is None and ids is None:
        raise SettingsError("tokenizer: required, such as open_clip.get_tokenizer(NAME)")
    return found, ids if tokenizer is None or tokenizer is ids else _tokenizer(tokenizer)  # type: ignore[return-value]


def _tokenizer(tokenizer: Any) -> Tokenizer:
    """A tokenizer with the loader's protocol. Raises SettingsError: it gives no ids [n, T]."""
    if isinstance(tokenizer, SimpleTokenizer | HFTokenizer):
        return wrap(tokenizer, tokenizer.context_length or CLIP_CONTEXT)
    if all(hasattr(tokenizer, name) for name in ("encode", "decode", "context_length", "vocab_size")):
        return cast(Tokenizer, tokenizer)
    return _FunctionTokenizer(tokenizer)


class _FunctionTokenizer:
    """Any function from a list of texts to ids [n, T], a tensor or an array."""

    vocab_size = 1 << 31

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            shape = self.encode(["a photo of a cat", "a"]).shape
        except Exception as error:
            raise SettingsError(f"tokenizer: cannot encode a list of texts: {error!r}") from error
        if len(shape) != 2 or shape[0] != 2:
            raise SettingsError(f"tokenizer: expected ids of shape [2, T] for 2 texts, not {shape}")
        self.context_length = int(shape[1])

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]."""
        return np.asarray(self._function(list(texts))).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, as the function tells no texts."""
        return " ".join(map(str, ids))


def _batches_in_epoch(plan: Plan) -> int | None:
    """Batches of an epoch; None where the samples are not known and counting them would take reading the shards."""
    data, samples = plan.settings.data, plan.settings.train.epoch_samples
    if plan.epochs is not None:
        return plan.epochs.steps
    if samples is None:
        samples = 0
        for source in plan.survey.sources.values():
            try:
                alone = source.with_settings(source.settings)
                samples += sum(count_samples(alone)) if source.samples is None else source.samples
            except SettingsError:
                return None
    if not samples:
        raise SettingsError("no usable sample: see clipstream.check(SHARDS)")
    if samples < data.global_batch_size:
        raise SettingsError(
            f"an epoch of {samples:,} samples is smaller than a batch of {data.global_batch_size:,}: use a smaller "
            f"batch_size"
        )
    return samples // data.global_batch_size
