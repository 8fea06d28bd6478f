"""Sources: the setting `shards` becomes shards that can be opened.

Settings enter; names of shards, samples per shard and open shards leave. Each type of source (tars, tables, folders,
CLIP_benchmark, toy and synthetic data, or a user's own) is an entry of `registry`, whose `Source` combines the types of
one setting. Only this package knows which type a shard has.

A source type is named by `data.sources.NAME.type`: a built-in one of `registry.TYPES`, or your own `module:Name`
(docs/plugins.md has an example). Its class is called with the source's settings and a `SourceContext`, lists its shards
in the main process, and opens them in the workers, which are forked: open files, connections and the like in `open`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from clipstream.data.settings import SourceSettings
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import redact
from clipstream.storage.tar import SampleRef as SampleRef
from clipstream.storage.tar import ShardIndex as ShardIndex
from clipstream.text import counted

MISSING_IMAGE = "missing_picture"  # the reason for a row whose image file cannot be read


class OpenShard(Protocol):
    """An open shard, with its samples in order in `index`; keys are unique in the shard."""

    index: ShardIndex

    def load(self, ref: SampleRef, suffixes: Collection[str] | None = None) -> dict[str, bytes]:
        """The members of a sample as bytes by suffix in lower case: all, or at least those of `suffixes` that exist.

        Raises:
            Dropped: the sample cannot be read; it is counted under the reason.
        """
        ...

    def look(self, ref: SampleRef) -> dict[str, bytes]:
        """The members shown in diagnostics, also of samples that `load` drops, where some can be read."""
        return self.load(ref)

    def close(self) -> None:
        """Release what `open` acquired."""
        return


@dataclass(frozen=True)
class SourceContext:
    """What a source type may use besides its settings."""

    store: ShardCache | None = None  # downloads shards; None where shards are only listed
    cache: str | None = None  # folder for files kept between runs; None for the default one
    key: str = "data.sources"  # dotted key of the source in the settings, for messages


class SourceType(Protocol):
    """The shards of one type."""

    tars: bool = False  # shards are tar files, which may have a side index
    staged: bool = False  # a copy of a shard can be used in its place
    writes: bool = False  # listing writes the shards, if they do not exist
    cheap: bool = False  # `open` neither transfers nor scans a file

    def __init__(self, settings: SourceSettings, context: SourceContext) -> None:
        """Take the settings; `settings.shards` holds the entries of this type alone."""

    def list_shards(self, spec: str) -> Sequence[str]:
        """The names of the shards that `spec`, one entry of `settings.shards`, stands for, in order.

        Names are unique and stay the same from run to run: the data order is computed from them.
        """
        ...

    def open(self, shard: str) -> OpenShard:
        """Open a shard.

        Raises:
            ShardError, OSError: it cannot be read; it is counted and skipped, up to `data.max_shard_failures`.
        """
        ...

    def describe(self, shards: Sequence[str]) -> str:
        """These shards in a few words, for the start of a run."""
        return counted(len(shards), "shard", ",")

    def num_samples(self, shard: str) -> int | None:
        """Samples of a shard, exactly; None if that is not known. `data.sampling.mode indexed` needs it."""
        return None

    def total_samples(self, shards: Sequence[str]) -> int | None:
        """Samples of these shards together; None if that takes opening them."""
        counts = [self.num_samples(shard) for shard in shards]
        return None if None in counts else sum(count or 0 for count in counts)

    def title(self, shard: str) -> str:
        """The shard's name in messages and sample keys, without credentials."""
        return redact(shard)

    def missing(self, shards: Sequence[str]) -> list[str]:
        """Those of the shards that are local files and do not exist."""
        return []

    def is_remote(self, shard: str) -> bool:
        """Whether opening the shard downloads it."""
        return False

    def prefetch(self, shard: str) -> bool:
        """Download a remote shard ahead of `open`; True if it must be released.

        Raises:
            ShardError, OSError, SettingsError: it cannot be downloaded now.
        """
        return False

    def release(self, shard: str, *, keep: bool = True) -> None:
        """Mark a shard as closed by this process; `keep` is False if its download was not usable."""
        return
