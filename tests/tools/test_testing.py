"""The checks for users' own parts pass correct parts and describe what is wrong with others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipstream.data.decode.captions import LabelField, build_caption
from clipstream.data.order.rng import SampleRNG
from clipstream.data.text_settings import CaptionSettings
from clipstream.distributed.world import World
from clipstream.errors import Dropped
from clipstream.losses.contrastive import SigmoidLoss, SoftmaxLoss
from clipstream.losses.settings import ClipLossSettings, SiglipLossSettings
from clipstream.testing import (
    check_caption_extractor,
    check_evaluator,
    check_image_transform,
    check_loss,
    check_optimizer,
    check_schedule,
    check_tokenizer,
    check_transform,
)
from clipstream.training.optim import SCHEDULES, AdamW, ScheduleSettings
from tests.support.evaluating import context_of
from tests.support.forks import skip_where_autograd_has_threads
from tests.support.pictures import ByteTokenizer

SAMPLE = {"__key__": "0", "__url__": "a.tar", "txt": b"a cat", "json": b'{"a": ["b", "c"]}', "cls": b"1"}
Call = Callable[[Mapping[str, Any], "SampleRNG | None"], Any]


class Extractor:
    def __init__(self, call: Call, members: Any = ("txt",)) -> None:
        self.call, self.members = call, members

    def __call__(self, sample: Mapping[str, Any], rng: SampleRNG | None) -> Any:
        return self.call(sample, rng)


def text(sample: Mapping[str, Any]) -> str:
    if "txt" not in sample:
        raise Dropped("no_caption")
    return str(sample["txt"].decode())


def spoil(sample: Any) -> str:
    sample["txt"] = b"other"
    return "a"


def shrunk(picture: Image.Image, size: tuple[int, int], rng: SampleRNG | None) -> Any:
    if min(picture.size) < 2:
        raise Dropped("too_small")
    return np.asarray(picture.resize(size[::-1])) // (1 if rng is None else 1 + rng.integer(2))


def blackened(picture: Image.Image, size: tuple[int, int], rng: SampleRNG | None) -> Any:
    picture.paste((0, 0, 0), (0, 0, *picture.size))
    return np.zeros((*size, 3), np.uint8)


class Changed(ByteTokenizer):
    def __init__(self, change: Callable[[Any, Sequence[str]], Any] = lambda ids, _: ids, **attributes: Any) -> None:
        self.change = change
        self.__dict__.update(attributes)

    def encode(self, texts: Sequence[str]) -> Any:
        return self.change(super().encode(texts), texts)


WRONG: dict[Any, list[tuple[Any, str]]] = {
    check_caption_extractor: [
        (Extractor(lambda s, d: text(s), 3), "make it a tuple"),
        (Extractor(lambda s, d: text(s), ("json",)), "dropped the sample"),
        (Extractor(lambda s, d: text(s) + str("json" in s)), "name all that it reads"),
        (Extractor(lambda s, d: s["txt"].decode()), r"Dropped\('no_caption'\)"),
        (Extractor(lambda s, d: text(s).encode()), "bytes: return a str"),
        (Extractor(lambda s, d: text(s)[:0]), "empty caption"),
        (Extractor(lambda s, d: text(s)[9]), "IndexError"),
        (Extractor(lambda s, d: text(s) + str(random.random())), "evaluation must not depend on chance"),
        (Extractor(lambda s, d: text(s) + (str(random.random()) if d else "")), "take all chance from `rng`"),
        (Extractor(lambda s, d: spoil(s) if "txt" in s else text(s)), "changed the sample"),
        (lambda s, d: "a", "attribute `members`"),
    ],
    check_transform: [
        (lambda sample: [sample], "it gave list"),
        (lambda sample: {str(random.random()): b""}, "could not be repeated"),
    ],
    check_image_transform: [
        (lambda p, size, rng: p.resize(size[::-1]), "return a numpy array uint8"),
        (lambda p, size, rng: shrunk(p, size, rng).astype(np.float32), "it gave float32"),
        (lambda p, size, rng: np.zeros((*size[::-1], 3), np.uint8), r"\(48, 32, 3\)"),
        (lambda p, size, rng: np.zeros((*size, 3), np.uint8)[9999], "image_transform_error"),
        (lambda p, size, rng: np.full((*size, 3), random.randrange(256), np.uint8), "must not depend on chance"),
        (lambda p, size, rng: np.full((*size, 3), random.randrange(256) if rng else 0, np.uint8), "from `rng`"),
        (blackened, "changed the image"),
    ],
    check_tokenizer: [
        (Changed(context_length=0), "`context_length` is 0"),
        (Changed(vocab_size="many"), "`vocab_size` is 'many'"),
        (Changed(lambda ids, _: ids.tolist()), "gave list: return a numpy array"),
        (Changed(lambda ids, _: ids.astype(np.int64)), "gave int64"),
        (Changed(lambda ids, _: ids[:, :5]), "cut and pad each"),
        (Changed(lambda ids, _: ids - 1), "vocab_size is 256"),
        (Changed(lambda ids, _: ids // 2 + random.randrange(100)), "second time"),
        (Changed(lambda ids, texts: ids // 2 + len(texts)), "depend on nothing else"),
        (Changed(decode=lambda ids: 3), "gave int: return a str"),
    ],
}


@pytest.mark.parametrize(
    ("check", "part", "message"), [(check, *wrong) for check, parts in WRONG.items() for wrong in parts]
)
def test_parts_that_are_wrong_are_told_why(check: Any, part: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(part, *[dict(SAMPLE)] * (check in (check_caption_extractor, check_transform)))


def test_parts_that_are_right_pass() -> None:
    for settings in ({"type": "text"}, {"type": "json", "path": "a"}):
        check_caption_extractor(build_caption(CaptionSettings.model_validate(settings)), SAMPLE)
    check_caption_extractor(LabelField("cls"), SAMPLE)
    check_caption_extractor(Extractor(lambda s, d: text(s), None), SAMPLE)
    check_transform(lambda sample: {**sample, "x": b""}, SAMPLE)
    check_transform(lambda sample: None, SAMPLE)
    check_image_transform(shrunk)
    check_tokenizer(ByteTokenizer())


class OwnLoss:
    """The softmax loss, spoilt by `spoil(share, features, world)`."""

    max_logit_scale = 100.0

    def __init__(self, spoil: Callable[[Any, Any, Any], Any] = lambda share, features, world: share) -> None:
        self.spoil = spoil

    def __call__(self, features: Any, batch: Any, world: Any) -> Any:
        return self.spoil(SoftmaxLoss(ClipLossSettings())(features, batch, world), features, world)


def test_right_losses_pass() -> None:
    skip_where_autograd_has_threads()
    check_loss(OwnLoss())
    check_loss(OwnLoss(lambda share, features, world: share.float()))
    check_loss(SigmoidLoss(SiglipLossSettings()), logit_bias=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda share, f, world: share.detach(), "has no gradient"),
        (lambda share, f, world: share.reshape(1), "without dimensions"),
        (lambda share, f, world: share * float("nan"), "on random features"),
        (lambda share, f, world: share * random.random(), "another loss the second time"),
        (lambda share, f, world: share / world.size, "sum to"),
        (lambda share, f, world: share + 0.1 * len(f.image), "weight 0 changed the loss"),
        (lambda share, f, world: 0 * share.detach() + f.image.sum() * 0 + f.logit_scale, "of `image` is absent"),
    ],
)
def test_wrong_losses_are_told(spoil: Callable[[Any, Any, Any], Any], message: str) -> None:
    skip_where_autograd_has_threads()
    with pytest.raises(AssertionError, match=message):
        check_loss(OwnLoss(spoil))


def test_evaluators_that_are_right_and_wrong() -> None:
    context = context_of(World())
    check_evaluator(lambda c: iter([("a", 1.0), ("b", 2)]), context)
    for found, message in (
        ([], "yielded no metric"),
        ([("a", 1.0), ("a", 1.0)], "'a' twice"),
        ([("a", float("nan"))], "finite number"),
        ([("a", "1")], "finite number"),
        ([1.0], "pairs of a name and a number"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_evaluator(lambda c, found=found: iter(found), context)  # type: ignore[misc]
    with pytest.raises(AssertionError, match="must not depend on chance"):
        check_evaluator(lambda c: iter([("a", random.random())]), context)


def trained(towers: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in towers.parameters() if p.requires_grad]


def adamw(change: Callable[[torch.optim.AdamW], object]) -> Callable[[Any], Any]:
    """An optimizer that builds AdamW and changes it."""

    def build(towers: torch.nn.Module, model: str) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(trained(towers))
        change(optimizer)
        return optimizer

    return lambda settings: build


class Stubborn(torch.optim.SGD):
    """Has a learning rate of its own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1
        super().step()


class Counting(torch.optim.SGD):
    """Remembers the number of its steps outside of its state."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        super().step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda settings: lambda towers, model: None, "gave NoneType: return a torch.optim.Optimizer"),
        (lambda settings: lambda towers, model: torch.optim.SGD(towers.parameters()), "and no frozen one"),
        (adamw(lambda optimizer: optimizer.param_groups[0]["params"].pop()), "each trainable parameter once"),
        (adamw(lambda o: setattr(o, "step", lambda: None)), "changed no weight"),
        (lambda settings: lambda t, m: torch.optim.SGD(trained(t)), None),
        (lambda settings: lambda t, m: Stubborn(trained(t)), "learning rate 0"),
        (lambda settings: lambda t, m: Counting(trained(t)), "load_state_dict"),
        (lambda settings: AdamW(settings), None),
    ],
)
def test_optimizers(make: Callable[[Any], Any], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_optimizer(make, AdamW.Settings())


def test_schedules() -> None:
    for kind in ("cosine", "linear", "constant", "const-cooldown"):
        more = {"cooldown": 10} if kind == "const-cooldown" else {}
        settings = ScheduleSettings.model_validate({"type": kind, "warmup": 5, **more})
        check_schedule(SCHEDULES[kind](settings), warmup=5)
    with pytest.raises(AssertionError, match="of step 7 is nan"):
        check_schedule(lambda step, *, peak, total_steps: math.nan if step == 7 else peak)
    calls = iter(range(1000))
    with pytest.raises(AssertionError, match="depend on the step alone"):
        check_schedule(lambda step, *, peak, total_steps: float(next(calls)))
