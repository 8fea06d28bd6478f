"""Files of the Hugging Face Hub: which are in its cache, which are missing, and their download.

Does not import torch, and does not contact the Hub for a file that is in the cache.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from clipstream.errors import SettingsError

TIMEOUT = 4.0  # s for the Hub to answer, before a run that needs files from it starts
OPTIONAL = ""  # among the names of a file that a repository may lack
Missing = dict[str, list[tuple[str, ...]]]  # repository -> for each file, its names in order of preference


@dataclass
class HubCache:
    """The Hub's cache, and the files that were looked for in vain.

    Args:
        folder: $HF_HUB_CACHE, or the one in the user's home, unless given.
    """

    folder: str | None
    missing: Missing = field(default_factory=dict)

    def find(self, repo: str, *files: tuple[str, ...], extras: tuple[str, ...] = ()) -> Path | None:
        """Path of the first of `files`; None if it is not in the cache. Missing files are added to `missing`.

        Args:
            repo: 'ORG/NAME' or 'ORG/NAME@REVISION' (branch, tag or commit).
            files: for each file, its alternative names in order of preference.
            extras: names of files that are downloaded together with missing ones if the repository has them.

        Raises SettingsError: `repo` is not a valid name of a repository.
        """
        paths = [self._cached(repo, names) for names in files]
        if absent := [names for names, path in zip(files, paths, strict=True) if path is None]:
            listed = self.missing.setdefault(repo, [])
            wanted = (*absent, *((name, OPTIONAL) for name in extras))
            listed.extend(names for names in wanted if names not in listed)
        return paths[0] if paths else None

    def _cached(self, repo: str, names: Iterable[str]) -> Path | None:
        repo_id, revision = _parts(repo)
        for name in names:
            try:
                path = try_to_load_from_cache(repo_id, name, cache_dir=cache_folder(self.folder), revision=revision)
            except HFValidationError as error:
                raise SettingsError(f"{repo!r} is not a repository of the Hugging Face Hub: {error}") from error
            if isinstance(path, str):
                return Path(path)
        return None


def cache_folder(folder: str | None) -> Path:
    """The Hub's cache: `folder`, else $HF_HUB_CACHE, else the one in the user's home."""
    return Path(folder or constants.HF_HUB_CACHE)


def _parts(repo: str) -> tuple[str, str | None]:
    """Split 'ORG/NAME@REVISION'; without a revision it is None, the branch main."""
    name, _, revision = repo.partition("@")
    return name, revision or None


def why_unreachable() -> str | None:
    """Why the Hub cannot be reached; None if it answers within `TIMEOUT`. Tries once."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT):
            return None
    except urllib.error.HTTPError:
        return None  # any answer will do
    except (OSError, ValueError) as error:
        return f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'reason', error)})"


def not_cached(missing: Missing, folder: str | None, label: str, reason: str) -> SettingsError:
    """The error for missing files while the Hub cannot be reached: which files, the folder that was searched, and the
    command that downloads them.
    """
    lines = [f"{label} needs files of the Hugging Face Hub that are not in its cache, and {reason}."]
    for repo, files in missing.items():
        repo_id, revision = _parts(repo)
        needed = [names for names in files if OPTIONAL not in names]
        whole = any("open_clip_config.json" in names for names in needed)  # which may name more files
        words = ["hf download", repo_id, *([] if whole else [names[0] for names in needed])]
        words += ["--revision", revision] if revision else []
        words += ["--cache-dir", folder] if folder else []
        lines += [
            f"  repository: {repo}",
            f"  files:      {', '.join(' or '.join(names) for names in needed)}",
            f"  looked in:  {cache_folder(folder) / f'models--{repo_id}'.replace('/', '--')}",
            f"  to download them: {' '.join(words)}",
        ]
    return SettingsError("\n".join(lines))


def download(missing: Missing, folder: str | None) -> None:
    """Download files into the cache, each under the first of its names that the repository has.

    Raises SettingsError: there is no such repository or file, access is denied, or the network failed.
    """
    for repo, files in missing.items():
        for names in files:
            if not any(name == OPTIONAL or _download(repo, name, folder) for name in names):
                raise SettingsError(f"the Hub's repository {repo!r} has no {' or '.join(names)}")


def _download(repo: str, name: str, folder: str | None) -> bool:
    """Download a file into the cache; returns whether the repository has it."""
    repo_id, revision = _parts(repo)
    try:
        hf_hub_download(repo_id, name, cache_dir=cache_folder(folder), revision=revision)
    except Exception as error:  # the client's network errors have no common base
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return False
        cause: BaseException = error
        while isinstance(error, LocalEntryNotFoundError) and (inner := cause.__cause__ or cause.__context__):
            cause = inner  # the network's error
        text = " ".join(str(cause).split()) or type(cause).__name__
        raise SettingsError(
            f"cannot download {name} of {repo!r} from {constants.ENDPOINT}: {text}\n"
            "Rerun the same command to continue the download. Private and gated repositories need `hf auth login`."
        ) from error
    return True
