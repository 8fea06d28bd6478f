"""Profiles of samples: member suffixes, JSON fields with examples, and the flags that would read them.

Raw samples enter; advice for users leaves. Images are not decoded.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import yaml

from clipstream.data.decode.captions import RawSample, build_caption, candidates, split_keys
from clipstream.data.json_path import parse_path, step_of, structure, unwrapped
from clipstream.data.source_settings import (
    CaptionSettings,
    JsonCaption,
    TextCaption,
)
from clipstream.errors import Dropped
from clipstream.storage.tar import PACKING, UNPACKING
from clipstream.text import lines, listed, printable
from clipstream.utils import content

MAX_FIELDS = 500  # a JSON member whose names are ids would otherwise fill the memory
MAX_SUFFIXES = 5000
MAX_LEAVES = 2000  # values of one JSON member that are looked at
MAX_JSON = 1 << 24  # bytes of a JSON member that is looked into
DEPTH = 8  # levels of a JSON member that are looked into
SHORT_FLAGS = "data.sources.train"  # the source that --caption-key and the like set
EXAMPLE_CHARS = 60
NAME_CHARS = 200  # of a field that is suggested
TRIED = 256  # first samples whose fields are looked at, and on which suggestions are tried
TRIED_BYTES = 1 << 22  # of their members without images
KEPT = 32  # different texts of a field that are kept
KEPT_CHARS = 120  # of each
CAPTION_NAMES = ("caption", "captions", "text", "texts", "description", "title", "alt", "prompt", "cap", "txt")
NOT_CAPTIONS = (
    *("url", "uri", "key", "id", "uid", "uuid", "status", "error", "error_message", "license", "exif"),
    *("sha256", "md5", "hash", "filename", "file", "path", "lang", "language", "locale", "split", "sku"),
)
# One word that is a code of a language, has digits or signs, or is very long: an id, a hash, a path, a URL.
_CODE = re.compile(r"(?i:true|false|none|null|nan)|[a-z]{2}(-[A-Za-z]{2,4})?|(?=.*[\d_=/\\@:])[!-~]+|[!-~]{25,}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_MARKED = re.compile(r"^\W*[a-z]{2,3}(?:[-_@.][\w.@-]+)?\s*[=:]", re.M)  # a line with a language's code: `fr.utf8=…`
_OF_ONE = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "HANGUL": "CJK"}  # scripts that one text may mix
_UNDOTTED = r"s,\.\([^./]*\.\),_\1,g"  # of neighbouring dots every second one: twice
RENAMING = f"{UNPACKING.removesuffix('&& ')}--transform='{_UNDOTTED};{_UNDOTTED}' && {PACKING}"
_UNFOLDED = r"s,/\([^/.]*\)\.\([^/]*\)$,.\1.\2,"  # FOLDER/NAME.SUFFIX: FOLDER.NAME.SUFFIX
UNFOLDING = UNPACKING + PACKING.replace(" -C", f" --transform='{_UNFOLDED}' -C")
PARTS = 8  # files that each folder of a tar has, at most
FALSE_NEGATIVES = 0.05  # share of a batch that is equal to another sample, from which it is told


@dataclass
class Field:
    """A text member, or a field of JSON members."""

    type: str  # of its first value that is not null
    example: str  # that value, shortened; several if one sample has several
    member: str = "json"  # suffix of the member that holds the field
    path: str = ""  # of the field in it; '' for the whole member
    samples: int = 0  # number of samples that have it
    most: int = 1  # largest number of values in one sample, for a field in a list
    count: int = 0  # number of texts over all samples
    texts: Counter[str] = field(default_factory=Counter)  # the first different texts, shortened, with their counts

    def add(self, value: Any) -> None:
        """Count a text, or those of a list."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                self.count += 1
                text = text[:KEPT_CHARS]
                if text in self.texts or len(self.texts) < KEPT:
                    self.texts[text] += 1

    @property
    def kind(self) -> str:
        """The type in words."""
        return self.type if self.most == 1 else f"{self.type}, up to {self.most} a sample"

    @property
    def is_constant(self) -> bool:
        """Whether (nearly) all texts are the same few."""
        return self.count >= 20 and len(self.texts) < KEPT and len(self.texts) <= max(1, self.count // 50)

    @property
    def are_tags(self) -> bool:
        """Whether samples have several short texts, as tags, and not alternative captions."""
        return _are_tags(self.count / max(1, self.samples), self.texts)

    @property
    def language(self) -> float:
        """Score from 0 to 1: how much the texts look like language and differ from each other."""
        kept = self.texts.total()
        if not kept:
            return 0.0
        likeness = sum(count * _language(text) for text, count in self.texts.items()) / kept
        return likeness * (0.5 + 0.5 * len(self.texts) / min(self.count, KEPT))


class Profile:
    """Counts of the members of a source's samples, and its first samples. Picklable, and of bounded size."""

    def __init__(self) -> None:
        self.samples: int = 0
        self.suffixes: Counter[str] = Counter()  # samples by member suffix
        self.parts: Counter[str] = Counter()  # samples by NAME.SUFFIX in a folder of the tar; the first names alone
        self.images: Counter[str] = Counter()  # as `suffixes`, of the members whose bytes begin as an image
        self.tried: list[dict[str, bytes]] = []  # the first samples, without their images
        self.strange: dict[str, str] = {}  # by suffix, what members are that may have the image and are not decoded

    def add(self, sample: RawSample) -> None:
        """Count one raw sample, suffix -> bytes; keys with `__` are ignored."""
        self.samples += 1
        kept: dict[str, bytes] = {}
        _, in_folder, stem = str(sample.get("__key__", "")).rpartition("/")
        for name, data in sample.items():
            if name.startswith("__") or not isinstance(data, (bytes, bytearray, memoryview)):
                continue
            suffix = name.lower()
            if suffix in self.suffixes or len(self.suffixes) < MAX_SUFFIXES:
                self.suffixes[suffix] += 1
            if in_folder and ((part := f"{stem}.{suffix}") in self.parts or len(self.parts) <= PARTS):
                self.parts[part] += 1
            if (kind := content.kind(bytes(data[:512]))) in content.IMAGES:
                self.images[suffix] += 1
            elif kind in content.STRANGE:
                self.strange.setdefault(suffix, str(content.describe(bytes(data[:512]))))
            else:
                kept[suffix] = bytes(data)
        self._keep([kept])

    def merge(self, other: Profile) -> None:
        self.samples += other.samples
        self.suffixes.update(other.suffixes)
        self.parts.update(other.parts)
        self.images.update(other.images)
        self.strange = other.strange | self.strange
        self._keep(other.tried)

    def _keep(self, samples: Sequence[dict[str, bytes]]) -> None:
        """Keep samples while there is room."""
        held = sum(len(data) for sample in self.tried for data in sample.values())
        for sample in samples[: TRIED - len(self.tried)]:
            held += sum(map(len, sample.values()))
            if held <= TRIED_BYTES:
                self.tried.append(sample)

    def fields(self) -> tuple[dict[str, Field], dict[str, Field]]:
        """(text members by suffix, JSON fields) of the samples kept.

        JSON fields are named by their path in the member `json`; those of another member by `SUFFIX:path`.
        """
        members: dict[str, Field] = {}
        inside: dict[str, Field] = {}
        for suffix, data in (item for sample in self.tried for item in sample.items()):
            if suffix.rpartition(".")[2] == "json":
                _add_json(inside, suffix, data)
            elif text := _readable(data[:512]):
                inner = structure(data.decode(errors="ignore"))
                texts = [one for one in inner if isinstance(one, str)] if isinstance(inner, list) else []
                if inner and not texts:
                    _add_json(inside, suffix, json.dumps(inner, default=str).encode())
                elif suffix in members or len(members) < MAX_FIELDS:
                    member = members.setdefault(suffix, Field("str", _short(text), suffix))
                    member.samples += 1
                    member.add(texts or text)
        return members, inside

    def _draw_captions(self, caption: CaptionSettings) -> list[list[str]]:
        """The captions that training may draw with these settings, of each sample kept."""
        extract = build_caption(caption)
        found: list[list[str]] = []
        for sample in self.tried:
            try:
                by_path = candidates(extract, {"__key__": "", "__url__": "", **sample})
                found.append([text for texts in by_path for text in texts])
            except Dropped:
                found.append([])
        return found

    def suggestion(self, image_key: str, caption: CaptionSettings | None, place: str = SHORT_FLAGS) -> list[str]:
        """The flags that would read these samples, best guess first; only those that differ from the settings.

        `place` is the key of the settings where the source stands.
        """
        flags = []
        if not self._has_image(image_key):
            dotted = self._dotted_suffixes()
            known = [suffix for suffix, _ in self.images.most_common() if suffix not in dotted and _nameable(suffix)]
            option = f"--{'' if place == SHORT_FLAGS else f'{place}.'}image-key"
            flags += [f"{option} {shlex.quote(suffix)}" for suffix in known[:1]]
        if caption is not None and not self._has_caption(caption):
            flags += self.captions(caption, place)[:1]
        return flags

    def hint(self, image_key: str, caption: CaptionSettings | None, place: str = SHORT_FLAGS) -> str:
        """The flags to use, and other members and fields with text if no caption was found; '' if nothing helps."""
        flags = self.suggestion(image_key, caption, place)
        parts = [f"use {' '.join(flags)}"] if flags else []
        if not self.images and not self._has_image(image_key):
            parts = [f"member {suffix} is {what}" for suffix, what in [*self.strange.items()][:2]]
        if caption is not None and not self._has_caption(caption):
            others = [flag for flag in self.captions(caption, place) if flag not in flags]
            if others:
                parts.append(f"other members and fields with text: {', '.join(others[:5])}")
            elif not flags:
                parts.append("no member or JSON field has text that looks like a caption")
        return "; ".join(parts)

    def advice(self, image_key: str, caption: CaptionSettings | None, place: str = SHORT_FLAGS) -> str:
        """Lines for a user whose source gives nothing usable: what was seen, what is missing, the flag to use.

        `caption` is None where no caption is read, but a label.
        """
        told = self.summary()
        if not self.samples:
            return lines(*told)
        if not self._has_image(image_key):
            wanted = split_keys(image_key)
            named = " or ".join(wanted) if len(wanted) < 5 else f"{wanted[0]}, {wanted[1]} or the like"
            told.append(f"no sample has an image member named {named} (--image-key)")
        if caption is None:
            told.append(
                f"set the fields that the evaluator reads below --{place.removesuffix('.data')}: members, or json:PATH"
            )
        elif not self._has_caption(caption):
            key = caption.key if isinstance(caption, (TextCaption, JsonCaption)) else caption.type
            at, flag = "", "key"
            if isinstance(caption, JsonCaption):
                at, flag = f" at {' or '.join(caption.paths)}", "json"
            told.append(f"no sample has text in the member {key.replace(';', ' or ')}{at} (--caption-{flag})")
        return lines(*filter(None, [*told, self.layout(), self.hint(image_key, caption, place)]))

    def summary(self) -> list[str]:
        """Two lines: suffixes with counts, and JSON fields with counts, types and examples."""
        if not self.samples:
            return ["no sample could be read"]
        seen = [f"{printable(suffix, 60)} ({count:,})" for suffix, count in self.suffixes.most_common()]
        lines = [f"members seen in {self.samples:,} samples: {listed(seen, 20) or 'none'}"]
        if json_fields := self.fields()[1]:
            ranked = sorted(json_fields.items(), key=lambda item: -item[1].samples)
            fields = [f"{printable(path, 60)} ({f.samples:,}, {f.kind}, e.g. {f.example})" for path, f in ranked]
            lines.append(f"JSON fields seen: {listed(fields, 15)}")
        return lines

    def captions(self, caption: CaptionSettings, place: str = SHORT_FLAGS) -> list[str]:
        """Flags for every member or field that looks like a caption, likeliest first.

        Each gives texts of the samples kept, and others than the settings do. Ranked by name; fields
        that repeat the same few texts come last, and those that do not look like language (codes, hashes, URLs,
        numbers) are left out. If the settings read JSON already, JSON fields named like captions come before text
        members.
        """
        text_rank = 15 if isinstance(caption, JsonCaption) else 0
        ranked: list[tuple[tuple[Any, ...], str, CaptionSettings]] = []
        dotted = {suffix.rpartition(".")[0] for suffix in self._dotted_suffixes()}
        members, json_fields = self.fields()
        for suffix, member in members.items():
            if suffix.rpartition(".")[0] in dotted or suffix in NOT_CAPTIONS:  # the text of one image of several
                continue
            if suffix == "class" and member.is_constant:  # images in one folder
                continue
            if member.language and suffix != "cls" and self.suffixes[suffix] * 2 >= self.samples and _nameable(suffix):
                name = "caption" if suffix == "txt" or suffix.startswith("caption") else suffix
                rank = text_rank + (CAPTION_NAMES.index(name) if name in CAPTION_NAMES else 12)
                key = (member.is_constant, rank, 0, -member.language, -member.samples)
                flag = f"--caption-key {shlex.quote(suffix)}"
                if place != SHORT_FLAGS:
                    flag = f"--{place}.caption {shlex.quote(f'{{type: text, key: {_scalar(suffix)}}}')}"
                ranked.append((key, flag, TextCaption(key=suffix)))
        for found in json_fields.values():
            path = found.path or "*"  # a list of texts in itself
            if found.type not in ("str", "list of str") or not _nameable(path) or not found.language:
                continue
            names = [step.lower() for step in parse_path(path) if isinstance(step, str)]
            if path != "*" and (not names or names[-1] in NOT_CAPTIONS):
                continue
            rank = min((CAPTION_NAMES.index(name) + 1 for name in names if name in CAPTION_NAMES), default=20)
            alternative = (found.type != "str") + (names[-1:] not in ([one] for one in ("en", *CAPTION_NAMES[:4])))
            key = (found.is_constant, rank, alternative, -found.language, -found.samples)
            if place == SHORT_FLAGS and found.member == "json" and ";" not in path:
                flag = f"--caption-json {shlex.quote(path)}"
            else:
                member_key = "" if found.member == "json" else f"key: {_scalar(found.member)}, "
                value = f"{{type: json, {member_key}path: {_scalar(path)}}}"
                flag = f"--{place}.caption {shlex.quote(value)}"
            ranked.append((key, flag, JsonCaption(path=path, key=found.member)))
            if found.are_tags and f"json {shlex.quote(path)}" in flag:
                joined = f"{{{path}}}"
                flag = f"--caption-json {shlex.quote(joined)}"
                ranked.append(((*key[:2], -1, *key[3:]), flag, JsonCaption(path=joined)))
        now = self._draw_captions(caption) if isinstance(caption, (TextCaption, JsonCaption)) else None
        best_first = sorted(ranked, key=lambda one: one[:2])
        return [flag for _, flag, found in best_first if any(texts := self._draw_captions(found)) and texts != now]

    def tags(self, caption: CaptionSettings) -> str:
        """A note if training would draw one of several tags of a sample with these settings; '' if not."""
        if not isinstance(caption, JsonCaption) or not (found := list(filter(None, self._draw_captions(caption)))):
            return ""
        texts = Counter(text for texts in found for text in texts)
        each, joined = texts.total() / len(found), shlex.quote(f"{{{caption.paths[0]}}}")
        if not _are_tags(each, texts):
            return ""
        return f"training draws one of {each:.0f} short texts of a sample: --caption-json {joined} joins them"

    def layout(self) -> str:
        """A note if each sample is a folder, or names of images have dots before their extension; '' if not."""
        stems, ends = zip(*(part.split(".", 1) for part in self.parts), strict=True) if self.parts else ((), ())
        if 2 <= len(set(stems)) == len(stems) <= PARTS and len(set(ends)) > 1 and min(self.parts.values()) > 2:
            files, first = printable(", ".join(sorted(self.parts)), 200), printable(next(iter(self.parts)), 60)
            return (
                f"each folder in the tar has the files {files}. Files belong to one sample if their paths are equal up "
                "to the first dot of the name, so each of these is a sample of its own. If a folder is a sample, "
                f"rename its files, e.g. to FOLDER.{first}: {UNFOLDING} (the check of NEW.tar names the flags to use)"
            )
        if "tar" in self.suffixes:
            return "the tar holds tars: unpack it, and name those"
        if not (dotted := self._dotted_suffixes()):
            return ""
        shown = [printable(suffix, 60) for suffix in dotted]
        return (
            f"images are members {listed(shown, 3)} of their samples: a key ends "
            f"at the first dot of the file's name, so photo.{shown[0]} is member {shown[0]} of the sample photo. To "
            f"use one of them alone: --image-key {shown[0]}. If each is an image of its own, rename the files, e.g. to "
            f"photo_{shown[0]}: {RENAMING}"
        )

    def _dotted_suffixes(self) -> list[str]:
        """Suffixes of images such as `0.png` and `1.png`, which differ before their last dot."""
        kinds: dict[str, list[str]] = {}
        for suffix in self.images:
            kinds.setdefault(suffix.rpartition(".")[2], []).append(suffix)
        dotted = []
        for extension, alike in kinds.items():
            names = [suffix for suffix in alike if suffix != extension]
            numbered = any(char.isdigit() for name in names for char in name.removesuffix(extension))
            if len(alike) > 4 or (len(alike) > 1 and numbered):
                dotted += names
        return dotted

    def _has_image(self, image_key: str) -> bool:
        return any(self.suffixes[suffix] for suffix in split_keys(image_key))

    def _has_caption(self, caption: CaptionSettings) -> bool:
        """Whether any of the samples kept has the caption that the settings name."""
        return not isinstance(caption, (TextCaption, JsonCaption)) or any(self._draw_captions(caption))


def _are_tags(each: float, texts: Counter[str]) -> bool:
    """Whether texts, so many of each sample, are tags: of one word or two, three or more a sample."""
    return each >= 2.5 and sum(len(text.split()) for text in texts) < 2 * len(texts)


def _add_json(fields: dict[str, Field], member: str, data: bytes) -> None:
    here: Counter[str] = Counter()
    try:
        if len(data) > MAX_JSON:
            raise ValueError("not looked into")
        leaves = list(islice(_leaves(json.loads(data)), MAX_LEAVES))
    except (ValueError, RecursionError):
        kind = "large JSON" if len(data) > MAX_JSON else "not valid JSON, or nested too deep"
        leaves = [("", kind, data[:EXAMPLE_CHARS].decode(errors="replace"))]
    for path, kind, value in leaves:
        title = path if member == "json" and path else f"{member}:{path}"
        if title not in fields and len(fields) >= MAX_FIELDS:
            continue
        found = fields.setdefault(title, Field(kind, _short(value), member, path))
        here[title] += 1
        if found.type == "null":
            found.type, found.example = kind, _short(value)
        elif found.samples == 0 and 1 < here[title] <= 3:
            found.example += f" | {_short(value)}"
        found.add(value)
    for title, number in here.items():
        fields[title].samples += 1
        fields[title].most = max(fields[title].most, number)


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """(path, kind, value) of all fields of a JSON value; `*` stands for the positions of a list of objects or lists."""
    deep = depth >= DEPTH
    value = unwrapped(value)
    if isinstance(value, dict) and not deep:
        for name, inner in value.items():
            if name := str(name):  # no path can name a field with an empty name
                yield from _leaves(inner, f"{path}.{step_of(name)}" if path else step_of(name), depth + 1)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value) and not deep:
        for inner in value:
            yield from _leaves(inner, f"{path}.*" if path else "*", depth + 1)
    elif isinstance(value, (dict, list)) and deep:
        yield path, "deeper levels", None
    elif isinstance(value, list):
        kinds = {_kind(item) for item in value}
        yield path, f"list of {kinds.pop()}" if len(kinds) == 1 else "list", value
    else:
        yield path, _kind(value), value


def _kind(value: Any) -> str:
    return {type(None): "null", dict: "object"}.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    """A JSON value as text, shortened."""
    if isinstance(value, str):
        value = value[: EXAMPLE_CHARS + 1]
    text = printable(json.dumps(value, ensure_ascii=False), 2 * EXAMPLE_CHARS)
    return text if len(text) <= EXAMPLE_CHARS else text[: EXAMPLE_CHARS - 1] + "…"


def _language(text: str) -> float:
    """Score from 0 to 1: how much a text looks like language, and not like a code, a number or an address."""
    text = text.strip()
    letters = sum(char.isalpha() for char in text)
    if not letters or _CODE.fullmatch(text):
        return 0.0
    marks = sum(char.isspace() or unicodedata.category(char)[0] == "M" for char in text)
    words = len(_WORD.findall(text))
    if not text.isascii() and " " not in text:  # scripts without spaces between words
        words = max(words, letters // 2)
    return (letters + marks) / len(text) * (1 + min(words, 3)) / 4


def is_multilingual(text: str) -> bool:
    """Whether a text has several languages: letters of three scripts, or lines that begin with a language's code."""
    letters = {char for char in text if char.isalpha()}
    scripts = {unicodedata.name(char, "").split(" ")[0].split("-")[0] for char in letters}
    return len({_OF_ONE.get(script, script) for script in scripts}) > 2 or len(_MARKED.findall(text)) > 1


def _nameable(*names: str) -> bool:
    """Whether names can be used in a suggested command."""
    return all(name and len(name) <= NAME_CHARS and printable(name) == name for name in names)


def _scalar(text: str) -> str:
    """A text as a scalar in YAML's flow style."""
    plain = re.fullmatch(r"\w[\w.*-]*", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text, ensure_ascii=False)


def _readable(head: bytes) -> str:
    """The beginning of a member if it is text, or ''."""
    # 512 bytes may end inside a character, whose first bytes (at most 3) are dropped.
    text = head.decode("utf-8", errors="ignore").strip()
    if len(text.encode()) + 3 < len(head.strip()) or any(ord(char) < 32 and char not in "\t\r\n\x1b" for char in text):
        return ""
    return text


def share_of_equal(values: Any, batch: int, shards: Any = None, of: float = 1.0) -> float:
    """The expected share of the samples of a batch that have the value of another one, from n samples of the data.

    Of each sample, the share of the others with its value is an unbiased estimate of the probability p that a sample of
    the data has it; one of `batch` - 1 has it with 1 - (1 - p)^(`batch` - 1), of which the mean over the samples is no
    overestimate. As samples of a shard are often alike, those of the same shard and of others are compared apart, each
    with its share of the data. Fewer than two equal pairs may be chance: 0.

    Args:
        values: [n], hashes.
        shards: [n], the shard of each; None if the samples are those of a batch: the share itself.
        of: number of shards of the data for each shard that was seen.
    """
    values = np.unique(values, return_inverse=True)[1]
    equal = np.bincount(values, minlength=1)[values]
    if (equal - 1).sum() < 4:
        return 0.0
    if shards is None:
        return float((equal > 1).mean())
    shards = np.unique(shards, return_inverse=True)[1]
    both = np.unique(values * (shards.max() + 1) + shards, return_inverse=True)[1]
    there, within = (np.bincount(numbers)[numbers] for numbers in (shards, both))
    own, others = (within - 1) / np.maximum(there - 1, 1), (equal - within) / np.maximum(len(values) - there, 1)
    share = there / len(values) / of
    return float(1 - ((1 - share * own - (1 - share) * others) ** (batch - 1)).mean())


def warning_of_equal(captions: Any, images: Any, batch: int, shards: Any = None, of: float = 1.0) -> str:
    """The warning on samples of a batch that the loss takes as negatives, though they are equal; '' if they are few.

    Args:
        captions, images: hashes of n samples, [n]; the others as for `share_of_equal`.
    """
    shares = {
        by: share_of_equal(values, batch, shards, of) for by, values in (("captions", captions), ("pictures", images))
    }
    by, most = max(shares.items(), key=lambda item: item[1])
    if most < FALSE_NEGATIVES:
        return ""
    named = zip(("caption", "image file"), shares.values(), strict=True)
    words = [f"{share:.0%} have the {word}" for word, share in named if share >= FALSE_NEGATIVES]
    flags = "--loss.duplicates mask" + " --loss.duplicates-by pictures" * (by == "pictures")
    return (
        f"of the samples in a batch of {batch:,}, about {' and '.join(words)} of another one, which the loss takes as "
        f"a negative: set {flags}, or --loss.positives.by if a field has the group of a sample"
    )
