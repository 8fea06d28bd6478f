"""Files of the Hugging Face Hub: which are cached, which are missing, and their download.

Does not import torch, and does not contact the Hub for a file that is in the cache.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from clipstream.errors import SettingsError


@dataclass(frozen=True)
class Need:
    """Files that a model needs from one repository."""

    repo: str  # 'ORG/NAME' or 'ORG/NAME@REVISION'
    files: tuple[tuple[str, ...], ...]  # for each file, its alternative names in order of preference
    extras: tuple[str, ...] = ()  # files that are downloaded as well if the repository has them


def cache_folder(cache_dir: str | None) -> Path:
    """The Hub's cache: `cache_dir`, else $HF_HUB_CACHE, else the one in the user's home."""
    return Path(cache_dir or constants.HF_HUB_CACHE)


def repository(name: str) -> str:
    """The 'ORG/NAME' of an 'hf-hub:ORG/NAME'; a revision (branch, tag or commit) may follow: 'ORG/NAME@REVISION'.

    Raises SettingsError: the name is empty.
    """
    scheme, _, repo = name.partition(":")
    if not repo:
        raise SettingsError(f"{name!r} names no repository: write {scheme}:ORG/NAME")
    return repo


def _parts(repo: str) -> tuple[str, str | None]:
    """Split 'ORG/NAME@REVISION'; without a revision it is None, the branch main."""
    name, _, revision = repo.partition("@")
    return name, revision or None


def cached(repo: str, names: Iterable[str], cache_dir: str | None) -> Path | None:
    """The first of `names` that the cache holds for the repository's revision.

    Raises SettingsError: `repo` is not a valid name of a repository.
    """
    repo_id, revision = _parts(repo)
    for name in names:
        try:
            path = try_to_load_from_cache(repo_id, name, cache_dir=cache_folder(cache_dir), revision=revision)
        except HFValidationError as error:
            raise SettingsError(f"{repo!r} is not a repository of the Hugging Face Hub (ORG/NAME): {error}") from error
        if isinstance(path, str):
            return Path(path)
    return None


def missing(needs: Iterable[Need], cache_dir: str | None) -> list[Need]:
    """The part of `needs` that is not in the cache."""
    found = []
    for need in needs:
        files = tuple(names for names in need.files if cached(need.repo, names, cache_dir) is None)
        if files:
            found.append(Need(need.repo, files, need.extras))
    return found


def why_unreachable(timeout: float = 4.0) -> str | None:
    """Why the Hub cannot be reached, or None. Tries once, so that a name server cannot delay the run for minutes."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    outcome = [f"{constants.ENDPOINT} does not answer within {timeout:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=timeout):
                outcome.clear()
        except urllib.error.HTTPError:
            outcome.clear()  # any answer will do
        except (OSError, ValueError) as error:
            outcome[0] = f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'reason', error)})"

    # urllib's timeout does not cover the name lookup, so a thread that is stuck in one is abandoned.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return outcome[0] if outcome else None


def explain(needs: Iterable[Need], cache_dir: str | None, label: str, reason: str) -> SettingsError:
    """The error for files that are not in the cache while the Hub cannot be reached: which, where, how to get them."""
    by_repo: dict[str, list[tuple[str, ...]]] = {}
    for need in needs:
        listed = by_repo.setdefault(need.repo, [])
        listed.extend(names for names in need.files if names not in listed)
    lines = [f"{label} needs files of the Hugging Face Hub that are not in its cache, and {reason}."]
    for repo, files in by_repo.items():
        repo_id, revision = _parts(repo)
        where = cache_folder(cache_dir) / f"models--{repo_id.replace('/', '--')}"
        option = (f" --revision {revision}" if revision else "") + (f" --cache-dir {cache_dir}" if cache_dir else "")
        whole = any("open_clip_config.json" in names for names in files)  # it may name more files
        wanted = ", ".join(names[0] + (f" (or {', '.join(names[1:])})" if names[1:] else "") for names in files)
        lines += [
            f"  repository: {repo}",
            f"  files:      {wanted}",
            f"  looked in:  {where}" + ("" if where.is_dir() else " (there is no such folder)"),
            "  to fetch them with a network: "
            + " ".join(["hf download", repo_id, *([] if whole else [names[0] for names in files])])
            + option,
        ]
    return SettingsError("\n".join(lines))


def download(needs: Iterable[Need], cache_dir: str | None) -> None:
    """Download files into the cache, each under the first of its names that the repository has.

    Raises SettingsError: there is no such repository or file, access is denied, or the network failed.
    """
    for need in needs:
        for names in need.files:
            if not any(_fetch(need.repo, name, cache_dir) for name in names):
                raise SettingsError(f"the Hub's repository {need.repo!r} has no {' or '.join(names)}")
        for name in need.extras:
            _fetch(need.repo, name, cache_dir)


def _fetch(repo: str, name: str, cache_dir: str | None) -> bool:
    """Download a file into the cache; returns whether the repository has it."""
    repo_id, revision = _parts(repo)
    page = f"{constants.ENDPOINT}/{repo_id}"
    log_in = "log in with 'hf auth login', or set HF_TOKEN"
    try:
        hf_hub_download(repo_id, name, cache_dir=cache_folder(cache_dir), revision=revision)
    except GatedRepoError as error:
        raise SettingsError(f"{repo_id!r} is gated: ask for access at {page}, then {log_in}") from error
    except RepositoryNotFoundError as error:
        raise SettingsError(f"the Hub has no repository {repo_id!r}, or it is private: then {log_in}") from error
    except RevisionNotFoundError as error:
        raise SettingsError(f"the Hub's repository {repo_id!r} has no revision {revision!r}: see {page}") from error
    except EntryNotFoundError as error:
        if not isinstance(error, LocalEntryNotFoundError):
            return False
        raise _broken(repo_id, name, error) from error  # means that the network failed
    except Exception as error:  # the client's network errors have no common base
        raise _broken(repo_id, name, error) from error
    return True


def _broken(repo_id: str, name: str, error: Exception) -> SettingsError:
    """The error for a failed download, with the first cause of the client's error in one line."""
    cause: BaseException = error
    while isinstance(error, LocalEntryNotFoundError) and (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    text = " ".join(str(cause).split()) or type(cause).__name__
    return SettingsError(
        f"cannot fetch {name} of {repo_id!r} from {constants.ENDPOINT}: {text}; files that came whole stay in the "
        "cache, and the same command fetches the rest"
    )
