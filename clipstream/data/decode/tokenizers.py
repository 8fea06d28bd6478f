"""Tokenizers: captions to token ids, with the same ids as open_clip's own tokenizer of the model.

It is faster than open_clip's by three means: no tensors, text cleaning only where it has an effect, and a bounded cache
of words. Imports torch only through open_clip, and `BytePairs` not at all.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from clipstream.data.settings import HubTokenizer, PathTokenizer, TokenizerSettings
from clipstream.errors import SettingsError, absent
from clipstream.text import shortened
from clipstream.utils.plugins import describe_error, untrusted_code_message
from clipstream.utils.section import make_part

if TYPE_CHECKING:
    import torch

Ids = np.ndarray[Any, np.dtype[np.int32]]

CACHED_WORDS = 100_000  # about 20 MB, and the number of words in millions of English captions
VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"  # of CLIP, a file of open_clip
MERGES, READ = 49152 - 256 - 2, 1 << 20  # lines of it that are used, and bytes that hold them
COUNTED = 256  # letters of a word up to which its count is exact: base64, for example, has no spaces
_SPECIAL = ("<start_of_text>", "<end_of_text>")
_ASCII = re.compile(  # of lower case; the kinds that are frequent are tried first
    r"[a-z]+|[0-9]|'(?:s|t|re|ve|m|ll|d)|<start_of_text>|<end_of_text>|[^\sa-z0-9]+", re.ASCII
)
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that CLIP's vocabulary has as themselves
CUT = "\N{BLACK SCISSORS}"  # in a caption that is shown: where the context length cuts it
SHOWN_REST = 120  # characters of what is cut
_LONG = 2000  # length of a text from which its words are matched lazily, and of a word from which a part is tried first
_FIRST_PART = 1 << 13  # characters of a long text that are tried first
# Steps of `tokenizers`: that change characters one by one, that part texts at spaces, that part words further.
_LOCAL = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Precompiled", "Strip", "StripAccents")
_AT_SPACES = ("BertPreTokenizer", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit")
_INSIDE = ("Digits", "Punctuation")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json",
)  # fmt: skip
_FETCHED = (*TOKENIZER_FILES, "tokenizer*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "config.json")


class Tokenizer(Protocol):
    """Makes token ids of texts. A user's own class is constructed with its settings."""

    @property
    def context_length(self) -> int:
        """T, ids per text."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]; longer texts are cut, shorter ones padded. The ids of a text depend on that text alone."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The readable text of the ids of one text."""
        ...


def readable(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of the ids; the ids themselves if they cannot be decoded, as after truncation inside a character."""
    try:
        return tokenizer.decode(ids)
    except Exception:  # a user's own may raise anything
        return " ".join(map(str, ids))


def mark_cut(tokenizer: Tokenizer, text: str) -> str:
    """The text on one line, with CUT where the context length ends, and no more than SHOWN_REST characters after it."""
    text = " ".join(text.split())
    try:
        ids = tokenizer.encode([text])[0]
        if (tokenizer.encode([f"{text} and more"])[0] != ids).any():  # the context has room
            return text
        low, high = 0, len(text)
        while low < high:  # the shortest beginning that has these ids
            middle = (low + high) // 2
            low, high = (low, middle) if (tokenizer.encode([text[:middle]])[0] == ids).all() else (middle + 1, high)
    except Exception:  # as in `readable`
        return text
    rest = text[low:].strip()
    return f"{text[:low]} {CUT} {shortened(rest, SHOWN_REST)}" if rest else text


def build_tokenizer(
    settings: TokenizerSettings,
    model_tokenizer: Callable[..., torch.Tensor],
    context_length: int,
    *,
    cache_dir: str | None = None,
) -> Tokenizer:
    """The tokenizer that the settings choose, tested on two texts.

    Args:
        settings: which one.
        model_tokenizer: of the model, from `open_clip.get_tokenizer`: texts -> int [n, T].
        context_length: T of the model; the settings may ask for less.
        cache_dir: the Hub's cache; $HF_HUB_CACHE unless set.

    Raises SettingsError: files or a class are missing, or the tokenizer does not fit the model.
    """
    length = settings.context_length or context_length
    if length > context_length:
        raise SettingsError(f"tokenizer.context_length {length} exceeds the model's {context_length}")
    tokenizer: Tokenizer
    if isinstance(settings, (HubTokenizer, PathTokenizer)):
        tokenizer = wrap(_hugging_face(settings, model_tokenizer, length, cache_dir), length)
    elif settings.type == "model":
        tokenizer = wrap(model_tokenizer, length)
    else:
        tokenizer = make_part("tokenizer", settings)
    # Two texts are encoded now, so that a tokenizer that cannot pad, for example, is an error in the settings.
    who = f"tokenizer ({settings.type})"
    try:
        ids, length, size = tokenizer.encode(["a photo of a cat", "a"]), tokenizer.context_length, tokenizer.vocab_size
    except Exception as error:
        raise SettingsError(f"{who}: cannot encode a text: {describe_error(settings.type, error)}") from error
    if length > context_length:
        raise SettingsError(f"{who}: context_length {length} exceeds the model's {context_length}")
    if getattr(ids, "shape", None) != (2, length) or ids.dtype != np.int32:
        got = f"{type(ids).__name__} {getattr(ids, 'dtype', '')} {getattr(ids, 'shape', '')}"
        raise SettingsError(f"{who}: encode returned {got}, not an array int32 {(2, length)}")
    if ids.min() < 0 or ids.max() >= size:
        raise SettingsError(f"{who}: ids {ids.min()} to {ids.max()} are not within its vocab_size {size}")
    return tokenizer


def wrap(tokenizer: Any, context_length: int) -> Tokenizer:
    """open_clip's tokenizer with this module's protocol; the ids are the same."""
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
        if not texts:
            return np.zeros((0, self.context_length), dtype=np.int32)
        ids: Ids = self._tokenizer(list(texts), context_length=self.context_length).numpy().astype(np.int32)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text without padding and special tokens."""
        inner = getattr(self._tokenizer, "tokenizer", None)
        if inner is None:
            return str(self._tokenizer.decode([int(i) for i in ids]))
        return str(inner.decode([int(i) for i in ids], skip_special_tokens=True))


class HuggingFaceTokenizer(OpenClipTokenizer):
    """open_clip's HFTokenizer in its standard mode: the whole batch goes through Rust into numpy, without tensors."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        super().__init__(tokenizer, context_length)
        self._clean, self._cuts = _Clean(tokenizer.clean_fn), _parts_words(tokenizer.tokenizer)

    def _cut(self, text: str) -> str:
        """The clean text, or its beginning if that fills the context."""
        for part in self._clean.parts(text) if self._cuts and len(text) > _FIRST_PART else ():
            clean = self._clean(part)
            ids = self._tokenizer.tokenizer(clean, max_length=self.context_length, truncation=True)["input_ids"]
            if len(ids) == self.context_length:
                return clean
        return self._clean(text)

    def encode(self, texts: Sequence[str]) -> Ids:
        if not texts:
            return np.zeros((0, self.context_length), dtype=np.int32)
        inner = self._tokenizer.tokenizer
        encoded = inner(
            [self._cut(text) for text in texts],
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


class BytePairs:
    """CLIP's byte pair encoding of words, with a bounded cache of them. Source: open_clip 3.3.0, SimpleTokenizer.

    Args:
        ranks: of the pairs of pieces that are merged.
        ids: of pieces.
        special: tokens with an id of their own: of the start, of the end, …

    Attributes:
        words: ids of the words in the cache.
        longest: letters of the longest piece.
    """

    def __init__(self, ranks: dict[tuple[str, ...], int], ids: dict[str, int], special: Sequence[str]) -> None:
        self._ranks, self._ids = ranks, ids
        self._special = {word: [ids[word]] for word in special}
        self.words, self.longest = dict(self._special), max(map(len, ids))

    def encode(self, text: str) -> list[int]:
        """The ids of the start, of a text that is not cut, and of the end."""
        start, end = (self.words[word] for word in _SPECIAL)
        return [*start, *(number for word in _words(text) for number in self.words.get(word) or self.add(word)), *end]

    def count(self, text: str) -> int:
        """The number of these ids; of longer words than COUNTED, nearly."""
        known = self.words
        return 2 + sum([len(known.get(word) or self._add_parts(word)) for word in _words(text)])

    def add(self, word: str) -> list[int]:
        """The ids of a word that was not in the cache."""
        if len(self.words) >= CACHED_WORDS:
            self.words.clear()
            self.words.update(self._special)
        known = self.words[word] = self.ids_of(self.merge(letters_of(word)))
        return known

    def _add_parts(self, word: str) -> list[int]:
        parts = (word[at : at + COUNTED] for at in range(0, len(word), COUNTED))
        return [number for part in parts for number in self.words.get(part) or self.add(part)]

    def ids_of(self, pieces: Sequence[str]) -> list[int]:
        return [self._ids[piece] for piece in pieces]

    def merge(self, letters: str) -> list[str]:
        """The pieces of a word that are in the vocabulary."""
        known, parts = self._ranks, [*letters[:-1], f"{letters[-1]}</w>"]
        ranks = [known.get(pair, MERGES) for pair in pairwise(parts)]
        # One pair at a time, the first of the best: a pair with the new piece ranks below the pair that it is made of.
        while ranks and (least := min(ranks)) < MERGES:
            at = ranks.index(least)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            del ranks[at]
            for place in range(max(0, at - 1), min(at + 1, len(ranks))):
                ranks[place] = known.get((parts[place], parts[place + 1]), MERGES)
        return parts

    def first_pieces(self, letters: str, wanted: int) -> list[str]:
        """The first pieces of a very long word, at least as many as wanted, or all.

        A merge never undone, a place where the word is parted at the end separates merges before and behind it: the
        pieces before are those of the word cut there. The longest piece has `longest` letters, so one of as many
        places in a row parts the word. If cut at each of them it begins with the same pieces, so does the whole word.
        """
        cut = 4 * wanted + self.longest
        while cut < len(letters):
            # A blank is part of no piece: the letter before it is not read as the last one of a word.
            ends = [self.merge(f"{letters[:end]} ")[:-1][:wanted] for end in range(cut - self.longest, cut)]
            if len(ends[0]) == wanted and all(one == ends[0] for one in ends):
                return ends[0]
            cut *= 4
        return self.merge(letters)


@cache
def clip_byte_pairs() -> BytePairs:
    """Those of CLIP's own vocabulary, without torch; read in 0.05 s."""
    package = find_spec("open_clip")
    assert package is not None and package.origin is not None
    with gzip.open(Path(package.origin).with_name(VOCABULARY)) as file:
        lines = file.read(READ).decode(errors="ignore").split("\n")[1 : MERGES + 1]
    letters, ranks = _letters().values(), {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, ranks), *_SPECIAL]
    return BytePairs(ranks, {piece: number for number, piece in enumerate(pieces)}, _SPECIAL)


@cache
def _letters() -> dict[int, str]:
    """The letter that the vocabulary has for each byte, in the order of their ids."""
    others = (byte for byte in range(256) if byte not in _PLAIN)
    return {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def letters_of(word: str) -> str:
    """A word in the letters of the vocabulary, one for each byte."""
    letters = _letters()
    return "".join([letters[byte] for byte in word.encode("utf-8", "surrogatepass")])


def is_plain(text: str) -> bool:
    """Whether ftfy and HTML leave a text as it is."""
    return text.isascii() and text.isprintable() and "&" not in text


def _words(text: str) -> list[str]:
    """The words of a text, once it is cleaned as open_clip does, in lower case."""
    if is_plain(text):
        return _ASCII.findall(text.lower())
    import ftfy  # of open_clip, as regex: on use, as their import takes long
    import regex

    letters = _ASCII.pattern.replace("a-z", r"\p{L}").replace("0-9", r"\p{N}")
    text = html.unescape(html.unescape(ftfy.fix_text(text))).lower()
    found: list[str] = regex.findall(letters, text, regex.IGNORECASE)
    return found


class BpeTokenizer(OpenClipTokenizer):
    """CLIP's own byte pair encoding (open_clip's SimpleTokenizer), with a bounded cache of words.

    It stops at the word that fills the context. A text of 23 characters takes 8 µs, one of 150 takes 21; the same
    vocabulary in a Rust tokenizer gives the same ids in 27 and 83 µs, open_clip's own class in 100 and 190 µs.
    """

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        super().__init__(tokenizer, context_length)
        self._clean = _Clean(tokenizer.clean_fn)
        special = [tokenizer.decoder[number] for number in tokenizer.all_special_ids]
        self._bpe = BytePairs(tokenizer.bpe_ranks, tokenizer.encoder, special)
        # The same pattern for ASCII texts, without Unicode's classes: Python's own `re` is faster.
        ascii_only = tokenizer.pat.pattern.replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9")
        self._ascii_words = re.compile(ascii_only, re.IGNORECASE | re.ASCII)
        self._cuts = not any(len(token.split()) > 1 for token in special)

    def encode(self, texts: Sequence[str]) -> Ids:
        """int32 [n, T]: start, the words, end, zeros."""
        ids = np.zeros((len(texts), self.context_length), dtype=np.int32)
        for row, text in zip(ids, texts, strict=True):
            for part in self._clean.parts(text) if self._cuts else (text,):
                found = self._first_ids(part)
                if len(found) >= self.context_length:
                    break
            del found[self.context_length - 1 :]
            found.append(self._tokenizer.eot_token_id)
            row[: len(found)] = found
        return ids

    def _first_ids(self, text: str) -> list[int]:
        """The start, and the ids of the words up to that which fills the context."""
        found, known = [self._tokenizer.sot_token_id], self._bpe.words
        text = self._clean(text)
        pattern = self._ascii_words if text.isascii() else self._tokenizer.pat
        words = pattern.findall(text) if len(text) < _LONG else (m.group() for m in pattern.finditer(text))
        for word in words:
            found += known.get(word) or self._ids_of(word)
            if len(found) >= self.context_length:
                break
        return found

    def _ids_of(self, word: str) -> list[int]:
        """The ids of a word that is not in the cache; of a very long one the first, as many as the context holds."""
        if len(word) * 4 > _LONG and len(letters := letters_of(word)) > _LONG:
            return self._bpe.ids_of(self._bpe.first_pieces(letters, self.context_length - 1))
        return self._bpe.add(word)

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to the end token, without the start token."""
        inner = self._tokenizer
        numbers = [int(i) for i in ids]
        if inner.eot_token_id in numbers:
            numbers = numbers[: numbers.index(inner.eot_token_id)]
        return str(inner.decode([i for i in numbers if i != inner.sot_token_id])).strip()


def _parts_words(tokenizer: Any) -> bool:
    """Whether the ids of a Hugging Face tokenizer's first words depend on these alone: a Rust tokenizer that keeps the
    first ids, parts texts at spaces, changes single characters before, and knows no token with a space in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.truncation_side != "right":
        return False
    normalizers, splitters = (_steps(one) for one in (backend.normalizer, backend.pre_tokenizer))
    at_spaces = [x["type"] for x in splitters if x["type"] in _AT_SPACES and x.get("use_regex", x.get("split", True))]
    return (
        bool(at_spaces)
        and all(one["type"] in (*_AT_SPACES, *_INSIDE) for one in splitters)
        and all(one["type"] in _LOCAL or _replaces_characters(one, "Metaspace" in at_spaces) for one in normalizers)
        and not any(len(token.split()) > 1 for token in tokenizer.get_added_vocab())
    )


def _replaces_characters(step: dict[str, Any], metaspace: bool) -> bool:
    """Whether a normalizer replaces single characters or white space; runs of spaces by the sign of `metaspace`."""
    pattern = step.get("pattern", {}).get("Regex", "")
    return bool(re.fullmatch(r"\[(?:\\.|[^\]\\])*\]|\\s\+", pattern)) or (metaspace and pattern == " {2,}")


def _steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer of `tokenizers`, of the parts of a sequence one by one."""
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {"normalizers": []}
    steps: list[dict[str, Any]] = state.get("normalizers", state.get("pretokenizers", [state]))
    return steps


class _Clean:
    """open_clip's cleaning of a text, without its costly part (ftfy, HTML) for texts that this cannot change."""

    def __init__(self, function: Callable[[str], str]) -> None:
        from open_clip.tokenizer import canonicalize_text, get_clean_fn

        self._full = function
        self._canonicalize: Callable[[str], str] = canonicalize_text
        names = ("whitespace", "lower", "canonicalize")
        self._name = next((name for name in names if get_clean_fn(name) is function), None)

    def parts(self, text: str) -> Iterator[str]:
        """Beginnings of a text whose words, once clean, are the first of the text, each longer; at last the text.

        ftfy mends each line for itself (6.3, `fix_text`), no HTML entity has a line break in it, and lower case depends
        on a word alone (the final sigma). A text that is not mended is cut at any space, others behind a line.
        """
        size, end = _FIRST_PART, " " if is_plain(text) else "\n"
        while self._name is not None and size < len(text):
            if part := text[: text.rfind(end, 0, size) + 1]:
                yield part
            size *= 16
        yield text

    def __call__(self, text: str) -> str:
        if self._name is None or not is_plain(text):
            return self._full(text)
        if self._name == "canonicalize":
            return self._canonicalize(text)
        text = " ".join(text.split())
        return text.lower() if self._name == "lower" else text


def _hugging_face(
    settings: HubTokenizer | PathTokenizer, model_tokenizer: Any, context_length: int, cache_dir: str | None
) -> Any:
    """open_clip's HFTokenizer over the files that the settings name."""
    if isinstance(settings, PathTokenizer):
        path = Path(settings.name).absolute()
        folder = path.parent if path.is_file() else path
        if not folder.is_dir():
            raise SettingsError(f"tokenizer.name: {absent(path)}")
        if not _holds_tokenizer(folder):
            files = ", ".join(TOKENIZER_FILES)
            raise SettingsError(f"tokenizer.name: no tokenizer in {folder}: none of {files} exists")
    else:
        folder = _hub_folder(settings.name, cache_dir)
    read = getattr(getattr(model_tokenizer, "tokenizer", None), "name_or_path", None)
    if read and Path(read).resolve() == folder.resolve():
        # The model was built from these files, and with the cleaning of texts that it was trained with.
        return model_tokenizer
    from open_clip.tokenizer import HFTokenizer

    try:
        return HFTokenizer(str(folder), context_length=context_length, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # transformers raises nearly anything on files that do not fit together
        text = untrusted_code_message(folder, error) or f"cannot load the tokenizer in {folder}: {error}"
        raise SettingsError(f"tokenizer.name: {text}") from error


def _hub_folder(name: str, cache_dir: str | None) -> Path:
    """The folder of a repository's tokenizer files in the Hub's cache; downloaded only if they are missing."""
    from huggingface_hub import constants, snapshot_download

    cache, why = Path(cache_dir or constants.HF_HUB_CACHE), "no tokenizer in the repository"
    for local in (True,) if constants.HF_HUB_OFFLINE else (True, False):
        patterns = None if local else list(_FETCHED)
        try:
            folder = Path(snapshot_download(name, cache_dir=cache, local_files_only=local, allow_patterns=patterns))
        except Exception as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        if _holds_tokenizer(folder):
            return folder
    offline = " HF_HUB_OFFLINE is set: nothing is downloaded." if constants.HF_HUB_OFFLINE else ""
    folder_name = f"models--{name.replace('/', '--')}"
    raise SettingsError(
        f"tokenizer.name: no tokenizer {name!r} in {cache / folder_name}.{offline} Run this on "
        f"a machine with a network: hf download {name} ({why})"
    )


def _holds_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in TOKENIZER_FILES)
