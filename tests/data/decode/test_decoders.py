"""The decoders: `exact` equals open_clip's transform, `fast` is close to it with the same crop."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import image_transform
from PIL import ExifTags, Image
from torchvision.transforms import RandomResizedCrop

from clipstream.data.batch import ImageSpec
from clipstream.data.decode import images
from clipstream.data.decode.images import FACTORS, decode, read_header
from clipstream.data.decode.train_transform import SPARE, TrainTransform, crop_box
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import AugmentSettings
from tests.support.image_files import decibels, save, smooth

WHITE = (255, 255, 255)


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """A picture with a photograph's spectrum, amplitudes as 1 / frequency, and some edges."""
    draw = np.random.default_rng(seed)
    side = -(-max(width, height) // 256) * 256  # whose transform is fast
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1
    planes = []
    for strength in (1.0, 0.2, 0.2):  # brightness, and two of colour
        noise = draw.normal(size=frequency.shape) + 1j * draw.normal(size=frequency.shape)
        plane = np.fft.irfft2(noise / frequency**1.2, s=(side, side))[:height, :width]
        planes.append(128 + 40 * strength * plane / plane.std())
    planes[0][height // 3 : height // 2, width // 4 : width // 2] += 60
    stack = np.stack(planes, axis=-1)
    return Image.fromarray(np.clip(stack, 0, 255).astype(np.uint8), "YCbCr").convert("RGB")


def both(size: int, **augment: Any) -> tuple[TrainTransform, TrainTransform]:
    spec, settings = ImageSpec((size, size)), AugmentSettings(**augment)
    return TrainTransform(spec, settings, "white"), TrainTransform(spec, settings, "white", decoder="exact")


@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.08, 1.0)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_exact_is_open_clips_transform_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, scale: tuple[float, float], interpolation: str
) -> None:
    augment = AugmentSettings(scale=scale, interpolation=interpolation)
    theirs = image_transform(
        (32, 40), is_train=True, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation=interpolation,
        aug_cfg={"scale": scale},
    )  # fmt: skip
    if interpolation == "bilinear":  # open_clip's training is bicubic whatever it is told
        next(t for t in theirs.transforms if isinstance(t, RandomResizedCrop)).interpolation = Image.BILINEAR
    ours = TrainTransform(ImageSpec((32, 40)), augment, "white", decoder="exact")
    rgb = Image.fromarray(smooth(130, 97))
    pictures = [
        save(rgb, "JPEG"), save(rgb, "JPEG", progressive=True), save(rgb.convert("L"), "JPEG"),
        save(rgb.convert("CMYK"), "JPEG"), save(rgb), save(rgb.convert("P")), save(rgb.convert("1")),
        save(rgb, "WEBP"), save(rgb, "TIFF"),
    ]  # fmt: skip
    for data, key in itertools.product(pictures, range(5)):
        left, top, width, height = crop_box((130, 97), augment, SampleRNG(key))
        monkeypatch.setattr(RandomResizedCrop, "get_params", lambda *_, box=(top, left, height, width): box)
        expected = (theirs(Image.open(io.BytesIO(data))) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(ours(data, SampleRNG(key)), expected)


def shift(moved: np.ndarray[Any, Any], still: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """By how many pixels (down, right) one picture lies off the other, to first order."""
    one, other = (pixels.astype(float).mean(axis=2) for pixels in (moved, still))
    slopes = np.stack([slope.ravel() for slope in np.gradient(other)], axis=1)
    found: np.ndarray[Any, Any] = np.linalg.lstsq(slopes, (other - one).ravel(), rcond=None)[0]
    return found


def sharpness(pixels: np.ndarray[Any, Any]) -> float:
    """Energy of the Laplacian of the grey picture."""
    grey = pixels.astype(float).mean(axis=2)
    inside = 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    return float(np.mean(inside**2))


SIDES = [(1500, 1100), (900, 1250), (1024, 768), (640, 480), (701, 483), (350, 527), (290, 130), (111, 222)]


@pytest.fixture(scope="module", params=[1, 8], ids=["upright", "turned"])
def photographs(request: pytest.FixtureRequest) -> list[bytes]:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = request.param
    options = [{"quality": 90, "subsampling": (0, 2)[seed % 2], "exif": exif} for seed in range(len(SIDES))]
    return [save(photograph(*side, seed), "JPEG", **options[seed]) for seed, side in enumerate(SIDES)]


@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.08, 1.0)])
@pytest.mark.parametrize("size", [224, 112, 32])
def test_fast_pixels_are_close_to_the_exact_ones_and_as_sharp(
    photographs: list[bytes], size: int, scale: tuple[float, float]
) -> None:
    """No crop lies off by half a pixel, of those it shows and of its source."""
    fast, exact = both(size, scale=scale)
    close, ratios = [], []
    for key, data in enumerate(photographs):
        pixels, expected = fast(data, SampleRNG(key)), exact(data, SampleRNG(key))
        close.append(decibels(pixels, expected))
        upright = read_header(data, upright=True).size
        box = crop_box(upright, fast.augment, SampleRNG(key))
        off = np.abs(shift(pixels, expected)) * max(1.0, box.height / size, box.width / size)
        assert off.max() < 0.5, f"picture {key} lies {off} of its pixels off"
        ratios.append(sharpness(pixels) / sharpness(expected))
    assert np.mean(close) > 45.0, close
    assert 0.97 <= np.median(ratios) <= 1.03 and min(ratios) >= 0.9, np.sort(ratios)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("kind", ["palette PNG", "GIF", "1-bit PNG", "1-bit TIFF", "CMYK TIFF"])
def test_pictures_that_are_no_smooth_colours_equal_the_exact_ones(kind: str, orientation: int) -> None:
    mode = {"p": "P", "G": "P", "1": "1", "C": "CMYK"}[kind[0]]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = save(photograph(300, 217, 1).convert(mode), kind.split()[-1], exif=exif)
    fast, exact = both(64, scale=(0.3, 1.0), flip=0.5)
    for key in range(10):
        np.testing.assert_array_equal(fast(data, SampleRNG(key)), exact(data, SampleRNG(key)))


def test_both_draw_the_same() -> None:
    data = save(Image.fromarray(smooth(500, 400)), "JPEG")
    many = {"scale": (0.1, 1.0), "interpolation": "random", "flip": 0.5, "gray_scale_prob": 0.5}
    for key in range(40):
        draws = [SampleRNG(key), SampleRNG(key)]
        one, other = (make(data, drawn) for make, drawn in zip(both(48, **many), draws, strict=True))
        assert decibels(one, other) > 30
        assert draws[0].integer(1 << 40) == draws[1].integer(1 << 40)


def test_the_orientation_is_found_behind_other_segments_and_nowhere_else() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    plain = save(photograph(40, 30, 0), "JPEG")
    tagged = save(photograph(40, 30, 0), "JPEG", exif=exif)
    segment = tagged[tagged.index(b"\xff\xe1") : tagged.index(b"\xff\xdb")]
    profile = b"\xff\xe2" + (60_000).to_bytes(2, "big") + bytes(59_998)
    for between in (b"", profile * 3, b"\xff\xff\xff"):
        assert read_header(plain[:2] + between + segment + plain[2:], upright=True).orientation == 6
    assert read_header(plain + segment, upright=True).orientation == 1


@pytest.mark.parametrize("size", [(640, 480), (333, 517), (17, 9), (100, 8)])
@pytest.mark.parametrize("factor", [1, *FACTORS])
def test_what_simplejpeg_refuses_pillow_decodes_at_the_same_size(size: tuple[int, int], factor: int) -> None:
    data = save(photograph(*size, 1), "JPEG", quality=95)
    header = read_header(data, upright=True)
    assert header.kind == "jpeg" and header.size == size
    fast = decode(data, header, factor, WHITE)
    slow = decode(data, header._replace(kind="other"), factor, WHITE)
    assert fast.shape == slow.shape == (-(-size[1] // factor), -(-size[0] // factor), 3)
    assert decibels(fast, slow) > 30
    inks = save(photograph(*size, 1).convert("CMYK"), "JPEG", quality=95)
    header = read_header(inks, upright=True)
    assert header.kind == "other" and header.scales
    assert decode(inks, header, factor, WHITE).shape == fast.shape


def test_a_crop_is_made_of_twice_the_pixels_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    data, taken, real = save(photograph(1200, 900, 3), "JPEG"), [], images.decode

    def watched(data: bytes, header: Any, factor: int, background: Any) -> Any:
        taken.append(factor)
        return real(data, header, factor, background)

    monkeypatch.setattr("clipstream.data.decode.train_transform.decode", watched)
    for size, key in itertools.product((40, 100, 224), range(30)):
        fast, _ = both(size, scale=(0.05, 1.0))
        fast(data, SampleRNG(key))
        box = crop_box((1200, 900), fast.augment, SampleRNG(key))
        assert taken[-1] <= max(1, min(box.width, box.height) / size / SPARE)
    assert set(taken) == {1, 2, 4, 8}


def test_webp_by_torchcodec_is_pillows() -> None:
    pytest.importorskip("torchcodec")
    if images.webp_decoder() is None:
        pytest.skip("torchcodec does not fit this torch")
    rgb = photograph(200, 150, 0)
    clear = rgb.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(rgb.size))
    for picture, options in itertools.product((rgb, clear), ({"quality": 80}, {"lossless": True})):
        data = save(picture, "WEBP", **options)
        header = read_header(data, upright=True)
        assert header.kind == "webp"
        np.testing.assert_array_equal(decode(data, header, 1, WHITE), np.asarray(Image.open(io.BytesIO(data))))
        assert decibels(*(make(data, SampleRNG(1)) for make in both(64))) > 50
