"""The registry of source types, and the choice of a type for each entry of the setting `shards`.

The setting enters; entries for `SourceType.list_shards`, each with its type, leave. Without `type`, the name of an
entry decides: `SCHEME:` as in TYPES, a table by its suffix, anything else is a tar. Types are imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from clipstream.config.plugins import load_plugin
from clipstream.config.section import with_home
from clipstream.data.settings import AUTO, SourceSettings
from clipstream.data.shard_url import parts_of, scheme_of, with_variables
from clipstream.data.sources.patterns import expand_pattern, expand_pipe
from clipstream.data.sources.protocol import SourceContext, SourceType
from clipstream.errors import SettingsError

TYPES = {
    "tar": "clipstream.data.sources.tars:TarSource",
    "table": "clipstream.data.sources.tables:TableSource",
    "folder": "clipstream.data.sources.folders:FolderSource",
    "imagenet": "clipstream.data.sources.folders:FolderSource",
    "benchmark": "clipstream.data.sources.clip_benchmark:BenchmarkSource",
    "toy": "clipstream.data.sources.toy_data:ToySource",
    "synthetic": "clipstream.data.sources.synthetic:SyntheticSource",
}
TABLE_FORMATS = {
    ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip


@cache
def source_type(name: str) -> type[SourceType]:
    """The class of a built-in type or of a `module:Name`.

    Raises:
        SettingsError: it cannot be imported, or is not a source type.
    """
    try:
        found = load_plugin(TYPES.get(name, name))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if not isinstance(found, type) or SourceType not in found.__mro__:
        raise SettingsError(f"{name}: derive it from clipstream.data.sources.protocol.SourceType")
    return found


def table_format(url: str) -> str | None:
    """`csv`, `json` or `parquet` by the suffix, also before `.gz`; None if the name is not that of a table."""
    if url.startswith("pipe:"):
        return None
    name = url.partition("?")[0].lower().removesuffix(".gz")
    return TABLE_FORMATS.get(name[name.rfind(".") :]) if "." in name.rpartition("/")[2] else None


def entries(spec: str | list[str], type: str = AUTO) -> Iterator[tuple[str, str]]:
    """(name of a type, entry for its `list_shards`) of all that `spec` names, in order, duplicates kept.

    Braces and `::` have webdataset's meaning, `*` and `~` the shell's (matches are sorted). `${NAME}` is an environment
    variable, or WDS_NAME as in webdataset; in a `pipe:` command the shell replaces it. A local file need not exist.
    A `module:Name` receives the items of `spec` unchanged.

    Raises:
        SettingsError: a pattern matches nothing, a local folder is named, a variable is not set, nothing is named, or
            a command is named although WDS_SECURE forbids commands.
    """
    parts = parts_of(spec) if ":" not in type else [spec] if isinstance(spec, str) else spec
    if not parts:
        raise SettingsError(f"{spec!r} names no shard")
    for part in parts:
        if ":" in type:
            yield type, part
        elif part.startswith("pipe:"):
            yield from (("tar", command) for command in expand_pipe(part))
        elif (scheme := scheme_of(text := with_home(with_variables(part)))) in TYPES:
            yield str(scheme), text
        elif type not in (AUTO, "tar", "table"):
            yield type, f"{type}:{text}"
        else:
            for url in expand_pattern(text):
                if type == "table" and table_format(url) is None:
                    raise SettingsError(f"{url}: a table's name ends in {', '.join(TABLE_FORMATS)}")
                yield ("tar" if table_format(url) is None else "table") if type == AUTO else type, url


def typed_shards(
    spec: str | list[str], type: str = AUTO, *, write: bool = True
) -> Iterator[tuple[str, type[SourceType]]]:
    """The shards that `spec` names, each with its type. Raises as `entries`.

    Tables are not read: a table, and an item for a `module:Name`, is one name. Without `write`, entries whose listing
    writes files are left out.
    """
    for name, entry in entries(spec, type):
        cls = source_type(name)
        if name in ("tar", "table") or ":" in name:
            yield entry, cls
        elif write or not cls.writes:
            made = cls(SourceSettings(shards=entry), SourceContext())
            yield from ((shard, cls) for shard in made.list_shards(entry))


def expand(spec: str | list[str], type: str = AUTO, *, write: bool = True) -> list[str]:
    """The names alone of `typed_shards`."""
    return [shard for shard, _ in typed_shards(spec, type, write=write)]
