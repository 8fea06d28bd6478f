"""Generated data as source types: toy data to learn from, and synthetic data to measure speed with.

`toy:SPLIT` are drawings of shapes with captions, as WebDataset shards in the cache folder. Scenes (what is drawn) are
sampled from a fixed seed; the images, 64 x 64 pixels, and captions follow from them. A split is written once per
version of this code and of Pillow. `synthetic:PIXELS` has one JPEG for all samples, without data on disk: it is
decoded, cropped and resized as a photograph is, and nothing can be learned from it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import secrets
import shutil
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from random import Random

import numpy as np
import PIL
from PIL import Image, ImageDraw

from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import OpenShard, SourceContext, SourceType
from clipstream.data.sources.tars import TarSource
from clipstream.errors import SettingsError
from clipstream.storage.shard_cache import cache_root, file_lock
from clipstream.storage.tar import SampleRef, ShardIndex
from clipstream.utils.section import part

SIDE = 64
JPEG_QUALITY = 90
FINE = 4  # masks are drawn so many times larger and averaged, for smooth edges

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 25, 30),
    "orange": (250, 130, 10),
    "yellow": (240, 215, 10),
    "green": (30, 150, 50),
    "cyan": (20, 200, 215),
    "blue": (30, 70, 215),
    "purple": (130, 35, 170),
    "pink": (250, 120, 185),
    "brown": (125, 70, 25),
    "black": (22, 22, 26),
}
TEXTURES = ("plain", "striped", "dotted", "checked")
SIZES: dict[str, tuple[int, int]] = {"small": (15, 17), "medium": (23, 25), "large": (34, 38)}
TILTS = (-12, -6, 0, 6, 12)
RAMP = np.linspace(-0.5, 0.5, SIDE, dtype=np.float32)

Point = tuple[float, float]


def _heart(t: float) -> Point:
    """The heart curve x = 16 sin^3 t, y = 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, in the unit square."""
    y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
    return 0.5 + 16 * math.sin(t) ** 3 / 34, 0.46 - y / 34


def _star(i: int) -> Point:
    """Corner i of a star with five points."""
    r, angle = 0.5 if i % 2 == 0 else 0.5 * 0.42, math.radians(-90.0 + 360.0 * i / 10)
    return 0.5 + r * math.cos(angle), 0.5 + r * math.sin(angle)


POLYGONS: dict[str, list[Point]] = {
    "square": [(0.08, 0.08), (0.92, 0.08), (0.92, 0.92), (0.08, 0.92)],
    "triangle": [(0.5, 0.04), (0.98, 0.92), (0.02, 0.92)],
    "diamond": [(0.5, 0.0), (0.85, 0.5), (0.5, 1.0), (0.15, 0.5)],
    "star": [_star(i) for i in range(10)],
    "cross": [
        (x / 3, y / 3)
        for x, y in ((1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (2, 2), (2, 3), (1, 3), (1, 2), (0, 2), (0, 1), (1, 1))
    ],
    "heart": [_heart(2 * math.pi * i / 48) for i in range(48)],
    "arrow": [(0.0, 0.33), (0.5, 0.33), (0.5, 0.05), (1.0, 0.5), (0.5, 0.95), (0.5, 0.67), (0.0, 0.67)],
    "hourglass": [(0.08, 0.02), (0.92, 0.02), (0.56, 0.5), (0.92, 0.98), (0.08, 0.98), (0.44, 0.5)],
    "bolt": [(0.55, 0.0), (0.15, 0.58), (0.45, 0.58), (0.3, 1.0), (0.85, 0.38), (0.52, 0.38), (0.78, 0.0)],
}
SHAPES = ("circle", "ring", "crescent", *POLYGONS)


@cache
def shape_mask(shape: str, size: int, tilt: int) -> Image.Image:
    """Coverage of a shape: an 'L' image [size, size], 255 inside, turned by `tilt` degrees."""
    full = size * FINE
    mask = Image.new("L", (full, full), 0)
    draw = ImageDraw.Draw(mask)
    if shape in POLYGONS:
        draw.polygon([(x * (full - 1), y * (full - 1)) for x, y in POLYGONS[shape]], fill=255)
    else:
        draw.ellipse((0, 0, full - 1, full - 1), fill=255)
        hole = {"ring": (0.28, 0.28, 0.72, 0.72), "crescent": (0.35, -0.05, 1.15, 0.75)}.get(shape)
        if hole:
            draw.ellipse(tuple(part * full for part in hole), fill=0)
    return mask.rotate(tilt, Image.Resampling.BILINEAR).reduce(FINE)


@cache
def texture_mask(texture: str, size: int, phase: int) -> Image.Image:
    """Where the second, lighter colour shows: an 'L' image [size, size]; `phase` in 0..3 shifts the pattern."""
    period = max(4.0, size / 4.0)
    y, x = np.mgrid[0 : size * FINE, 0 : size * FINE] / FINE + phase * period / 4
    if texture == "striped":
        on = (y % period) < period / 2
    elif texture == "checked":
        on = ((x // (period * 0.75)) + (y // (period * 0.75))) % 2 == 0
    else:  # dotted
        on = (x % period - period / 2) ** 2 + (y % period - period / 2) ** 2 < (0.32 * period) ** 2
    return Image.fromarray((on * 255).astype(np.uint8)).reduce(FINE)


SEED = 2
SHARD_SAMPLES = 1000
SHARDS = {"train": 30, "heldout": 2, "gallery": 1}
SPLITS = tuple(SHARDS)
PLACES = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
SIZE_WORDS = {"small": ("small", "little", "tiny"), "medium": ("medium", "medium-sized"), "large": ("large", "big")}
TEXTURE_WORDS = {
    "plain": ("plain", "solid"),
    "striped": ("striped",),
    "dotted": ("dotted", "spotted"),
    "checked": ("checked", "checkered"),
}
MOST = {"small": 3, "medium": 2, "large": 1}  # objects of a size in a group: half an image holds them side by side
ALONE = 0.75  # share of training scenes with a single group
DETAIL = 0.5  # of training captions, see `word_scene`; what they omit makes shapes and colours worth learning
COUNTS = ("", "one", "two", "three")


@dataclass(frozen=True)
class Group:
    """Equal objects next to each other."""

    count: int
    size: str
    colour: str
    texture: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """The content of an image."""

    groups: tuple[Group, ...]  # one or two
    where: str  # 'left' or 'above': the first group relative to the second; one of PLACES for a single object; else ''


@cache
def heldout_pairs() -> tuple[tuple[str, str], ...]:
    """The 20 pairs (colour, shape) that are not in the training data: each colour twice, each shape once or twice."""
    shapes = len(SHAPES)
    return tuple((colour, SHAPES[(i + shift) % shapes]) for i, colour in enumerate(COLOURS) for shift in (0, 5))


def classes() -> list[str]:
    """Names of the held-out pairs, in the order of the numbers in the member `cls`."""
    return [f"{colour} {shape}" for colour, shape in heldout_pairs()]


@cache
def _shown_pairs() -> tuple[tuple[str, str], ...]:
    held = set(heldout_pairs())
    return tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in held)


def _random_group(random: Random, pairs: tuple[tuple[str, str], ...]) -> Group:
    colour, shape = random.choice(pairs)
    size = random.choice(tuple(MOST))
    count = 1 if random.random() < 0.6 else random.randint(1, MOST[size])
    texture = random.choice(TEXTURES)
    return Group(count, size, colour, texture, shape)


def draw_scene(random: Random, pairs: tuple[tuple[str, str], ...], alone: float) -> Scene:
    """A random scene of the given pairs (colour, shape), with a single group with probability `alone`."""
    first = _random_group(random, pairs)
    if random.random() < alone:
        return Scene((first,), random.choice(PLACES) if first.count == 1 else "")
    second = _random_group(random, pairs)
    while (second.colour, second.shape) == (first.colour, first.shape):
        second = _random_group(random, pairs)
    return Scene((first, second), random.choice(("left", "above")))


def draw_image(scene: Scene, random: Random) -> bytes:
    """JPEG bytes of a scene, SIDE x SIDE pixels on a pale gradient; details that the scene does not fix are random."""
    half = SIDE // 2
    if scene.where == "left":
        boxes = [(0, 0, half - 1, SIDE), (half + 1, 0, SIDE, SIDE)]
    elif scene.where == "above":
        boxes = [(0, 0, SIDE, half - 1), (0, half + 1, SIDE, SIDE)]
    elif not scene.where:
        boxes = [(0, 0, SIDE, SIDE)]
    else:
        row, column = divmod(PLACES.index(scene.where), 3)
        reach = SIZES[scene.groups[0].size][1] + 5
        x, y = ((SIDE - reach) * part // 2 for part in (column, row))
        boxes = [(x, y, x + reach, y + reach)]
    base = np.array([205 + 45 * random.random() for _ in range(3)], dtype=np.float32)
    slope_x, slope_y = random.uniform(-14, 14), random.uniform(-14, 14)
    fade = slope_x * RAMP[None, :] + slope_y * RAMP[:, None]
    image = Image.fromarray(np.minimum(base + fade[:, :, None], 255).astype(np.uint8))
    for group, box in zip(scene.groups, boxes, strict=True):
        _draw_group(image, group, box, random)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return out.getvalue()


def _draw_group(image: Image.Image, group: Group, box: tuple[int, int, int, int], random: Random) -> None:
    """Draw the equal objects of a group in separate cells of the box (left, top, right, bottom)."""
    left, top, right, bottom = box
    side = min(random.randint(*SIZES[group.size]), right - left, bottom - top)
    columns, rows = max(1, (right - left) // (side + 1)), max(1, (bottom - top) // (side + 1))
    wide, high = (right - left) / columns, (bottom - top) / rows
    phase = random.randrange(4)
    for cell in random.sample(range(columns * rows), group.count):
        x = left + cell % columns * wide + random.random() * (wide - side)
        y = top + cell // columns * high + random.random() * (high - side)
        tone = tuple(min(255, max(0, part - 16 + int(random.random() * 33))) for part in COLOURS[group.colour])
        mask = shape_mask(group.shape, side, random.choice(TILTS))
        patch = Image.new("RGB", (side, side), tone)
        if group.texture != "plain":
            # A darker (for black: a lighter) shade of the colour, so that outline and colour are kept.
            shade = tuple(part // 2 for part in tone) if max(tone) > 96 else tuple(part + 80 for part in tone)
            patch.paste(shade, (0, 0), texture_mask(group.texture, side, phase))
        image.paste(patch, (int(x), int(y)), mask)


def _word_group(group: Group, random: Random, detail: float) -> str:
    """A noun phrase; see `word_scene`."""
    words = [group.colour] if random.random() < (1 + detail) / 2 else []
    if random.random() < detail:
        words.insert(random.randrange(len(words) + 1), random.choice(TEXTURE_WORDS[group.texture]))
    if random.random() < detail:
        words.insert(0, random.choice(SIZE_WORDS[group.size]))
    if group.count > 1:
        plural = group.shape + ("es" if group.shape.endswith(("s", "ch")) else "s")
        return " ".join([COUNTS[group.count], *words, plural])
    words.append(group.shape)
    article = "an" if words[0][0] in "aeiou" or words[0] == "hourglass" else "a"
    return " ".join([random.choice((article, article, "one")), *words])


def word_scene(scene: Scene, random: Random, detail: float) -> str:
    """A caption of a scene in one of many wordings, which names size, texture and place with probability `detail` each.

    The colour is named with probability (1 + detail) / 2, so that it is not sufficient.
    """
    opening = random.choice(("", "", "", "a picture of ", "a drawing of ", "an image of "))
    phrases = [_word_group(group, random, detail) for group in scene.groups]
    if len(phrases) == 1:
        place = f" {scene.where}" if scene.where and random.random() < detail else ""
        return opening + phrases[0] + place
    first, second = phrases
    near, far = ("left of", "right of") if scene.where == "left" else ("above", "below")
    side, other = ("on the left", "on the right") if scene.where == "left" else ("at the top", "at the bottom")
    prefix = "to the " if scene.where == "left" and random.random() < 0.5 else ""
    wordings = (
        f"{first} {prefix}{near} {second}",
        f"{second} {prefix}{far} {first}",
        f"{first} {side} and {second} {other}",
    )
    return opening + random.choice(wordings)


@cache
def gallery_scenes() -> dict[Scene, None]:
    """The different scenes of the gallery, in order, as keys of a dict for fast lookup."""
    random = Random(f"{SEED} gallery scenes")
    scenes: dict[Scene, None] = {}
    while len(scenes) < SHARDS["gallery"] * SHARD_SAMPLES:
        scenes[draw_scene(random, _shown_pairs(), alone=0.25)] = None
    return scenes


def _samples(split: str, shard: int) -> Iterator[dict[str, bytes]]:
    """The samples of a shard: members by suffix."""
    random = Random(f"{SEED} {split} {shard}")
    names, gallery = classes(), gallery_scenes()
    fixed = list(gallery)[shard * SHARD_SAMPLES :] if split == "gallery" else []
    for position in range(SHARD_SAMPLES):
        if split == "gallery":
            scene = fixed[position]
        elif split == "heldout":
            scene = draw_scene(random, heldout_pairs(), alone=1.0)
        else:
            scene = draw_scene(random, _shown_pairs(), alone=ALONE)
            while scene in gallery:
                scene = draw_scene(random, _shown_pairs(), alone=ALONE)
        caption = word_scene(scene, random, DETAIL if split == "train" else 1.0)
        description = {
            "caption": caption,
            "captions": [word_scene(scene, random, DETAIL) for _ in range(3)],
            "groups": [vars(group) for group in scene.groups],
            "where": scene.where,
        }
        sample = {"jpg": draw_image(scene, random), "txt": caption.encode(), "json": json.dumps(description).encode()}
        if split == "heldout":
            sample["cls"] = str(names.index(f"{scene.groups[0].colour} {scene.groups[0].shape}")).encode()
        yield sample


@part(SourceSettings, "toy")
class ToySource(TarSource):
    """The tars of `toy:SPLIT`."""

    staged = False
    writes = True
    generated = True

    def list_shards(self, spec: str) -> Sequence[str]:
        """Their paths; see `shards`."""
        return shards(spec.partition(":")[2])


def cache_folder() -> Path:
    """The folder of the splits, named by a hash of what determines their bytes: this code and Pillow."""
    version = hashlib.sha256(Path(__file__).read_bytes() + PIL.__version__.encode()).hexdigest()[:12]
    return cache_root() / f"toy-{version}"


def shards(split: str) -> list[str]:
    """Paths of the tars of a split, in order; written on the first call, by one process while others wait.

    Raises SettingsError: there is no such split, or the cache folder cannot be written.
    """
    if split not in SHARDS:
        raise SettingsError(f"toy:{split}: unknown split; choose from {', '.join(SPLITS)}")
    folder = cache_folder() / split
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(folder.parent / f"{split}.lock"):
                if not folder.is_dir():
                    _write_split(split, folder)
    except OSError as error:
        raise SettingsError(
            f"cannot write the toy data to {folder}: {error}; "
            "set CLIPSTREAM_CACHE to a folder with 300 MB of free space"
        ) from error
    return [str(folder / f"{shard:05d}.tar") for shard in range(SHARDS[split])]


def _write_split(split: str, folder: Path) -> None:
    """Write the tars of a split to a temporary folder and rename it: a folder with its final name is complete."""
    made = folder.parent / f"{split}-{secrets.token_hex(4)}"
    made.mkdir()
    try:
        for shard in range(SHARDS[split]):
            # The bytes depend on the contents only, not on time or user.
            with tarfile.open(made / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for position, sample in enumerate(_samples(split, shard)):
                    for suffix, payload in sample.items():
                        member = tarfile.TarInfo(f"{split}-{shard:03d}-{position:04d}.{suffix}")
                        member.size = len(payload)
                        tar.addfile(member, io.BytesIO(payload))
        (made / "classnames.txt").write_text("\n".join(classes()) + "\n")
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


PIXELS, LARGEST = 256, 4096  # the default, and the most
SYNTHETIC_SHARDS, SYNTHETIC_SAMPLES = 100, 1000  # samples of a shard


@part(SourceSettings, "synthetic")
class SyntheticSource(SourceType):
    """The shards of `synthetic:` or `synthetic:PIXELS`, named `synthetic:PIXELS/NUMBER`."""

    generated = True

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        return

    def list_shards(self, spec: str) -> Sequence[str]:
        """100 shards of 1,000 samples. Raises SettingsError if PIXELS is not 8 to 4096."""
        text = spec.partition(":")[2]
        pixels = PIXELS if not text else int(text) if text.isdecimal() else 0
        if not 8 <= pixels <= LARGEST:
            raise SettingsError(f"{spec!r}: expected synthetic:PIXELS with 8 to {LARGEST} pixels per side")
        return [f"synthetic:{pixels}/{number:04d}" for number in range(SYNTHETIC_SHARDS)]

    def open(self, shard: str) -> OpenShard:
        return SyntheticShard(shard)

    def num_samples(self, shard: str) -> int:
        return SYNTHETIC_SAMPLES


class SyntheticShard(OpenShard):
    """Samples with the members `jpg` and `txt`."""

    def __init__(self, name: str) -> None:
        pixels, _, number = name.partition(":")[2].partition("/")
        self._pixels = int(pixels)
        first = int(number) * SYNTHETIC_SAMPLES
        self.index = ShardIndex([SampleRef(f"{first + i:06d}") for i in range(SYNTHETIC_SAMPLES)])

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The JPEG, and a caption with the sample's number."""
        members = {"jpg": _photograph(self._pixels), "txt": f"picture number {int(ref.key)}".encode()}
        return {name: data for name, data in members.items() if suffixes is None or name in suffixes}


@lru_cache(maxsize=8)
def _photograph(pixels: int) -> bytes:
    """A JPEG of smooth colours, about as large in bytes as a photograph of its size."""
    coarse = np.random.default_rng(0).integers(0, 256, (-(-pixels // 8), -(-pixels // 8), 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((pixels, pixels), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()
