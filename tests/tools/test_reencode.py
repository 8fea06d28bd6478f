"""Resized and re-encoded images: training and evaluation see the same, and other members are unchanged."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, features

from clipstream.data.batch import ImageSpec
from clipstream.data.decode.images import EvalTransform, Pixels
from clipstream.errors import Dropped
from clipstream.storage.tar import Shard, scan
from clipstream.tools.reencode import Format, Recipe, recode, rewrite
from tests.support.tars import write_tar

NEAR, PALETTE = 2.5, 4.0  # mean differences; evaluation resizes palettes without a filter
KEYS = ("jpg", "jpeg", "png", "webp", "gif")
TO_64 = Recipe(64, "keep", 95)


def smooth(width: int, height: int, channels: int = 3) -> Image.Image:
    """Smooth colours, no two corners alike."""
    small = np.random.default_rng(channels).integers(0, 256, (3, 4, channels), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def read(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.Make] = "somebody"
    return exif.tobytes()


def seen(data: bytes, *, upright: bool = False, background: str = "green") -> Pixels:
    """What the transforms make of a picture, at a small size."""
    return EvalTransform(ImageSpec((48, 48), resize_mode="squash"), background, upright)(data)


def distance(one: Pixels, other: Pixels) -> float:
    return float(np.abs(one.astype(float) - other.astype(float)).mean())


@pytest.mark.parametrize(
    ("picture", "kind", "options"),
    [
        (smooth(300, 200), "JPEG", {"quality": 95}),
        (smooth(200, 1200), "JPEG", {"quality": 95}),
        (smooth(300, 200).convert("L"), "JPEG", {}),
        (smooth(300, 200).convert("CMYK"), "JPEG", {"quality": 95}),
        (smooth(300, 200), "PNG", {}),
        (smooth(300, 200, 4), "PNG", {}),
        (smooth(300, 200).quantize(), "PNG", {}),
        (smooth(300, 200).quantize(), "PNG", {"transparency": 7}),
        (smooth(300, 200).convert("L").convert("LA"), "PNG", {}),
        (Image.fromarray(np.asarray(smooth(300, 200).convert("L")).astype(np.uint16) << 8), "PNG", {}),
        (smooth(300, 200, 4), "WEBP", {"lossless": True}),
        (smooth(300, 200), "BMP", {}),
        (smooth(300, 200), "TIFF", {}),
    ],
)
def test_smaller_pictures_look_the_same(picture: Image.Image, kind: str, options: dict[str, Any]) -> None:
    data = saved(picture, kind, **options)
    smaller = recode(data, TO_64)
    assert smaller.what == "resized"
    found = read(smaller.data)
    width, height = picture.size
    short = min(width, height)
    assert found.format == kind and found.size == (round(width * 64 / short), round(height * 64 / short))
    clear = "A" in picture.mode or "transparency" in options
    assert found.has_transparency_data == clear, "transparency stays, and nothing else becomes transparent"
    assert distance(seen(smaller.data), seen(data)) < (PALETTE if picture.mode == "P" else NEAR)


def test_what_is_small_enough_and_of_the_format_stays_byte_for_byte() -> None:
    for data in (saved(smooth(64, 90), "JPEG"), saved(smooth(90, 50), "PNG"), saved(smooth(400, 300), "GIF")):
        assert recode(data, TO_64) == (data, "unchanged")
    data = saved(smooth(300, 200), "PNG")
    assert recode(data, Recipe(None, "png", 95)) == (data, "unchanged")


@pytest.mark.parametrize(("kind", "wanted"), [("jpg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
def test_another_format(kind: Format, wanted: str) -> None:
    for picture, before in ((smooth(120, 100, 4), "TIFF"), (smooth(120, 100), "BMP"), (smooth(120, 100), "GIF")):
        data = saved(picture, before)
        other = recode(data, Recipe(None, kind, 95, "green"))
        assert other.what == "reencoded"
        found = read(other.data)
        assert (found.format, found.size) == (wanted, (120, 100))
        assert found.has_transparency_data == (kind != "jpg" and before == "TIFF")
        assert distance(seen(other.data), seen(data)) < (PALETTE if before == "GIF" else NEAR), (
            "what is clear lies on the source's background"
        )


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "wanted"), [("JPEG", "keep"), ("WEBP", "jpg"), ("PNG", "webp"), ("JPEG", "png")])
def test_orientation_stays_a_tag(orientation: int, kind: str, wanted: Format) -> None:
    """Evaluation looks at pictures as they are stored, training at upright ones: both must see what they saw."""
    data = saved(smooth(300, 200), kind, exif=turned(orientation))
    smaller = recode(data, Recipe(64, wanted, 95)).data
    assert read(smaller).size == (96, 64)
    for upright in (False, True):
        assert distance(seen(smaller, upright=upright), seen(data, upright=upright)) < NEAR
    assert b"somebody" not in smaller, "of the rest, nothing is needed"


def test_a_turned_tiff_is_stored_as_it_is_seen() -> None:
    """Pillow turns a TIFF as it decodes it, for whoever asks."""
    data = saved(smooth(300, 200), "TIFF", exif=turned(6))
    smaller = recode(data, TO_64).data
    assert read(smaller).size == (64, 96)
    for upright in (False, True):
        assert distance(seen(smaller, upright=upright), seen(data, upright=upright)) < NEAR


def test_colour_profiles_stay_where_they_fit() -> None:
    profile = b"a profile of RGB" * 9
    assert read(recode(saved(smooth(300, 200), "JPEG", icc_profile=profile), TO_64).data).info["icc_profile"] == profile
    assert read(recode(saved(smooth(300, 200), "PNG", icc_profile=profile), TO_64).data).info["icc_profile"] == profile
    grey = saved(smooth(300, 200).convert("CMYK"), "JPEG", icc_profile=profile)
    assert "icc_profile" not in read(recode(grey, TO_64).data).info


def test_a_large_jpeg_decoded_small_is_close_to_the_full_decode() -> None:
    data = saved(smooth(1600, 1200), "JPEG", quality=95)
    full = np.asarray(read(data).resize((128, 96), Image.Resampling.LANCZOS)).astype(float)
    found = np.asarray(read(recode(data, Recipe(96, "keep", 95)).data)).astype(float)
    assert np.abs(found - full).mean() < 1.5


def test_what_cannot_be_decoded_stays() -> None:
    data = saved(smooth(300, 200), "JPEG")
    for broken in (b"", b"<html>", data[: len(data) // 2], data[:200] + b"damage" * 99):
        assert recode(broken, TO_64) == (broken, "undecodable")
        with pytest.raises(Dropped):
            seen(broken)


def test_avif() -> None:
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = saved(smooth(300, 200, 4), "AVIF", quality=95)
    smaller = recode(data, TO_64)
    assert smaller.what == "resized" and read(smaller.data).format == "AVIF"
    assert distance(seen(smaller.data), seen(data)) < NEAR


def rewritten(tmp_path: Path, samples: list[dict[str, Any]], recipe: Recipe) -> tuple[Path, dict[str, int]]:
    source, target = write_tar(tmp_path / "a.tar", samples), tmp_path / "b.tar"
    index = scan(source)
    assert index.fault is None
    return target, dict(rewrite(source, index, target, KEYS, recipe, lambda done: None))


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_a_rewritten_tar_differs_in_its_pictures_alone(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(70_000)
    samples = [
        {"__key__": "a/0", "JPG": saved(smooth(300, 200), "JPEG"), "txt": "ein Bild", "npy": noise},
        {"__key__": "a/" + "long" * 40, "json": "{}", "png": saved(smooth(50, 40), "PNG")},
        {"__key__": "b/ü", "txt": "", "jpg": b"broken", "json": '{"n": 1}'},
        {"__key__": "b/1.x", "txt": "dots in keys"},
        {"__key__": "c/2", "png": saved(smooth(300, 200), "PNG"), "jpg": saved(smooth(200, 300), "JPEG")},
    ]
    target, done = rewritten(tmp_path, samples, TO_64)
    assert done == {"resized": 2, "unchanged": 1, "undecodable": 1}
    assert names(target) == names(tmp_path / "a.tar")
    before, after = Shard(tmp_path / "a.tar"), Shard(target)
    assert after.index.fault is None
    for old, new in zip(before.index.samples, after.index.samples, strict=True):
        assert old.key == new.key and list(old.members) == list(new.members)
        first, second = before.load(old), after.load(new)
        changed = {suffix for suffix in first if first[suffix] != second[suffix]}
        # Of two pictures the run takes the first suffix that it looks for.
        assert changed == ({"jpg"} if old.key in ("a/0", "c/2") else set())
    before.close()
    after.close()


def test_other_members_of_a_tar_stay(tmp_path: Path) -> None:
    source, target = tmp_path / "a.tar", tmp_path / "b.tar"
    data = saved(smooth(300, 200), "JPEG")
    with tarfile.open(source, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, body in [
            ("folder", tarfile.DIRTYPE, b""), ("__meta__.json", tarfile.REGTYPE, b"{}"),
            ("folder/0.jpg", tarfile.REGTYPE, data), ("link", tarfile.SYMTYPE, b""),
            (f"{'folder/' * 40}0.jpg", tarfile.REGTYPE, data), ("folder/.hidden", tarfile.REGTYPE, b"x"),
            ("folder/1.jpeg", tarfile.LNKTYPE, b""),
        ]:  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.size, member.mtime, member.linkname = kind, len(body), 7, "folder/0.jpg"
            tar.addfile(member, io.BytesIO(body))
    rewrite(source, scan(source), target, KEYS, Recipe(64, "webp", 95), lambda done: None)
    with tarfile.open(source) as old, tarfile.open(target) as new:
        for one, other in zip(old.getmembers(), new.getmembers(), strict=True):
            assert (one.name.replace(".jpg", ".webp"), one.type, one.mtime) == (other.name, other.type, other.mtime)
            file = new.extractfile(other) if other.isreg() else None
            if file is not None and other.name.endswith(".webp"):
                assert read(file.read()).size == (96, 64)
    shard = Shard(target)
    assert [ref.key for ref in shard.index.samples] == ["folder/0", f"{'folder/' * 40}0", "folder/1"]
    assert [*shard.load(shard.index.samples[0]).values()] == [*shard.load(shard.index.samples[2]).values()]


def test_a_suffix_follows_its_format_unless_that_hides_the_picture(tmp_path: Path) -> None:
    picture = saved(smooth(300, 200), "PNG")
    samples = [
        {"__key__": "0", "png": picture},
        {"__key__": "1", "jpg": saved(smooth(300, 200), "JPEG"), "png": picture},  # as .webp it would come behind .png
        {"__key__": "2", "PNG": picture, "webp": b"taken"},
        {"__key__": "3", "png": b"broken"},
    ]
    target, done = rewritten(tmp_path, samples, Recipe(64, "webp", 95))
    assert names(target) == ["0.webp", "1.jpg", "1.png", "2.PNG", "2.webp", "3.png"]
    assert done == {"resized": 3, "undecodable": 1}
    shard = Shard(target)
    kinds = [read(shard.load(ref)[suffix]).format for ref, suffix in zip(shard.index.samples, ("webp", "jpg", "png"))]  # noqa: B905
    shard.close()
    assert kinds == ["WEBP", "JPEG", "PNG"]


def test_suffixes_of_formats() -> None:
    recipe = Recipe(None, "jpg", 95)
    wanted = {"png": "jpg", "jpeg": "jpeg", "jpg": "jpg", "left.webp": "left.jpg", "image": "image", "PNG": "jpg"}
    assert {suffix: recipe.suffix(suffix) for suffix in wanted} == wanted
    assert TO_64.suffix("png") == "png"
