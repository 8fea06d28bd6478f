"""JPEGs that are decoded with their batch: which are left to it, and their pixels beside Pillow's and `exact`'s."""

from __future__ import annotations

import io
import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from clipstream.data.batch import ImageSpec
from clipstream.data.decode import gpu_jpeg
from clipstream.data.decode.gpu_jpeg import JpegDecoder, crop_and_resize, decode_by_pillow
from clipstream.data.decode.images import FILTERS, Pixels
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import AugmentSettings
from clipstream.errors import Dropped, SettingsError
from tests.support.image_files import decibels, photograph, save, sharpness, smooth, turning

PHOTO = Image.fromarray(smooth(90, 70))
JPEG = save(PHOTO, "JPEG")
TABLES = JPEG.index(b"\xff\xdb")
JUNK = JPEG[:TABLES] + b"\0junk" + JPEG[TABLES:]  # which Pillow passes over


def transform(decoder: Any, size: int = 64, **augment: Any) -> TrainTransform:
    return TrainTransform(ImageSpec((size, size)), AugmentSettings(**augment), "white", decoder=decoder)


def as_array(data: bytes) -> Pixels:
    return np.frombuffer(data, dtype=np.uint8)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("more", [{}, {"exif": turning(1)}], ids=["plain", "with EXIF"])
def test_a_baseline_jpeg_is_left_with_the_crop_of_the_other_decoders(subsampling: int, more: dict[str, Any]) -> None:
    data, augment = save(PHOTO, "JPEG", subsampling=subsampling, **more), {"flip": 0.5, "interpolation": "random"}
    left, exact = transform("gpu", **augment), transform("exact", **augment)
    decoded, seen = [decode_by_pillow(as_array(data))], set()
    for key in range(6):
        slot = np.zeros((64, 64, 3), dtype=np.uint8)
        left(data, SampleRNG(key), slot)
        assert left.jpeg is not None and slot.tobytes().startswith(data) and left.jpeg[0] == len(data)
        pixels = crop_and_resize(decoded, torch.tensor([left.jpeg]), (64, 64))[0].permute(1, 2, 0).numpy()
        expected = exact(data, SampleRNG(key))
        assert np.abs(pixels.astype(int) - expected).max() <= 2 and left.lost == exact.lost
        seen.add(left.jpeg[5:])
    assert len(seen) > 2


@pytest.mark.parametrize(
    "data",
    [
        save(PHOTO, "JPEG", progressive=True), save(PHOTO.convert("L"), "JPEG"), save(PHOTO.convert("CMYK"), "JPEG"),
        simplejpeg.encode_jpeg(np.asarray(PHOTO), colorsubsampling="411"), save(PHOTO, "JPEG", keep_rgb=True), JUNK,
        JPEG + b"\0", save(PHOTO, "JPEG", exif=turning(6)), save(PHOTO.resize((60, 1025)), "JPEG", quality=1),
        save(PHOTO, "JPEG", comment=b" " * 20000), save(PHOTO), save(PHOTO, "WEBP"),
    ],
    ids=["progressive", "grey", "CMYK", "4:1:1", "RGB", "junk", "more", "turned", "long", "large", "PNG", "WebP"],
)  # fmt: skip
def test_other_files_are_decoded_by_the_worker(data: bytes) -> None:
    slot, expected = np.zeros((2, 64, 64, 3), dtype=np.uint8)
    left = transform("gpu", flip=0.5)
    for key in range(3):
        left(data, SampleRNG(key), slot)
        transform("fast", flip=0.5)(data, SampleRNG(key), expected)
        assert left.jpeg is None and np.array_equal(slot, expected)


@pytest.mark.parametrize("filter", FILTERS)
def test_crops_are_resized_as_pillow_does(filter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of several sizes in one call, also in several parts, mirrored or not, made smaller and larger."""
    sizes, crops, expected = [(300, 200), (90, 131), (20, 33), (64, 64), (5, 7)], [], []
    images = [torch.from_numpy(smooth(*size, seed=seed)) for seed, size in enumerate(sizes)]
    for number, (image, (width, height)) in enumerate(zip(images, sizes, strict=True)):
        left, top, wide, high, flip = number % 3, number % 2, width - 3, height - 4, number % 2
        crops.append((1, left, top, wide, high, flip, filter == "bilinear"))
        cut = Image.fromarray(image.numpy()).crop((left, top, left + wide, top + high))
        pixels = np.asarray(cut.resize((48, 40), FILTERS[filter]))
        expected.append(pixels[:, ::-1] if flip else pixels)
    for part in (1 << 28, 1):
        monkeypatch.setattr(gpu_jpeg, "CHUNK_BYTES", part)
        made = crop_and_resize(images, torch.tensor(crops, dtype=torch.int32), (40, 48)).permute(0, 2, 3, 1).numpy()
        assert np.abs(made.astype(int) - np.stack(expected)).max() <= 2


def test_the_decoder_gives_pillows_pixels_and_refuses_what_is_broken() -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    decoder = JpegDecoder("cpu")
    assert decoder.decibels > 100 and "libjpeg-turbo on cpu" in decoder.name
    broken, other = JPEG.replace(b"\xff\xdb", b"\xff\xee"), save(Image.fromarray(smooth(33, 250)), "JPEG")
    for files in ([JPEG, broken, other], [JUNK], [other, JPEG, JPEG, JUNK]):  # the memory of images is used again
        found = decoder([as_array(data) for data in files])
        for data, image in zip(files, found, strict=True):
            assert (image is None) == (data in (broken, JUNK))
            if image is not None:
                assert torch.equal(image, torch.from_numpy(np.array(Image.open(io.BytesIO(data)))))
    assert decode_by_pillow(as_array(JUNK)).shape == (70, 90, 3)
    with pytest.raises(Dropped, match="undecodable_image"):
        decode_by_pillow(as_array(broken))


def test_photographs_are_close_to_the_exact_ones_and_as_sharp() -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    decoder, left, exact = JpegDecoder("cpu"), transform("gpu", 224), transform("exact", 224)
    slot, sizes = np.zeros((224, 224, 3), dtype=np.uint8), ((480, 400), (350, 427), (290, 330))
    for key, (size, sampling) in enumerate(itertools.product(sizes, (0, 2))):
        data = save(photograph(*size, key), "JPEG", quality=90, subsampling=sampling)
        left(data, SampleRNG(key), slot)
        (image,) = decoder([slot.reshape(-1)[: len(data)]])
        assert image is not None and left.jpeg is not None
        pixels = crop_and_resize([image], torch.tensor([left.jpeg]), (224, 224))[0].permute(1, 2, 0).numpy()
        expected = exact(data, SampleRNG(key))
        assert decibels(pixels, expected) > 50
        assert 0.97 < sharpness(pixels) / sharpness(expected) < 1.03


def test_without_the_library_or_with_an_old_one_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("nvidia.nvimgcodec")
    old.__version__ = "0.7.0"  # type: ignore[attr-defined]
    for module, said in ((None, "import of nvidia.nvimgcodec halted"), (old, "installed: 0.7.0")):
        monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", module)
        with pytest.raises(SettingsError, match=rf"pip install 'clipstream\[gpu-decoder\]' \({said}"):
            JpegDecoder("cpu")
