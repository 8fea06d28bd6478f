"""The fingerprint of the order of samples: all that makes two runs' global batches the same.

It is kept in checkpoints (`DataState.fingerprint`) and compared when a run resumes. No shard is read for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.order.state import Fingerprint
from clipstream.data.settings import DataSettings
from clipstream.data.shard_url import redact, stable_name
from clipstream.data.sources.source import Source

ORDER_VERSION = 2  # of the algorithm; another number is another order
MIXED_ORDER_VERSION = 3  # the same, of several sources and of the mode `epoch`
TOKENIZER = "tokenizer"
# Texts that tokenizers treat differently: case, digits, marks, other scripts, spaces, long words, long texts.
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


def fingerprint_of(settings: DataSettings, seed: int, tokenizer: Tokenizer, sources: Sequence[Source]) -> Fingerprint:
    """All that fixes the global batches, by the setting's name, as JSON values. The shards' folder does not matter.

    Args:
        settings: with `lanes` resolved.
        seed: of the run.
        tokenizer: identified by its ids of a few texts, wherever its files are.
        sources: in the order of names; in the mode `indexed` with the counts of their samples.
    """
    sampling = settings.sampling
    mixed = sampling.mode == "epoch" or (sampling.mode == "resampled" and len(settings.sources) > 1)
    order: Fingerprint = {
        "run.seed": seed,
        "data.global_batch_size": settings.global_batch_size,
        "data.batch_schedule": settings.batch_schedule,
        "data.lanes": settings.lanes,
        "data.sampling.mode": sampling.mode,
        "data.sampling.shards": sampling.shards,
        "data.sampling.replacement": sampling.replacement,
        "data.sampling.remainder": sampling.remainder,
        "data.shuffle.window": settings.shuffle.window,
        "data.shuffle.shards": settings.shuffle.shards,
        TOKENIZER: _tokenizer_identity(tokenizer),
        "the version of the order": MIXED_ORDER_VERSION if mixed else ORDER_VERSION,
    }
    for name, source in zip(sorted(settings.sources), sources, strict=True):
        held = "" if source.counts is None else f", with {sum(source.counts):,} samples {_digest(source.counts)}"
        named = _digest(stable_names(source.names))
        order[f"data.sources.{name}.shards"] = f"{len(source.names)}, named {named}{held}"
        order[f"data.sources.{name}.weight"] = settings.sources[name].weight
    found: Fingerprint = json.loads(json.dumps(order))
    return found


def differences(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """Setting -> 'old value -> new value' of all that differs."""
    return {
        key: f"{before.get(key, 'none')} -> {now.get(key, 'none')}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    }


def stable_names(urls: list[str]) -> list[str]:
    """Names of shards that stay the same when they are copied elsewhere or a signature in their URL is renewed."""
    names = [stable_name(url) for url in urls]
    return names if len(set(names)) == len(set(urls)) else [redact(url) for url in urls]


def _tokenizer_identity(tokenizer: Tokenizer) -> str:
    """A tokenizer by its ids, as files are moved and classes renamed."""
    ids = []
    for text in PROBES:
        try:
            ids.append(tokenizer.encode([text]).tolist())
        except Exception as error:  # a user's own may refuse a text that never occurs in its captions
            ids.append(type(error).__name__)
    return f"{tokenizer.vocab_size} tokens, {tokenizer.context_length} a text, of kind {_digest(ids)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
