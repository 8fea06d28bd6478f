"""Checks for parts of your own, to call in your own tests: each raises AssertionError that says what to change.

There is one for each kind of plug-in. No test framework is needed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.multiprocessing.spawn import start_processes

from clipstream.data.batch import Batch
from clipstream.data.decode.captions import CaptionExtractor, RawSample
from clipstream.data.decode.images import UserImageTransform
from clipstream.data.decode.tokenizers import Tokenizer, build_tokenizer
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import SourceSettings
from clipstream.data.sources import OpenShard, ShardIndex, SourceContext, SourceType
from clipstream.data.text_settings import TokenizerSettings
from clipstream.distributed.world import World
from clipstream.errors import Dropped
from clipstream.evals.context import EvalContext, Example, Table
from clipstream.losses.contrastive import ContrastiveLoss
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Features
from clipstream.report.sinks import Record, RunInfo, Sink
from clipstream.training.optim import Optimizer, OptimSettings, Schedule

ROWS, WIDTH = 5, 8  # of the random features
RANKS = 2
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}  # tolerance for two computations of a loss, by dtype
SMALL_MODEL: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "layers": 1, "width": 32, "heads": 2},
}
SINK_RECORDS: tuple[Record, ...] = (
    {"step": 10, "start": {"ranks": 1}},
    {"step": 20, "samples": 1280, "loss": 2.5, "lr": 1e-3, "samples_per_s": 100.0, "data_wait": 0.1, "seconds": 1.0},
    {"step": 20, "stages": {"decode": {"p50": 0.01, "p99": 0.02}}, "data_wait": 0.1, "seconds": 1.0},
    {"step": 20, "health": {"train": {"read": 9, "used": 8, "dropped": {"no_caption": 1}}}},
    {"step": 20, "quarantine": [{"source": "train", "shard": "0.tar", "key": "0", "reason": "no_caption"}]},
    {"step": 20, "nonfinite": {"loss": "nan", "grad_norm": "nan", "keys": ["0.tar/0"]}},
    {"step": 20, "rollback": {"to": 10, "skipped": 3}},
    {"step": 20, "eval": "val", "top1": 0.5, "n": 100, "chance": 0.1, "seconds": 1.0},
    {"step": 20, "eval": "val", "error": "no such file", "seconds": 1.0},
    {"step": 20, "end": {"status": "done"}},
)
TEXTS = ("a photo of a cat", "", "Ein Käfer & 2 Äpfel 🍎", "word " * 500)
CHANCE = "take all chance from `rng`, not from random, numpy or torch"
EVALUATION = "evaluation must not depend on chance"


def _call(call: Callable[[], Any], when: str, advice: str) -> Any:
    """The result of a call of the user's part. Raises AssertionError: it raised anything but Dropped."""
    try:
        return call()
    except Dropped:
        raise
    except Exception as error:
        raise AssertionError(f"{when} raised {error!r}: {advice}") from error


def check_source(make: type[SourceType], settings: SourceSettings) -> None:
    """Check a source type on shards that exist: the lists of shards and samples, and members of some samples.

    Args:
        make: the user's own class.
        settings: its settings, which name at least one shard.

    Raises AssertionError: it breaks the protocol of `clipstream.data.sources.SourceType`.
    """
    assert SourceType in make.__mro__, "derive it from clipstream.data.sources.SourceType"
    specs = [settings.shards] if isinstance(settings.shards, str) else settings.shards
    lists: list[list[str]] = []
    for _ in range(2):
        source = make(settings, SourceContext())
        found = [source.list_shards(spec) for spec in specs]
        assert not any(isinstance(names, str | Set | None) for names in found), (
            f"list_shards({specs[0]!r}) gave {type(found[0]).__name__}: return a list of the shards' names"
        )
        lists.append([shard for names in found for shard in names])
    shards = lists[0]
    assert shards, "it lists no shard"
    assert all(isinstance(shard, str) for shard in shards), f"a name of a shard is not a str: {shards[:3]!r}"
    assert shards == lists[1], "two calls of list_shards gave different shards: a run could not be repeated"
    assert len(set(shards)) == len(shards), "two shards have the same name"
    assert isinstance(source.describe(shards), str), "describe must return a str"
    for shard in shards[:3]:
        first, again = source.open(shard), source.open(shard)
        assert OpenShard in type(first).__mro__, (
            f"open({shard!r}) gave {type(first).__name__}: derive it from clipstream.data.sources.OpenShard"
        )
        assert isinstance(getattr(first, "index", None), ShardIndex), f"open({shard!r}).index is no ShardIndex"
        keys = [ref.key for ref in first.index.samples]
        assert keys, f"{shard} has no sample"
        assert all(isinstance(key, str) for key in keys), f"{shard}: a key is not a str: {keys[:3]!r}"
        assert len(set(keys)) == len(keys), f"{shard}: two samples have the same key"
        assert keys == [ref.key for ref in again.index.samples], f"{shard}: opened again, it has other samples"
        count = source.num_samples(shard)
        assert count in (None, len(keys)), f"{shard}: num_samples gave {count}, and it has {len(keys)} samples"
        for number in sorted({0, len(keys) // 2, len(keys) - 1}):
            ref = first.index.samples[number]
            where, members = f"{shard}: {ref.key}", first.load(ref)
            assert members and all(isinstance(n, str) and isinstance(data, bytes) for n, data in members.items()), (
                f"{where}: load gave {members!r:.200}: return members as bytes by suffix"
            )
            odd = [name for name in members if name != name.lower() or name.startswith(".")]
            assert not odd, f"{where}: write the suffix {odd[0]!r} in lower case and without a dot before it"
            assert again.load(ref) == members, f"{where}: load gave other members the second time"
            for name, data in members.items():
                assert first.load(ref, (name,)).get(name) == data, (
                    f"{where}: load with suffixes ({name!r},) lacks that member, or changed it"
                )
        first.close()
        again.close()


def check_caption_extractor(extractor: CaptionExtractor, sample: RawSample) -> None:
    """Check a caption extractor on a sample that has a caption.

    Args:
        extractor: the user's own, already constructed.
        sample: `__key__`, `__url__`, and members as bytes by suffix in lower case.

    Raises AssertionError: it breaks the protocol of `clipstream.data.decode.captions.CaptionExtractor`.
    """
    members, before = getattr(extractor, "members", 0), dict(sample)
    assert members is None or (isinstance(members, (tuple, list)) and all(isinstance(name, str) for name in members)), (
        "give it an attribute `members`: make it a tuple of the suffixes that it reads, such as ('json', 'txt'), or "
        "None for all"
    )

    def caption(sample: RawSample, rng: SampleRNG | None = None) -> str:
        advice = "such samples are counted as extractor_error; raise clipstream.errors.Dropped(reason) to drop them"
        try:
            found = _call(lambda: extractor(sample, rng), "it", advice)
        except Dropped as drop:
            raise AssertionError(f"it dropped the sample ({drop}): check it with a sample that has a caption") from drop
        assert isinstance(found, str), f"it gave {type(found).__name__}: return a str"
        assert found.strip(), "it gave an empty caption: raise clipstream.errors.Dropped('empty_caption') instead"
        return found

    first = caption(sample)
    assert caption(sample) == first, f"two calls with rng=None gave different captions: {EVALUATION}"
    for key in range(20):
        drawn = caption(sample, SampleRNG(key))
        assert caption(sample, SampleRNG(key)) == drawn, f"two calls with one rng gave different captions: {CHANCE}"
    assert dict(sample) == before, "it changed the sample: other parts read it too"
    if members is not None:
        wanted = {name.lower().lstrip(".") for name in members}
        fewer = {name: value for name, value in sample.items() if name.startswith("__") or name in wanted}
        assert caption(fewer) == first, (
            f"with the members {sorted(wanted)} alone it gave another caption: name all that it reads in `members`"
        )
    empty: RawSample = {"__key__": "empty", "__url__": "empty.tar"}
    with contextlib.suppress(Dropped):
        advice = "raise clipstream.errors.Dropped('no_caption') instead, so that it is counted under that reason"
        _call(lambda: extractor(empty, None), "a sample without members", advice)


def check_transform(transform: Callable[[dict[str, Any]], RawSample | None], sample: RawSample) -> None:
    """Check a sample transform on a sample.

    Args:
        transform: the function that a source's `transform` names; None as its result drops the sample.
        sample: `__key__`, `__url__`, and members as bytes by suffix in lower case.

    Raises AssertionError: it gives no mapping, or not the same one twice.
    """
    first, second = transform(dict(sample)), transform(dict(sample))
    assert first is None or isinstance(first, Mapping), (
        f"it gave {type(first).__name__}: return the sample, or None to drop it"
    )
    same = first is second is None
    if first is not None and second is not None:
        same = list(first) == list(second) and all(np.array_equal(one, second[key]) for key, one in first.items())
    assert same, "two calls with the same sample gave different results: a run could not be repeated"


def check_image_transform(transform: UserImageTransform, size: tuple[int, int] = (32, 48)) -> None:
    """Check an image transform on images of several shapes.

    Args:
        transform: the user's own, already constructed.
        size: (height, width) of the model that it is to work with.

    Raises AssertionError: it breaks the protocol of `clipstream.data.decode.images.UserImageTransform`.
    """
    noise = np.random.default_rng(0)
    advice = "a run counts that as image_transform_error; raise clipstream.errors.Dropped(reason) to drop images"
    for height, width in ((480, 640), (100, 20), (5, 7), (1, 1)):
        image = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        before, shown = image.tobytes(), f"an image of {width} x {height}"
        for key in (None, *range(5)):
            results = []
            for _ in range(2):
                with contextlib.suppress(Dropped):
                    rng = None if key is None else SampleRNG(key)
                    results.append(_call(partial(transform, image, size, rng), f"it got {shown} and", advice))
            for pixels in results:
                assert isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (*size, 3), (
                    f"it gave {getattr(pixels, 'dtype', type(pixels).__name__)} {getattr(pixels, 'shape', '')} for "
                    f"{shown}: return a numpy array uint8 {(*size, 3)}"
                )
            assert len(results) != 1 and (not results or np.array_equal(results[0], results[1])), (
                f"two calls with one rng gave different pixels: {EVALUATION if key is None else CHANCE}"
            )
        assert image.tobytes() == before, "it changed the image: make a copy of it"


def check_tokenizer(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    """Check a tokenizer: shape, dtype and range of its ids, and that the ids of a text depend on that text only.

    Raises AssertionError: it breaks the protocol of `clipstream.data.decode.tokenizers.Tokenizer`.
    """
    for name in ("context_length", "vocab_size"):
        value = getattr(tokenizer, name, None)
        assert isinstance(value, int) and value > 0, f"`{name}` is {value!r}: make it a positive whole number"
    width, vocabulary = tokenizer.context_length, tokenizer.vocab_size
    ids = tokenizer.encode(list(texts))
    assert isinstance(ids, np.ndarray), f"encode gave {type(ids).__name__}: return a numpy array"
    assert ids.dtype == np.int32, f"encode gave {ids.dtype}: return int32"
    assert ids.shape == (len(texts), width), (
        f"encode gave the shape {ids.shape} for {len(texts)} texts: cut and pad each to context_length {width}"
    )
    assert ids.min() >= 0 and ids.max() < vocabulary, (
        f"ids lie within {ids.min()} to {ids.max()}, but vocab_size is {vocabulary}"
    )
    assert np.array_equal(tokenizer.encode(list(texts)), ids), "the same texts gave other ids the second time"
    for text, row in zip(texts, ids, strict=True):
        assert np.array_equal(tokenizer.encode([text])[0], row), (
            f"{text[:40]!r} alone gave other ids than among others: the ids of a text must depend on nothing else"
        )
    decoded = tokenizer.decode([int(i) for i in ids[0]])
    assert isinstance(decoded, str), f"decode gave {type(decoded).__name__}: return a str"


def check_loss(loss: ContrastiveLoss, *, logit_bias: bool = False) -> None:
    """Check a loss on random features: alone, with a sample of weight 0, and on two ranks with unequal rows.

    The ranks are two gloo processes, forked from this one, or spawned if CUDA is available; then the loss must be
    picklable.

    Args:
        loss: the user's own, already constructed.
        logit_bias: whether the loss is for models with a logit bias.

    Raises AssertionError: it breaks the protocol of `clipstream.losses.contrastive.ContrastiveLoss`.
    """
    for name in ("max_logit_scale", "min_logit_scale"):
        limit = getattr(loss, name, "absent" if name == "max_logit_scale" else None)
        assert limit is None or (isinstance(limit, int | float) and limit > 0), (
            f"`{name}` is {limit!r}: make it a positive number, or None for no limit"
        )
    with tempfile.TemporaryDirectory() as folder:  # first, as a process cannot fork after autograd has used CUDA
        method = "spawn" if torch.cuda.is_available() else "fork"
        try:
            start_processes(_on_rank, (loss, logit_bias, folder), RANKS, start_method=method)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise AssertionError(f"on {RANKS} ranks it failed: {str(error).strip().splitlines()[-1]}") from error
        parts = [torch.load(Path(folder, str(rank))) for rank in range(RANKS)]
    value, gradients = _share(loss, logit_bias, range(ROWS))
    again, _ = _share(loss, logit_bias, range(ROWS))
    assert torch.equal(value, again), "the same features gave another loss the second time"
    for name in ("image", "text"):
        assert gradients[name].any(), f"the gradient of `{name}` is absent: training needs it"
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), f"the gradient of `{name}` is not finite"
    without, _ = _share(loss, logit_bias, range(ROWS - 1), global_size=ROWS - 1)
    zeroed, _ = _share(loss, logit_bias, range(ROWS), last_weight=0.0)
    assert _close(zeroed, without), (
        f"a sample of weight 0 changed the loss from {without:.8f} to {zeroed:.8f}: it must be as if it were not there"
    )
    total = sum(share for share, _ in parts)
    assert _close(total, value), (
        f"the shares of {RANKS} ranks sum to {total:.8f}, and the loss of all rows on one rank is {value:.8f}: return "
        "this rank's share, and gather the others' rows with gradient"
    )
    for name, whole in gradients.items():
        found = [part[name] for _, part in parts]
        assert _close(torch.cat(found) if whole.ndim else torch.stack(found).sum(), whole, like=value), (
            f"the gradient of `{name}` on {RANKS} ranks is not that of one rank: gather with gradient, so that every "
            "rank's share tells all rows that it used"
        )


def _close(one: torch.Tensor, other: torch.Tensor, like: torch.Tensor | None = None) -> bool:
    limit = CLOSE.get((other if like is None else like).dtype, 1e-2)
    return torch.allclose(one.double(), other.double(), rtol=limit, atol=limit)


def _on_rank(rank: int, loss: ContrastiveLoss, logit_bias: bool, folder: str) -> None:
    """Save this rank's share and gradients in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        cut = ROWS // 2 + 1
        rows = range(cut) if rank == 0 else range(cut, ROWS)
        torch.save(_share(loss, logit_bias, rows, World(rank=rank, size=RANKS)), Path(folder, str(rank)))
    finally:
        dist.destroy_process_group()


def _share(
    loss: ContrastiveLoss,
    logit_bias: bool,
    rows: range,
    world: World | None = None,
    global_size: int = ROWS,
    last_weight: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The share of some rows of the random features, with distinct captions; its gradients by name, zeros if unused."""
    generator = torch.Generator().manual_seed(0)
    drawn = nn.functional.normalize(torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=generator), dim=-1)
    image, text = drawn[:, rows.start : rows.stop].clone()
    bias = torch.tensor(-2.0, dtype=torch.float64) if logit_bias else None
    features = Features(image, text, torch.tensor(5.0, dtype=torch.float64), bias)
    leaves = {name: leaf.requires_grad_() for name, leaf in features._asdict().items() if leaf is not None}
    weights = torch.ones(len(rows), dtype=torch.float64)
    weights[-1] = last_weight
    batch = Batch(
        pixels=None,
        ids=torch.tensor(rows, dtype=torch.int32)[:, None],
        weights=weights,
        keys=tuple(f"0.tar/{number}" for number in rows),
        sources=torch.zeros(len(rows), dtype=torch.uint8),
        step=0,
        global_size=global_size,
        pictures=torch.tensor(rows, dtype=torch.int64),
    )
    share = loss(features, batch, world or World())
    assert isinstance(share, torch.Tensor) and share.ndim == 0, "it must return a tensor without dimensions"
    assert bool(torch.isfinite(share)), f"it gave {share.item()} on random features"
    assert share.requires_grad, "its result has no gradient: compute it of the features, without detach or no_grad"
    share.backward()  # type: ignore[no-untyped-call]
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return share.detach(), gradients


def check_optimizer(make: Callable[[Any], Optimizer], settings: OptimSettings, *, model: str = "ViT-B-32") -> None:
    """Check an optimizer on a small module, part of which is frozen.

    Args:
        make: the user's class.
        settings: its settings.
        model: the model's name that it is called with.

    Raises AssertionError: it breaks the protocol of `clipstream.training.optim.Optimizer`.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(0)
        towers = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        towers.register_parameter("logit_scale", nn.Parameter(torch.zeros(())))
        for parameter in towers.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        towers[2].requires_grad_(False)
        return towers, make(settings)(towers, model)

    def step(towers: nn.Module, optimizer: torch.optim.Optimizer, lr: float, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in towers.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        return [parameter.detach().clone() for parameter in towers.parameters()]

    towers, optimizer = build()
    assert isinstance(optimizer, torch.optim.Optimizer), (
        f"it gave {type(optimizer).__name__}: return a torch.optim.Optimizer"
    )
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    trainable = [id(parameter) for parameter in towers.parameters() if parameter.requires_grad]
    assert sorted(held) == sorted(trainable), (
        "its groups must hold each trainable parameter once and no frozen one: use parameter_groups(towers, wd)"
    )
    before = [parameter.detach().clone() for parameter in towers.parameters()]
    still = step(towers, optimizer, 0.0, 1)
    assert all(map(torch.equal, before, still)), (
        "a step with learning rate 0 changed weights: take the rate from param_groups[i]['lr'], which training sets"
    )
    moved = step(towers, optimizer, 0.01, 2)
    assert all(weights.isfinite().all() for weights in moved), "a step gave weights that are NaN or infinite"
    assert not all(map(torch.equal, before, moved)), "a step with learning rate 0.01 changed no weight"
    state = optimizer.state_dict()
    for values in state["state"].values():
        for name, value in values.items():
            assert isinstance(value, torch.Tensor), (
                f"the state {name!r} is {value!r}: checkpoints store tensors only; do without, or make it one"
            )
    resumed, again = build()
    for parameter, weights in zip(resumed.parameters(), moved, strict=True):
        parameter.data = weights.clone()
    again.load_state_dict(copy.deepcopy(state))
    assert all(map(torch.equal, step(towers, optimizer, 0.01, 3), step(resumed, again, 0.01, 3))), (
        "a step after state_dict and load_state_dict differs: keep everything that it remembers in its state"
    )


def check_schedule(schedule: Schedule, *, warmup: int = 0, peak: float = 1e-3, total_steps: int = 100) -> None:
    """Check a learning-rate schedule on all steps of a run.

    Args:
        schedule: the user's own, already constructed with its settings.
        warmup: `settings.warmup`; earlier steps are not asked for.
        peak: `optim.lr`.

    Raises AssertionError: it breaks the protocol of `clipstream.training.optim.Schedule`.
    """
    steps = range(warmup, total_steps)
    rates = {step: schedule(step, peak=peak, total_steps=total_steps) for step in steps}
    for step, rate in rates.items():
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        assert number and math.isfinite(rate) and rate >= 0, (
            f"the learning rate of step {step} is {rate!r}: return a finite number, 0 or more"
        )
    again = {step: schedule(step, peak=peak, total_steps=total_steps) for step in reversed(steps)}
    assert again == rates, "the steps in another order gave other rates: a rate must depend on the step alone"


def check_sink(make: Callable[[Any, RunInfo], Sink], settings: Any) -> None:
    """Check a sink with a record of each kind and an image, in a run that starts and in one that resumes.

    Args:
        make: the user's own class; called as make(settings, run).
        settings: its settings.

    Raises AssertionError: it breaks the protocol of `clipstream.report.sinks.Sink`.
    """
    example = Example(torch.zeros((3, 8, 8), dtype=torch.uint8), "a text", key="0.tar/0", guesses=(("a text", 0.5),))
    table = Table("a table", ("class", "right"), (("a cat", "1 of 2"),))
    for resume_step, when in ((None, "a new run"), (10, "a resumed run")):
        with tempfile.TemporaryDirectory() as folder:
            run = RunInfo(Path(folder), total_steps=20, resume_step=resume_step)
            sink = _call(partial(make, settings, run), f"in {when} its construction", "the run would not start")
            for name in ("write", "show", "status", "close"):
                assert callable(getattr(sink, name, None)), (
                    f"it has no method `{name}`: derive from clipstream.report.sinks.Sink, whose methods do nothing"
                )
            for record in SINK_RECORDS:
                given = copy.deepcopy(record)
                _call(partial(sink.write, given), f"in {when} `write`", f"return early for unused records ({record!r})")
                assert given == record, f"`write` changed the record {record!r}: other sinks read it too"
            calls = partial(sink.show, 20, "val", [example], [table]), partial(sink.status, "saving"), sink.close
            for call in calls:
                _call(call, f"in {when} `show`, `status` or `close`", "a run would report it and go on")


def small_context() -> EvalContext:
    """The context of an evaluator, with a small CLIP of random weights on the CPU; for `check_evaluator`."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "small.json")
        config.write_text(json.dumps(SMALL_MODEL))
        towers = build_towers(ModelSettings(name=str(config)), seed=0)
    settings = TokenizerSettings.model_validate({"type": "model"})
    tokenizer = build_tokenizer(settings, towers.open_clip_tokenizer(), towers.context_length)
    return EvalContext(towers, tokenizer, World())


def check_evaluator(
    evaluator: Callable[[EvalContext], Iterable[tuple[str, float]]], context: EvalContext | None = None
) -> None:
    """Check an evaluator on its own data with a small model.

    Args:
        evaluator: the user's own, already constructed with its settings.
        context: the model; `small_context()` unless given.

    Raises AssertionError: it breaks the protocol of `clipstream.evals.runner.Evaluator`.
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
