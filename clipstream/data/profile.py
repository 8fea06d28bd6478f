"""Owns the view of what samples hold: member suffixes, JSON fields with examples, and the flag that would read them.

It looks at raw samples only, decodes no picture, and decides nothing: which samples are used is `fields`' work.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from clipstream.data.fields import split_keys
from clipstream.data.settings import CaptionSettings, JsonCaption, TextCaption

MAX_FIELDS = 500  # a JSON member whose names are ids would otherwise fill the memory
SHORT_FLAGS = "data.sources.train"  # the source that --caption-key and the like set
EXAMPLE_CHARS = 60
CAPTION_NAMES = ("caption", "captions", "text", "texts", "description", "title", "alt", "prompt", "cap", "txt")
NOT_CAPTIONS = (
    *("url", "uri", "key", "id", "uid", "uuid", "status", "error", "error_message", "license", "exif"),
    *("sha256", "md5", "hash", "filename", "file", "path"),
)


class JsonField(NamedTuple):
    """A field of JSON members: samples that have it, the kind of its first value, and that value, cut short."""

    samples: int
    type: str
    example: str


class Profile:
    """Counts of what a source's samples hold. Picklable; small whatever the number of samples.

    Attributes:
        samples: number of samples added.
        suffixes: samples by member suffix.
        images: samples by suffix of the members whose bytes begin as a picture.
        texts: first example by suffix of the members that are short readable text.
        json_fields: by dotted path into the member `json`; of another JSON member, `SUFFIX:path`.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.suffixes: Counter[str] = Counter()
        self.images: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self.json_fields: dict[str, JsonField] = {}

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count one raw sample: `__…__` keys are passed over, the others are suffix -> bytes."""
        self.samples += 1
        for name, data in sample.items():
            if name.startswith("__") or not isinstance(data, (bytes, bytearray, memoryview)):
                continue
            suffix = name.lower()
            self.suffixes[suffix] += 1
            head = bytes(data[:512])
            if _is_image(head):
                self.images[suffix] += 1
            elif suffix.rpartition(".")[2] == "json":
                self._add_json(suffix, bytes(data))
            elif suffix not in self.texts and len(self.texts) < MAX_FIELDS and (text := _readable(head)):
                self.texts[suffix] = text

    def merge(self, other: Profile) -> None:
        """Add another profile's counts to this one; the first example of each field stays."""
        self.samples += other.samples
        self.suffixes.update(other.suffixes)
        self.images.update(other.images)
        self.texts = other.texts | self.texts
        for path, field in other.json_fields.items():
            self._count(path, field)

    def suggestion(self, image_key: str, caption: CaptionSettings | None) -> list[str]:
        """The flags that would read these samples, best guess first; only those that differ from the settings."""
        flags = []
        wanted = split_keys(image_key)
        if not any(self.suffixes[suffix] for suffix in wanted):
            flags += [f"--image-key {_quoted(suffix)}" for suffix, _ in self.images.most_common(1)]
        if caption is not None and not self._caption_found(caption):
            flags += self._caption_flags(caption)[:1]
        return flags

    def advice(self, image_key: str, caption: CaptionSettings | None, place: str = SHORT_FLAGS) -> str:
        """Lines for a user whose source gives nothing usable: what was seen, what is missing, the flag to use.

        Args:
            caption: None where no caption is read, but a label.
            place: key of the settings where the source stands.
        """
        lines = self.summary()
        wanted = split_keys(image_key)
        if not any(self.suffixes[suffix] for suffix in wanted):
            lines.append(f"no sample has an image member named {' or '.join(wanted)} (--image-key)")
        missing = caption is not None and not self._caption_found(caption)
        if caption is None:
            lines.append(f"the label is named by --{place.removesuffix('.data')}.label: a member, or json:PATH")
        elif missing:
            lines.append(_caption_missing(caption))
        if note := self._dots_in_keys():
            lines.append(note)
        if flags := self.suggestion(image_key, caption):
            lines.append(f"use {' '.join(_placed(flag, place) for flag in flags)}")
            if caption is not None and missing:
                others = [_placed(flag, place) for flag in self._caption_flags(caption) if flag not in flags]
                if others:
                    lines.append(f"other members and fields with text: {', '.join(others[:5])}")
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """What was seen, in two lines: suffixes with counts, JSON fields with counts, types and examples."""
        if not self.samples:
            return ["no sample was found in the shards"]
        seen = ", ".join(f"{suffix} ({count:,})" for suffix, count in self.suffixes.most_common(20))
        rest = len(self.suffixes) - 20
        more = f" and {rest:,} more" if rest > 0 else ""
        lines = [f"members seen in {self.samples:,} samples: {seen or 'none'}{more}"]
        if self.json_fields:
            ranked = sorted(self.json_fields.items(), key=lambda item: -item[1].samples)
            fields = ", ".join(f"{path} ({f.samples:,}, {f.type}, e.g. {f.example})" for path, f in ranked[:15])
            more = f" and {len(ranked) - 15:,} more" if len(ranked) > 15 else ""
            lines.append(f"JSON fields seen: {fields}{more}")
        return lines

    def _add_json(self, suffix: str, data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            self._count(f"{suffix}:", JsonField(1, "not valid JSON", repr(data[:EXAMPLE_CHARS])))
            return
        prefix = "" if suffix == "json" else f"{suffix}:"
        for path, kind, example in _leaves(value):
            self._count(prefix + path, JsonField(1, kind, _short(example)))

    def _count(self, path: str, field: JsonField) -> None:
        known = self.json_fields.get(path)
        if known is not None:
            # A field that was null first takes the type of the first value that says something.
            kind = field if known.type == "null" else known
            self.json_fields[path] = JsonField(known.samples + field.samples, kind.type, kind.example)
        elif len(self.json_fields) < MAX_FIELDS:
            self.json_fields[path] = field

    def _caption_found(self, caption: CaptionSettings) -> bool:
        """Whether any sample has what the settings name; a user's own extractor is trusted to find its members."""
        if isinstance(caption, TextCaption):
            return any(self.suffixes[suffix] for suffix in split_keys(caption.key))
        if isinstance(caption, JsonCaption):
            if caption.fallback and any(self.suffixes[suffix] for suffix in split_keys(caption.fallback)):
                return True
            prefix = "" if caption.key.lower() == "json" else f"{caption.key.lower()}:"
            return any(self._has_text(prefix + path) for path in caption.paths)
        return True

    def _has_text(self, path: str) -> bool:
        fields = {name.lower(): field for name, field in self.json_fields.items()}
        field = fields.get(path.lower())
        if field is None:  # a position in a list of strings is no field of its own
            parent, _, position = path.lower().rpartition(".")
            field = fields.get(parent) if position.isdigit() else None
        return field is not None and field.type in ("str", "list of str")

    def _caption_flags(self, caption: CaptionSettings) -> list[str]:
        """Flags for every member or field that looks like a caption, likeliest first.

        Where the settings read JSON already, JSON fields named like captions come before text members.
        """
        text_rank = 15 if isinstance(caption, JsonCaption) else 0
        ranked: list[tuple[tuple[int, int, int], str]] = []
        for suffix, example in self.texts.items():
            words = suffix != "cls" and any(char.isalpha() for char in example)
            if words and self.suffixes[suffix] * 2 >= self.samples:
                rank = 0 if suffix in ("txt", "text", "caption") else 2 if suffix.startswith("caption") else 12
                ranked.append(((rank + text_rank, 0, -self.suffixes[suffix]), f"--caption-key {_quoted(suffix)}"))
        for path, field in self.json_fields.items():
            suffix, _, inner = path.rpartition(":") if ":" in path else ("json", "", path)
            names = [name.lower() for name in inner.split(".")]
            if field.type not in ("str", "list of str") or not inner or names[-1] in NOT_CAPTIONS:
                continue
            flag = f"--caption-json {_quoted(inner)}"
            if suffix != "json":
                flag = f"caption: {{type: json, key: {suffix}, path: {inner}}} (in a config file)"
            rank = min((CAPTION_NAMES.index(name) + 1 for name in names if name in CAPTION_NAMES), default=20)
            alternative = (field.type != "str") + (names[-1] not in ("en", *CAPTION_NAMES[:4]))
            ranked.append(((rank, alternative, -field.samples), flag))
        return [flag for _, flag in sorted(ranked)]

    def _dots_in_keys(self) -> str | None:
        """A hint when suffixes are as many as samples: the files' names have dots before their extension."""
        if self.samples < 4 or len(self.suffixes) * 2 < self.samples:
            return None
        return (
            "nearly every sample has suffixes of its own: a key ends at the first dot of the file name, so names such "
            "as 'a.1.jpg' and 'a.2.jpg' are members of one sample 'a'; write the shards anew without dots in the keys"
        )


def _placed(flag: str, place: str) -> str:
    """A short flag, which is for training's source alone, as the flag of the source at `place`."""
    name, _, value = flag.partition(" ")
    kinds = {"--caption-key": "type: text, key", "--caption-json": "type: json, path"}
    if place == SHORT_FLAGS or name not in ("--image-key", *kinds):
        return flag
    if name == "--image-key":
        return f"--{place}.image-key {value}"
    bare = value.strip("'")
    return f"--{place}.caption '{{{kinds[name]}: {bare}}}'"


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """(dotted path, kind, example) of a JSON value; of a list of objects, the first one stands for all."""
    if isinstance(value, dict) and depth < 8:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name), depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)) and depth < 8:
        yield from _leaves(value[0], f"{path}.0" if path else "0", depth + 1)
    elif isinstance(value, list):
        kinds = {_kind(item) for item in value}
        yield path, f"list of {kinds.pop()}" if len(kinds) == 1 else "list", value
    else:
        yield path, _kind(value), value


def _kind(value: Any) -> str:
    return {type(None): "null", dict: "object"}.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= EXAMPLE_CHARS else text[: EXAMPLE_CHARS - 1] + "…"


def _quoted(text: str) -> str:
    return f"'{text}'" if any(char in " ;|&$*'\"()<>" for char in text) else text


def _is_image(head: bytes) -> bool:
    """JPEG, PNG, GIF, WebP, TIFF or BMP, by the first bytes that each format prescribes."""
    if head.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\0", b"MM\0*")):
        return True
    return (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or (head[:2] == b"BM" and head[6:10] == b"\0\0\0\0")


def _readable(head: bytes) -> str | None:
    """The text of a member's beginning when it is text, cut short."""
    # 512 bytes may end inside a character: its first bytes (at most 3) are given up.
    text = head.decode("utf-8", errors="ignore").strip()
    if not text or len(text.encode()) + 3 < len(head.strip()):
        return None
    if any(ord(char) < 32 and char not in "\t\r\n" for char in text):
        return None
    return _short(text)


def _caption_missing(caption: CaptionSettings) -> str:
    if isinstance(caption, JsonCaption):
        return f"no {caption.key} member has text at {' or '.join(caption.paths)} (--caption-json)"
    key = caption.key if isinstance(caption, TextCaption) else caption.type
    return f"no sample has the caption member {' or '.join(split_keys(key))} (--caption-key)"
