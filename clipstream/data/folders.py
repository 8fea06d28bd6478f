"""Owns pictures in one folder a class, as torchvision's ImageFolder has them: a class's folder is a shard.

`folder:PATH` numbers the classes in the order of their names. `imagenet:PATH` takes folders named by ImageNet's synsets
(n01440764 …), or by numbers as ImageNet-V2's, and gives each its number in ImageNet, so a part of ImageNet is labelled
right, too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path

from clipstream.data.tarstream import SampleRef, ShardIndex
from clipstream.errors import Dropped, SettingsError

SCHEMES = ("folder", "imagenet")
IMAGENET_CLASSES = 1000
SYNSETS = "data/_info/imagenet_synsets.txt"  # of timm, in ImageNet's order


def names(spec: str) -> list[str]:
    """The shards of `folder:PATH` or `imagenet:PATH`: one a class, in the order of their names.

    Raises:
        SettingsError: no such folder, none in it, or one that is no class of ImageNet's.
    """
    scheme, _, path = spec.partition(":")
    root = Path(path).expanduser()
    if scheme == "imagenet":  # ImageNet-V2 comes as one folder in the one that is named
        inner = sorted(path for path in root.glob("[Ii]mage[Nn]et[Vv]2*") if path.is_dir())
        root = inner[0] if len(inner) == 1 else root
    if not root.is_dir():
        raise SettingsError(f"{spec}: the folder {root} is not there")
    return [f"{scheme}:{root / name}" for name in _numbers(scheme, root)]


class FolderShard:
    """The pictures of a class, with an open shard's protocol.

    Members: the picture by its suffix, `cls` (the class's number) and `class` (its folder's name).
    """

    def __init__(self, name: str, image_keys: Collection[str]) -> None:
        scheme, _, path = name.partition(":")
        self._folder = Path(path)
        self._number = _numbers(scheme, self._folder.parent)[self._folder.name]
        files = sorted(file for file in _files(self._folder) if _suffix(file) in image_keys)
        self.index = ShardIndex([SampleRef(file, {}) for file in files], None)

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The sample's members.

        Raises:
            Dropped: `unreadable_member`.
        """
        members = {"cls": str(self._number).encode(), "class": self._folder.name.encode()}
        found = {name: data for name, data in members.items() if suffixes is None or name in suffixes}
        try:
            found[_suffix(ref.key)] = (self._folder / ref.key).read_bytes()
        except OSError as error:
            raise Dropped("unreadable_member", str(error)) from error
        return found

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """As `load`, all members."""
        return self.load(ref)

    def close(self) -> None:
        """Nothing is open."""


def _files(folder: Path) -> Iterator[str]:
    """Files under a folder, by their paths in it. Raises OSError where a part cannot be read."""
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for where, inner, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:  # a link back
            inner.clear()
            continue
        seen.add(real)
        yield from (os.path.relpath(os.path.join(where, file), folder) for file in files)


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower().removeprefix(".")


@lru_cache(maxsize=64)
def _numbers(scheme: str, root: Path) -> dict[str, int]:
    """Class folder -> its number, in the order of their names."""
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise SettingsError(f"{scheme}:{root}: it holds no folders; one a class is expected")
    if scheme == "folder":
        return {name: number for number, name in enumerate(folders)}
    known = _imagenet()
    if strange := [name for name in folders if name not in known]:
        raise SettingsError(
            f"imagenet:{root}: {strange[0]!r} is no class of ImageNet ({len(strange)} of {len(folders)} folders are "
            "not): folders are named n01440764 and so on; for other classes use an evaluator of type zero_shot with "
            "data.shards 'folder:PATH' and classes of your own"
        )
    return {name: known[name] for name in folders}


@lru_cache(maxsize=1)
def _imagenet() -> dict[str, int]:
    """ImageNet's classes by synset and by number; read beside timm's code, whose import would import torch."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations, "timm is installed with clipstream"
    synsets = (Path(spec.submodule_search_locations[0]) / SYNSETS).read_text().split()
    assert len(synsets) == IMAGENET_CLASSES
    return {**{str(n): n for n in range(IMAGENET_CLASSES)}, **{name: n for n, name in enumerate(synsets)}}
