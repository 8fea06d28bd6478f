"""What is opened by which reader: formats of extras, rare JPEGs, and the files that Pillow takes wrongly."""

from __future__ import annotations

import importlib
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

import clipstream
from clipstream.data.batch import ImageSpec
from clipstream.data.decode import image_files
from clipstream.data.decode.image_files import jpeg_header
from clipstream.data.decode.images import (
    EvalTransform,
    _check_depth,
    decode,
    decode_image,
    eight_bits,
    open_image,
    read_header,
)
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import AugmentSettings
from clipstream.errors import Dropped
from tests.support.image_files import bomb, decibels, png, save, smooth, tiff, turned, turning

WHITE = (255, 255, 255)
HALVES = np.zeros((40, 60, 3), np.uint8) + np.array([200, 40, 10], np.uint8)
HALVES[:, 30:] = 20, 90, 220
HALVES[:12] = 10, 200, 60


def pixels(data: bytes, upright: bool = False) -> np.ndarray[Any, Any]:
    """uint8 [H, W, 3] of a file, the same in evaluation, in training and in `stage`."""
    found = np.asarray(decode_image(data, WHITE, upright).convert("RGB"))
    size = ImageSpec(found.shape[:2], resize_mode="squash")
    whole = AugmentSettings(scale=(1, 1), ratio=(0.1, 10))
    train = TrainTransform(size, whole, "white", upright, "exact")(data, SampleRNG(0))
    assert train.shape == found.shape
    if not upright:
        assert np.array_equal(EvalTransform(size, "white")(data), found)
        assert np.array_equal(np.asarray(eight_bits(open_image(data), "white").convert("RGB")), found)
    return found


def encoded(kind: str, orientation: int = 1) -> bytes:
    """The file of a picture that upright has the pixels HALVES, nearly."""
    if kind in EXTRAS:
        module = importlib.import_module(EXTRAS[kind])
        getattr(module, "register_heif_opener", lambda: None)()
    picture = turned(Image.fromarray(HALVES), orientation)
    options = {"WEBP": {"lossless": True}, "HEIF": {"quality": 95}, "JXL": {"quality": 98}}.get(kind, {})
    return save(picture, kind, **options, **({} if orientation == 1 else {"exif": turning(orientation)}))


EXTRAS = {"HEIF": "pillow_heif", "JXL": "pillow_jxl"}


@pytest.mark.parametrize("kind", ["HEIF", "JXL", "JPEG2000", "PPM"])
def test_formats_of_phones_and_of_extras_are_decoded(kind: str) -> None:
    pytest.importorskip(EXTRAS.get(kind, "PIL"))
    assert decibels(pixels(encoded(kind)), HALVES) > 30


@pytest.mark.parametrize("kind", EXTRAS)
def test_without_its_extra_a_format_names_it(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pytest.importorskip(EXTRAS[kind])
    data = encoded(kind)
    image_files._formats.cache_clear()
    monkeypatch.setattr(image_files, "find_spec", lambda name: None)
    with pytest.raises(Dropped, match=rf"image: install clipstream\[{kind.lower()}\] to decode it"):
        decode_image(data, WHITE, False)
    image_files._formats.cache_clear()
    monkeypatch.undo()
    with pytest.raises(Dropped, match="damaged or of an unknown kind"):
        decode_image(data[:100], WHITE, False)


@pytest.mark.parametrize("orientation", [1, *range(3, 9), 2])
@pytest.mark.parametrize("kind", ["WEBP", "HEIF"])
def test_orientation_is_applied_once(kind: str, orientation: int) -> None:
    """pillow-heif 1.8 turns pixels itself and sets the tag to 1; torchcodec 0.17 turns a WebP by its EXIF itself."""
    pytest.importorskip({"WEBP": "torchcodec"}.get(kind, "pillow_heif"))
    data = encoded(kind, orientation)
    theirs = Image.open(io.BytesIO(data))
    assert decibels(pixels(data, upright=True), HALVES) > 30
    stored = np.asarray(theirs.convert("RGB"))
    assert np.array_equal(pixels(data), stored)
    for upright, wanted in ((False, stored), (True, np.asarray(ImageOps.exif_transpose(theirs).convert("RGB")))):
        header = read_header(data, upright)
        assert np.array_equal(decode(data, header, 1, WHITE), stored) and header.size == theirs.size
        whole = AugmentSettings(scale=(1, 1), ratio=(0.1, 10))
        fast = TrainTransform(ImageSpec(wanted.shape[:2]), whole, "white", upright)
        assert decibels(fast(data, SampleRNG(0)), wanted) > 40


def test_a_jpeg_in_jpeg_xl_is_turned_by_its_exif_and_other_jpeg_xl_is_not() -> None:
    """libjxl has turned other pixels already (ISO 18181-2: EXIF's orientation is ignored); pillow-jxl-plugin 1.3."""
    pytest.importorskip("pillow_jxl")
    assert decibels(pixels(save(Image.fromarray(HALVES), "JXL", quality=98, exif=turning(6)), True), HALVES) > 30


def with_frame(marker: int, bits: int, factors: list[int]) -> bytes:
    """A JPEG whose frame header says so; its pixels stay those of a baseline file."""
    data = save(Image.fromarray(smooth(32, 24)), "JPEG")
    at = data.index(b"\xff\xc0")
    size = int.from_bytes(data[at + 2 : at + 4], "big")
    parts = b"".join(bytes([number + 1, factor, 0]) for number, factor in enumerate(factors))
    frame = bytes([bits]) + data[at + 5 : at + 9] + bytes([len(factors)]) + parts
    return data[:at] + bytes([0xFF, marker]) + (2 + len(frame)).to_bytes(2, "big") + frame + data[at + 2 + size :]


def test_simplejpeg_is_given_usual_jpegs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library has ended the process on a legal file of a rare kind; here it is asked for nothing."""
    given: list[bytes] = []

    def noted(data: bytes, *_: object, **__: object) -> Any:
        given.append(data)
        raise ValueError

    monkeypatch.setattr(simplejpeg, "decode_jpeg_header", noted)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    usual = ([0x22, 0x11, 0x11], [0x21, 0x11, 0x11], [0x11, 0x11, 0x11], [0x11], [0x22])
    odd = ([0x31, 0x11, 0x11], [0x22, 0x11, 0x12], [0x11, 0x11], [0x11] * 4, [0x51], [0x01, 0x11, 0x11], [])
    frames = [*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), 0xDE]
    for marker, bits, factors in itertools.product(frames, (2, 8, 12, 16), (*usual, *odd)):
        data = with_frame(marker, bits, factors)
        plain = marker in (0xC0, 0xC1, 0xC2) and bits == 8 and factors in usual
        assert jpeg_header(data).is_plain == plain
        given.clear()
        try:
            header = read_header(data, True)
            assert header.kind == "other"
        except Dropped as drop:
            assert drop.reason == "undecodable_image"
            assert bits == 8 or f"a JPEG image of {bits} bits" in drop.detail
        assert given == [data] * plain


def test_the_header_of_a_jpeg_is_found_as_libjpeg_finds_it() -> None:
    plain, tagged = (save(Image.fromarray(smooth(32, 24)), "JPEG", **options) for options in ({}, {"exif": turning(6)}))
    profiles = 3 * (b"\xff\xe2" + (60_000).to_bytes(2, "big") + bytes(59_998))
    right, odd = (b"", b"\xff\xff\xff", profiles), (b"garbage", b"\0", b"\xff\x01", b"\xff\xfe\0\x06\xff\xc3\xff\xda")
    for (data, orientation), between in itertools.product(((plain, 1), (tagged, 6)), (*right, *odd)):
        found = jpeg_header(whole := data[:2] + between + data[2:])
        assert found.is_plain and found.exif == (orientation == 6)
        assert between in odd or read_header(whole, upright=True).orientation == orientation
    segment = tagged[tagged.index(b"\xff\xe1") : tagged.index(b"\xff\xdb")]
    assert read_header(plain + segment, upright=True).orientation == 1, "behind the image is none"
    for cut in range(len(plain)):
        assert jpeg_header(plain[:cut]).marker in (0, 0xC0)


ACROSS, DOWN = np.meshgrid(np.linspace(0, 1, 48), np.linspace(1, 0, 32))
RAMPS = np.dstack([ACROSS, DOWN, np.full_like(DOWN, 0.3), 0.2 + ACROSS / 2, np.full_like(DOWN, 0.6)])
# What must be read: value's type, bands, ExtraSamples.
READ = {("u1", 1, None), ("u1", 3, None), ("u1", 4, None), ("u1", 4, 0), ("u2", 1, None), ("u2", 3, None),
        ("u2", 4, 0), ("f4", 1, None), ("i4", 1, None)}  # fmt: skip


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "i4", "u4", "f2", "f4", "f8"])
@pytest.mark.parametrize("bands", [1, 2, 3, 4, 5])
def test_a_tiff_has_its_pixels_or_is_dropped_as_what_it_is(dtype: str, bands: int) -> None:
    """Pillow 12.3 and 13.0 misread 16-bit bands apart, big-endian float32 and int32 that are compressed, a fourth band
    without ExtraSamples (as alpha), signed bytes, grey of more than 8 bits whose zero is white (as a negative), one
    band that is said to be apart (not inverted, nor swapped), and unsigned values over 2**31 (as negative).
    """
    most = {"u1": 255, "i1": 127, "u2": 65535, "i2": 32767, "i4": 65535, "u4": 2**32 - 1}.get(dtype, 1)
    values = (RAMPS[..., :bands] * most).astype(dtype)
    for order, apart, packed, photometric in itertools.product("<>", (False, True), (False, True), (0, 1, 2)):
        if (photometric == 2) > (bands > 2):
            continue
        for extra in (None, 0, 1, 2) if bands > (3 if photometric == 2 else 1) else (None,):
            data = tiff(values, order, photometric, extra, apart, packed)
            truth = RAMPS[..., :3] if photometric == 2 else RAMPS[..., [0, 0, 0]]
            truth = (1 - truth if photometric == 0 else truth) * (0.5 if dtype == "i2" else 1) * 255
            try:
                found = pixels(data)
            except Dropped as drop:
                assert drop.reason == "undecodable_image"
                assert drop.detail.startswith((f"a TIFF image of {bands} x ", "a TIFF image whose alpha", "ValueError"))
                common = (dtype, bands, extra) in READ and not apart
                assert not common or (photometric == 0 and dtype != "u1") or (bands > 2 and photometric < 2)
                continue
            if bands == 2 and extra in (1, 2):  # alpha, laid on white
                truth = truth * RAMPS[..., 1:2] + 255 * (1 - RAMPS[..., 1:2])
            assert np.abs(found - truth).mean() < 2, (order, apart, packed, photometric, extra)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("channels", [1, 3])
def test_one_transparent_value_of_a_png_is_clear_and_no_other(bits: int, channels: int) -> None:
    """tRNS of the PNG specification, of the file's own depth: Pillow 12.3 compares parts of 16 bits, and ignores those
    of wide grey; that of 2 and 4 bits is not scaled as the pixels are.
    """
    if channels == 3 and bits < 8:
        return
    most = (1 << bits) - 1
    steps = np.linspace(0, most, 2 if bits == 1 else 4).astype(int)
    values = np.repeat(np.repeat(steps, 8)[None, :, None], 6, axis=0).repeat(channels, axis=2)
    if bits == 16:
        values[:3] += np.where(values[:3] < most, 1, -1)  # as dark as the others, in 8 bits
    for step in steps:
        clear = int(step).to_bytes(2, "big") * channels
        truth = np.where((values == step).all(axis=2, keepdims=True), 255, values * (255 / most))
        assert np.abs(pixels(png(values, bits, clear)) - truth).max() <= 1, step


def test_words_of_pillow_on_single_files_are_ours(tmp_path: Path) -> None:
    """Pillow 12.3 warns of images of more than 89,478,485 pixels, and logs TIFFs of many bands; none names a file."""
    (tmp_path / "a").write_bytes(bomb(10_000, 9_500))
    (tmp_path / "b").write_bytes(tiff(np.zeros((4, 4, 13), np.uint8), photometric=1, extra=0))
    code = (
        "import sys; from pathlib import Path; from clipstream.data.decode.images import open_image\n"
        "print(open_image(Path('a').read_bytes()).size)\ntry: open_image(Path('b').read_bytes())\n"
        "except Exception as error: print(error)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(clipstream.__file__).parent.parent)}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert found.stdout.startswith("(10000, 9500)\nundecodable_image: a TIFF image of 13 x 8 bits")
    assert not found.stderr


def test_sixteen_bits_of_low_values_in_jpeg_2000_are_told() -> None:
    """Pillow keeps the upper 8 bits of colours, and all of grey."""
    grey = (np.linspace(0, 3000, 64 * 32).reshape(32, 64)).astype(np.uint16)
    assert pixels(save(Image.fromarray(grey), "JPEG2000"))[-1, -1, 0] > 150
    dark = bytearray(save(Image.fromarray(HALVES // 32), "JPEG2000", no_jp2=True))
    assert pixels(bytes(dark)).max() < 64
    for bits in (12, 16):  # as Pillow decodes 16 bits; the header of these 8 is changed alone
        dark[42] = bits - 1
        with pytest.raises(Dropped, match=f"a JPEG 2000 image of {bits} bits with low values"):
            _check_depth(Image.fromarray(HALVES // 32), bytes(dark))
