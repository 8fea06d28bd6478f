"""Re-encodes pictures: smaller, or in another format; and copies a local tar with its pictures re-encoded.

The image transforms give the same pixels of the result as of the original, as far as its size and format allow: the
orientation stays in its EXIF tag, and transparency stays if the format has it. All other members of a tar are copied
unchanged.
"""

from __future__ import annotations

import copy
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

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
    """How pictures are re-encoded."""

    size: int | None  # pixels of the shorter side of larger pictures; None keeps sizes
    format: Format  # of the result; 'keep' keeps each picture's own
    quality: int  # of JPEG, WebP and AVIF, 1 to 100
    background: str = "white"  # colour under transparent pixels, for formats without transparency

    def suffix(self, suffix: str) -> str:
        """The suffix of a re-encoded member: its last part is replaced, or the format appended if it names none."""
        head, dot, last = suffix.rpartition(".")
        same = self.format == "keep" or _SUFFIXES.get(last.lower(), _NAMES[self.format]) == _NAMES[self.format]
        return suffix if same else f"{head}{dot}{self.format}"


class Recoded(NamedTuple):
    """A re-encoded picture."""

    data: bytes  # the file; the original one if nothing was to be done, or nothing could be
    what: str  # 'resized', 'reencoded', 'unchanged' or 'undecodable'


def recode(data: bytes, recipe: Recipe) -> Recoded:
    """Re-encode a picture. Only the first frame of an animation is kept, as training uses no other.

    Orientation and colour profile are kept, other metadata is not. Palettes are replaced by RGB; evaluation, which
    resizes palettes without a filter as open_clip does, then has a smoother picture. A picture that cannot be decoded
    or written is returned unchanged, and so is a GIF that is to keep its format.
    """
    try:
        picture = opened(data)
        orientation = orientation_of(picture)
        have = _SAMES.get(str(picture.format), str(picture.format))
        want = have if recipe.format == "keep" else _NAMES[recipe.format]
        if have == "TIFF":  # turned by Pillow when it is decoded
            picture.load()
        smaller = recipe.size is not None and min(picture.size) > recipe.size
        if want not in _WRITTEN or not (smaller or want != have):
            return Recoded(data, "unchanged")
        colours, profile = _COLOURS.get(picture.mode), picture.info.get("icc_profile")
        target = picture.size
        if smaller and recipe.size is not None:
            scale = recipe.size / min(picture.size)
            width, height = (max(recipe.size, round(side * scale)) for side in picture.size)
            target = (width, height)
            if have == "JPEG":
                picture.draft(picture.mode, (target[0] * SPARE, target[1] * SPARE))
        picture = eight_bits(picture, recipe.background if want in _WITHOUT_ALPHA else None)
        if picture.size != target:
            picture = picture.resize(target, Image.Resampling.LANCZOS)
        # Always given: else Pillow writes the original profile, which may be of another colour space.
        options: dict[str, object] = {"icc_profile": profile if _COLOURS[picture.mode] == colours else None}
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
        picture.save(file, want, **options)
        return Recoded(file.getvalue(), "resized" if smaller else "reencoded")
    except Exception:  # Dropped, or any exception of Pillow's readers and writers; training counts the picture
        return Recoded(data, "undecodable")


def rewrite(
    source: Path,
    index: ShardIndex,
    target: Path,
    image_keys: Sequence[str],
    recipe: Recipe,
    tell: Callable[[int], None],
) -> Counter[str]:
    """Write `source` to `target`, with the picture that training reads from each sample re-encoded.

    Args:
        source: an intact tar.
        index: its samples.
        image_keys: suffixes of the picture in lower case, first present wins.
        tell: called with the number of bytes of `source` that are done.

    Returns:
        Number of pictures that were 'resized', 'reencoded', 'unchanged' or 'undecodable'.

    Raises:
        OSError: one of the files cannot be read or written.
    """
    keeping = replace(recipe, format="keep")
    pictures: dict[int, tuple[str, str]] = {}  # offset of the data -> suffix before and after
    for _, members in index.samples:
        suffix = next((key for key in image_keys if key in members), None)
        if suffix is None or members[suffix][1] >= LINK:
            continue
        renamed = recipe.suffix(suffix)
        left = (members.keys() - {suffix}) | {renamed}
        # Under its new suffix it must still be the one that training reads; else it keeps its format.
        clash = renamed in members or next((key for key in image_keys if key in left), None) != renamed
        new = suffix if renamed != suffix and clash else renamed
        pictures.setdefault(members[suffix][0], (suffix, new))  # not that of a later hard link
    done: Counter[str] = Counter()
    names: dict[str, str] = {}  # of pictures whose suffix changes, which hard links may name
    with (
        open(source, "rb") as file,
        tarfile.open(source, "r:", errors="surrogateescape") as before,
        tarfile.open(target, "w:", format=tarfile.PAX_FORMAT, errors="surrogateescape") as after,
    ):
        for member in before:
            before.members, after.members = [], []  # type: ignore[attr-defined]  # else both keep all members
            tell(member.offset_data)
            file.seek(member.offset_data)
            if member.offset_data not in pictures:
                has_data = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
                if member.linkname in names:
                    member.linkname = names[member.linkname]
                    member.pax_headers = {**member.pax_headers, "linkpath": member.linkname}
                after.addfile(member, file if has_data else None)
                continue
            suffix, renamed = pictures[member.offset_data]
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
