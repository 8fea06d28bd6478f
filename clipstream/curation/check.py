"""What `clipstream check` and the function `clipstream.check` find: what a data set contains, and which of its samples
training would use.

A source enters; a report leaves. The first look reads some samples of up to ten shards, in this process, as the sample
table does; with `all`, the table of all samples is made, from which `problems` computes figures. Imports no torch.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from clipstream.config.command_line import output_file
from clipstream.config.config_file import non_defaults, portable, secrets
from clipstream.config.plan import LARGE, batch_of
from clipstream.config.settings import PathLike, Settings, load, tree_of
from clipstream.config.short_flags import READING_FLAGS
from clipstream.config.value_tree import to_yaml
from clipstream.curation.problems import CONTEXT, LARGE_ADVICE, Examined, ReportTable, examine, write_page
from clipstream.curation.sample_table import Columns, Row, RowReader
from clipstream.data.batch import ImageSpec
from clipstream.data.decode.images import lost_area, transparency_note
from clipstream.data.decode.sample_profile import SHORT_FLAGS, Profile, warning_of_equal
from clipstream.data.loader.health import Captions, lost_area_note
from clipstream.data.settings import LARGE_PIXELS, DataSettings
from clipstream.data.shard_pass import SamplePass, ShardSamples, spread
from clipstream.data.source_settings import CaptionSettings, SourceSettings
from clipstream.data.sources import MISSING_IMAGE, Source, SourceContext, list_sources
from clipstream.data.sources.folders import contents, named_folder, tell_images_without_row
from clipstream.data.sources.indexes import count_samples
from clipstream.errors import ClipstreamError, DataError, SettingsError, ShardError, absent, each, wrong_type
from clipstream.storage.download import fault_of
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import in_braces, redact, redact_tree
from clipstream.storage.tar import SCATTERED
from clipstream.text import counted, lines, listed, printable, shortened
from clipstream.utils import atomic_write, executors
from clipstream.utils.console import ResultConsole, print_training, result_table
from clipstream.utils.logs import loading, on_terminal

SAMPLES, WHOLE = 500, 2000  # samples to read; data with at most so many are read whole
FEW = 5000  # samples below which the suggested command begins with published weights
SHARDS_READ = 10  # of a large data set, spread over it
ROWS = 25
CELL = 400  # characters of a table's cell
SQUARE = ImageSpec((224, 224))  # whose crop leaves out as much as that of any square
SAID = 0.1  # mean share of the area that a crop leaves out, from which it is told
OFF_TERMINAL = 160  # columns where there is no terminal
PROFILED = 64  # samples whose members and fields give examples and suggestions of the report on all


def check(
    shards: PathLike | Sequence[PathLike],
    *,
    folder: PathLike | None = None,
    samples: int | None = None,
    all: bool = False,
    settings: Mapping[str, Any] | None = None,
    **flags: str | None,
) -> CheckReport:
    """Look into a data set: its members and JSON fields, and the samples that training would use and drop.

    Args:
        shards: as `--train-data` takes them: tars, manifests, folders; with braces, globs and `::`; text or a path,
            or a list of them.
        folder: what a manifest's relative paths begin at.
        samples: number of samples to read, spread over the shards; 0 for all; unless set 500, or all of 2,000 or fewer.
        all: also read all samples as `check --all` does; `figures` of the report are then those of its `--json`.
        settings: further keys of the source, as training takes them: `{"caption.type": a_function_of_your_own}`.
        flags: short flags of the command line on how samples are read, with underscores, such as `caption_key`,
            `caption_json` and `image_key`; also `separator`, of a CSV.

    Returns:
        The findings, also where no sample is usable.

    Raises:
        SettingsError: the shards cannot be listed, or the caption settings do not fit together.
        DataError: a manifest cannot be read.

    Examples:
        >>> import clipstream
        >>> report = clipstream.check("shards/*.tar")
        >>> report.ok, report.used, report.drops
        (True, 24, Counter())
        >>> dict(report.profile.suffixes)
        {'jpg': 24, 'txt': 24, 'json': 24, 'cls': 24}
        >>> clipstream.check("shards/*.tar", caption_json="caption.de").drops
        Counter({'no_caption': 24})
    """
    for name, value in flags.items():
        if name != "separator" and f"--{name.replace('_', '-')}" not in READING_FLAGS:
            raise TypeError(f"check() got an unexpected keyword argument {name!r}")
        if not isinstance(value, str | None):
            raise wrong_type(name, "text", value)
    if not isinstance(folder, str | os.PathLike | None):
        raise wrong_type("folder", "a path", folder)
    if not isinstance(samples, int | None) or (samples or 0) < 0:
        raise SettingsError(f"samples: expected a number of samples, 0 or more, not {samples!r}")
    names = [os.fspath(one) for one in each("shards", "a pattern or a list of patterns", shards, (str, os.PathLike))]
    words = reading_flags({**flags, "folder": None if folder is None else os.fspath(folder)})
    if not isinstance(settings, Mapping | None):
        raise wrong_type("settings", "a mapping of the keys of a source", settings)
    with on_terminal():
        own = tree_of({f"{SHORT_FLAGS}.{key}": value for key, value in (settings or {}).items()})
        loaded = load(["--train-data", "::".join(in_braces(names)), *words], trees=[own])
        report = look(loaded.data.sources["train"], samples)
        if all:
            report.figures = examine(list_sources(loaded.data)["train"], loaded.data).figures
        return report


def reading_flags(given: Mapping[str, str | None]) -> list[str]:
    """The flags of training for what is given on how samples are read, by name."""
    own = {name: f"{SHORT_FLAGS}.{name}" for name in ("folder", "separator")}
    words = ((f"--{own.get(name, name).replace('_', '-')}", value) for name, value in given.items())
    return [word for flag, value in words if value is not None for word in (flag, value)]


@dataclass
class CheckReport:
    """What a data set contains, and what training would do with the samples that were read.

    `print(report)` shows tables; a notebook shows them too.
    """

    shards: str  # description of the source
    missing: list[str] = field(default_factory=list)  # local shards that do not exist
    faults: dict[str, str] = field(default_factory=dict)  # shard -> its fault
    held: int = 0  # number of samples in the opened shards
    profile: Profile = field(default_factory=Profile)  # members and JSON fields of the samples read
    used: int = 0  # number of samples read that training would use
    drops: Counter[str] = field(default_factory=Counter)  # number of samples read that training would drop, by reason
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one such sample, with details
    captions: dict[str, str] = field(default_factory=dict)  # 'SHARD/KEY' -> caption of the first samples used
    first_captions: Captions = field(default_factory=Captions)  # of the samples checked for constant captions
    long: int = 0  # number of captions of more than `CONTEXT` tokens
    # of the images used, the share of the area that the centre crop of a model with square images leaves out
    lost: list[float] = field(default_factory=list)
    transparent: int = 0  # of `used`
    background: str = "white"
    large: list[str] = field(default_factory=list)  # 'SHARD/KEY' of images of more than LARGE_PIXELS
    total: int | None = None  # number of samples, if it is known
    hashes: list[tuple[int, int]] = field(default_factory=list)  # of caption and image file, of the samples used
    of_shards: list[int] = field(default_factory=list)  # the number of the shard of each of these
    each: float = 1.0  # number of shards for each one that was opened
    figures: dict[str, Any] = field(default_factory=dict)  # of all samples, as JSON values, if they were asked for

    @property
    def tried(self) -> int:
        """Number of samples read, usable or not."""
        return self.used + self.drops.total()

    @property
    def ok(self) -> bool:
        """Whether training would use all samples that were read, and nothing is missing or broken."""
        return self.used == self.tried > 0 and not self.missing and not self.faults

    def __str__(self) -> str:
        console = Console(
            file=(text := io.StringIO()), markup=False, highlight=False, emoji=False, width=OFF_TERMINAL,
            force_terminal=False, force_jupyter=False,  # else rich displays its own output in a notebook, with colours
        )  # fmt: skip
        show(self, console)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre;overflow-x:auto;font-family:monospace">{html.escape(str(self))}</pre>'


def look(source: SourceSettings, samples: int | None) -> CheckReport:
    """Read `samples` samples (0: all; None: `SAMPLES`, or all of `WHOLE` and fewer), spread evenly over the shards, or
    over ten of them if there are more.

    Raises:
        SettingsError: the caption settings do not fit together, or the shards cannot be listed.
        DataError: a manifest cannot be read.
    """
    with contextlib.closing(ShardCache(None)) as cache:
        shards, data = Source(source, SourceContext(cache, key=SHORT_FLAGS)), DataSettings()
        folders = [path for part in source.parts if (path := named_folder(part, source.type)) is not None]
        tell_images_without_row(shards)
        held = [f"{path} holds {contents(path, source.image_key).what}" for path in folders]
        report = CheckReport("; ".join([*held, shards.summary()]), shards.missing, background=source.background)
        report.total = shards.samples
        if report.total is None and len(shards.names) <= SHARDS_READ:
            with contextlib.suppress(ClipstreamError):
                report.total = sum(count_samples(shards))
        if samples is None:
            samples = 0 if report.total is not None and report.total <= WHOLE else SAMPLES
        read = RowReader(source, Columns(), data, report.profile)

        def look_at(number: int, found: ShardSamples) -> list[Row]:
            report.held += len(found.shard.index.samples)
            if found.shard.index.fault is not None:
                report.faults[redact(walk.shards[number])] = str(found.shard.index.fault)
            return read(found)[0]

        walk = SamplePass(shards, data, None, look_at)
        missing = set(report.missing)
        there = [name for name in shards.names if name not in missing]
        chosen = [*spread([name for name in there if not shards.types[name].cheap], SHARDS_READ if samples else 0)]
        chosen += spread([name for name in there if shards.types[name].cheap], samples)
        report.each = len(there) / max(1, len(chosen))
        for number, name in enumerate(chosen):
            if samples and report.tried >= samples:
                break
            walk.most = -(-(samples - report.tried) // (len(chosen) - number)) if samples else 0
            try:
                rows = walk.work(walk.shards.index(name))
            except (ShardError, OSError) as error:
                report.faults[redact(name)] = fault_of(error)
                continue
            for row in rows:
                _count(report, row)
            report.of_shards += [number] * (len(report.hashes) - len(report.of_shards))
    return report


def _count(report: CheckReport, row: Row) -> None:
    """Count a sample by its row of the sample table."""
    where, size = f"{row['shard']}/{row['key']}", (row.get("width", 0), row.get("height", 0))
    report.large += [where] * (size[0] * size[1] > LARGE_PIXELS)
    if row["reason"]:
        report.drops[row["reason"]] += 1
        shown, detail = printable(where, 200), row["detail"]
        report.examples.setdefault(row["reason"], f"{shown}: {detail}" if detail else shown)
        return
    report.used += 1
    report.first_captions.add(where, row["caption"], None, flat=row["one_colour"])
    report.long += row["caption_tokens"] > CONTEXT
    report.lost.append(lost_area(size, SQUARE))
    report.transparent += row["transparent"]
    report.hashes.append((row["caption_hash"], row["file_hash"]))
    if len(report.captions) < 3:
        report.captions[where] = row["caption"]


def show(report: CheckReport, console: Console) -> None:
    """Print the report as tables."""
    read, profile = report.tried, report.profile
    console.print(f"{report.shards}: {read:,} samples read of {report.held:,} in the shards opened")
    if report.missing:
        console.print(f"missing: {len(report.missing):,} of them: {listed(list(map(printable, report.missing)), 3)}")
    _show_table(console, ReportTable("Faults", ("shard", "fault"), list(report.faults.items())))
    if not read:
        return
    texts, json_fields = profile.fields()
    columns = {name for name, one in json_fields.items() if name in texts and texts[name].example == one.example}
    columns |= {name for name in json_fields if profile.images[name]}  # of a table: as members and in its JSON
    told = {"json"} if columns == json_fields.keys() else set()
    told |= {suffix for suffix in ("image", "txt") if f"{suffix} from column" in report.shards}
    members: list[tuple[str, ...]] = []
    for suffix, count in profile.suffixes.most_common():
        if not columns or suffix not in told:
            text = texts[suffix].example if suffix in texts else ""
            what = "image" if profile.images[suffix] else text or ("JSON" if suffix.endswith("json") else "bytes")
            members.append((suffix, f"{count:,}", what))
    fields = sorted(json_fields.items(), key=lambda item: -item[1].samples)
    rows = [(path, f"{one.samples:,}", one.kind, one.example) for path, one in fields if path not in columns]
    example = next((f"{where}: {shortened(text, 80)}" for where, text in report.captions.items()), "")
    found = [(f"{report.used:,}", f"{report.used / read:.1%}", "used", example)]
    for reason, count in report.drops.most_common():
        found.append((f"{count:,}", f"{count / read:.1%}", f"dropped: {reason}", report.examples[reason]))
    for table in (
        ReportTable("Members", ("suffix", "samples", "content"), members),
        ReportTable(f"JSON fields of {len(profile.tried):,} samples", ("path", "samples", "type", "example"), rows),
        ReportTable("With these settings", ("samples", "share", "result", "example"), found),
    ):
        _show_table(console, table)
    notes = [lost_area_note(share)] if report.lost and (share := fmean(report.lost)) >= SAID else []
    notes += filter(None, [transparency_note(report.transparent, report.used, report.background)])
    for note in notes:
        console.print(f"note: {note}", soft_wrap=not console.is_terminal)


def _show_table(console: Console, table: ReportTable) -> None:
    """Print the first rows of a table, unless there are none."""
    shown = result_table(table.title, table.columns, ("samples", "share"))
    for row in table.rows[:ROWS]:
        shown.add_row(*(printable(cell, CELL) for cell in row))
    if len(table.rows) > ROWS:
        shown.add_row(f"… and {len(table.rows) - ROWS:,} more")
    if table.rows:
        console.print(shown)


def _warnings(report: CheckReport, caption: CaptionSettings) -> Iterator[str]:
    """What to look at in the captions and images that training would use."""
    if warning := report.first_captions.warning():
        others = report.profile.captions(caption)
        yield warning + (f"; members and fields with text: {', '.join(others[:5])}" if others else "")
    captions, images = np.array(report.hashes, np.uint64).reshape(-1, 2).T
    if warning := warning_of_equal(captions, images, batch_of(report.total or LARGE), report.of_shards, report.each):
        yield warning
    if warning := report.first_captions.flat_warning():
        yield warning
    if report.long:
        share = f"{report.long:,} captions ({report.long / report.used:.0%})"
        yield f"{share} have more than {CONTEXT} tokens, which is what CLIP models read: the rest is cut off"
    if report.large:
        some = f"{counted(len(report.large), 'image', ',')} of more than {LARGE_PIXELS:,} pixels"
        yield f"{some} (such as {listed(list(map(printable, report.large)), 3)}): {LARGE_ADVICE}"
    if warning := report.first_captions.languages_warning(caption):
        yield warning
    if warning := report.profile.tags(caption):
        yield warning


def _further(report: CheckReport, settings: Settings, found: Examined | None) -> list[str]:
    """Flags of the suggested command besides those of the data."""
    total, broken = (report.total, 0) if found is None else (found.figures["used"], len(found.figures["broken_shards"]))
    # Not of classes, which are no captions to hold out; an evaluation ends at a broken shard.
    flags = [] if broken or report.first_captions.warning() else ["--val-split", "0.1"]
    if not broken and total is not None and total < FEW:
        flags += ["--model", "ViT-B-32", "--pretrained", "openai"]
    if found is not None:  # what would end training
        failed = {
            "shard": (broken / found.figures["shards"], settings.data.max_shard_failures),
            "sample": (1 - total / max(1, found.figures["samples"]), settings.data.max_sample_failures),
        }
        for what, (share, most) in failed.items():
            flags += [f"--data.max-{what}-failures={math.ceil(100 * share) / 100}"] if share > most else []
    return flags


def print_report(settings: Settings, flags: Sequence[str], options: Any) -> None:
    """Print what the source `train` contains and the command that trains on it, and write the files that are asked for.

    Args:
        flags: of the data, with which `settings` were made; `--train-data SHARDS` first.

    Raises:
        SettingsError: the caption settings do not fit together, the shards cannot be listed, or files not be written.
        DataError: no sample is usable, or `--strict` does not accept the data.
    """
    for flag, path in {"--json": options.json_, "--html": options.html, "--yaml": options.yaml}.items():
        if path is not None and (flag, path) != ("--json", "-"):
            output_file(path, flag)
    section, found = settings.data.sources[SHORT_FLAGS.rpartition(".")[2]], None
    executor = executors.check_executor(options.executor)
    folder = None if options.table is None else Path(options.table)
    loading.show("reading samples")
    report = look(section, PROFILED if options.all else options.samples)
    loading.end()
    if options.all:
        source = Source(section, SourceContext(cache=settings.data.cache, key=SHORT_FLAGS))
        with contextlib.redirect_stdout(sys.stderr if options.json_ == "-" else sys.stdout):
            found = examine(source, settings.data, headers=options.headers, folder=folder, executor=executor)
        if not found.figures["used"]:
            found, report = None, look(section, None)
    console, further = ResultConsole(OFF_TERMINAL, markup=False), _further(report, settings, found)
    trains = load([*flags, *further]) if found is not None else settings
    if found is None:
        show(report, console)
    elif options.json_ != "-":
        _show_all(found, report.profile, console)
        report.long = 0  # which is told already, of all
    layout = [f"note: {note}" for note in [report.profile.layout()] if note]
    if found is None and not report.used:
        for line in layout:
            console.print(line, soft_wrap=True)
        raise DataError(_nothing_usable(report, section))
    warnings = [f"{'warning' if found is None else 'note'}: {one}" for one in _warnings(report, section.caption)]
    if found is None or options.json_ != "-":
        for line in [*layout, *warnings] if found is None else [*warnings, *layout]:
            console.print(line, soft_wrap=found is not None or not console.is_terminal)
        print_training(["clipstream", "train", "--train-data", redact(flags[1]), *flags[2:], *further])
    if found is not None:
        _write_files(found, report.profile, settings.data, trains, options)
        if options.strict is not None and (failures := found.failures(options.strict)):
            raise DataError(lines(f"--strict: {counted(len(failures), 'problem')}", *failures))


def _write_files(found: Examined, profile: Profile, data: DataSettings, trains: Settings, options: Any) -> None:
    """Write the figures, the page and the settings that train, as far as they are asked for."""
    text = json.dumps(found.figures, indent=1, ensure_ascii=False) + "\n"
    if options.json_ == "-":
        print(text, end="")
    elif options.json_ is not None:
        atomic_write.replace(Path(options.json_), text.encode(errors="backslashreplace"))
    model = {"name": trains.model.name, **non_defaults(trains.model)}
    tree = {"model": model, "data": non_defaults(portable(trains.data))}
    broken = "# No data.val_split, as shards are broken: `clipstream pack` mends them.\n"
    head = f"# clipstream train --config FILE\n{broken if found.figures['broken_shards'] else ''}"
    if options.html is not None:
        write_page(found, Path(options.html), data, profile, head + to_yaml(redact_tree(tree)))
    if options.yaml is not None:
        content = (head + to_yaml(tree)).encode(errors="surrogateescape")
        atomic_write.replace(Path(options.yaml), content, private=bool(secrets(trains)))


def _show_all(found: Examined, profile: Profile, console: Console) -> None:
    """Print the figures of all samples as tables."""
    figures, tables = found.figures, found.tables(profile)
    console.print(f"{figures['data']}: {figures['samples']:,} samples read, {figures['used']:,} used by training")
    counted_names = {"formats": figures["images"]["formats"], "languages": figures["captions"]["languages"]}
    for name, table in tables.items():
        _show_table(console, table)
        for title, counts in counted_names.items() if name == "sizes" else ():
            shares = [f"{one} {count / sum(counts.values()):.1%}" for one, count in counts.items()]
            if shares:
                console.print(f"{title}: {listed(shares, 10)}", soft_wrap=True)
    if not found.problems:
        console.print("no problem was found")
    if found.skipped:
        console.print(f"note: {found.skipped}", soft_wrap=True)


def _nothing_usable(report: CheckReport, source: SourceSettings) -> str:
    """Why no sample is usable, and the flags that change that, if there are any."""
    if not report.tried:
        why = absent(report.missing[0]) if report.missing else "see the faults in the table above"
        return f"no sample of {report.shards} could be read: {why}"
    reason, count = report.drops.most_common(1)[0]
    hint = report.profile.hint(source.image_key, source.caption)
    if reason in ("no_image", MISSING_IMAGE) and "image-key" not in hint and not hint.startswith("member "):
        hint = ""  # a caption alone does not help
    scattered = next((fault for fault in report.faults.values() if fault.startswith(SCATTERED)), None)
    useful, layout = hint.startswith(("use ", "member ")), report.profile.layout()
    if not useful and (scattered or layout):
        hint = scattered or "see the note above"
    elif not useful:
        hint = f"e.g. {report.examples[reason]}" + (f"; {hint}" if hint and reason == "no_caption" else "")
    if reason == MISSING_IMAGE and "; " not in report.examples[reason]:  # the example has no advice of its own
        hint += "; if the paths of the images begin in another folder, set --folder"
    return f"none of {report.tried:,} samples is usable, {count:,} of them dropped as {reason}: {hint}"
