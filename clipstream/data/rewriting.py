"""Owns the way from a whole local tar to the same one with changed pictures; never changes anything else in it.

Names, order, and all other members stay, byte for byte; a picture's suffix follows its format.
"""

from __future__ import annotations

import copy
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from clipstream.data.recoding import Recipe, recode
from clipstream.data.tarstream import ShardIndex


def rewrite(
    source: Path,
    index: ShardIndex,
    target: Path,
    image_keys: Sequence[str],
    recipe: Recipe,
    tell: Callable[[int], None],
) -> Counter[str]:
    """Write `source` to `target`, in each sample the picture that training takes by the recipe.

    Args:
        source: a tar without a fault.
        index: its samples.
        image_keys: suffixes of the picture in lower case, first present wins.
        tell: called with the bytes of `source` that are done, as it goes.

    Returns:
        How many pictures were 'resized', 'reencoded', 'unchanged' or 'undecodable'.

    Raises:
        OSError: one of the files cannot be read or written.
    """
    pictures = dict(_pictures(index, image_keys, recipe))
    done: Counter[str] = Counter()
    with (
        open(source, "rb") as file,
        tarfile.open(source, "r:", errors="surrogateescape") as before,
        tarfile.open(target, "w:", format=tarfile.PAX_FORMAT, errors="surrogateescape") as after,
    ):
        for member in before:
            before.members, after.members = [], []  # type: ignore[attr-defined]  # both would hold all that went by
            tell(member.offset_data)
            file.seek(member.offset_data)
            if member.offset_data in pictures:
                done[_put(after, member, file.read(member.size), pictures[member.offset_data])] += 1
            else:
                has_data = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
                after.addfile(member, file if has_data else None)
    return done


class _Picture(NamedTuple):
    """A member that is a picture: its suffix, the one that it has when it was written anew, and how it is written."""

    suffix: str
    renamed: str
    recipe: Recipe


def _pictures(index: ShardIndex, image_keys: Sequence[str], recipe: Recipe) -> Iterator[tuple[int, _Picture]]:
    """By the offset of their bytes: of each sample, the one that training takes."""
    keeping = replace(recipe, format="keep")
    for _, members in index.samples:
        suffix = next((key for key in image_keys if key in members), None)
        if suffix is None:
            continue
        renamed = recipe.suffix(suffix)
        left = (members.keys() - {suffix}) | {renamed}
        # Under its new suffix it must still be the one that training takes.
        taken = next((key for key in image_keys if key in left), None)
        clash = renamed != suffix and (renamed in members or taken != renamed)
        yield members[suffix][0], _Picture(suffix, suffix if clash else renamed, keeping if clash else recipe)


def _put(after: tarfile.TarFile, member: tarfile.TarInfo, data: bytes, picture: _Picture) -> str:
    """Add a picture's member; what became of it."""
    data, what = recode(data, picture.recipe)
    changed = copy.copy(member)
    changed.size = len(data)
    # What these say of the old member would go before name and size.
    changed.pax_headers = {key: value for key, value in member.pax_headers.items() if key not in ("path", "size")}
    if what in ("resized", "reencoded") and picture.renamed != picture.suffix:
        changed.name = member.name[: len(member.name) - len(picture.suffix)] + picture.renamed
    after.addfile(changed, io.BytesIO(data))
    return what
