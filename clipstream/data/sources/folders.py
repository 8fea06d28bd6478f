"""Image folders as a source type: one folder per class, as in torchvision's ImageFolder; a class is a shard.

`folder:PATH` numbers the classes in the order of their names. `imagenet:PATH` takes folders named by ImageNet's synsets
(n01440764 …), or by numbers as in ImageNet-V2, and labels each with its number in ImageNet, also if only some of the
classes are there.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from clipstream.data.decode.captions import split_keys
from clipstream.data.settings import SourceSettings
from clipstream.data.sources import OpenShard, SourceContext, SourceType
from clipstream.errors import Dropped, SettingsError
from clipstream.storage.tar import SampleRef, ShardIndex
from clipstream.utils.logs import logger

IMAGENET_CLASSES = 1000
# Folders that archivers and file servers leave, beside hidden ones.
JUNK = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found")
SYNSETS = "data/_info/imagenet_synsets.txt"  # of timm, in ImageNet's order


class FolderSource(SourceType):
    """The shards of `folder:PATH` or `imagenet:PATH`, named `SCHEME:PATH/CLASS`."""

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        self._image_keys = split_keys(settings.image_key)

    def list_shards(self, spec: str) -> Sequence[str]:
        """The classes in the order of their names.

        Raises:
            SettingsError: there is no such folder, it holds no folders, one without images, or one that is not a
                class of ImageNet.
        """
        scheme, _, path = spec.partition(":")
        root = Path(path)
        if scheme == "imagenet":  # the archive of ImageNet-V2 has one folder around the classes
            inner = sorted(path for path in root.glob("[Ii]mage[Nn]et[Vv]2*") if path.is_dir())
            root = inner[0] if len(inner) == 1 else root
        if not root.is_dir():
            raise SettingsError(f"{spec}: the folder {root} does not exist")
        return [f"{scheme}:{root / name}" for name in _numbers(scheme, root, self._image_keys)]

    def open(self, shard: str) -> OpenShard:
        return FolderShard(shard, self._image_keys)

    def num_samples(self, shard: str) -> int:
        return len(self.open(shard).index.samples)

    def total_samples(self, shards: Sequence[str]) -> None:
        """Unknown: listing all folders may take minutes."""


class FolderShard(OpenShard):
    """The images of a class. Members: the image by its suffix, `cls` (number of the class), `class` (folder's name)."""

    def __init__(self, name: str, image_keys: tuple[str, ...]) -> None:
        scheme, _, path = name.partition(":")
        self._folder = Path(path)
        number = _numbers(scheme, self._folder.parent, image_keys)[self._folder.name]
        self._label = {"cls": str(number).encode(), "class": self._folder.name.encode()}
        self.index = ShardIndex([SampleRef(file) for file in sorted(_images(self._folder, image_keys))])

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """See OpenShard. Raises Dropped: `unreadable_member`."""
        found = {name: data for name, data in self._label.items() if suffixes is None or name in suffixes}
        try:
            found[_suffix(ref.key)] = (self._folder / ref.key).read_bytes()
        except OSError as error:
            raise Dropped("unreadable_member", str(error)) from error
        return found


def _images(folder: Path, image_keys: Collection[str]) -> Iterator[str]:
    """Paths of the images under a folder, relative to it. Raises OSError if a part cannot be read."""
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for where, inner, files in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(where)) in seen:  # a link to a folder above
            inner.clear()
            continue
        seen.add(real)
        inner[:] = [name for name in inner if not _is_junk(name)]
        images = (file for file in files if not _is_junk(file) and _suffix(file) in image_keys)
        yield from (os.path.relpath(os.path.join(where, file), folder) for file in images)


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name in JUNK


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower().removeprefix(".")


@lru_cache(maxsize=64)
def _numbers(scheme: str, root: Path, image_keys: tuple[str, ...]) -> dict[str, int]:
    """Folder of a class -> number of the class, in the order of their names."""
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not _is_junk(entry.name))
    if not folders:
        raise SettingsError(f"{scheme}:{root}: no class folders in it")
    if empty := [name for name in folders if not any(_images(root / name, image_keys))]:
        said = f"{scheme}:{root}: {len(empty)} of {len(folders)} folders have no images, such as {empty[0]!r}"
        if scheme == "folder":  # as torchvision's ImageFolder; of imagenet:, names have numbers of their own
            raise SettingsError(
                f"{said}: each folder is a class, numbered in the order of names. Remove folders that are not classes "
                f"or have no images, and for a subset of the classes use the evaluator's label 'class' (names) "
                f"instead of numbers"
            )
        logger.warning(said)
    if scheme == "folder":
        return {name: number for number, name in enumerate(folders)}
    known = {str(n): n for n in range(IMAGENET_CLASSES)}
    # Read without importing timm, which imports torch.
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations, "timm is installed with clipstream"
    synsets = (Path(spec.submodule_search_locations[0]) / SYNSETS).read_text().split()
    assert len(synsets) == IMAGENET_CLASSES
    known.update({name: n for n, name in enumerate(synsets)})
    if strange := [name for name in folders if name not in known]:
        raise SettingsError(
            f"imagenet:{root}: {strange[0]!r} is not a class of ImageNet ({len(strange)} of {len(folders)} folders "
            f"are not): expected folders such as n01440764; for other classes use an evaluator of type zero_shot with "
            f"data.shards 'folder:PATH' and classes"
        )
    return {name: known[name] for name in folders}
