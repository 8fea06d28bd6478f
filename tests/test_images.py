"""Pixels: evaluation equal to open_clip's, training's crops, and pictures of every kind and fault."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import image_transform
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from clipstream.batch import ImageSpec
from clipstream.data.images import EvalTransform, TrainTransform, crop_box
from clipstream.data.order import Draws
from clipstream.data.settings import AugmentSettings
from clipstream.errors import Dropped, SettingsError

SIZES = [(97, 60), (60, 97), (33, 33), (20, 64), (10, 7), (64, 48)]


def smooth(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint8 [height, width, channels] of smooth colours with some noise."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (4, 4, channels), dtype=np.uint8)
    planes = [Image.fromarray(small[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)]
    noise = draw.integers(-20, 20, (height, width, channels))
    return np.clip(np.stack([np.asarray(plane) for plane in planes], axis=-1) + noise, 0, 255).astype(np.uint8)


def save(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def photo(width: int, height: int, kind: str = "JPEG", **options: Any) -> bytes:
    return save(Image.fromarray(smooth(width, height)), kind, **options)


def both(size: int, background: str = "white") -> list[EvalTransform | TrainTransform]:
    spec = ImageSpec((size, size))
    return [EvalTransform(spec, background), TrainTransform(spec, AugmentSettings(), background)]


def reference(data: bytes, spec: ImageSpec) -> np.ndarray[Any, Any]:
    """open_clip's transform with its normalisation switched off; float32 times 255 is exact in uint8."""
    transform = image_transform(
        spec.size, is_train=False, mean=(0.0,) * 3, std=(1.0,) * 3, resize_mode=spec.resize_mode,
        interpolation=spec.interpolation, fill_color=spec.fill,
    )  # fmt: skip
    return (transform(Image.open(io.BytesIO(data))) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("goal", [(32, 32), (24, 40)])
@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_evaluation_equals_open_clip_bit_for_bit(goal: tuple[int, int], mode: str, interpolation: str) -> None:
    spec = ImageSpec(goal, interpolation, mode, fill=77)
    transform = pickle.loads(pickle.dumps(EvalTransform(spec, "red")))
    for width, height in SIZES:
        rgb = Image.fromarray(smooth(width, height))
        pictures = [
            photo(width, height), photo(width, height, "WEBP"), save(rgb), save(rgb.convert("L")),
            save(rgb.convert("P")), save(rgb.convert("1")), save(rgb.convert("CMYK"), "JPEG"),
            photo(width, height, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
        ]  # fmt: skip
        for data in pictures:
            pixels = transform(data)
            assert pixels.shape == (*goal, 3) and pixels.dtype == np.uint8 and pixels.flags["C_CONTIGUOUS"]
            np.testing.assert_array_equal(pixels, reference(data, spec), err_msg=f"{width} x {height}")


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_an_alpha_channel_that_hides_nothing_changes_nothing(mode: str) -> None:
    spec = ImageSpec((32, 32))
    for width, height in SIZES:
        data = save(Image.fromarray(smooth(width, height)).convert(mode))
        np.testing.assert_array_equal(EvalTransform(spec, "red")(data), reference(data, spec))


def clear(kind: str) -> bytes:
    """A picture, all of it transparent, with black under it."""
    if kind == "palette":
        return save(Image.new("P", (40, 30), 0), transparency=0)
    if kind == "rgb":
        return save(Image.new("RGB", (40, 30)), transparency=(0, 0, 0))
    if kind == "grey":
        return save(Image.new("LA", (40, 30)))
    return save(Image.new("RGBA", (40, 30)), kind, **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "palette", "rgb", "grey"])
def test_the_background_shows_through(kind: str) -> None:
    for name, colour in [("white", (255, 255, 255)), ("#102030", (16, 32, 48))]:
        for transform in both(16, name):
            assert (transform(clear(kind), Draws(1)) == np.array(colour, dtype=np.uint8)).all()
    with pytest.raises(SettingsError, match="'no such colour'"):
        both(16, "no such colour")


def test_16_bit_greys_keep_their_brightness() -> None:
    data = save(Image.fromarray(np.full((20, 20), 0x4080, dtype=np.uint16)))
    for transform in both(8):
        assert (transform(data, Draws(1)) == 0x40).all()


class TorchDraws:
    """Draws from torch's global state as torchvision does, to compare with its crops."""

    def uniform(self) -> float:
        return torch.empty(1).uniform_(0, 1).item()

    def integer(self, n: int) -> int:
        return int(torch.randint(0, n, size=(1,)).item())


@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.08, 1.0)])
@pytest.mark.parametrize("size", [(300, 200), (100, 1000), (1000, 90), (1, 5)])
def test_crops_are_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    augment = AugmentSettings(scale=scale)
    picture = Image.new("L", size)
    same = 0
    for seed in range(100):
        torch.manual_seed(seed)
        top, left, height, width = RandomResizedCrop.get_params(picture, list(scale), list(augment.ratio))
        torch.manual_seed(seed)
        same += crop_box(size, augment, TorchDraws()) == (left, top, width, height)  # type: ignore[arg-type]
    assert same >= 98  # torchvision computes in float32: a rounding may differ


def decibels(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10(255**2 / np.mean((one.astype(float) - other) ** 2)))


@pytest.mark.parametrize("size", [(60, 50), (300, 260), (800, 500)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_training_pixels_are_those_of_the_crop(kind: str, size: tuple[int, int]) -> None:
    augment = AugmentSettings(scale=(0.3, 1.0))
    data = photo(*size, kind)
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    for key in range(8):
        left, top, width, height = crop_box(size, augment, Draws(key))
        crop = whole.crop((left, top, left + width, top + height)).resize((32, 32), Image.Resampling.BICUBIC)
        pixels = TrainTransform(ImageSpec((32, 32)), augment, "white")(data, Draws(key))
        assert decibels(pixels, np.asarray(crop)) > 33


def test_the_same_draws_give_the_same_pixels_also_into_a_slab() -> None:
    augment = AugmentSettings(scale=(0.5, 1.0), interpolation="random", flip=0.5)
    transform = pickle.loads(pickle.dumps(TrainTransform(ImageSpec((24, 32)), augment, "white")))
    data = photo(80, 60)
    slab = np.zeros((40, 24, 32, 3), dtype=np.uint8)
    for key, slot in enumerate(slab):
        assert transform(data, Draws(key), slot) is slot
        np.testing.assert_array_equal(slot, transform(data, Draws(key)))
    assert len({slot.tobytes() for slot in slab}) == 40
    slot = np.zeros((24, 32, 3), dtype=np.uint8)
    EvalTransform(ImageSpec((24, 32)), "white")(data, None, slot)
    assert slot.any()


def test_flip_mirrors() -> None:
    whole = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    data = photo(40, 40)
    spec = ImageSpec((20, 20))
    plain = TrainTransform(spec, AugmentSettings(**whole), "white")(data, Draws(1))
    mirrored = TrainTransform(spec, AugmentSettings(**whole, flip=1), "white")(data, Draws(1))
    np.testing.assert_array_equal(mirrored, plain[:, ::-1])
    sometimes = TrainTransform(spec, AugmentSettings(**whole, flip=0.3), "white")
    assert 40 < sum((sometimes(data, Draws(key)) != plain).any() for key in range(200)) < 80


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises a huge picture."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT5\xaf\x06\x1e"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "undecodable_image"),
        (b"<html>not found</html>", "undecodable_image"),
        (photo(60, 60)[:-200], "undecodable_image"),
        (photo(60, 60)[:20], "undecodable_image"),
        (photo(60, 60, "PNG")[:-100], "undecodable_image"),
        (photo(60, 60, "WEBP")[:-100], "undecodable_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "undecodable_image"),
        (bomb(60_000, 60_000), "image_too_large"),
        (bomb(13_400, 13_400), "image_too_large"),
    ],
)
def test_bad_pictures_are_dropped_with_a_reason(data: bytes, reason: str) -> None:
    for transform in both(16):
        with pytest.raises(Dropped) as drop:
            transform(data, Draws(1))
        assert drop.value.reason == reason and drop.value.detail


def test_thin_strips_neither_fail_nor_fill_the_memory() -> None:
    data = save(Image.new("RGB", (1, 9000)))
    with pytest.raises(Dropped, match="image_too_large: a strip of 1 x 9000"):
        EvalTransform(ImageSpec((224, 224)), "white")(data)
    assert EvalTransform(ImageSpec((16, 16), resize_mode="longest"), "white")(data).shape == (16, 16, 3)
    assert TrainTransform(ImageSpec((16, 16)), AugmentSettings(), "white")(data, Draws(1)).shape == (16, 16, 3)
