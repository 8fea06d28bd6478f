"""Re-encoding of images, smaller or in another format, alone (`recode`) or in a copy of a tar (`rewrite`).

The image transforms give the same pixels of the result as of the original, as far as its size and format allow: the
orientation stays in its EXIF tag, and transparency stays if the format has it. All other members of a tar are copied
unchanged.
"""

from __future__ import annotations

import copy
import io
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from PIL import ExifTags, Image

from clipstream.data.decode.images import eight_bits, opened, orientation_of
from clipstream.storage.tar import LINK, ShardIndex

Format = Literal["keep", "jpg", "webp", "png"]
_NAMES = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
_SAMES = {"MPO": "JPEG"}  # Pillow's name -> format of its first frame
_WRITTEN = frozenset(("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF"))  # not GIF, whose palette would change
_WITHOUT_ALPHA = frozenset(("JPEG", "BMP"))
_SUFFIXES = {"jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP", "png": "PNG", "gif": "", "avif": "", "bmp": "", "tif": "",
             "tiff": ""}  # fmt: skip
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

    def suffix(self, suffix: str) -> str:
        """The suffix of a re-encoded member: its last part is replaced, or the format appended if it names none."""
        head, dot, last = suffix.rpartition(".")
        same = self.format == "keep" or _SUFFIXES.get(last.lower(), _NAMES[self.format]) == _NAMES[self.format]
        return suffix if same else f"{head}{dot}{self.format}"


def recode(data: bytes, recipe: Recipe) -> tuple[bytes, str]:
    """Re-encode an image file. Only the first frame of an animation is kept, as training uses no other.

    Orientation and colour profile are kept, other metadata is not. Palettes are replaced by RGB; evaluation, which
    resizes palettes without a filter as open_clip does, then has a smoother image. A GIF that is to keep its format is
    returned unchanged.

    Returns:
        (file, 'resized', 'reencoded', 'unchanged' or 'undecodable'); the last two have the original file.
    """
    try:
        image = opened(data)
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


def rewrite(source: Path, index: ShardIndex, target: Path, image_keys: Sequence[str], recipe: Recipe) -> Counter[str]:
    """Write `source` to `target`, with the image that training reads from each sample re-encoded.

    Args:
        source: an intact tar.
        index: its samples.
        image_keys: suffixes of the image in lower case, first present wins.

    Returns:
        Number of images by the result of `recode`.

    Raises OSError: one of the files cannot be read or written.
    """
    keeping = replace(recipe, format="keep")
    images: dict[int, tuple[str, str]] = {}  # offset of the data -> suffix before and after
    for _, members in index.samples:
        suffix = next((key for key in image_keys if key in members), None)
        if suffix is None or members[suffix][1] >= LINK:
            continue
        renamed = recipe.suffix(suffix)
        left = (members.keys() - {suffix}) | {renamed}
        # Under its new suffix it must still be the one that training reads; else it keeps its format.
        clash = renamed in members or next((key for key in image_keys if key in left), None) != renamed
        new = suffix if renamed != suffix and clash else renamed
        images.setdefault(members[suffix][0], (suffix, new))  # not that of a later hard link
    done: Counter[str] = Counter()
    names: dict[str, str] = {}  # of images whose suffix changes, which hard links may name
    with (
        open(source, "rb") as file,
        tarfile.open(source, "r:", errors="surrogateescape") as before,
        tarfile.open(target, "w:", format=tarfile.PAX_FORMAT, errors="surrogateescape") as after,
    ):
        for member in before:
            before.members, after.members = [], []  # type: ignore[attr-defined]  # else both keep all members
            file.seek(member.offset_data)
            if member.issparse() and (whole := before.extractfile(member)) is not None:  # written with its holes
                member.type, member.sparse = tarfile.REGTYPE, None
                member.name = member.pax_headers.get("GNU.sparse.name", member.name)
                own = ("GNU.sparse", "path", "size")
                member.pax_headers = {k: v for k, v in member.pax_headers.items() if not k.startswith(own)}
                after.addfile(member, whole)
                continue
            if member.offset_data not in images:
                has_data = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
                if member.linkname in names:
                    member.linkname = names[member.linkname]
                    member.pax_headers = {**member.pax_headers, "linkpath": member.linkname}
                after.addfile(member, file if has_data else None)
                continue
            suffix, renamed = images[member.offset_data]
            kept = renamed == suffix and recipe.suffix(suffix) != suffix
            data, what = recode(file.read(member.size), keeping if kept else recipe)
            done[what] += 1
            changed = copy.copy(member)
            changed.size = len(data)
            # Their old name and size would take precedence.
            changed.pax_headers = {
                key: value for key, value in member.pax_headers.items() if key not in ("path", "size")
            }
            if what in ("resized", "reencoded") and renamed != suffix and member.name.lower().endswith(f".{suffix}"):
                changed.name = names[member.name] = member.name[: len(member.name) - len(suffix)] + renamed
            after.addfile(changed, io.BytesIO(data))
    return done
