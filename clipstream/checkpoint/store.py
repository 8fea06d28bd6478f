"""The folder of checkpoints: which are whole, newest and best, and which are kept; and the lock of a run's folder.

Imports no torch, as settings are checked with it.

    checkpoints/step_00000100/   whole if its COMPLETE lists files that exist with these sizes
    checkpoints/latest, best     names of checkpoints

A new checkpoint's folder has the suffix `.tmp` until its files are complete and flushed. It is then renamed, and only
after that the one that it replaces is removed: a crash at any moment leaves a whole checkpoint.

The lock is `flock` and not filelock's `FileLock`: forked data workers must hold it too, so that a killed run's folder
is free only when they have ended; other processes only probe it, by a shared lock; the file names its holder, which
filelock 3.13 truncates at each attempt; and file systems without locks still have to work.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from clipstream.errors import ClipstreamError, SettingsError, absent, errors_as, nearest
from clipstream.models.model_config import AVERAGED_FILE, CONFIG_FILE, HUB, LOCAL, WEIGHT_FILES, is_model
from clipstream.models.settings import ModelSettings, TowerSettings
from clipstream.models.transformers_names import other_model
from clipstream.utils import atomic_write
from clipstream.utils.atomic_write import LOCK
from clipstream.utils.logs import logger
from clipstream.utils.section import Count, parse_as, with_home

MARKER, LATEST, BEST = "COMPLETE", "latest", "best"
NAME = re.compile(r"step_(\d{8})(\.old)?")  # .old: moved aside for a new save of the same step
DRAFT, ASIDE = ".tmp", ".old"
CLAIM, CLAIMED = "rescue-", 3600.0  # s for which a claim stays; train.rescue_seconds is shorter
# Files that a run may have written before its first step.
_EARLY = {
    LOCK, "config.yaml", "metrics.jsonl", "quarantine.jsonl", "report.html", "tensorboard", "pictures", "out.log",
    "val_split.txt",
}  # fmt: skip
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/(?!\d+\b)[A-Za-z0-9][\w.-]*(@[\w./-]+)?")  # but not ViT-B/32
_FILES = (".json", ".pt", ".pth", ".bin", ".safetensors", ".ckpt")  # endings of files of a model


def _inside(name: str) -> str:
    """A file's name below a folder. Raises ValueError: it leads out of the folder."""
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError("not a file of the checkpoint")
    return name


_File = Annotated[str, AfterValidator(_inside)]


@dataclass(frozen=True)
class Marker:
    """Content of COMPLETE."""

    # number of the save in its folder, which orders checkpoints: after a resume from an older one, the same steps are
    # saved again
    serial: Count
    step: Count  # steps done
    sizes: Mapping[_File, Count]  # bytes by file
    checksums: Mapping[_File, str] = field(default_factory=dict)  # checksum by file

    @classmethod
    def from_json(cls, text: bytes) -> Marker | None:
        """The marker in a text; None if it is incomplete, as after a crash."""
        try:
            values = parse_as(dict[str, Any], text)
            return parse_as(cls, {**values, "sizes": values.get("files")})
        except ValueError:
            return None

    def to_json(self) -> bytes:
        values = {"serial": self.serial, "step": self.step, "files": self.sizes, "checksums": self.checksums}
        return json.dumps(values).encode()


@dataclass(frozen=True)
class Best:
    """Content of the file `best`: the checkpoint of the best evaluation so far."""

    name: _File  # of its folder
    metric: str  # EVALUATOR/METRIC
    value: float  # of the metric
    serial: Count  # of the checkpoint, because the same step may be saved again

    @classmethod
    def from_text(cls, text: str) -> Best | None:
        """The content of a text; None if it is incomplete."""
        name, _, rest = text.partition("\n")
        try:
            return parse_as(cls, {**parse_as(dict[str, Any], rest), "name": name})
        except ValueError:
            return None

    def to_text(self) -> bytes:
        """The text that `from_text` reads: the first line is the name alone, for people and scripts."""
        values = {"metric": self.metric, "value": self.value, "serial": self.serial}
        return f"{self.name}\n{json.dumps(values)}\n".encode()


def folder_of(step: int) -> str:
    return f"step_{step:08d}"


def marker_of(checkpoint: Path) -> Marker | None:
    """The marker of a checkpoint whose files have the right sizes; None for any other folder.

    Raises OSError: that cannot be read, as the disk fails or its server is away.
    """
    try:
        marker = Marker.from_json((checkpoint / MARKER).read_bytes())
        sizes = {} if marker is None else marker.sizes
        return marker if all((checkpoint / name).stat().st_size == size for name, size in sizes.items()) else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise type(error)(error.errno, f"cannot read {error.filename or checkpoint}: {error.strerror}") from error


def fault(checkpoint: Path, files: Collection[str] | None = None, marker: Marker | None = None) -> str | None:
    """The damage of a checkpoint, whose files (all, or `files`) are read; None if there is none. The marker is given of
    a folder that has none, and its files in the right sizes.
    """
    if (marker := marker or marker_of(checkpoint)) is None:
        return "it is incomplete"
    for name, checksum in marker.checksums.items():
        if files is None or name in files:
            try:
                if atomic_write.checksum(checkpoint / name) != checksum:
                    return f"{name} does not match its checksum"
            except OSError as error:
                return f"cannot read {name}: {error.strerror}"
    return None


def candidates(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []


def markers(folder: Path, unread: list[str] | None = None) -> dict[str, Marker]:
    """The markers of the checkpoints whose files have the right sizes, by name, newest first. `unread` receives the
    names of those that cannot be read. Raises OSError: without it, as `marker_of`.
    """
    found = dict[str, Marker]()
    for path in candidates(folder):
        try:
            if (marker := marker_of(path)) is not None:
                found[path.name] = marker
        except OSError:
            if unread is None:
                raise
            unread.append(path.name)
    return dict(sorted(found.items(), key=lambda item: item[1].serial, reverse=True))


def whole(folder: Path) -> list[Path]:
    """The checkpoints whose files have the right sizes, newest first."""
    return [folder / name for name in markers(folder)]


def read_pointer(pointer: Path) -> Path | None:
    """The checkpoint that a file `latest` or `best` names, whole or not."""
    try:
        name = pointer.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[\w.-]*\w", name):  # of another file, as open_clip's or a page of HTML
        return None
    named = pointer.parent / name
    aside = named.with_name(f"{name}{ASIDE}")  # after a crash during a second save of its step
    return aside if aside.is_dir() and not named.is_dir() else named


def newest(folder: Path, files: Collection[str] | None = None, intact: Path | None = None) -> Path | None:
    """The newest checkpoint without a `fault`, as `intact` is known to be; warns of newer ones that are damaged."""
    found = whole(folder)
    last = read_pointer(folder / LATEST)
    faults = [(last, "it is incomplete")] if last is not None and last not in found else []
    taken = None
    for path in found:
        if (damage := None if path == intact else fault(path, files)) is None:
            taken = path
            break
        faults.append((path, damage))
    for path, damage in faults:
        instead = taken.name if taken else "none"
        logger.warning(f"checkpoint {path} is damaged ({damage}); using the previous one: {instead}")
    return taken


def find(
    folder: Path, resume: str | None, files: Collection[str] | None = None, intact: Path | None = None
) -> Path | None:
    """The checkpoint to resume from.

    Args:
        folder: LOGS/NAME/checkpoints; it need not exist.
        resume: 'latest' (there must be one), 'auto' (if there is one), the path of a checkpoint, of a file `latest` or
            `best`, or of a run's folder (its newest), or None.
        files: the files to be read, which must be intact; all by default.
        intact: a checkpoint of `folder` whose files were read already.

    Raises SettingsError: there is none, or the named one is incomplete or damaged.
    """
    if resume is None:
        return None
    if resume in ("latest", "auto"):
        taken = newest(folder, files, intact)
        if taken is None and resume == "latest":
            raise SettingsError(f"--resume latest: no complete checkpoint in {folder}; --resume auto starts a new run")
        if taken is None and (damaged := candidates(folder)):
            what = f"all checkpoints in {folder} are incomplete ({', '.join(p.name for p in damaged)})"
            raise SettingsError(f"--resume auto: {what}; move them away to start a new run")
        return taken
    path = Path(resume)
    if path.is_file():
        path = read_pointer(path) or path
        if path.is_file():  # of open_clip's trainer, or refused when it is read
            return path
    with errors_as(SettingsError, f"--resume {resume}", SettingsError):
        return _intact(path, files)


def global_batch_size(path: Path) -> int | None:
    """That of the checkpoint that a folder of checkpoints, a run's folder, a checkpoint or a file `latest` names; the
    newest of them is taken by its size. None where there is none.
    """
    path = (read_pointer(path) or path) if path.is_file() else path
    with suppress(OSError, ValueError, LookupError, TypeError):
        found = [path] if marker_of(path) else whole(path) or whole(path / "checkpoints")
        state = json.loads((found[0] / "state.json").read_bytes())
        return int(state["train"]["data"]["fingerprint"]["data.global_batch_size"])
    return None


def _intact(path: Path, files: Collection[str] | None) -> Path:
    """The checkpoint in a folder, or the newest one of a run's folder; arguments and errors as `find`."""
    with errors_as(SettingsError, "", OSError):
        if (marker := marker_of(path)) is not None:
            if (damage := fault(path, files, marker)) is None:
                return path
            raise SettingsError(f"the checkpoint {path} is damaged: {damage}")
        if path.is_dir() and not NAME.fullmatch(path.name):
            inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            if (taken := newest(inner, files)) is not None:
                return taken
    raise SettingsError(f"no complete checkpoint (with a file {MARKER}) in {path}")


def begin(folder: Path, name: str, size: int) -> Path:
    """An empty draft for a checkpoint of that name; drafts of dead processes are removed.

    Raises OSError: the folder cannot be made, as the run's is away, or the disk has less space than `size` bytes: other
    files of the run would fail as well.
    """
    folder.mkdir(exist_ok=True)
    clear(folder)
    for path in candidates(folder):
        if path.name.endswith(ASIDE) and not (plain := path.with_name(path.name.removesuffix(ASIDE))).exists():
            path.rename(plain)  # a crash before the new one replaced it
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < size:  # 0 of a remote file system that does not know
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    draft = folder / f"{name}{DRAFT}"
    draft.mkdir()
    return draft


def next_serial(folder: Path, after: int = 0) -> int:
    """The number of the next save: larger than those in the folder, and than `after`."""
    found = markers(folder, unread := list[str]())
    return max((after, *(marker.serial for marker in found.values()))) + 1 + len(unread)


def commit(draft: Path, marker: Marker) -> Path:
    """Turn a draft, whose files are flushed, into the newest checkpoint, and return its path."""
    atomic_write.write(draft / MARKER, [marker.to_json()])
    for path in (*(p for p in draft.rglob("*") if p.is_dir()), draft):
        atomic_write.flush(path)
    folder, final = draft.parent, draft.with_name(draft.name.removesuffix(DRAFT))
    aside = folder / f"{final.name}{ASIDE}"
    if final.exists():
        remove(aside)
        final.rename(aside)
    draft.rename(final)
    atomic_write.flush(folder)
    atomic_write.replace(folder / LATEST, f"{final.name}\n".encode())
    remove(aside)
    return final


def best_of(folder: Path) -> Best | None:
    """The best checkpoint so far; None also if its step was saved again since then.

    The checkpoint need not be in this folder, e.g. after a resume from the remote copy.
    """
    try:
        best = Best.from_text((folder / BEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    marker = None if best is None else markers(folder, []).get(best.name)
    return None if best is None or (marker is not None and marker.serial != best.serial) else best


def names_to_keep(folder: Path, markers: Mapping[str, Marker], *, last: int, every: int | None) -> set[str]:
    """The names of the checkpoints to keep, the best one of `folder` included.

    Args:
        markers: of the whole checkpoints, here or in the remote copy.
        last: number of the newest ones to keep.
        every: keep the multiples of this step.
    """
    best = best_of(folder)
    newest_first = sorted(markers, key=lambda name: markers[name].serial, reverse=True)
    return {
        name
        for newer, name in enumerate(newest_first)
        if newer < last
        or (best is not None and name == best.name)
        or (every and markers[name].step > 0 and markers[name].step % every == 0)
    }


def prune(folder: Path, *, last: int, every: int | None, spared: Collection[str] = ()) -> None:
    """Remove checkpoints, incomplete ones too, but not `names_to_keep`, those in `spared` and the unreadable."""
    stay = names_to_keep(folder, markers(folder, unread := list[str]()), last=last, every=every)
    for path in candidates(folder):
        if path.name not in stay and path.name not in spared and path.name not in unread:
            remove(path)


def clear(folder: Path) -> None:
    for draft in list(folder.glob(f"*{DRAFT}")):
        remove(draft)


def claim(folder: Path, name: str) -> None:
    """Let this process be the only one of those with this name to write a checkpoint.

    Raises ClipstreamError: another one is.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{CLAIM}{name}").touch(exist_ok=False)
    except FileExistsError as error:
        raise ClipstreamError("another rank, which cannot be reached, saves it") from error


def clear_claims(folder: Path) -> None:
    """Delete old claims; a rank that no other reaches may still look for one of the attempt before this one."""
    for path in folder.glob(f"{CLAIM}*"):
        if path.stat().st_mtime < time.time() - CLAIMED:
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint; its marker first, so that a partly deleted one does not count."""
    if path.is_dir():
        with suppress(FileNotFoundError):
            (path / MARKER).unlink()
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Subject:
    """A model to evaluate."""

    label: str  # its name in the results
    checkpoint: Path | None = None  # its folder; None for the model that the settings name
    run: Path | None = None  # the folder of its run, if there is one
    step: int = 0  # of the checkpoint; 0 for a pretrained model


def model_at(path: Path) -> Path | None:
    """The folder of the model at a path: of the newest checkpoint of a run, of the checkpoint that a file `latest` or
    `best` names, or any folder that open_clip reads or that has transformers' CLIPModel or SiglipModel; None if there
    is no model.

    Raises SettingsError: a run has no checkpoint, its weights are damaged, or it is another model of transformers.
    """
    if path.is_file() and path.name in (LATEST, BEST):
        path = read_pointer(path) or path
    if not path.is_dir():
        return None
    if (path / "checkpoints").is_dir() or path.name.startswith("step_"):
        # Checked on every rank; the optimizer's moments, which are twice as large, are not needed here.
        return _intact(path, (*WEIGHT_FILES, AVERAGED_FILE))
    if is_model(path):
        return path
    if (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
        advice = "it saves one every checkpoint.every steps, and at its end"
        raise SettingsError(f"{path} is a run without a checkpoint: {advice}")
    if (other := other_model(path)) is not None:
        raise SettingsError(f"{path} {other}")
    return None


def resolve_model_name(text: str) -> str:
    """A model's name as `models.pretrained` reads it: `local-dir:FOLDER` for what `model_at` finds, `hf-hub:ORG/NAME`
    for ORG/NAME where there is no such path, and every other name (open_clip's, a tag, a file) as it is.

    Raises SettingsError: as `model_at`, or ORG or ORG/NAME is the wrong name of a folder.
    """
    text = with_home(text)
    path = Path(text.removeprefix(LOCAL))
    if text.startswith(HUB) or (text.startswith(LOCAL) and is_model(path)):
        return text
    if (folder := model_at(path)) is not None:
        return f"{LOCAL}{folder}"
    if not _REPOSITORY.fullmatch(text) or path.suffix in _FILES or path.exists():
        return text
    if path.parent.exists() or nearest(path.parent.name, (one.name for one in Path().glob("*") if one.is_dir())):
        raise SettingsError(absent(text))
    return HUB + text


def with_own_config(model: Mapping[str, Any], name: str = "name") -> dict[str, Any]:
    """The settings of a model by key; if they name weights alone that have a configuration, the model is that of these.
    `name` is the key of the model's name, beside `pretrained`.
    """
    own, weights = model.get(name), model.get("pretrained")
    if isinstance(own, str) and weights is None and not own.endswith(".json") and Path(own).is_file():
        own, weights = None, own
    if own is None and isinstance(weights, str) and model.get("config") is None:
        if weights.startswith((HUB, LOCAL)):
            return {**model, name: weights, "pretrained": None}
        if Path(weights).is_file() and is_model(Path(weights).parent):
            return {**model, name: f"{LOCAL}{Path(weights).parent}", "pretrained": weights}
    return dict(model)


def locate(path: str) -> Subject:
    """The checkpoint at a path, as `model_at`, or of a file of weights in it.

    Raises SettingsError: there is no checkpoint, or its weights are damaged.
    """
    given = Path(path)
    folder = model_at(given.parent if given.is_file() and given.name in WEIGHT_FILES else given)
    if folder is None:
        why = "does not exist"
        if given.exists():
            why = f"is neither a run folder (checkpoints/) nor a checkpoint ({CONFIG_FILE})"
            why += "; for a file of weights, use --model NAME --pretrained FILE" * given.is_file()
        raise SettingsError(f"--checkpoint: {path} {why}")
    above, number = folder.resolve().parent.parent, folder.name.removeprefix("step_")
    run = above if (above / "config.yaml").is_file() else None
    return Subject(folder.name, folder, run, int(number) if number.isdecimal() else 0)


def model_in(checkpoint: Path, model: ModelSettings, tokenizer_fits: bool, *, averaged: bool = False) -> ModelSettings:
    """The settings of a checkpoint's model, without those of training, but with the precision of each tower.
    `tokenizer_fits`: the settings' tokenizer is known to be the model's.

    Raises SettingsError: the checkpoint has no averaged weights.
    """
    weights = checkpoint / AVERAGED_FILE
    if averaged and not weights.is_file():
        raise SettingsError(f"--weights averaged: {checkpoint} has no averaged weights (--train.ema)")
    update: dict[str, Any] = {str(key): TowerSettings(precision=kept) for key, kept in model.own_precisions.items()}
    update |= {"name": f"{LOCAL}{checkpoint}", "config": None, "pretrained": str(weights) if averaged else None}
    update["allow_mismatch"] = tokenizer_fits or model.allow_mismatch
    return model.without_training().model_copy(update=update)


def holds_a_run(folder: Path) -> bool:
    """Whether a new run would overwrite a checkpoint, a training record, or files that are not a run's."""
    if not folder.is_dir():
        return folder.exists()
    names = {path.name for path in folder.iterdir()}
    if any(name not in _EARLY and not re.fullmatch(r"out-\d+\.log", name) for name in names):
        return True
    metrics = folder / "metrics.jsonl"
    return bool(names) and (b'"loss"' in metrics.read_bytes() if metrics.is_file() else bool(names - {LOCK}))


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder's lock; true, too, if the file system has no locks."""
    with suppress(OSError), open(folder / LOCK, "rb") as lock:
        return not atomic_write.try_lock(lock.fileno(), fcntl.LOCK_SH)
    return False


def lock_folder(folder: Path) -> AbstractContextManager[None]:
    """A context in which only this process trains in the folder, made and locked as by `atomic_write.lock_folder`."""
    return atomic_write.lock_folder(folder, "--logs: the folder", "wait for it, stop it, or use another --name")
