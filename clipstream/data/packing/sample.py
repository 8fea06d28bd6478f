"""A sample for a new shard: a raw sample of any source enters; key and members that default flags train on leave."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from clipstream.data.decode.captions import (
    RawSample,
    build_caption,
    build_transform,
    candidates,
    image_bytes,
    split_keys,
)
from clipstream.data.decode.images import decode, read_header
from clipstream.data.decode.reencode import Recipe, recode
from clipstream.data.json_path import structure
from clipstream.data.settings import IMAGE_KEY, SourceSettings
from clipstream.data.text_settings import LabelCaption
from clipstream.errors import Dropped
from clipstream.utils.content import HEAD, IMAGE_NAME, kind

LONGEST = 90  # bytes of a key
OTHER = "other."  # before the suffix of a member that training would take for the image or the caption
LABEL = "cls"
SUFFIXES = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "WebP": "webp", "TIFF": "tif", "BMP": "bmp", "AVIF": "avif",
            "HEIC": "heic", "JXL": "jxl", "JPEG2000": "jp2", "PPM": "ppm"}  # fmt: skip
_IMAGES = frozenset(IMAGE_KEY.split(";"))
_ODD = re.compile(r"[^\w/-]+")


@dataclass(frozen=True)
class Recording:
    """How samples are written."""

    recipe: Recipe | None = None  # how images are re-encoded; None to copy them
    decode: bool = False  # whether images that cannot be decoded are left out, beside those without a header
    max_pixels: int = 1 << 40  # of an image


def plain_key(key: str) -> str:
    """A key without suffix of an image, and with nothing but letters, digits, `_`, `-` and `/`."""
    plain = re.sub(r"/{2,}", "/", _ODD.sub("_", IMAGE_NAME.sub("", key))).strip("/_") or "sample"
    return plain if len(plain.encode()) <= LONGEST else plain.encode()[-LONGEST:].decode(errors="ignore").strip("/_")


class SamplePacker:
    """Makes the members of a new sample from one of a source, so that training reads them by default flags.

    The image becomes `jpg`, `png`, …, by its content; all captions that training may draw become `txt`, several as a
    JSON list. A member that default flags would take in place of them gets the suffix `other.…`. Of a table, the row
    as `json` and the column `cls` are kept; of other samples, all members.
    """

    def __init__(self, settings: SourceSettings, recording: Recording) -> None:
        self._settings = settings
        self._keys = split_keys(settings.image_key)
        recipe = recording.recipe
        self._recipe = None if recipe is None else replace(recipe, background=settings.background)
        self._recording, self._labelled = recording, isinstance(settings.caption, LabelCaption)
        self._caption = build_caption(
            settings.caption.model_copy(update={"templates": "plain"}) if self._labelled else settings.caption
        )
        self._transform = build_transform(settings.transform)

    def needed(self, columns: bool) -> Collection[str] | None:
        """The members that are read; None for all."""
        if not columns or self._transform is not None or self._caption.members is None:
            return None
        return (*self._keys, *self._caption.members, "json", LABEL)

    def __call__(self, sample: RawSample, columns: bool, more: Sequence[str]) -> tuple[dict[str, bytes], str]:
        """The members in order, and the result of `recode`, '' without it.

        Args:
            columns: whether members are columns of a table.
            more: captions to add.

        Raises Dropped: there is no usable image, or neither caption nor label.
        """
        if self._transform is not None:
            sample = self._transform(sample)
        data, what = image_bytes(sample, self._settings.image_key), ""
        head = read_header(data, False, self._recording.max_pixels)
        if self._recipe is not None:
            data, what = recode(data, self._recipe)
            if what == "undecodable":
                raise Dropped("undecodable_image")
        elif self._recording.decode:
            decode(data, head, 1, (255, 255, 255))
        names = {str(name).lower(): name for name in sample if not str(name).startswith("__")}
        chosen = next(key for key in self._keys if key in names)
        suffix = SUFFIXES.get(kind(data[:HEAD]) or "") or chosen.rpartition(".")[2]
        found, texts = {suffix: data}, self._texts(sample, names, more)
        if texts:
            plain = len(texts) == 1 and structure(texts[0]) is None
            found["txt"] = (texts[0] if plain else json.dumps(texts, ensure_ascii=False)).encode()
        for name in sorted(names, key=lambda name: (name != "json", name != LABEL, name)):
            value = sample[names[name]]
            value = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            if name == chosen or (columns and name not in ("json", LABEL)) or not isinstance(value, bytes):
                continue
            if name == "txt" and texts == [value.decode("utf-8-sig", "replace").strip()]:
                continue
            taken = name in found or name in _IMAGES or (name == "txt" and bool(texts))
            found[f"{OTHER}{name}" if taken else name] = value
        return found, what

    def _texts(self, sample: RawSample, names: Collection[str], more: Sequence[str]) -> list[str]:
        """All captions, each once. Raises Dropped: there is none, and no label."""
        texts: list[str] = []
        try:
            by_path = candidates(self._caption, sample)
            texts = [] if self._labelled else [text for path in by_path for text in path]
            if not by_path:
                raise Dropped("no_caption")
        except Dropped:
            if not more and LABEL not in names:
                raise
        return list(dict.fromkeys([*texts, *more]))
