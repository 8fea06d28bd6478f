"""Owns the way from captions to token ids, and from labels to class numbers.

Whatever the tokenizer is, its ids are those of open_clip's own tokenizer for the same model; only the way there is
shorter: no tensors, less cleaning where nothing needs it, a bounded cache. It imports torch only through open_clip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from clipstream.data.settings import HubTokenizer, PathTokenizer, TokenizerSettings
from clipstream.errors import DataError, SettingsError
from clipstream.plugins import load_plugin

if TYPE_CHECKING:
    import torch

Ids = np.ndarray[Any, np.dtype[np.int32]]

CACHED_WORDS = 100_000  # some 20 MB; English captions of millions of pictures have about as many words
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.*", "merges.txt")


class Tokenizer(Protocol):
    """Makes token ids of texts. A user's own is constructed with its settings.

    Attributes:
        context_length: T, ids a text.
        vocab_size: ids are 0 to vocab_size - 1.
    """

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]; a longer text is cut, a shorter one padded. The ids of a text depend on nothing else."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """A readable text of the ids of one text."""
        ...


def build_tokenizer(
    settings: TokenizerSettings,
    model_tokenizer: Callable[..., torch.Tensor],
    context_length: int,
    *,
    cache_dir: str | None = None,
) -> Tokenizer:
    """The tokenizer that the settings choose, tried on two texts.

    Args:
        settings: which one.
        model_tokenizer: what `open_clip.get_tokenizer` gives for the model: texts -> int [n, T].
        context_length: T of the model; the settings may ask for less.
        cache_dir: the Hub's cache; $HF_HUB_CACHE unless set.

    Raises:
        SettingsError: files or a class that are not there, or a tokenizer that does not fit the model.
    """
    length = settings.context_length or context_length
    if length > context_length:
        raise SettingsError(
            f"tokenizer.context_length {length} is more than the model reads ({context_length}): "
            "set it lower, or choose a model with a longer context"
        )
    tokenizer: Tokenizer
    if isinstance(settings, (HubTokenizer, PathTokenizer)):
        tokenizer = wrap(_hugging_face(settings, model_tokenizer, length, cache_dir), length)
    elif settings.type == "model":
        tokenizer = wrap(model_tokenizer, length)
    else:
        tokenizer = _own(settings)
        if tokenizer.context_length > context_length:
            raise SettingsError(
                f"tokenizer: {settings.type} gives {tokenizer.context_length} ids a text, the model reads {context_length}"
            )
    _try(tokenizer, settings)
    return tokenizer


def wrap(tokenizer: Callable[..., torch.Tensor], context_length: int) -> Tokenizer:
    """open_clip's tokenizer with our protocol; the ids are the same."""
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    if type(tokenizer) is SimpleTokenizer and tokenizer.reduction_fn is None:
        return BpeTokenizer(tokenizer, context_length)
    if type(tokenizer) is HFTokenizer and not tokenizer.tokenizer_mode:
        return HuggingFaceTokenizer(tokenizer, context_length)
    return OpenClipTokenizer(tokenizer, context_length)


class OpenClipTokenizer:
    """Any tokenizer of open_clip, called as it is."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        self._tokenizer = tokenizer
        self.context_length = context_length
        inner = getattr(tokenizer, "tokenizer", None)
        self.vocab_size = int(tokenizer.vocab_size) if inner is None else len(inner)

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]."""
        if not texts:
            return np.zeros((0, self.context_length), dtype=np.int32)
        ids: Ids = self._tokenizer(list(texts), context_length=self.context_length).numpy().astype(np.int32)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text without padding and special tokens."""
        inner = getattr(self._tokenizer, "tokenizer", None)
        if inner is None:
            specials = set(self._tokenizer.all_special_ids) | {0}
            return str(self._tokenizer.decode([int(i) for i in ids if int(i) not in specials])).strip()
        return str(inner.decode([int(i) for i in ids], skip_special_tokens=True))


class HuggingFaceTokenizer(OpenClipTokenizer):
    """open_clip's HFTokenizer in its standard mode: the whole batch goes through Rust into numpy, without tensors."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        super().__init__(tokenizer, context_length)
        self._clean = _Clean(tokenizer.clean_fn)

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]."""
        if not texts:
            return np.zeros((0, self.context_length), dtype=np.int32)
        inner = self._tokenizer.tokenizer
        encoded = inner(
            [self._clean(text) for text in texts],
            max_length=self.context_length,
            padding="max_length",
            truncation=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_tensors="np",
        )
        ids: Ids = encoded["input_ids"].astype(np.int32)
        if self._tokenizer.strip_sep_token:
            ids[ids == inner.sep_token_id] = 0
        return ids


class BpeTokenizer:
    """CLIP's own byte pair encoding (open_clip's SimpleTokenizer), with a bounded cache of words.

    It stops at the word that fills the context: the rest of a long text costs nothing.
    """

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._clean = _Clean(tokenizer.clean_fn)
        self._words: dict[str, list[int]] = {}
        self._specials = dict(zip(tokenizer.cache, tokenizer.cache, strict=True)) if not tokenizer.cache else {}
        self.context_length = context_length
        self.vocab_size = int(tokenizer.vocab_size)

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]: start, the words, end, zeros."""
        ids = np.zeros((len(texts), self.context_length), dtype=np.int32)
        for row, text in zip(ids, texts, strict=True):
            found = [self._tokenizer.sot_token_id]
            for match in self._tokenizer.pat.finditer(self._clean(text)):
                found += self._word(match.group())
                if len(found) >= self.context_length:
                    break
            del found[self.context_length - 1 :]
            found.append(self._tokenizer.eot_token_id)
            row[: len(found)] = found
        return ids
