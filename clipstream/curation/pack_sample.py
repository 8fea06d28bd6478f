"""A sample for a new shard: a raw sample of any source enters; key and members that default flags train on leave.

The image transforms give the same pixels of a re-encoded image as of the original, as far as its size and format allow:
the orientation stays in its EXIF tag, and transparency stays if the format has it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from PIL import ExifTags, Image

from clipstream.data.decode.captions import (
    RawSample,
    build_caption,
    build_transform,
    candidates,
    image_bytes,
    split_keys,
)
from clipstream.data.decode.images import decode, eight_bits, open_image, orientation_of, read_header
from clipstream.data.json_path import structure
from clipstream.data.source_settings import IMAGE_KEY, LabelCaption, SourceSettings
from clipstream.errors import Dropped
from clipstream.utils.content import HEAD, IMAGE_NAME, kind

Format = Literal["keep", "jpg", "webp", "png"]
_NAMES = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
_SAMES = {"MPO": "JPEG"}  # Pillow's name -> format of its first frame
_WRITTEN = frozenset(("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF"))  # not GIF, whose palette would change
_WITHOUT_ALPHA = frozenset(("JPEG", "BMP"))
# Pillow's mode -> the colour space of its profile.
_COLOURS = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "PA": "RGB", "RGB": "RGB", "RGBA": "RGB"}
FINE = 90  # quality from which colour has full resolution: 46 instead of 43 dB at 95, with a quarter more bytes
# A JPEG is decoded at a reduced scale if at least so many times the target's pixels remain: from 2,000 to 3,200 px to
# 512 in a third of the time, with 53 dB to the full decode (42 dB for the most detailed of 6 photographs).
SPARE = 2


@dataclass(frozen=True)
class Recipe:
    """How images are re-encoded."""

    size: int | None  # pixels of the shorter side of larger images; None keeps sizes
    format: Format  # of the result; 'keep' keeps each image's own
    quality: int  # of JPEG, WebP and AVIF, 1 to 100
    background: str = "white"  # colour under transparent pixels, for formats without transparency


def recode(data: bytes, recipe: Recipe) -> tuple[bytes, str]:
    """Re-encode an image file. Only the first frame of an animation is kept, as training uses no other.

    Orientation and colour profile are kept, other metadata is not. Palettes are replaced by RGB; evaluation, which
    resizes palettes without a filter as open_clip does, then has a smoother image. A GIF that is to keep its format is
    returned unchanged.

    Returns:
        (file, 'resized', 'reencoded', 'unchanged' or 'undecodable'); the last two have the original file.
    """
    try:
        image = open_image(data)
        orientation = orientation_of(image)
        have = _SAMES.get(str(image.format), str(image.format))
        want = have if recipe.format == "keep" else _NAMES[recipe.format]
        if have == "TIFF":  # turned by Pillow when it is decoded
            image.load()
        smaller = recipe.size is not None and min(image.size) > recipe.size
        if want not in _WRITTEN or not (smaller or want != have):
            return (data, "unchanged")
        colours, profile = _COLOURS.get(image.mode), image.info.get("icc_profile")
        target = image.size
        if smaller and recipe.size is not None:
            scale = recipe.size / min(image.size)
            width, height = (max(recipe.size, round(side * scale)) for side in image.size)
            target = (width, height)
            if have == "JPEG":
                image.draft(image.mode, (target[0] * SPARE, target[1] * SPARE))
        image = eight_bits(image, recipe.background if want in _WITHOUT_ALPHA else None)
        if image.size != target:
            image = image.resize(target, Image.Resampling.LANCZOS)
        # Always given: else Pillow writes the original profile, which may be of another colour space.
        options: dict[str, object] = {"icc_profile": profile if _COLOURS[image.mode] == colours else None}
        if want in ("JPEG", "WEBP", "AVIF"):
            options["quality"] = recipe.quality
        if want == "JPEG":
            options["subsampling"] = "4:4:4" if recipe.quality >= FINE else "4:2:0"
        elif want == "TIFF":
            options["compression"] = "tiff_lzw"
        if orientation != 1:
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = orientation
            options["exif"] = exif.tobytes()
        file = io.BytesIO()
        image.save(file, want, **options)
        return (file.getvalue(), "resized" if smaller else "reencoded")
    except Exception:  # Dropped, or any exception of Pillow's readers and writers; training counts the image
        return (data, "undecodable")


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

    def members_needed(self, columns: bool) -> Collection[str] | None:
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
