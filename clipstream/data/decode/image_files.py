"""Image files: which formats are read, what their headers say, and the faults of Pillow's readers mended or refused.

The bytes of a file enter, an opened `PIL.Image` of which nothing is decoded leaves; or Dropped, with what the file is
and what to do about it. HEIC and JPEG XL are read by libraries of extras, imported for the first such file.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
import zlib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from PIL import Image, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from clipstream.data.settings import MAX_PIXELS
from clipstream.errors import Dropped
from clipstream.utils.content import describe, kind

# Not all formats of Pillow: its EPS reader, for example, starts a program. An MPO is opened as a JPEG.
PLUGINS = {"JPEG": "Jpeg", "PNG": "Png", "WEBP": "WebP", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff", "PPM": "Ppm",
           "JPEG2000": "Jpeg2K"}  # fmt: skip
PLUGINS |= {"AVIF": "Avif"} if find_spec("PIL._avif") else {}
FORMATS = tuple(PLUGINS)
EXTRAS = {"HEIC": ("heif", "pillow_heif", "HEIF"), "JXL": ("jxl", "pillow_jxl", "JXL")}  # extra, module, Pillow's name
Image.preinit()  # once, before the workers are forked
for _name in PLUGINS.values():
    import_module(f"PIL.{_name}ImagePlugin")
# Pillow's own words on single files name no file: large images are counted by `check`, damaged ones are dropped.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
logging.getLogger("PIL").addHandler(logging.NullHandler())

_HUFFMAN = (0xC0, 0xC1, 0xC2)  # JPEG's frames: baseline, extended, progressive; others are lossless, arithmetic, …
_LOSSLESS = (0xC3, 0xC7, 0xCB, 0xCF)
_FRAMES = frozenset((*range(0xC0, 0xD0), 0xDE)) - {0xC4, 0xC8, 0xCC}  # markers of frames, also of a hierarchy
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD9), 0xFF))  # markers without a segment, and bytes that are no marker
_SAMPLING = (  # of the three components of a JPEG, horizontal and vertical, as libjpeg-turbo's TurboJPEG names them
    *(f"{luma}1111" for luma in ("11", "21", "12", "22", "41", "14")), "221212", "222121", "212121", "121212", "222222",
)  # fmt: skip
_COMMON = ("221111", "211111", "111111")
_SMALLER = "scale it down, or cut it into tiles"
_LIMIT = f"more than {MAX_PIXELS:,}: {_SMALLER}"
_NUMBERS = {1: "unsigned", 2: "signed", 3: "floating point"}  # TIFF's tag SampleFormat


class JpegHeader(NamedTuple):
    """What the segments before a JPEG's pixels say."""

    exif: bool  # whether there is an EXIF segment
    marker: int = 0  # of the frame: its process; 0 without one
    bits: int = 0  # per channel
    sampling: str = ""  # digits of the factors of each component, as in _SAMPLING
    scanned: int = 0  # components of the first scan

    @property
    def is_plain(self) -> bool:
        """Whether it is 8-bit Huffman-coded, of components as nearly all files have them."""
        usual = self.sampling in _SAMPLING or (len(self.sampling) == 2 and set(self.sampling) <= set("1234"))
        return self.marker in _HUFFMAN and self.bits == 8 and usual

    @property
    def scales(self) -> bool:
        """Whether it can be decoded at a fraction of its size."""
        return self.marker not in _LOSSLESS

    @property
    def is_baseline(self) -> bool:
        """Whether it is of one scan with three components, sampled 4:2:0, 4:2:2 or 4:4:4, as hardware decoders take."""
        return self.marker == 0xC0 and self.bits == 8 and self.scanned == 3 and self.sampling in _COMMON


def jpeg_header(data: bytes) -> JpegHeader:
    """The header of a JPEG, found as libjpeg finds it: bytes between segments are passed over.

    Source: ITU-T T.81, annex B.
    """
    at, exif, frame, scanned = 2, False, b"", 0
    while (at := data.find(b"\xff", at)) >= 0:
        marker = data[at + 1] if at + 1 < len(data) else 0xD9
        if marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker in (0xD9, 0xDA):  # the end, or the pixels
            scanned = data[at + 4] if marker == 0xDA and at + 4 < len(data) else 0
            break
        end = at + 2 + (data[at + 2] << 8 | data[at + 3] if at + 4 <= len(data) else 0)
        if marker == 0xE1:
            exif = exif or data[at + 4 : at + 10] == b"Exif\0\0"
        elif marker in _FRAMES and not frame:
            frame = data[at + 1 : at + 2] + data[at + 4 : end]
        at = end
    factors = frame[8::3] if len(frame) > 6 and len(frame) == 7 + 3 * frame[6] else b""
    return JpegHeader(exif, frame[0], frame[1], factors.hex(), scanned) if len(frame) > 1 else JpegHeader(exif)


@cache
def _formats(kind: str | None) -> tuple[str, ...]:
    """Pillow's names of the formats that a file of this kind is opened by, with the reader of an extra registered."""
    if kind not in EXTRAS or find_spec(EXTRAS[kind][1]) is None:
        return FORMATS
    _, name, form = EXTRAS[kind]
    module = import_module(name)
    if kind == "HEIC":
        module.register_heif_opener(thumbnails=False)
        module.options.DECODE_THREADS = 1  # as of all decoders: workers are as many as cores
    else:
        module.JpegXLImagePlugin.DECODE_THREADS = 0
    return (*FORMATS, form)


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image with its header read and nothing decoded. Raises Dropped."""
    form = kind(data)
    if form == "TIFF" and _tiff(data)[1]:
        raise Dropped("undecodable_image", _describe_unidentified(data, form))
    try:
        image: Image.Image = Image.open(io.BytesIO(_without_text(data)), formats=_formats(form))
    except Image.DecompressionBombError as error:
        count = re.search(r"\d+", str(error))
        raise Dropped("image_too_large", f"{int(count[0]) if count else 0:,} pixels, {_LIMIT}") from error
    except Exception as error:  # Pillow's readers raise nearly anything on broken files
        unknown = isinstance(error, UnidentifiedImageError) or form in EXTRAS
        raise Dropped("undecodable_image", _describe_unidentified(data, form) if unknown else repr(error)) from error
    check_size(image.size, max_pixels)
    _mend(image)
    return image


def _describe_unidentified(data: bytes, form: str | None) -> str:
    """What a file is that Pillow does not read, and what to do."""
    what = describe(data) or f"not an image: {len(data)} bytes that begin with {bytes(data[:8])!r}"
    if form in EXTRAS and find_spec(EXTRAS[form][1]) is not None:
        return f"{what.partition(':')[0]}, damaged or of an unknown kind: convert it to JPEG or PNG"
    if form == "TIFF":
        return f"{_tiff(data)[0]}, which is not decoded: save it as PNG, or as TIFF of 8 bits in grey or RGB"
    if form == "JPEG" and (jpeg := jpeg_header(data)).marker and not jpeg.is_plain:
        channels = len(jpeg.sampling) // 2
        return f"a JPEG image of {jpeg.bits} bits and {channels} channels: convert it to JPEG of 8 bits, or to PNG"
    return f"{what}, damaged or cut off" if what.endswith(" image") else what


def _mend(image: Image.Image) -> None:
    """Correct what Pillow (12.3 and 13.0 alike) takes wrongly from the header of a PNG or TIFF."""
    tiles = image.tile if image.format in ("PNG", "TIFF") else []  # type: ignore[attr-defined]
    args = tiles[0][3] if tiles else ""
    raw = args if isinstance(args, str) else (args or ("",))[0]
    if image.format == "PNG" and raw in ("L;2", "L;4") and "transparency" in image.info:
        image.info["transparency"] *= 85 if raw == "L;2" else 17  # as the pixels are scaled
    if tiles and tiles[0][0] == "libtiff" and raw[1:] in (";16BS", ";32BS", ";32BF"):
        # libtiff gives values in the machine's order, and Pillow swaps them again.
        image.tile = [tile._replace(args=(raw.replace("B", ""), *tile[3][1:])) for tile in tiles]  # type: ignore[attr-defined]


def _tiff(data: bytes) -> tuple[str, bool]:
    """What a TIFF holds, and whether Pillow (12.3 and 13.0 alike) reads other pixels than it has. Source: TIFF 6.0."""
    try:
        file = io.BytesIO(data)
        tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(16 if 43 in data[2:4] else 8))
        file.seek(tags.next)
        tags.load(file)
        bits, forms = tags.get(258, (1,)), tags.get(339, (1,))
        bands, photometric = tags.get(277, len(bits)), tags.get(262, 0)
        apart, packed = bands > 1 and tags.get(284, 1) == 2, tags.get(259, 1) != 1
        what = f"a TIFF image of {bands} x {bits[0]} bits, {_NUMBERS.get(forms[0], 'of an unknown kind')}"
    except Exception:
        return "a TIFF image, damaged or cut off", False
    what += f"{', zero is white' * (photometric == 0)}{', bands apart' * apart}{', compressed' * packed}"
    negative = photometric == 0 and bits[0] > 8
    first_alone = apart and photometric in (0, 1)  # of bands of grey that are stored apart
    single = bands == 1 and tags.get(284) == 2 and not packed and (photometric == 0 or bits[0] == 32 or forms[0] == 2)
    mixed = apart and ((bits[0] == 16 and (bands > 3 or not packed)) or (bands > 3 and packed and 338 not in tags))
    return what, negative or first_alone or single or mixed or (forms[0], bits[0]) == (2, 8)


def _without_text(data: bytes) -> bytes:
    """A PNG without its texts, and without a colour profile that is larger than Pillow takes; other files as they are.

    Source: PNG specification, chunk layout (length, type, data, CRC-32).
    """
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    kept, at = [data[:8]], 8
    while at + 8 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        if kind not in (b"tEXt", b"zTXt", b"iTXt") and not (kind == b"iCCP" and _is_large(data[at + 8 : end - 4])):
            kept.append(data[at:end])
        at = end
    return data if sum(map(len, kept)) == len(data) else b"".join([*kept, data[at:]])


def _is_large(profile: bytes) -> bool:
    """Whether the content of an iCCP chunk (name, method, zlib data) unpacks to more than Pillow's limit."""
    unpacked = zlib.decompressobj()
    with contextlib.suppress(zlib.error):  # damaged: for Pillow to tell
        unpacked.decompress(profile.partition(b"\0")[2][1:], PngImagePlugin.MAX_TEXT_CHUNK)
    return bool(unpacked.unconsumed_tail)


def check_size(size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> None:
    """Refuse images of more than `max_pixels`, or without any. Raises Dropped."""
    width, height = size
    if width * height > max_pixels:
        raise Dropped("image_too_large", f"{width} x {height} pixels, more than {max_pixels:,}: {_SMALLER}")
    if width * height == 0:
        raise Dropped("undecodable_image", f"{width} x {height} pixels")
