"""JPEGs that the GPU's hardware decoder decodes (`data.decoder: gpu`); on the CPU, nvImageCodec's libjpeg-turbo."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.decode.gpu_jpeg import JpegDecoder
from clipstream.data.loader.loader import Loader
from tests.support.image_files import decibels, photograph, save, sharpness
from tests.support.loaders import data, digest, loader
from tests.support.tars import write_tar

pytest.importorskip("nvidia.nvimgcodec")
SLEEP = 20_000_000  # clock cycles: about 10 ms
SIDES = ((480, 400), (350, 427), (290, 330), (400, 300))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shard of 24 JPEGs, of which every fourth is progressive, and every second without subsampling."""
    samples: list[dict[str, Any]] = []
    for number in range(24):
        image = photograph(*SIDES[number % 4], number % 6)
        file = save(image, "JPEG", quality=85, subsampling=number % 2 * 2, progressive=number % 4 == 3)
        samples.append({"__key__": f"{number:03d}", "jpg": file, "txt": str(number)})
    return str(write_tar(tmp_path_factory.mktemp("photographs") / "a.tar", samples))


def stream_on(device: str, shard: str, decoder: str, **changes: Any) -> Loader:
    settings = data(shard, decoder=decoder, workers=2, augment={"flip": 0.5}, **changes)
    return loader(settings, device=device, image=ImageSpec((224, 224)))


def batches(device: str, shard: str, decoder: str, count: int = 4) -> list[Batch]:
    with stream_on(device, shard, decoder) as stream:
        return [batch.to("cpu") for batch in islice(stream, count)]


def test_the_hardware_decoder_interpolates_chroma(device: str) -> None:
    decoder = JpegDecoder(device)
    assert ("the hardware decoder" if device != "cpu" else "libjpeg-turbo") in decoder.name
    assert decoder.decibels > 50


def test_images_are_those_of_the_exact_decoder(device: str, photographs: str) -> None:
    for left, exact in zip(*(batches(device, photographs, kind) for kind in ("gpu", "exact")), strict=True):
        assert left.keys == exact.keys and bool((left.weights == 1).all())
        for key, pixels, expected in zip(left.keys, left.images, exact.images, strict=True):
            found, wanted = (one.permute(1, 2, 0).cpu().numpy() for one in (pixels, expected))
            if int(key[-3:]) % 4 != 3:  # the others are the workers'
                assert decibels(found, wanted) > 50, key
                assert 0.97 < sharpness(found) / sharpness(wanted) < 1.03


def test_batches_are_the_same_each_time(device: str, photographs: str) -> None:
    one, other = (batches(device, photographs, "gpu", 8) for _ in range(2))
    assert [digest([batch.to("cpu")]) for batch in one] == [digest([batch.to("cpu")]) for batch in other]


def test_no_image_is_written_while_it_is_read(cuda: str, photographs: str) -> None:
    """The decoder, which does not keep to the order of its stream, waits for delayed work on it."""
    expected = [digest([batch]) for batch in batches(cuda, photographs, "gpu", 8)]
    with stream_on(cuda, photographs, "gpu", prefetch=1) as stream:
        copies: Any = stream._prefetch
        found = []
        for _ in range(8):
            with torch.cuda.stream(copies._copies.stream):
                torch.cuda._sleep(SLEEP)
            batch = next(stream)
            torch.cuda._sleep(SLEEP)
            found.append(digest([batch.to("cpu")]))
        assert found == expected
