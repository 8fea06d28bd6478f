"""Owns the embedded data: drawn scenes with captions, as WebDataset shards in a cache folder that is made once.

Three splits: `train`; `heldout`, whose pictures show only pairs of colour and shape that training never shows (member
`cls`); `gallery`, 1,000 pairs for retrieval that denote different scenes, none of them in training. It never needs
the network, and never imports torch. What it makes is a function of this file, of `drawing.py` and of Pillow.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import PIL
from filelock import FileLock

from clipstream.data import drawing
from clipstream.data.drawing import COLOURS, SHAPES, SIDE, TEXTURES, Canvas
from clipstream.data.home import cache_root
from clipstream.errors import SettingsError

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
# The most things of a size that a group may have: half a picture holds them side by side.
MOST = {"small": 3, "medium": 2, "large": 1}
# Share of training's scenes with a single group of things.
ALONE = 0.75
# How much training's captions tell: see `word_scene`. What they leave out makes shapes and colours worth learning.
DETAIL = 0.5
COUNTS = ("", "one", "two", "three")


@dataclass(frozen=True)
class Group:
    """Things of one kind that stand together."""

    count: int
    size: str
    colour: str
    texture: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """What a picture shows: one group, or two of which the first is left of or above the second.

    Attributes:
        groups: one or two.
        where: 'left' or 'above' for two groups; for a thing alone a place of PLACES; else ''.
    """

    groups: tuple[Group, ...]
    where: str


@cache
def heldout_pairs() -> tuple[tuple[str, str], ...]:
    """The 20 pairs (colour, shape) that training never shows: every colour twice, every shape once or twice."""
    shapes = len(SHAPES)
    return tuple((colour, SHAPES[(i + shift) % shapes]) for i, colour in enumerate(COLOURS) for shift in (0, 5))


def classes() -> list[str]:
    """Names of the held-out pairs, in the order of the `cls` member's numbers."""
    return [f"{colour} {shape}" for colour, shape in heldout_pairs()]


@cache
def _shown_pairs() -> tuple[tuple[str, str], ...]:
    held = set(heldout_pairs())
    return tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in held)


def _draw_group(random: Random, pairs: tuple[tuple[str, str], ...]) -> Group:
    colour, shape = random.choice(pairs)
    size = random.choice(tuple(MOST))
    count = 1 if random.random() < 0.6 else random.randint(1, MOST[size])
    texture = random.choice(TEXTURES)
    return Group(count, size, colour, texture, shape)


def draw_scene(random: Random, pairs: tuple[tuple[str, str], ...], alone: float) -> Scene:
    """A scene of the given pairs (colour, shape); `alone` is the share with a single group."""
    first = _draw_group(random, pairs)
    if random.random() < alone:
        return Scene((first,), random.choice(PLACES) if first.count == 1 else "")
    second = _draw_group(random, pairs)
    while (second.colour, second.shape) == (first.colour, first.shape):
        second = _draw_group(random, pairs)
    return Scene((first, second), random.choice(("left", "above")))


def _boxes(scene: Scene) -> list[tuple[int, int, int, int]]:
    """Where each group goes: (left, top, right, bottom) in pixels."""
    half = SIDE // 2
    if scene.where == "left":
        return [(0, 0, half - 1, SIDE), (half + 1, 0, SIDE, SIDE)]
    if scene.where == "above":
        return [(0, 0, SIDE, half - 1), (0, half + 1, SIDE, SIDE)]
    if not scene.where:
        return [(0, 0, SIDE, SIDE)]
    row, column = divmod(PLACES.index(scene.where), 3)
    reach = drawing.SIZES[scene.groups[0].size][1] + 5
    left, top = ((SIDE - reach) * part // 2 for part in (column, row))
    return [(left, top, left + reach, top + reach)]


def draw_picture(scene: Scene, random: Random) -> bytes:
    """JPEG bytes of a scene, SIDE x SIDE pixels; what the scene leaves open comes from `random`."""
    canvas = Canvas(random)
    for group, box in zip(scene.groups, _boxes(scene), strict=True):
        canvas.group(box, **vars(group))
    return canvas.jpeg()


def _word_group(group: Group, random: Random, detail: float) -> str:
    """A noun phrase; a size and a texture are each told with probability `detail`, a colour with (1 + detail) / 2."""
    words = [group.colour] if random.random() < (1 + detail) / 2 else []
    if random.random() < detail:
        words.insert(random.randrange(len(words) + 1), random.choice(TEXTURE_WORDS[group.texture]))
    if random.random() < detail:
        words.insert(0, random.choice(SIZE_WORDS[group.size]))
    if group.count > 1:
        return " ".join([COUNTS[group.count], *words, _plural(group.shape)])
    words.append(group.shape)
    article = "an" if words[0][0] in "aeiou" or words[0] == "hourglass" else "a"
    return " ".join([random.choice((article, article, "one")), *words])


def _plural(shape: str) -> str:
    return shape + ("es" if shape.endswith(("s", "ch")) else "s")


def word_scene(scene: Scene, random: Random, detail: float) -> str:
    """A caption of a scene, in one of many wordings; `detail` is the probability that a size, texture or place is told.

    A colour is told with probability (1 + detail) / 2: a model that went by colours alone would be at a loss.
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
    """The gallery's scenes, all different, as the keys of a dict: in order, and quick to look up."""
    random = Random(f"{SEED} gallery scenes")
    scenes: dict[Scene, None] = {}
    while len(scenes) < SHARDS["gallery"] * SHARD_SAMPLES:
        scenes[draw_scene(random, _shown_pairs(), alone=0.25)] = None
    return scenes


def _samples(split: str, shard: int) -> Iterator[dict[str, bytes]]:
    """The members of each sample of a shard, by suffix."""
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
        told = {
            "caption": caption,
            "captions": [word_scene(scene, random, DETAIL) for _ in range(3)],
            "groups": [vars(group) for group in scene.groups],
            "where": scene.where,
        }
        sample = {"jpg": draw_picture(scene, random), "txt": caption.encode(), "json": json.dumps(told).encode()}
        if split == "heldout":
            sample["cls"] = str(names.index(f"{scene.groups[0].colour} {scene.groups[0].shape}")).encode()
        yield sample


def _write_shard(path: Path, split: str, shard: int) -> None:
    """Write one tar whose bytes depend on its contents only."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for position, sample in enumerate(_samples(split, shard)):
            for suffix, payload in sample.items():
                member = tarfile.TarInfo(f"{split}-{shard:03d}-{position:04d}.{suffix}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))


def version() -> str:
    """A short hash of all that the shards' bytes depend on: this code and Pillow."""
    parts = [Path(__file__).read_bytes(), Path(drawing.__file__).read_bytes(), PIL.__version__.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def cache_folder() -> Path:
    """Where the shards are."""
    return cache_root() / f"scenes-{version()}"


def shards(split: str) -> list[str]:
    """Paths of the tars of a split, in order; made on the first call, by one process while others wait.

    A folder under its final name is complete: it is written elsewhere beside it and renamed.

    Raises:
        SettingsError: there is no such split, or the cache folder cannot be written.
    """
    if split not in SHARDS:
        raise SettingsError(f"scenes:{split}: there is no such split; choose one of {', '.join(SPLITS)}")
    folder = cache_folder() / split
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.parent / f"{split}.lock"):
                if not folder.is_dir():
                    _make(split, folder)
    except OSError as error:
        raise SettingsError(
            f"cannot write the embedded scenes to {folder}: {error}; "
            "set CLIPSTREAM_CACHE to a folder with 300 MB of room"
        ) from error
    return [str(folder / f"{shard:05d}.tar") for shard in range(SHARDS[split])]


def _make(split: str, folder: Path) -> None:
    """Write all tars of a split into a temporary folder and give it its name."""
    made = Path(tempfile.mkdtemp(prefix=f"{split}-", dir=folder.parent))
    try:
        for shard in range(SHARDS[split]):
            _write_shard(made / f"{shard:05d}.tar", split, shard)
        (made / "classnames.txt").write_text("\n".join(classes()) + "\n")
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
