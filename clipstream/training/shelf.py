"""Owns the folder of checkpoints: which are whole, newest and best, which stay; imports no torch.

    checkpoints/step_00000100/   whole if its COMPLETE names files of the sizes that are there
    checkpoints/latest, best     names of checkpoints

A new one is a folder whose name ends in `.tmp` until it is whole, flushed and renamed, and what it replaces is removed
after that, so what was whole before a crash stays until the next one is. It never looks into what is saved.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clipstream import durable
from clipstream.errors import SettingsError
from clipstream.world import World

MARKER, LATEST, BEST = "COMPLETE", "latest", "best"
NAME = re.compile(r"step_(\d{8})(\.old)?")  # .old: moved aside for a new save of the same step
DRAFT, ASIDE = ".tmp", ".old"


@dataclass(frozen=True)
class Marker:
    """What COMPLETE says of a checkpoint.

    Attributes:
        serial: the save's number in its folder. Steps do not tell the newest: a run that goes on from an older
            checkpoint counts steps again.
        step: steps done.
        sizes: file -> its bytes.
        checksums: file -> its checksum; empty in a checkpoint of a version that made none.
    """

    serial: int
    step: int
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]

    @classmethod
    def parse(cls, text: bytes) -> Marker | None:
        """The marker that a text holds; None where it holds none, as after a crash."""
        try:
            told = json.loads(text)
            sizes = {str(name): int(size) for name, size in told["files"].items()}
            return cls(int(told["serial"]), int(told["step"]), sizes, dict(told.get("checksums", {})))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def dump(self) -> bytes:
        """The text that `parse` reads."""
        told = {"serial": self.serial, "step": self.step, "files": self.sizes, "checksums": self.checksums}
        return json.dumps(told).encode()


@dataclass(frozen=True)
class Best:
    """What the file `best` says: the checkpoint of the best evaluation so far.

    Attributes:
        name: of its folder.
        metric: EVALUATOR/METRIC.
        value: of the metric.
        serial: of the checkpoint, as a later run may save the same step anew.
    """

    name: str
    metric: str
    value: float
    serial: int

    @classmethod
    def parse(cls, text: str) -> Best | None:
        """What a text says; None where it says nothing."""
        name, _, rest = text.partition("\n")
        try:
            told = json.loads(rest)
            return cls(name, str(told["metric"]), float(told["value"]), int(told["serial"]))
        except (ValueError, KeyError, TypeError):
            return None

    def dump(self) -> bytes:
        """The text that `parse` reads: the name alone on its first line, for people and scripts."""
        told = {"metric": self.metric, "value": self.value, "serial": self.serial}
        return f"{self.name}\n{json.dumps(told)}\n".encode()


def folder_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def marker_of(checkpoint: Path) -> Marker | None:
    """The marker of a checkpoint whose files have their sizes; None of any other folder."""
    try:
        marker = Marker.parse((checkpoint / MARKER).read_bytes())
        whole = marker is not None and all(
            (checkpoint / name).stat().st_size == size for name, size in marker.sizes.items()
        )
        return marker if whole else None
    except OSError:
        return None


def fault(checkpoint: Path, files: Collection[str] | None = None) -> str | None:
    """What is wrong with a checkpoint, its files read: all, or those of `files`; None where nothing is."""
    marker = marker_of(checkpoint)
    return "it is not whole" if marker is None else fault_by(marker, checkpoint, files)


def fault_by(marker: Marker, folder: Path, files: Collection[str] | None = None) -> str | None:
    """As `fault`, of a folder with the marker's files in their sizes."""
    for name, told in marker.checksums.items():
        if files is not None and name not in files:
            continue
        try:
            found = durable.checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != told:
            return f"{name} is not what was written"
    return None


def candidates(folder: Path) -> list[Path]:
    """What is named like a checkpoint."""
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints by their sizes, newest first."""
    found = [(marker.serial, path) for path in candidates(folder) if (marker := marker_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def pointed(pointer: Path) -> Path | None:
    """The checkpoint that a file `latest` or `best` names, whole or not."""
    try:
        name = pointer.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return None
    named = pointer.parent / name
    aside = named.with_name(f"{name}{ASIDE}")  # a crash in the middle of a new save of its step
    return aside if aside.is_dir() and not named.is_dir() else named


def newest(folder: Path, files: Collection[str] | None = None) -> Path | None:
    """The newest checkpoint without a `fault`; damaged ones that should have been it are named on stderr."""
    found = whole(folder)
    last = pointed(folder / LATEST)
    faults = [(last, "it is not whole")] if last is not None and last not in found else []
    taken = None
    for path in found:
        if (told := fault(path, files)) is None:
            taken = path
            break
        faults.append((path, told))
    for path, told in faults:
        instead = taken.name if taken else "none"
        print(f"warning: checkpoint {path} is damaged ({told}); the one before is used: {instead}", file=sys.stderr)
    return taken


def find(folder: Path, resume: str | None, files: Collection[str] | None = None) -> Path | None:
    """The checkpoint to go on from.

    Args:
        folder: LOGS/NAME/checkpoints; it need not be there.
        resume: 'latest' (there must be one), 'auto' (if there is one), the path of a checkpoint, of a file `latest` or
            `best`, or of a run's folder (its newest), or None.
        files: those that will be read, and so have to be without a fault; all unless given.

    Raises:
        SettingsError: there is none, or the one that is named is not whole or damaged.
    """
    if resume is None:
        return None
    if resume not in ("latest", "auto"):
        return _named(Path(resume), files)
    taken = newest(folder, files)
    if taken is None and resume == "latest":
        raise SettingsError(f"--resume latest: no whole checkpoint in {folder}; --resume auto starts without one")
    if taken is None and (damaged := candidates(folder)):
        raise SettingsError(
            f"--resume auto: none of the checkpoints in {folder} is whole ({', '.join(p.name for p in damaged)}); "
            "move them away to start anew"
        )
    return taken


def _named(path: Path, files: Collection[str] | None) -> Path:
    """As `find`, of a path."""
    given = path
    if path.is_file():
        path = pointed(path) or path
    if NAME.fullmatch(path.name) or marker_of(path) is not None:
        told = fault(path, files)
        if told is None:
            return path
        if marker_of(path) is not None:
            raise SettingsError(f"--resume {given}: the checkpoint {path} is damaged: {told}")
    elif path.is_dir():
        inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if (found := newest(inner, files)) is not None:
            return found
    raise SettingsError(f"--resume {given}: no whole checkpoint there (a whole one has a file {MARKER})")


def agree(find: Callable[[], Path | None], world: World) -> Path | None:
    """The checkpoint that rank 0 finds, however long it looks; every rank calls this, and has to see it.

    Raises:
        SettingsError: as `find`, or a rank does not see rank 0's checkpoint.
    """
    found: Path | None = world.on_main(find)
    sees = world.gather_objects(found is None or marker_of(found) is not None)
    if not all(sees):
        raise SettingsError(
            f"--resume: rank {sees.index(False)} does not see {found}, which rank 0 found: "
            "the folder of the runs (--logs) must be shared by all nodes"
        )
    return found


def begin(folder: Path, name: str, size: int) -> Path:
    """An empty draft of a checkpoint of that name; what dead saves left is removed.

    Args:
        size: bytes that will be written, about.

    Raises:
        OSError: the folder cannot be made, or the disk has no such room: what else writes to it would run into that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    for path in candidates(folder):
        if path.name.endswith(ASIDE) and not (plain := path.with_name(path.name.removesuffix(ASIDE))).exists():
            path.rename(plain)  # a crash came before the one that was to replace it
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    draft = folder / f"{name}{DRAFT}"
    draft.mkdir()
    return draft


def next_serial(folder: Path, after: int = 0) -> int:
    """The number of the next save: above those in the folder, and above `after`."""
    return max((after, *(marker.serial for path in candidates(folder) if (marker := marker_of(path))))) + 1


def put(draft: Path, marker: Marker) -> Path:
    """Make a draft, whose files are on the disk, a checkpoint, and the newest; where it is now."""
    durable.write(draft / MARKER, [marker.dump()])
    for path in (*(p for p in draft.rglob("*") if p.is_dir()), draft):
        durable.flush(path)
    folder, final = draft.parent, draft.with_name(draft.name.removesuffix(DRAFT))
    aside = folder / f"{final.name}{ASIDE}"
    if final.exists():
        remove(aside)
        final.rename(aside)
    draft.rename(final)
    durable.flush(folder)
    durable.replace(folder / LATEST, f"{final.name}\n".encode())
    remove(aside)
    return final


def best_of(folder: Path) -> Best | None:
    """The best checkpoint so far; it may lie elsewhere, as where a run went on from its remote copy.

    None also where its step was saved anew since then.
    """
    try:
        told = Best.parse((folder / BEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    marker = None if told is None else marker_of(folder / told.name)
    return None if told is None or (marker is not None and marker.serial != told.serial) else told


def is_better(value: float, than: float | None, *, lower: bool, margin: float = 0.0) -> bool:
    """Whether a metric's value is better, by more than a margin; one that is no number never is."""
    gain = 0.0 if than is None else than - value if lower else value - than
    return math.isfinite(value) and (than is None or gain > margin)


def kept(serials: Mapping[str, int], *, last: int, every: int | None, best: str | None) -> set[str]:
    """The names of the checkpoints that stay.

    Args:
        serials: name -> number of the save, of the whole ones.
        last: so many of the newest stay.
        every: those of its multiples stay.
        best: the name of the best one, which stays.
    """
    newest_first = sorted(serials, key=lambda name: serials[name], reverse=True)
    stay = set(newest_first[:last])
    for name in newest_first:
        match = NAME.fullmatch(name)
        if name == best or (every and match and int(match[1]) > 0 and int(match[1]) % every == 0):
            stay.add(name)
    return stay


def keep(folder: Path, *, last: int, every: int | None, spared: Collection[str] = ()) -> None:
    """Remove what does not stay, and what is not whole. `spared` stays as well, for the time being."""
    serials = {path.name: marker.serial for path in candidates(folder) if (marker := marker_of(path)) is not None}
    best = best_of(folder)
    stay = kept(serials, last=last, every=every, best=None if best is None else best.name)
    _remove_all(path for path in candidates(folder) if path.name not in stay and path.name not in spared)


def clear(folder: Path) -> None:
    """Remove what dead saves left."""
    _remove_all(folder.glob(f"*{DRAFT}"))


def remove(path: Path) -> None:
    """Delete a checkpoint; its marker first, so that a half deleted one does not count."""
    if path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            (path / MARKER).unlink()
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_all(paths: Iterable[Path]) -> None:
    for path in list(paths):
        remove(path)
