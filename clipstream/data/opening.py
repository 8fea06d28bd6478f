"""Owns a source's list of shards and the opening of each: a tar, a block of a manifest's rows, a synthetic one.

It makes a manifest's Arrow file when the source is named, once for all processes of a node; it opens tars only when
they are asked for.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from clipstream.data import folders, index, synthetic
from clipstream.data.fields import split_keys
from clipstream.data.home import cache_root
from clipstream.data.manifest import kind_of, to_arrow
from clipstream.data.profile import SHORT_FLAGS
from clipstream.data.remote import ShardError, ShardStore
from clipstream.data.rows import Pictures, RowShard, columns, count_rows
from clipstream.data.settings import SourceSettings
from clipstream.data.shards import expand, local_path, redact, scheme_of
from clipstream.data.sizes import samples_of_tars
from clipstream.data.tarstream import SampleRef, Shard, ShardIndex
from clipstream.errors import DataError, Dropped, SettingsError

BLOCK = 1000  # rows of a manifest that make a shard, at most
BLOCKS = 192  # that a source is cut into at least, if it has the rows: 48 lanes hold 4 each
FORM = 1  # of the Arrow files, part of their name: another form is made anew


class OpenShard(Protocol):
    """A shard that is open: its samples, and their members."""

    @property
    def index(self) -> ShardIndex: ...

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The bytes of a sample's members by suffix: all, or those of `suffixes`. Raises Dropped."""
        ...

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """The members for people: all that can be read of them. Raises Dropped."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Opener:
    """The shards of a source.

    Args:
        source: names them.
        store: fetches tars and manifests; None only to name shards.
        cache: folder for the Arrow files of manifests; clipstream's own under ~/.cache unless given.
        place: key of the settings where the source stands, for messages.

    Attributes:
        names: the shards, in order. A block of rows is named `MANIFEST#FIRST-LAST`.
        samples: how many samples they hold, where that is known without opening them.
        manifests: manifest -> its rows.
        counts: how many samples each shard must hold, in the order of `names`, where an order rests on that.

    Raises:
        SettingsError: the shards cannot be listed.
        DataError: a manifest that is not there, cannot be read, or names no pictures.
    """

    def __init__(
        self, source: SourceSettings, store: ShardStore | None, *, cache: str | None = None, place: str = "data.sources"
    ) -> None:
        self._store = store
        self._source, self._place = source, place
        self._pictures: dict[str, Pictures] = {}
        self._arrows: dict[str, Path] = {}
        self._blocks: dict[str, tuple[str, range]] = {}
        urls = expand(source.shards)
        self.manifests: dict[str, int] = {}
        for url in dict.fromkeys(urls):
            if kind_of(url) is not None:
                self.manifests[url] = self._read(url, cache)
        rows = sum(self.manifests.values())
        self._block = max(1, min(BLOCK, -(-rows // BLOCKS)))
        self.names = [name for url in urls for name in (self._cut(url) if url in self.manifests else [url])]
        self.samples = self._known(urls)
        self.counts: list[int] | None = None

    def open(self, name: str) -> OpenShard:
        """Open a shard; a remote one is fetched first.

        Raises:
            ShardError, OSError: it gives nothing.
        """
        if name in self._blocks:
            url, rows = self._blocks[name]
            return RowShard(self._arrows[url], rows, self._pictures[url])
        if (scheme := scheme_of(name)) == "synthetic":
            return synthetic.SyntheticShard(name)
        if scheme in folders.SCHEMES:
            return folders.FolderShard(name, split_keys(self._source.image_key))
        assert self._store is not None, "an opener without a store only names shards"
        local = self._store.local(name)
        is_itself = local_path(name) == str(local)  # and not unpacked, or fetched: its index tells of what it was
        try:
            return Shard(local, index.opened_by(name, self._source.index) if is_itself else None)
        except BaseException:
            self._store.release(name)
            raise

    def release(self, name: str, *, keep: bool = True) -> None:
        """Say that this process reads the shard no more; with `keep` false, that it was of no use."""
        if self._store is not None:
            self._store.release(name, keep=keep)

    def bring(self, name: str) -> bool:
        """Bring a remote shard here, ahead of `open`; whether it is held now, to be released like an opened one.

        Raises:
            ShardError, OSError, SettingsError: it cannot be had, or not now.
        """
        assert self._store is not None, "an opener without a store only names shards"
        return self._store.bring(name)

    def is_remote(self, name: str) -> bool:
        """Whether a shard has to be fetched from elsewhere."""
        return name not in self._blocks and is_remote(name)

    def title(self, name: str) -> str:
        """What a shard is called in messages and keys: a block of rows by its manifest; without credentials."""
        return redact(self._blocks[name][0] if name in self._blocks else name)

    def summary(self) -> str:
        """How much there is, in words."""
        shards = [name for name in self.names if name not in self._blocks]
        parts = [f"{len(shards):,} shard{'s' * (len(shards) != 1)}"] if shards else []
        parts += [f"{len(self.manifests)} manifest{'s' * (len(self.manifests) != 1)}"] if self.manifests else []
        return " and ".join(parts) + ("" if self.samples is None else f", {self.samples:,} samples")

    def is_block(self, name: str) -> bool:
        """Whether a shard is a block of a manifest's rows: quick to open, and small."""
        return name in self._blocks

    def known_samples(self, name: str) -> int | None:
        """The samples of a shard that is no tar; None for a tar, which only a look at it tells."""
        if name in self._blocks:
            return len(self._blocks[name][1])
        return None if scheme_of(name) not in ("synthetic", *folders.SCHEMES) else len(self.open(name).index.samples)

    @property
    def missing(self) -> list[str]:
        """Local shards that are not there."""
        return [name for name in self.names if self._is_file(name) and not os.path.exists(name)]

    def _is_file(self, name: str) -> bool:
        return name not in self._blocks and scheme_of(name) is None

    def _known(self, urls: list[str]) -> int | None:
        total = sum(self.manifests[url] for url in urls if url in self.manifests)
        made = [url for url in urls if scheme_of(url) == "synthetic"]
        tars = [url for url in urls if url not in self.manifests and url not in made]
        held = samples_of_tars(tars)
        return None if held is None else total + held + synthetic.SAMPLES * len(made)

    def _read(self, url: str, cache: str | None) -> int:
        """Make the manifest's Arrow file where there is none; its rows."""
        source, where = self._source, f"{self._place}.shards: {redact(url)}"
        store = _kept_store(cache)
        try:
            local, version = _local_manifest(url, cache)
            identity = ":".join(map(str, [version, source.separator, source.quoting, FORM]))

            def fill(part: Path, _: object) -> None:
                print(f"reading {redact(url)} once, into {store.folder}", file=sys.stderr, flush=True)
                to_arrow(local, url, part, separator=source.separator, quoting=source.quoting)

            arrow = self._arrows[url] = store.spooled(f"{url}#rows", identity, fill)
        except (ShardError, OSError) as error:
            raise DataError(f"{where}: {error}") from error
        keys = split_keys(source.image_key)
        if not (names := columns(arrow)) or not set(names) & set(keys):
            flag = "--image-key" if self._place == SHORT_FLAGS else f"--{self._place}.image-key"
            raise DataError(
                f"{where}: none of its columns holds pictures by the names looked for ({', '.join(keys)}); its columns "
                f"are {', '.join(names) or 'none'}: name the picture's, a path, by {flag}"
            )
        self._pictures[url] = Pictures(keys, self._folder(url, arrow, keys))
        return count_rows(arrow)

    def _folder(self, url: str, arrow: Path, keys: tuple[str, ...]) -> str:
        """What relative paths begin at: the manifest's own folder, or else the working folder if the first is there."""
        if self._source.folder is not None:
            return os.path.expanduser(self._source.folder)
        own = os.path.dirname(local_path(url) or "")
        for folder in (own, ""):
            try:
                if RowShard(arrow, range(1), Pictures(keys, folder)).load(SampleRef("0", {}), keys):
                    return folder
            except Dropped:
                continue
        return own

    def _cut(self, url: str) -> list[str]:
        rows = self.manifests[url]
        names = []
        for first in range(0, rows, self._block):
            block = range(first, min(first + self._block, rows))
            names.append(f"{url}#{block[0]}-{block[-1]}")
            self._blocks[names[-1]] = (url, block)
        return names


def is_remote(url: str) -> bool:
    """Whether a shard, or a manifest, has to be fetched from elsewhere."""
    return scheme_of(url) not in (None, "file", "synthetic", *folders.SCHEMES)


def _kept_store(cache: str | None) -> ShardStore:
    """Where Arrow files are kept from run to run."""
    try:
        return ShardStore(cache or str(cache_root() / "manifests"))
    except SettingsError as error:
        if cache is not None:
            raise
        raise SettingsError(f"{error}: name another by --data.cache, or by CLIPSTREAM_CACHE") from error


def _local_manifest(url: str, cache: str | None) -> tuple[Path, str]:
    """The manifest as a local file, and what changes when it does."""
    named = local_path(url)
    if named is None:
        return _fetched(url, cache)
    local, path = _fetching_store(cache).local(url), Path(named).absolute()
    stat = path.stat()
    return local, f"{path}:{stat.st_mtime_ns}:{stat.st_size}"


@lru_cache(maxsize=256)
def _fetched(url: str, cache: str | None) -> tuple[Path, str]:
    """A remote manifest: without a cache, fetched once a process."""
    local = _fetching_store(cache).local(url)
    digest = hashlib.sha256()
    with open(local, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return local, digest.hexdigest()


@lru_cache(maxsize=8)
def _fetching_store(cache: str | None) -> ShardStore:
    """What brings manifests here; without a cache, for the process's life."""
    return ShardStore(cache)
