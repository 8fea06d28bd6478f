"""Loaders with `data.decoder: gpu`, whose JPEGs nvImageCodec decodes, here by its backend for CPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clipstream.cli.verbs.train import main
from clipstream.data.batch import Batch, ImageSpec
from clipstream.data.decode.gpu_jpeg import JpegDecoder
from clipstream.data.loader.batch_buffers import HostBatches, JpegBatches
from clipstream.data.order_plan import views_of
from clipstream.errors import DataError, SettingsError
from tests.support.image_files import decibels, save, smooth
from tests.support.loaders import data, digest, indexed, loader
from tests.support.runs import flags, furnish
from tests.support.tars import write_tar

pytest.importorskip("nvidia.nvimgcodec")
SIZE = ImageSpec((64, 64))
FORMS = (("JPEG", {}), ("PNG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"subsampling": 0}), ("WEBP", {}))


def picture(number: int) -> bytes:
    form, options = FORMS[number % len(FORMS)]
    return save(Image.fromarray(smooth(70 + number, 90 - number, seed=number)), form, **options)


def shard(folder: Path, pictures: list[bytes]) -> str:
    samples = [{"__key__": f"{i:03d}", "jpg": one, "txt": f"picture {i}"} for i, one in enumerate(pictures)]
    return str(write_tar(folder / "mixed.tar", samples))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shard of 30 pictures of several formats."""
    return shard(tmp_path_factory.mktemp("mixed"), [picture(number) for number in range(30)])


@pytest.mark.parametrize("workers", [0, 2])
def test_mixed_batches_are_whole_and_in_the_order_of_the_other_decoders(mixed: str, workers: int) -> None:
    settings = {"workers": workers, "augment": {"flip": 0.5, "interpolation": "random"}}
    with (
        loader(data(mixed, decoder="gpu", **settings), image=SIZE) as one,
        loader(data(mixed, decoder="exact", **settings), image=SIZE) as other,
    ):
        for left, exact in islice(zip(one, other, strict=True), 5):
            assert left.keys == exact.keys and left.jpegs is None and left.pixels is not None
            for name in ("ids", "weights", "checksums", "sources"):
                assert torch.equal(getattr(left, name), getattr(exact, name))
            for pixels, expected in zip(left.pixels.numpy(), exact.images.numpy(), strict=True):
                assert decibels(pixels, expected) > 40  # of those that workers decode, with chroma that is repeated


def test_a_loader_goes_on_with_the_same_pixels(mixed: str) -> None:
    settings = data(mixed, decoder="gpu", workers=0)
    with loader(settings, image=SIZE) as first:
        found = [digest([batch]) for batch in islice(first, 3)]
        state = first.state()
        found += [digest([batch]) for batch in islice(first, 3)]
    with loader(settings, image=SIZE, start=state) as second:
        assert [digest([batch]) for batch in islice(second, 3)] == found[3:]


@pytest.mark.parametrize("kind", [data, indexed])
def test_a_jpeg_that_nothing_decodes_leaves_its_slot_empty_and_is_counted(kind: type, tmp_path: Path) -> None:
    broken = picture(0).replace(b"\xff\xdb", b"\xff\xee")  # without quantization tables, which no header shows
    path = shard(tmp_path, [broken, *(picture(number) for number in range(1, 24))])
    with loader(kind(path, decoder="gpu", lanes=4), image=SIZE) as stream:
        empty = 0
        for batch in islice(stream, 4):
            stream.mark_trained()
            for key, weight, pixels in zip(batch.keys, batch.weights.tolist(), batch.images, strict=True):
                assert (weight == 0) == (key == "mixed.tar/000") and bool(pixels.any()) == bool(weight)
                empty += weight == 0
        counts = stream.trained.sources["train"]
        assert empty and counts.dropped == {"undecodable_image": empty} and counts.used == 48 - empty
        assert counts.read == 48 and counts.examples["undecodable_image"].startswith("mixed.tar/000: OSError")
    nothing = shard(tmp_path / "nothing", [broken] * 24)
    few = data(nothing, decoder="gpu", max_sample_failures=0.1)
    with loader(few, image=SIZE) as stream, pytest.raises(DataError, match="undecodable_image"):
        list(islice(stream, 1000))


def test_a_broken_jpeg_is_listed_by_its_shard_and_key(tmp_path: Path) -> None:
    broken = picture(0).replace(b"\xff\xdb", b"\xff\xee")
    shards = [shard(tmp_path / name, [broken, *(picture(number) for number in range(1, 12))]) for name in "ab"]
    with loader(data(shards, decoder="gpu", lanes=4), image=SIZE) as stream:  # both files have the same name
        for _ in islice(stream, 6):
            stream.mark_trained()
        listed = {(one.shard, one.key) for one in stream.trained.take_dropped()}
    assert listed and listed <= {(path, "000") for path in shards}


def test_what_the_decoder_refuses_is_decoded_by_pillow_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    jpeg = save(Image.fromarray(smooth(60, 50)), "JPEG")
    junk = jpeg[:20] + b"\0junk" + jpeg[20:]  # between two segments, which Pillow passes over
    slots, crops = np.zeros((3, 64, 64, 3), dtype=np.uint8), np.zeros((3, 7), dtype=np.int32)
    for row, file in ((0, jpeg), (2, junk)):
        slots[row].reshape(-1)[: len(file)] = np.frombuffer(file, dtype=np.uint8)
        crops[row] = len(file), 0, 0, 60, 50, 0, 0
    slots[1] = 7
    made = [torch.zeros(3, dtype=torch.int32)] * 2
    pixels, rows = torch.from_numpy(slots).permute(0, 3, 1, 2), torch.from_numpy(crops)
    batch = Batch(pixels, made[0], torch.ones(3), ("a", "b", "c"), made[1], 0, 3, jpegs=rows)
    caplog.set_level(logging.INFO, "clipstream")
    copies = JpegBatches(HostBatches(), "cpu", told=True)
    found = copies.finish(copies.wait(copies.start(batch)))
    copies.close()
    assert torch.equal(found.images[0], found.images[2]) and bool((found.images[1] == 7).all()) and not copies.broken
    assert "gets 2 of the first batch's 3 images" in caplog.text
    assert "1 images refused, and left to Pillow: c" in caplog.text and "which is slow: for tests" in caplog.text


def test_waits_for_the_decoder_are_waits_for_data(mixed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(self: JpegDecoder, files: Sequence[np.ndarray]) -> list[torch.Tensor | None]:
        time.sleep(0.5)
        return decode(self, files)

    with loader(data(mixed, decoder="gpu", workers=0), image=SIZE) as stream:
        decode = JpegDecoder.__call__
        monkeypatch.setattr(JpegDecoder, "__call__", slowly)
        next(stream)
        assert stream.wait_seconds >= 0.5


def test_stored_views_are_made_by_another_decoder(mixed: str) -> None:
    assert views_of(data(mixed, decoder="gpu"), 0, 1) == {"views": 0}
    with pytest.raises(SettingsError, match="not supported for stored features"):
        views_of(data(mixed, decoder="gpu"), 2, 1)


def test_a_run_says_which_decoder_it_has_and_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    furnish(tmp_path)
    quick = ("--log.report", "false")
    assert main(flags(tmp_path, "x", "--data.decoder", "gpu", *quick, steps=2)) == 0
    assert "decoder  nvImageCodec 0." in capsys.readouterr().out
    assert main(flags(tmp_path, "x", "--data.decoder", "fast", "--resume", "latest", *quick, steps=3)) == 0
    assert "data.decoder gpu -> fast" in capsys.readouterr().out
