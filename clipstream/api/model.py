"""`load_model` and `zero_shot`: images and texts become features, similarities and classes.

Preprocessing and tokenizer are those of open_clip for the model, bit for bit, from the code that evaluates during
training. Nothing here has a gradient; to train a model, take its `clip`, or `clipstream.train`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from clipstream.api.run import Run
from clipstream.checkpoint.store import locate, model_in, resolve_model_name, with_own_config
from clipstream.config.settings import Settings, load
from clipstream.data.batch import ImageSpec
from clipstream.data.decode.class_names import class_names, fold_name, prompt_templates
from clipstream.data.decode.images import EvalTransform
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.distributed.world import World, resolve_device
from clipstream.errors import Dropped, SettingsError, each, wrong_type
from clipstream.evals.context import EvalContext, context_for, evaluating
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import Weights
from clipstream.evals.statistics import metrics_of
from clipstream.evals.zero_shot import text_classifiers
from clipstream.models.precision import autocast
from clipstream.models.pretrained import preflight
from clipstream.models.settings import ModelSettings, Precision
from clipstream.models.towers import Towers
from clipstream.utils.logs import on_terminal
from clipstream.utils.torch_state import restore_matmul_precision

ImageLike: TypeAlias = "Image.Image | str | os.PathLike[str] | bytes | torch.Tensor"
FILES = (Image.Image, str, os.PathLike, bytes)  # what an image is decoded from
ImagesLike: TypeAlias = "ImageLike | Sequence[ImageLike]"
Source: TypeAlias = "Run | str | os.PathLike[str]"


class Preprocess:
    """A model's preprocessing in evaluation: an image becomes its normalised pixels, as open_clip's transform gives.

    Attributes:
        image: size, interpolation and way of the resize.
        mean: of each channel, 0 to 1.
        std: standard deviation of each channel, 0 to 1.
    """

    def __init__(self, image: ImageSpec, mean: Sequence[float], std: Sequence[float]) -> None:
        self.image = image
        self.mean: tuple[float, ...] = tuple(mean)
        self.std: tuple[float, ...] = tuple(std)
        self._transform = EvalTransform(image, "white")

    def __repr__(self) -> str:
        return f"Preprocess({self.image}, mean={self.mean}, std={self.std})"

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) in pixels."""
        return self.image.size

    def pixels(self, image: Image.Image | str | os.PathLike[str] | bytes) -> torch.Tensor:
        """uint8 [3, H, W] of a PIL image, a path, or the bytes of an image file, before it is normalised.

        Raises:
            ValueError: the image cannot be decoded.
            OSError: the file cannot be read.
            SettingsError: `image` is something else.
        """
        if not isinstance(image, FILES):
            raise wrong_type("image", "a PIL image, a path, or the bytes of an image file", image)
        try:
            if isinstance(image, Image.Image):
                found = self._transform.fit(image)
            else:
                data = image if isinstance(image, bytes) else Path(image).expanduser().read_bytes()
                found = self._transform(data)
        except Dropped as error:
            shown = "the image" if isinstance(image, bytes | Image.Image) else os.fspath(image)
            raise ValueError(f"{shown} cannot be used: {error}") from error
        return torch.from_numpy(np.ascontiguousarray(found)).permute(2, 0, 1)

    def __call__(self, image: Image.Image | str | os.PathLike[str] | bytes) -> torch.Tensor:
        """float32 [3, H, W], normalised. Takes and raises what `pixels` does."""
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (self.pixels(image).float() / 255 - mean) / std


class TextTokenizer:
    """A model's tokenizer, called as open_clip's: texts become ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def context_length(self) -> int:
        """T, ids a text."""
        return self._tokenizer.context_length

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""
        return self._tokenizer.vocab_size

    def encode(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32 [n, T] of one text or several; longer texts are cut, shorter ones padded.

        Raises SettingsError: `texts` is something else.
        """
        return self._tokenizer.encode(list(each("texts", "a text or several", texts, str)))

    def decode(self, ids: Sequence[int] | torch.Tensor) -> str:
        """The readable text of the ids of one text. Raises SettingsError: `ids` is something else."""
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        return self._tokenizer.decode(list(each("ids", "the ids of a text", ids, (int, np.integer))))

    def __call__(self, texts: str | Sequence[str]) -> torch.Tensor:
        """int64 [n, T] of one text or several. Raises what `encode` does."""
        return torch.from_numpy(self.encode(texts)).long()


@dataclass(frozen=True)
class ImageLabel:
    """The class of an image, as `Model.label` finds it; '' and NaN if the image cannot be read."""

    name: str = ""
    score: float = math.nan  # its cosine, the largest
    margin: float = math.nan  # that cosine minus the second largest
    probability: float = math.nan  # the softmax over the classes at the model's scale; not calibrated
    error: str = ""  # why the image cannot be read


def usable_device(device: str | torch.device) -> str:
    """torch's name of the device; auto is a GPU if there is one, and 'cuda' that of this rank (see `World.gpu`).

    Raises SettingsError: torch has no such device, or sees no GPU.
    """
    if not isinstance(device, str | torch.device):
        raise wrong_type("device", "torch's name of a device, such as 'cpu'", device)
    try:
        device = str(torch.device(resolve_device(str(device))))
    except RuntimeError as error:
        raise SettingsError(f"device is {device!r}: {str(error).splitlines()[0]}") from error
    group = World.of_group(device)
    return (World.from_env(device) if group.size == 1 and device == "cuda" else group).device


class Model:
    """A model with its preprocessing and tokenizer, in evaluation mode and without gradients.

    Attributes:
        context: what evaluators see of the model.
        preprocess: an image -> normalised pixels.
        tokenizer: texts -> ids.
    """

    def __init__(self, towers: Towers, context: EvalContext) -> None:
        self.towers: Towers = towers
        self.context: EvalContext = context
        mean, std = (values.flatten().tolist() for values in (towers.mean, towers.std))
        self.preprocess: Preprocess = Preprocess(towers.image, mean, std)
        self.tokenizer: TextTokenizer = TextTokenizer(context.tokenizer)

    def __repr__(self) -> str:
        return f"Model(embed_dim={self.embed_dim}, image_size={self.preprocess.size}, device={self.device!r})"

    @property
    def device(self) -> str:
        """torch's name of the device."""
        return self.context.world.device

    @property
    def clip(self) -> torch.nn.Module:
        """open_clip's model."""
        return self.towers.clip  # type: ignore[no-any-return]

    @property
    def embed_dim(self) -> int:
        """D, numbers of a feature."""
        return int(self.towers.config.model_cfg["embed_dim"])

    @property
    def logit_scale(self) -> float:
        """What cosines are multiplied by in the loss."""
        return float(self.towers.scalars()[0].detach())

    @property
    def logit_bias(self) -> float | None:
        """What is added to the logits; None for a model of the softmax loss."""
        bias = self.towers.scalars()[1]
        return None if bias is None else float(bias.detach())

    def encode_image(self, images: ImagesLike, *, batch_size: int = 256) -> torch.Tensor:
        """Features of images, float32 [n, D] with rows of length 1, on the model's device.

        Args:
            images: one image or several: PIL images, paths, bytes of image files, or tensors [3, H, W] and
                [n, 3, H, W] of the model's size: uint8, or normalised by `preprocess`.
            batch_size: images at once.

        Raises:
            ValueError: an image cannot be decoded, or a tensor has another shape.
            OSError: a file cannot be read.
            SettingsError: `images` is something else.
        """
        batch_size = _positive(batch_size)
        found: list[torch.Tensor] = []
        items = each("images", "images, paths or tensors", images, (*FILES, torch.Tensor))
        rows = (row for item in items for row in self._rows(item))
        while some := list(islice(rows, batch_size)):
            for _, same in groupby(some, key=lambda row: row.dtype):
                found.append(self._encode_tensor(torch.stack(list(same))))
        return torch.cat(found) if found else torch.empty(0, self.embed_dim, device=self.device)

    def _rows(self, image: ImageLike) -> torch.Tensor:
        """[n, 3, H, W] of an image or of a tensor of images."""
        rows = image if isinstance(image, torch.Tensor) else self.preprocess.pixels(image)
        rows = rows[None] if rows.ndim == 3 else rows
        if rows.ndim != 4 or tuple(rows.shape[1:]) != (3, *self.preprocess.size):
            size = ", ".join(map(str, self.preprocess.size))
            raise ValueError(f"expected an image tensor [3, {size}] or [n, 3, {size}], not {list(rows.shape)}")
        return rows

    def _encode_tensor(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype == torch.uint8:
            return self.context.encode_image(images)
        dtype = next(self.towers.clip.visual.parameters()).dtype
        with evaluating(self.towers), torch.no_grad(), autocast(self.device, self.context.precision):
            return self.towers.encode_normalized(images.to(self.device, dtype)).float()

    def encode_text(self, texts: str | Sequence[str] | torch.Tensor, *, batch_size: int = 256) -> torch.Tensor:
        """Features of texts, float32 [n, D] with rows of length 1, on the model's device.

        Args:
            texts: one text or several, or ids [n, T] of `tokenizer`.
            batch_size: texts at once.

        Raises:
            ValueError: ids have another shape or type.
            SettingsError: `texts` is something else.
        """
        if not isinstance(texts, torch.Tensor):
            texts = self.tokenizer(each("texts", "a text, several or their ids", texts, str))  # type: ignore[arg-type]
        elif texts.ndim != 2 or texts.is_floating_point() or texts.is_complex():
            raise ValueError(f"expected token ids as integers [n, T], not {texts.dtype} {list(texts.shape)}")
        ids = torch.split(texts, _positive(batch_size))
        parts = [self.context.encode_text(part) for part in ids if len(part)]
        return torch.cat(parts) if parts else torch.empty(0, self.embed_dim, device=self.device)

    def similarity(self, images: ImagesLike | torch.Tensor, texts: str | Sequence[str] | torch.Tensor) -> torch.Tensor:
        """Cosines of images and texts, float32 [n, m].

        Args:
            images: as `encode_image` takes them, or features [n, D].
            texts: as `encode_text` takes them, or features [m, D].

        Raises:
            ValueError: features have another width than the model's; and as `encode_image` and `encode_text`.
            OSError, SettingsError: as these.
        """
        found = []
        for values, encode in ((images, self.encode_image), (texts, self.encode_text)):
            if not (isinstance(values, torch.Tensor) and values.ndim == 2 and values.is_floating_point()):
                found.append(encode(values))  # type: ignore[arg-type]
            elif values.shape[1] != self.embed_dim:
                raise ValueError(f"expected features [n, {self.embed_dim}], not {list(values.shape)}")
            else:
                found.append(normalize(values.to(self.device).float(), dim=-1))
        return found[0] @ found[1].T

    def label(
        self, images: ImagesLike, classes: str | Sequence[str], templates: str | Sequence[str] = "openai"
    ) -> list[ImageLabel]:
        """The class of each image, in their order; takes images as `encode_image` does, or features [n, D].

        Names that differ in case alone are one class. Raises as `encode_image` and `zero_shot`, but not for an image
        that cannot be read.
        """
        names = {fold_name(name): name for name in class_names(classes)}  # of ImageNet's, two occur twice
        classifier, found = zero_shot(self, list(names.values()), templates), list[ImageLabel | None]()

        def readable() -> Iterator[torch.Tensor]:
            for item in each("images", "images, paths or tensors", images, (*FILES, torch.Tensor)):
                try:
                    rows = self._rows(item)
                except (ValueError, OSError) as error:
                    if isinstance(item, torch.Tensor):
                        raise
                    found.append(ImageLabel(error=str(error)))
                    continue
                found.extend([None] * len(rows))
                yield from rows

        known = isinstance(images, torch.Tensor) and images.ndim == 2
        cosines = self.similarity(images if known else self.encode_image(readable()), classifier.weights)  # type: ignore[arg-type]
        best, top, logits = cosines.argmax(dim=1).tolist(), cosines.topk(2).values, self.logit_scale * cosines
        chances = (logits.amax(dim=1) - logits.logsumexp(dim=1)).exp()
        values = torch.stack([top[:, 0], top[:, 0] - top[:, 1], chances], dim=1).tolist()
        labels = (ImageLabel(classifier.classes[number], *of) for number, of in zip(best, values, strict=True))
        return list(labels) if known else [one or next(labels) for one in found]


def _positive(batch_size: int) -> int:
    """The argument `batch_size`. Raises SettingsError: it is no positive integer."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise SettingsError(f"batch_size: expected a positive integer, not {batch_size!r}")
    return batch_size


def load_model(
    source: Source,
    pretrained: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device = "auto",
    precision: Precision | Literal["auto"] = "fp32",
    weights: Weights = "trained",
    cache_dir: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
) -> tuple[Model, Preprocess, TextTokenizer]:
    """A trained or pretrained model, its preprocessing and its tokenizer.

    Args:
        source: a `Run` or its folder (its newest checkpoint), a checkpoint's folder or file, any folder that open_clip
            reads, `ORG/NAME` on the Hub, a name of open_clip's (`ViT-B-32`), or the path of a JSON config.
        pretrained: with a name or a config: a tag (`openai`), a weights file, or one of these folders or repositories.
        device: torch's name, or auto for a GPU if there is one.
        precision: of the arithmetic; auto for bfloat16 where the device computes it.
        weights: of a checkpoint: 'trained', or 'averaged' of a run with `train.ema`.
        cache_dir: the Hub's cache; $HF_HUB_CACHE unless set.
        config: a file of settings over those of the run. With the run's own `config.yaml`, the Python code that it
            names (a tokenizer of your own) is used.

    Returns:
        The model; a function from a PIL image or a path to float32 [3, H, W]; a function from texts to int64 [n, T].

    Raises:
        SettingsError: there is no such run, checkpoint, model or tag, or its files cannot be downloaded.

    Examples:
        >>> import clipstream
        >>> model, preprocess, tokenizer = clipstream.load_model("runs/first", device="cpu")
        >>> model.encode_image(["cat.jpg", "dog.jpg"]).shape
        torch.Size([2, 16])
        >>> model.similarity("cat.jpg", ["a cat", "a dog"]).shape
        torch.Size([1, 2])
        >>> preprocess("cat.jpg").shape, tokenizer(["a cat"]).shape
        (torch.Size([3, 16, 16]), torch.Size([1, 8]))
    """
    device = usable_device(device)
    if not isinstance(source, Run | str | os.PathLike):
        raise wrong_type("source", "a run, a path or a model's name", source)
    paths = {"pretrained": pretrained, "cache_dir": cache_dir, "config": config}
    for name, value in paths.items():
        if not isinstance(value, str | os.PathLike | None):
            raise wrong_type(name, "text or a path", value)
    choices = {"precision": (precision, (*get_args(Precision), "auto")), "weights": (weights, get_args(Weights))}
    for name, (chosen, known) in choices.items():
        if chosen not in known:
            raise SettingsError(f"{name}: {chosen!r} is not one of {', '.join(known)}")
    found_paths = {name: None if value is None else os.fspath(value) for name, value in paths.items()}
    with on_terminal(), restore_matmul_precision():
        settings, model = _settings_of(source, weights, **found_paths)
        preflight(model, settings.tokenizer)
        train = settings.train.model_copy(update={"precision": precision})
        world = World(device=device)
        context = context_for(settings.model_copy(update={"train": train}), model.without_training(), world)
    found = Model(context.towers, context)
    return found, found.preprocess, found.tokenizer


def _settings_of(
    source: Source, weights: Weights, *, pretrained: str | None, cache_dir: str | None, config: str | None
) -> tuple[Settings, ModelSettings]:
    """The settings of a model's run, or the defaults, and those of the model."""
    cache = {} if cache_dir is None else {"cache_dir": cache_dir}
    path = source.folder if isinstance(source, Run) else Path(source).expanduser()
    if not path.is_dir():
        if weights != "trained":
            raise SettingsError(f"weights={weights!r}: {source} is not a checkpoint")
        names = {"name": str(path), "pretrained": pretrained}
        names = {key: None if name is None else resolve_model_name(name) for key, name in names.items()}
        model = ModelSettings(**with_own_config(names), **cache)
        return Settings(model=model), model
    if pretrained is not None:
        raise SettingsError(f"{path} has weights: remove pretrained={pretrained!r}")
    subject = locate(str(path))
    assert subject.checkpoint is not None
    settings = (
        Settings() if subject.run is None else load([] if config is None else ["--config", config], run=subject.run)
    )
    own = settings.model.model_copy(update=cache)
    return settings, model_in(subject.checkpoint, own, subject.run is not None, averaged=weights == "averaged")


def evaluate_model(model: Model | Source, settings: Settings) -> dict[str, dict[str, float]]:
    """The metrics of each evaluator of the settings, by name. Collective over the program's process group.

    Raises:
        SettingsError: an evaluator cannot be made.
        DataError: its data are missing, broken or not usable.
    """
    if not isinstance(model, Model):
        model = load_model(model)[0]
    own = model.context
    world = World.of_group(model.device)
    context = EvalContext(own.towers, own.tokenizer, world, settings.data, own.precision, own.loss)
    whole = {"weights": "trained", "on_error": "raise"}
    sections = {name: section.model_copy(update=whole) for name, section in settings.evals.items()}
    return {
        record["eval"]: {key: value for key, value in metrics_of(record).items() if key not in ("dropped", "seconds")}
        for record in EvalRunner(sections, context)(0, last=True)
    }


class ZeroShotClassifier:
    """A classifier of images made of class names (CLIP, arXiv:2103.00020, section 3.1.4).

    Attributes:
        model: that encodes images.
        classes: C names.
        weights: L2-normalised float32 [C, D]: of each class, the mean over its prompts' features.
    """

    def __init__(self, model: Model, classes: Sequence[str], weights: torch.Tensor) -> None:
        self.model: Model = model
        self.weights: torch.Tensor = weights
        self.classes: list[str] = list(classes)

    def __repr__(self) -> str:
        return f"ZeroShotClassifier({len(self.classes)} classes, {self.model!r})"

    def logits(self, images: ImagesLike) -> torch.Tensor:
        """Cosines times the model's scale, float32 [n, C]."""
        return self.model.logit_scale * self.model.similarity(images, self.weights)

    def __call__(self, images: ImagesLike) -> torch.Tensor:
        """Probabilities of the classes, float32 [n, C]: the softmax of `logits`."""
        return self.logits(images).softmax(dim=-1)

    def predict(self, images: ImagesLike) -> list[str]:
        """The most probable class of each image."""
        return [self.classes[number] for number in self.logits(images).argmax(dim=-1).tolist()]


def zero_shot(
    model: Model | Source,
    classes: str | Sequence[str],
    templates: str | Sequence[str] = "openai",
) -> ZeroShotClassifier:
    """A classifier for class names, as the evaluator `zero_shot` makes it.

    Args:
        model: of `load_model`, or what that takes.
        classes: names, a file with one a line, or 'imagenet'.
        templates: prompts with {c} or {}, a file with one a line, or 'openai' (80), 'simple' (7) or 'plain' (1).

    Raises SettingsError: there is no such file, fewer than 2 classes, or a template has no place for the name.

    Examples:
        >>> import clipstream
        >>> classifier = clipstream.zero_shot("runs/first", ["cat", "dog"], ["a photo of a {}"])
        >>> classifier(["cat.jpg", "dog.jpg"]).shape
        torch.Size([2, 2])
        >>> set(classifier.predict(["cat.jpg", "dog.jpg"])) <= {"cat", "dog"}
        True
    """
    if not isinstance(model, Model):
        model = load_model(model)[0]
    names = class_names(classes)
    (weights,) = text_classifiers(model.context, [(names, prompt_templates(templates))])
    return ZeroShotClassifier(model, names, weights)
