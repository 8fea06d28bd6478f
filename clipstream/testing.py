"""Owns the checks that users call on parts of their own, in their own tests: caption extractor, transform, tokenizer.

Each raises AssertionError with what is wrong and what to do, and gives nothing back. No test framework is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clipstream.data.fields import CaptionExtractor
from clipstream.data.order import Draws
from clipstream.data.text import Tokenizer
from clipstream.errors import Dropped

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
