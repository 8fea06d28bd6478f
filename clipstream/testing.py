"""Owns the checks that users call on parts of their own, in their own tests: caption extractor, transform, tokenizer,
loss, evaluator.

Each raises AssertionError with what is wrong and what to do, and gives nothing back. No test framework is needed.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipstream.data.fields import CaptionExtractor
from clipstream.data.order import Draws
from clipstream.data.text import Tokenizer
from clipstream.errors import Dropped
from clipstream.world import World

if TYPE_CHECKING:
    import torch

    from clipstream.batch import Batch
    from clipstream.evals.protocol import EvalContext
    from clipstream.model.losses import ContrastiveLoss
    from clipstream.model.towers import Features

ROWS, WIDTH = 5, 8  # of the features that a loss is checked on
RANKS = 2
CLOSE = {"float64": 1e-9, "float32": 1e-5}  # two ways to one loss, by the type that it is computed in
SMALL_MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "layers": 1, "width": 32, "heads": 2},
}
TEXTS = ("a photo of a cat", "", "Ein Käfer & 2 Äpfel 🍎", "word " * 500)


def check_caption_extractor(extractor: CaptionExtractor, sample: Mapping[str, Any]) -> None:
    """Check a caption extractor on a sample that has a caption.

    Args:
        extractor: the user's own, already constructed.
        sample: `__key__`, `__url__`, and members as bytes by suffix in lower case.

    Raises:
        AssertionError: it breaks the protocol of `clipstream.data.fields.CaptionExtractor`.
    """
    assert hasattr(extractor, "members"), "give it an attribute `members`: the suffixes that it reads, or None for all"
    members = extractor.members
    assert members is None or (isinstance(members, (tuple, list)) and all(isinstance(name, str) for name in members)), (
        f"`members` is {members!r}: make it a tuple of suffixes such as ('json', 'txt'), or None for all"
    )
    before = dict(sample)
    first = _caption(extractor, sample, None)
    assert _caption(extractor, sample, None) == first, (
        "two calls with draws=None gave different captions: evaluation must not depend on chance"
    )
    for key in range(20):
        drawn = _caption(extractor, sample, Draws(key))
        assert _caption(extractor, sample, Draws(key)) == drawn, (
            "two calls with the same draws gave different captions: take all chance from `draws`, not from random, "
            "numpy or torch"
        )
    assert dict(sample) == before, "it changed the sample: other parts read it too"
    if members is not None:
        wanted = {name.lower().lstrip(".") for name in members}
        fewer = {name: value for name, value in sample.items() if name.startswith("__") or name in wanted}
        assert _caption(extractor, fewer, None) == first, (
            f"with the members {sorted(wanted)} alone it gave another caption: name all that it reads in `members`"
        )
    try:
        extractor({"__key__": "empty", "__url__": "empty.tar"}, None)
    except Dropped:
        pass
    except Exception as error:
        raise AssertionError(
            f"a sample without members made it raise {error!r}: raise clipstream.errors.Dropped('no_caption') instead, "
            "so that the sample is counted under that reason"
        ) from error


def check_transform(transform: Callable[[dict[str, Any]], Mapping[str, Any] | None], sample: Mapping[str, Any]) -> None:
    """Check a sample transform on a sample.

    Args:
        transform: the function that a source's `transform` names; None as its result drops the sample.
        sample: `__key__`, `__url__`, and members as bytes by suffix in lower case.

    Raises:
        AssertionError: it gives no mapping, or not the same one twice.
    """
    first, second = transform(dict(sample)), transform(dict(sample))
    assert first is None or isinstance(first, Mapping), (
        f"it gave {type(first).__name__}: return the sample, or None to drop it"
    )
    assert (first is None) == (second is None) and (first is None or _same(first, second or {})), (
        "two calls with the same sample gave different results: a run could not be repeated"
    )


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return list(first) == list(second) and all(
        np.array_equal(value, second[key]) if isinstance(value, np.ndarray) else bool(value == second[key])
        for key, value in first.items()
    )


def check_tokenizer(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    """Check a tokenizer: shape, type and range of its ids, and that a text's ids depend on that text alone.

    Raises:
        AssertionError: it breaks the protocol of `clipstream.data.text.Tokenizer`.
    """
    for name in ("context_length", "vocab_size"):
        value = getattr(tokenizer, name, None)
        assert isinstance(value, int) and value > 0, f"`{name}` is {value!r}: make it a positive whole number"
    width, vocabulary = tokenizer.context_length, tokenizer.vocab_size
    texts = list(texts)
    ids = tokenizer.encode(texts)
    assert isinstance(ids, np.ndarray), f"encode gave {type(ids).__name__}: return a numpy array"
    assert ids.dtype == np.int32, f"encode gave {ids.dtype}: return int32"
    assert ids.shape == (len(texts), width), (
        f"encode gave the shape {ids.shape} for {len(texts)} texts: cut and pad each to context_length {width}"
    )
    assert ids.min() >= 0 and ids.max() < vocabulary, (
        f"ids lie within {ids.min()} to {ids.max()}, but vocab_size is {vocabulary}"
    )
    assert np.array_equal(tokenizer.encode(texts), ids), "the same texts gave other ids the second time"
    for text, row in zip(texts, ids, strict=True):
        assert np.array_equal(tokenizer.encode([text])[0], row), (
            f"{text[:40]!r} alone gave other ids than among others: the ids of a text must depend on nothing else"
        )
    decoded = tokenizer.decode([int(i) for i in ids[0]])
    assert isinstance(decoded, str), f"decode gave {type(decoded).__name__}: return a str"


def _caption(extractor: CaptionExtractor, sample: Mapping[str, Any], draws: Draws | None) -> str:
    try:
        caption = extractor(sample, draws)
    except Dropped as drop:
        raise AssertionError(f"it dropped the sample ({drop}): check it with a sample that has a caption") from drop
    except Exception as error:
        raise AssertionError(
            f"it raised {error!r}: a run counts that as extractor_error and drops the sample; "
            "raise clipstream.errors.Dropped(reason) for samples that cannot be used"
        ) from error
    assert isinstance(caption, str), f"it gave {type(caption).__name__}: return a str"
    assert caption.strip(), "it gave an empty caption: raise clipstream.errors.Dropped('empty_caption') instead"
    return caption


def check_loss(loss: ContrastiveLoss, *, logit_bias: bool = False) -> None:
    """Check a loss on random features: alone, with a sample of weight 0, and on two ranks with unequal rows.

    The ranks are two processes of gloo: forked from this one or, where CUDA forbids that, fresh ones, for which the
    loss must be picklable.

    Args:
        loss: the user's own, already constructed.
        logit_bias: whether it is for models with a logit bias.

    Raises:
        AssertionError: it breaks the protocol of `clipstream.model.losses.ContrastiveLoss`.
    """
    import torch

    limit = getattr(loss, "max_logit_scale", "absent")
    assert limit is None or (isinstance(limit, int | float) and limit > 0), (
        f"`max_logit_scale` is {limit!r}: make it a positive number, or None for no limit"
    )
    parts = _on_ranks(loss, logit_bias)  # first: a process whose autograd has run may not be forked where CUDA is
    ones = torch.ones(ROWS, dtype=torch.float64)
    value, gradients = _one_pass(loss, _random_features(logit_bias), ones, World(), ROWS)
    again, _ = _one_pass(loss, _random_features(logit_bias), ones, World(), ROWS)
    assert torch.equal(value, again), "the same features gave another loss the second time"
    for name in ("image", "text"):
        assert gradients[name].any(), f"the gradient of `{name}` is absent: training needs it"
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), f"the gradient of `{name}` is not finite"
    weights = torch.cat([ones[:-1], ones.new_zeros(1)])
    without, _ = _one_pass(loss, _rows(_random_features(logit_bias), 0, ROWS - 1), ones[:-1], World(), ROWS - 1)
    zeroed, _ = _one_pass(loss, _random_features(logit_bias), weights, World(), ROWS)
    assert _close(zeroed, without), (
        f"a sample of weight 0 changed the loss from {without:.8f} to {zeroed:.8f}: it must be as if it were not there"
    )
    total = sum(part["share"] for part in parts)
    assert _close(total, value), (
        f"the shares of {RANKS} ranks sum to {total:.8f}, and the loss of all rows on one rank is {value:.8f}: return "
        "this rank's share, and gather the others' rows with gradient"
    )
    for name, whole in gradients.items():
        found = [part["gradients"][name] for part in parts]
        assert _close(torch.cat(found) if whole.ndim else torch.stack(found).sum(), whole, like=value), (
            f"the gradient of `{name}` on {RANKS} ranks is not that of one rank: gather with gradient, so that every "
            "rank's share tells all rows that it used"
        )


def _close(one: Any, other: Any, like: Any = None) -> bool:
    import torch

    limit = CLOSE.get(str((other if like is None else like).dtype).removeprefix("torch."), 1e-2)
    return torch.allclose(one.double(), other.double(), rtol=limit, atol=limit)


def _on_ranks(loss: ContrastiveLoss, logit_bias: bool) -> list[dict[str, Any]]:
    """Each rank's share and gradients."""
    import torch
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _on_rank,
                args=(loss, logit_bias, folder),
                nprocs=RANKS,
                start_method="spawn" if torch.cuda.is_available() else "fork",
            )
        except Exception as error:
            raise AssertionError(f"on {RANKS} ranks it failed: {str(error).strip().splitlines()[-1]}") from error
        return [torch.load(Path(folder, str(rank))) for rank in range(RANKS)]


def _on_rank(rank: int, loss: ContrastiveLoss, logit_bias: bool, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        cut = ROWS // 2 + 1
        own = slice(0, cut) if rank == 0 else slice(cut, ROWS)
        features = _rows(_random_features(logit_bias), own.start, own.stop)
        weights = torch.ones(own.stop - own.start, dtype=torch.float64)
        share, gradients = _one_pass(loss, features, weights, World(rank=rank, size=RANKS), ROWS, own.start)
        torch.save({"share": share, "gradients": gradients}, Path(folder, str(rank)))
    finally:
        dist.destroy_process_group()


def _random_features(logit_bias: bool) -> Features:
    import torch

    from clipstream.model.towers import Features

    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    unit = torch.nn.functional.normalize
    bias = torch.tensor(-2.0, dtype=torch.float64) if logit_bias else None
    return Features(unit(image), unit(text), torch.tensor(5.0, dtype=torch.float64), bias)


def _rows(features: Features, start: int, stop: int) -> Features:
    return features._replace(image=features.image[start:stop].clone(), text=features.text[start:stop].clone())


def _one_pass(
    loss: ContrastiveLoss, features: Features, weights: Any, world: World, global_size: int, start: int = 0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The share, and the gradients of the features and scalars by name; zeros for what was not used."""
    import torch

    leaves = {name: leaf.requires_grad_() for name, leaf in features._asdict().items() if leaf is not None}
    share = loss(features, _captions(weights, start, global_size), world)
    assert isinstance(share, torch.Tensor) and share.ndim == 0, "it must return a tensor without dimensions"
    assert bool(torch.isfinite(share)), f"it gave {share.item()} on random features"
    assert share.requires_grad, "its result has no gradient: compute it of the features, without detach or no_grad"
    share.backward()  # type: ignore[no-untyped-call]
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return share.detach(), gradients


def _captions(weights: torch.Tensor, start: int, global_size: int) -> Batch:
    """A batch without pixels, whose captions differ."""
    import torch

    from clipstream.batch import Batch

    numbers = range(start, start + len(weights))
    return Batch(
        pixels=None,
        ids=torch.tensor(numbers, dtype=torch.int32)[:, None],
        weights=weights,
        keys=tuple(f"0.tar/{number}" for number in numbers),
        sources=torch.zeros(len(weights), dtype=torch.uint8),
        step=0,
        global_size=global_size,
        pictures=torch.tensor(numbers, dtype=torch.int64),
    )


def small_context() -> EvalContext:
    """What an evaluator works with, around a small CLIP of random weights on the CPU; for `check_evaluator`."""
    from clipstream.data.settings import DataSettings, TokenizerSettings
    from clipstream.data.text import build_tokenizer
    from clipstream.evals.protocol import EvalContext
    from clipstream.model.settings import ModelSettings
    from clipstream.model.towers import build_towers

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "small.json")
        config.write_text(json.dumps(SMALL_MODEL))
        towers = build_towers(ModelSettings(name=str(config)), seed=0)
    settings = TokenizerSettings.model_validate({"type": "model"})
    tokenizer = build_tokenizer(settings, towers.open_clip_tokenizer(), towers.context_length)
    return EvalContext.for_towers(towers, tokenizer, World(), data=DataSettings(workers=0), precision="fp32")


def check_evaluator(
    evaluator: Callable[[EvalContext], Iterable[tuple[str, float]]], context: EvalContext | None = None
) -> None:
    """Check an evaluator on its own data with a small model.

    Args:
        evaluator: the user's own, already constructed with its settings.
        context: the model; `small_context()` unless given.

    Raises:
        AssertionError: it breaks the protocol of `clipstream.evals.protocol.Evaluator`.
    """
    context = context or small_context()
    first = _metrics(evaluator, context)
    assert first, "it yielded no metric: yield (name, value) pairs"
    assert _metrics(evaluator, context) == first, (
        "the same model gave other figures the second time: an evaluation must not depend on chance"
    )


def _metrics(evaluator: Callable[[EvalContext], Iterable[tuple[str, float]]], context: EvalContext) -> dict[str, float]:
    found: dict[str, float] = {}
    for pair in evaluator(context):
        assert isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str), (
            f"it yielded {pair!r}: yield pairs of a name and a number"
        )
        name, value = pair
        assert name not in found, f"it yielded {name!r} twice"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        assert number and math.isfinite(value), f"{name!r} is {value!r}: yield a finite number"
        found[name] = value
    return found
