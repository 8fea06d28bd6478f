"""Owns what makes two runs' batches the same: noted in a checkpoint, and compared with the settings that go on from it.

Never reads a shard, and never decides what to do about a difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from clipstream.data.opening import Opener
from clipstream.data.settings import DataSettings
from clipstream.data.shards import redact, stable_name
from clipstream.data.text import Tokenizer

ORDER = 2  # what the order of samples is computed by; another number is another order
TOKENIZER = "tokenizer"
# What tokenizers treat differently: case, digits, marks, other scripts, spaces, long words, long texts.
PROBES = (
    "a photo of a cat",
    "A Photo, of THE Cat's 12,345 whiskers!",
    "Zürich – naïve café № 7 ½",
    "照片上的猫 кошка на фото 🐈",
    "  two  spaces\tand a tab\n",
    "https://example.com/a_b-c.jpg &amp; <b>bold</b>",
    "antidisestablishmentarianism " * 40,
    "",
)
Order = dict[str, Any]


def order_of(settings: DataSettings, seed: int, tokenizer: Tokenizer, openers: Sequence[Opener]) -> Order:
    """What fixes the global batches, by the setting's name, as JSON gives it back; the folder of the shards does not.

    Args:
        settings: with `lanes` resolved.
        seed: of the run.
        tokenizer: known by what it makes of a few texts, wherever its files are.
        openers: of the sources, in the order of their names; in the mode `indexed` they know their shards' samples.
    """
    sampling = settings.sampling
    order: Order = {
        "run.seed": seed,
        "data.global_batch_size": settings.global_batch_size,
        "data.batch_schedule": settings.batch_schedule,
        "data.lanes": settings.lanes,
        "data.sampling.mode": sampling.mode,
        "data.sampling.shards": sampling.shards,
        "data.sampling.replacement": sampling.replacement,
        "data.sampling.tail": sampling.tail,
        "data.shuffle.window": settings.shuffle.window,
        "data.shuffle.shards": settings.shuffle.shards,
        TOKENIZER: _identity(tokenizer),
        "the version of the order": ORDER,
    }
    for name, opener in zip(sorted(settings.sources), openers, strict=True):
        held = "" if opener.counts is None else f", with {sum(opener.counts):,} samples {_digest(opener.counts)}"
        named = _digest(_stable_names(opener.names))
        order[f"data.sources.{name}.shards"] = f"{len(opener.names)}, named {named}{held}"
        order[f"data.sources.{name}.weight"] = settings.sources[name].weight
    found: Order = json.loads(json.dumps(order))
    return found


def differences(before: Order | str, now: Order, former: str) -> dict[str, str]:
    """What differs: setting -> 'old value -> new value'.

    Args:
        before: of a checkpoint; a hash in those of versions that noted no more.
        now: of the present settings.
        former: the hash that such a version would have made of them.
    """
    if isinstance(before, str):
        text = "batch size and schedule, lanes, seed, shards, weights, sampling or shuffle (it did not note which)"
        return {} if before == former else {"the checkpoint's": text}
    return {
        key: f"{before.get(key, 'none')} -> {now.get(key, 'none')}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    }


def former_hash(settings: DataSettings, seed: int, openers: Sequence[Opener]) -> str:
    """The hash that versions noted before they noted each setting."""
    names, sampling = sorted(settings.sources), settings.sampling
    fixed = [
        ORDER, seed, settings.global_batch_size, settings.lanes, sampling.mode, settings.shuffle.window,
        settings.shuffle.shards, names, [_former_names(opener.names) for opener in openers],
        [settings.sources[name].weight for name in names],
        *([settings.batch_schedule] if settings.batch_schedule else []),
        # There was no such choice then.
        *([] if (sampling.shards, sampling.replacement) == ("shared", True) else ["another"]),
    ]  # fmt: skip
    return _digest(fixed)


def _identity(tokenizer: Tokenizer) -> str:
    """A tokenizer by what it does: files move, and classes are renamed."""
    made = []
    for text in PROBES:
        try:
            made.append(tokenizer.encode([text]).tolist())
        except Exception as error:  # a user's own may refuse a text that its captions never hold
            made.append(type(error).__name__)
    return f"{tokenizer.vocab_size} tokens, {tokenizer.context_length} a text, of kind {_digest(made)}"


def _stable_names(urls: list[str]) -> list[str]:
    """Shards by names that stay when they are copied elsewhere or a signature in their URL is renewed."""
    return _told_apart([stable_name(url) for url in urls], urls)


def _former_names(urls: list[str]) -> list[str]:
    """As former versions had them: of commands and packed files, with all that stands behind the last slash."""
    return _told_apart([redact(url).partition("?")[0].rpartition("/")[2] for url in urls], urls)


def _told_apart(names: list[str], urls: list[str]) -> list[str]:
    return names if len(set(names)) == len(set(urls)) else [redact(url) for url in urls]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
