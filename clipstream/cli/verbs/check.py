"""The verb check: inspect a data set: which samples are used and dropped."""

from __future__ import annotations

from clipstream.config.command_line import CommandLine, Verb, argument, flag, switch
from clipstream.curation.check import print_report, reading_flags
from clipstream.data.decode.sample_profile import SHORT_FLAGS
from clipstream.storage.shard_url import in_braces
from clipstream.utils.executors import MEANING
from clipstream.utils.section import GIVEN, Conflict, Section


class CheckFlags(Section):
    """Inspect a data set: its shards, members and JSON fields, the samples that these settings use and drop, and the
    flags to train on it. Exit code 3 if no sample is usable.
    """

    shards: list[str] = argument("tar files: braces, '::', globs, pipe:, http(s):; a table; or a local folder")
    folder: str | None = flag("base folder of a table's relative paths (default: the table's folder)")
    separator: str | None = flag("separator of a CSV (default: detected from its header)", form="CHARACTER")
    samples: int | None = flag("samples to read; 0: all (default: 500, or all of 2,000 or fewer)", ge=0)
    all: bool = switch("read all samples: captions, images, duplicates, problems")
    headers: bool = switch("with --all: read the headers of images only: faster, no duplicates")
    table: str | None = flag("with --all: folder for the table of samples (default: in the cache)", form="FOLDER")
    json_: str | None = flag("with --all: write the figures as JSON; '-': print nothing else", form="FILE")
    html: str | None = flag("with --all: write a page with charts, the worst samples and examples", form="FILE")
    yaml: str | None = flag("with --all: write settings that train on these data, for --config", form="FILE")
    strict: float | None = flag(
        "with --all: exit code 3 if a problem concerns more than this share of the samples (default: 0), for CI",
        bare=0.0, ge=0, lt=1,
    )  # fmt: skip
    executor: str | None = flag(f"with --all: {MEANING}", form="EXECUTOR")

    pairs = (
        *(
            Conflict({key: GIVEN, "all": False}, "requires --all")
            for key in ("table", "json_", "html", "yaml", "strict", "executor")
        ),
        Conflict({"headers": True, "all": False}, "requires --all"),
        Conflict({"samples": GIVEN, "all": True}, "not supported with --all, which reads all samples"),
    )


def run(command: CommandLine[CheckFlags]) -> None:
    own = command.own
    shards = "::".join(in_braces(own.shards))
    flags = [*reading_flags({"folder": own.folder, "separator": own.separator}), *command.flags]
    words = ["--train-data", shards, *flags]
    print_report(command.load(words).settings, words, own)


main = Verb("check", CheckFlags, run, ("Captions and images",), within=f"{SHORT_FLAGS}.")
