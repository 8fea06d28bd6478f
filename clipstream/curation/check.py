"""The verb `clipstream check SHARDS` and the function `clipstream.check`: what a data set contains, and which of its
samples training would use.

Shards are read and decoded as in training, without a model and without importing torch.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from typing_extensions import TypedDict, Unpack

from clipstream.config.config_sources import to_yaml
from clipstream.config.dump import portable, print_config, secrets, take_flag
from clipstream.config.entry import entry_point
from clipstream.config.flags import output_file
from clipstream.config.plan import LARGE, batch_of
from clipstream.config.settings import PathLike, Settings, changed, load, read, tree_of
from clipstream.curation import check_all as whole
from clipstream.curation.byte_pairs import BytePairs
from clipstream.curation.duplicates import caption_hash, file_hash
from clipstream.data.batch import ImageSpec
from clipstream.data.decode.captions import CaptionExtractor, build_caption, image_bytes
from clipstream.data.decode.images import (
    check_shape,
    converted,
    is_transparent,
    loaded,
    lost_area,
    opaque,
    opened,
    transparency_note,
)
from clipstream.data.decode.sample_profile import SHORT_FLAGS, Profile, warning_of_equal
from clipstream.data.image_settings import LARGE_PIXELS, rgb
from clipstream.data.loader.health import Captions, lost_area_note
from clipstream.data.settings import IMAGE_KEY, SourceSettings
from clipstream.data.sources import MISSING_IMAGE, OpenShard, SampleRef, Source, SourceContext, open_sources, with_file
from clipstream.data.sources.folders import contents, named_folder
from clipstream.data.sources.indexes import count_samples
from clipstream.data.text_settings import CaptionSettings
from clipstream.errors import ClipstreamError, DataError, Dropped, SettingsError, absent, each, wrong_type
from clipstream.storage.download import ShardError, fault_of
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import in_braces, redact, redact_tree
from clipstream.storage.tar import SCATTERED
from clipstream.text import MESSAGE, counted, lines, listed, percent, printable, shortened
from clipstream.utils import atomic_write, executors
from clipstream.utils.console import ResultConsole, result_table
from clipstream.utils.cores import cores
from clipstream.utils.logs import loading, on_terminal

T = TypeVar("T")
SAMPLES, WHOLE = 500, 2000  # samples to read; data with at most so many are read whole
FEW = 5000  # samples below which the suggested command begins with published weights
SHARDS_READ = 10  # of a large data set, spread over it
ROWS = 25
CELL = 400  # characters of a table's cell
SQUARE = ImageSpec((224, 224))  # whose crop leaves out as much as that of any square
SAID = 0.1  # mean share of the area that a crop leaves out, from which it is told
OFF_TERMINAL = 160  # columns where there is no terminal
PROFILED = 64  # samples whose members and fields give examples and suggestions
WHOLE_FLAGS = ("headers", "executor", "table", "json", "html", "yaml", "strict")  # that need --all
CONTEXT = 77  # tokens that CLIP models read of a caption
_TOKENS = BytePairs()


def build_parser() -> argparse.ArgumentParser:
    """The verb's command line."""
    parser = argparse.ArgumentParser(
        prog="clipstream check",
        description="Inspect a data set: its shards, members and JSON fields, the samples that these settings use and "
        "drop, and the flags to train on it. Exit code 3 if no sample is usable.",
        epilog=f"--{SHORT_FLAGS}.KEY VALUE is that of clipstream train, e.g. caption.type my_module:my_function.",
    )
    shards = "tar files: braces, '::', globs, pipe:, http(s):; a table; or a local folder"
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help=shards)
    options = (
        ("--caption-key", "SUFFIX", "text member with the caption (default: txt; for a CSV: title, else txt)"),
        (
            "--caption-json",
            "PATHS",
            "path into the JSON member, or a text of fields such as '{title} by {brand}'; several, by ';', in order",
        ),
        ("--caption-lines", "WHICH", "of a text of several lines: all (default), first, or random"),
        (
            "--image-key",
            "SUFFIXES",
            f"suffixes of the image member, separated by ';' (default: {IMAGE_KEY.replace(';', '; ')})",
        ),
        ("--folder", None, "base folder of a table's relative paths (default: the table's folder)"),
        ("--separator", "CHARACTER", "separator of a CSV (default: detected from its header)"),
    )
    for flag, metavar, meaning in options:
        parser.add_argument(flag, metavar=metavar, help=meaning)
    parser.add_argument("--print-config", action="store_true", help="print these flags as YAML for --config, and exit")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples to read; 0: all (default: 500, or all of 2,000 or fewer)"
    )
    group = parser.add_argument_group("the whole of a data set")
    group.add_argument("--all", action="store_true", help="read all samples: captions, images, duplicates, problems")
    group.add_argument("--headers", action="store_true", help="read the headers of images only: faster, no duplicates")
    group.add_argument("--table", metavar="FOLDER", help="folder for the table of samples (default: in the cache)")
    group.add_argument("--json", metavar="FILE", help="write the figures as JSON; '-': print nothing else")
    group.add_argument("--html", metavar="FILE", help="write a page with charts, the worst samples and examples")
    group.add_argument("--yaml", metavar="FILE", help="write settings that train on these data, for --config")
    group.add_argument(
        "--strict", nargs="?", type=float, const=0.0, metavar="SHARE",
        help="exit code 3 if a problem concerns more than this share of the samples (default: 0), for CI",
    )  # fmt: skip
    executors.add_flag(group)
    return parser


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if no sample is usable."""
    parser = build_parser()
    every, argv = take_flag(argv)
    reading, argv = _reading_flags(argv)
    options = parser.parse_args(argv)
    if options.strict is not None and not 0 <= options.strict < 1:
        parser.error(f"--strict: expected a share from 0 to below 1, not {options.strict:g}")
    if options.samples is not None and options.samples < 0:
        parser.error(f"--samples must be 0 or more, not {options.samples}")
    given = [flag for flag in WHOLE_FLAGS if getattr(options, flag) not in (None, False)]
    if given and not options.all:
        parser.error(f"--{given[0]} needs --all")
    if options.all and options.samples is not None:
        parser.error("--samples does not go with --all, which reads all samples")
    shards, flags = "::".join(in_braces(options.shards)), [*_flags(vars(options)), *reading]
    settings = (written := read(["--train-data", shards, *flags])).settings
    if every is not None:
        return print_config(written, "check", every)
    command = ["clipstream", "train", "--train-data", redact(shards), *flags]
    if options.all:
        check_all(settings, ["--train-data", shards, *flags], command, options)
    else:
        print_checked(settings.data.sources["train"], command, options.samples)
    return 0


def _reading_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of training's source with their values, and the rest of a command line."""
    reading, rest, words = list[str](), list[str](), iter(argv)
    for word in words:
        if word.startswith(f"--{SHORT_FLAGS}."):
            reading += [word] if "=" in word else [word, *islice(words, 1)]
        else:
            rest.append(word)
    return reading, rest


class ReadingFlags(TypedDict, total=False):
    """Arguments of `check`."""

    caption_key: str | None
    caption_lines: str | None
    caption_json: str | None
    image_key: str | None
    separator: str | None


def check(
    shards: PathLike | Sequence[PathLike],
    *,
    folder: PathLike | None = None,
    samples: int | None = None,
    all: bool = False,
    settings: Mapping[str, Any] | None = None,
    **flags: Unpack[ReadingFlags],
) -> CheckReport:
    """Look into a data set: its members and JSON fields, and the samples that training would use and drop.

    Args:
        shards: as `--train-data` takes them: tars, manifests, folders; with braces, globs and `::`; text or a path,
            or a list of them.
        folder: what a manifest's relative paths begin at.
        samples: number of samples to read, spread over the shards; 0 for all; unless set 500, or all of 2,000 or fewer.
        all: also read all samples as `check --all` does; `figures` of the report are then those of its `--json`.
        settings: further keys of the source, as training takes them: `{"caption.type": a_function_of_your_own}`.
        flags: texts. `caption_key`: suffix of the caption's member, default 'txt', of a CSV 'title' first.
            `caption_lines`: the 'first' or a 'random' line of a text. `caption_json`: path into the JSON member, such
            as 'caption.en'; several by ';'. `image_key`: suffixes of the image member. `separator`: of a CSV.

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
    given: dict[str, Any] = dict.fromkeys(ReadingFlags.__annotations__) | dict(flags)
    for name, value in given.items():
        if name not in ReadingFlags.__annotations__:
            raise TypeError(f"check() got an unexpected keyword argument {name!r}")
        if not isinstance(value, str | None):
            raise wrong_type(name, "text", value)
    if not isinstance(folder, str | os.PathLike | None):
        raise wrong_type("folder", "a path", folder)
    if not isinstance(samples, int | None) or (samples or 0) < 0:
        raise SettingsError(f"samples: expected a number of samples, 0 or more, not {samples!r}")
    names = [os.fspath(one) for one in each("shards", "a pattern or a list of patterns", shards, (str, os.PathLike))]
    words = _flags({**given, "folder": None if folder is None else os.fspath(folder)})
    if not isinstance(settings, Mapping | None):
        raise wrong_type("settings", "a mapping of the keys of a source", settings)
    with on_terminal():
        own = tree_of({f"{SHORT_FLAGS}.{key}": value for key, value in (settings or {}).items()})
        loaded = load(["--train-data", "::".join(in_braces(names)), *words], trees=[own])
        report = look(loaded.data.sources["train"], samples)
        if all:
            report.figures = whole.examine(open_sources(loaded.data)["train"], loaded.data).figures
        return report


def _flags(options: Mapping[str, str | None]) -> list[str]:
    """The flags of training that say how samples are read."""
    own = {name: f"{SHORT_FLAGS}.{name}" for name in ("folder", "separator")}
    given = ((own.get(name, name), options[name]) for name in (*ReadingFlags.__annotations__, "folder"))
    return [word for key, value in given if value is not None for word in (f"--{key.replace('_', '-')}", value)]


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
    extract = build_caption(source.caption)
    with contextlib.closing(ShardCache(None)) as store:
        shards = Source(source, SourceContext(store, key=SHORT_FLAGS))
        folders = [path for part in source.parts if (path := named_folder(part, source.type)) is not None]
        held = [f"{path} holds {contents(path, source.image_key).what}" for path in folders]
        view = CheckReport("; ".join([*held, shards.summary()]), shards.missing, background=source.background)
        view.total = shards.samples
        if view.total is None and len(shards.names) <= SHARDS_READ:
            with contextlib.suppress(ClipstreamError):
                view.total = sum(count_samples(shards))
        if samples is None:
            samples = 0 if view.total is not None and view.total <= WHOLE else SAMPLES
        missing = set(view.missing)
        there = [name for name in shards.names if name not in missing]
        chosen = _spread([name for name in there if not shards.types[name].cheap], SHARDS_READ if samples else 0)
        chosen += _spread([name for name in there if shards.types[name].cheap], samples)
        view.each = len(there) / max(1, len(chosen))
        for number, name in enumerate(chosen):
            if samples and view.tried >= samples:
                break
            wanted = -(-(samples - view.tried) // (len(chosen) - number)) if samples else 0
            try:
                shard = shards.open(name)
            except (ShardError, OSError) as error:
                view.faults[redact(name)] = fault_of(error)
                continue
            view.held += len(shard.index.samples)
            if shard.index.fault is not None:
                view.faults[redact(name)] = str(shard.index.fault)
            for ref in _spread(shard.index.samples, wanted):
                _look_at(view, shard, ref, f"{shards.shard_names[name]}/{ref.key}", source, extract)
            view.of_shards += [number] * (len(view.hashes) - len(view.of_shards))
            shard.close()
            shards.types[name].release(name)
    return view


def _look_at(
    view: CheckReport, shard: OpenShard, ref: SampleRef, where: str, source: SourceSettings, extract: CaptionExtractor
) -> None:
    """Read a sample, decode its image and caption as training does, and count the result."""
    about = {"__key__": ref.key, "__url__": ""}
    try:
        try:
            sample = {**about, **shard.load(ref)}
        except Dropped:
            with contextlib.suppress(Dropped):
                view.profile.add({**about, **shard.look(ref)})
            raise
        view.profile.add(sample)
        data, text = image_bytes(sample, keys=source.image_key), extract(sample, None)
        image = opened(data)
        check_shape(image.size)
        view.large += [where] * (image.size[0] * image.size[1] > LARGE_PIXELS)
        lost = lost_area(image.size, SQUARE)
        transparent = is_transparent(loaded(image))
        pixels = np.asarray(converted(opaque(image, rgb(source.background))))
    except Dropped as drop:
        view.drops[drop.reason] += 1
        shown, detail = printable(where, 200), with_file(shard, ref, drop.detail)
        view.examples.setdefault(drop.reason, f"{shown}: {detail}" if detail else shown)
    else:
        view.used += 1
        view.first_captions.add(where, text, pixels)
        view.long += _TOKENS.count(text) > CONTEXT
        view.lost.append(lost)
        view.transparent += transparent
        view.hashes.append((caption_hash(text), file_hash(data)))
        if len(view.captions) < 3:
            view.captions[where] = text


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` evenly spaced items; all for 0."""
    if count <= 0 or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def show(view: CheckReport, console: Console) -> None:
    """Print the report as tables."""
    read, profile = view.tried, view.profile
    console.print(f"{view.shards}: {read:,} samples read of {view.held:,} in the shards opened")
    if view.missing:
        console.print(f"missing: {len(view.missing):,} of them: {listed(list(map(printable, view.missing)), 3)}")
    _table(console, "Faults", ("shard", "fault"), list(view.faults.items()))
    if not read:
        return
    members, (texts, json_fields) = [], profile.fields()
    columns = {name for name, one in json_fields.items() if name in texts and texts[name].example == one.example}
    columns |= {name for name in json_fields if profile.images[name]}  # of a table: as members and in its JSON
    told = {"json"} if columns == json_fields.keys() else set()
    told |= {suffix for suffix in ("image", "txt") if f"{suffix} from column" in view.shards}
    for suffix, count in profile.suffixes.most_common():
        if columns and suffix in told:
            continue
        text = texts[suffix].example if suffix in texts else ""
        what = "image" if profile.images[suffix] else text or ("JSON" if suffix.endswith("json") else "bytes")
        members.append((suffix, f"{count:,}", what))
    _table(console, "Members", ("suffix", "samples", "content"), members)
    fields = sorted(json_fields.items(), key=lambda item: -item[1].samples)
    fields = [(path, value) for path, value in fields if path not in columns]
    rows = [(path, f"{value.samples:,}", value.kind, value.example) for path, value in fields]
    _table(console, f"JSON fields of {len(profile.tried):,} samples", ("path", "samples", "type", "example"), rows)
    example = next((f"{where}: {shortened(text, 80)}" for where, text in view.captions.items()), "")
    found = [(f"{view.used:,}", f"{view.used / read:.1%}", "used", example)]
    for reason, count in view.drops.most_common():
        found.append((f"{count:,}", f"{count / read:.1%}", f"dropped: {reason}", view.examples[reason]))
    _table(console, "With these settings", ("samples", "share", "result", "example"), found)
    notes = [lost_area_note(share)] if view.lost and (share := fmean(view.lost)) >= SAID else []
    notes += filter(None, [transparency_note(view.transparent, view.used, view.background)])
    for note in notes:
        console.print(f"note: {note}", soft_wrap=not console.is_terminal)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the first rows of a table, unless there are none."""
    shown = result_table(title, columns, ("samples", "share"))
    for row in rows[:ROWS]:
        shown.add_row(*(printable(cell, CELL) for cell in row))
    if len(rows) > ROWS:
        shown.add_row(f"… and {len(rows) - ROWS:,} more")
    if rows:
        console.print(shown)


def _warnings(view: CheckReport, caption: CaptionSettings) -> Iterator[str]:
    """What to look at in the captions and images that training would use."""
    if warning := view.first_captions.warning():
        others = view.profile.captions(caption)
        yield warning + (f"; members and fields with text: {', '.join(others[:5])}" if others else "")
    captions, images = np.array(view.hashes, np.uint64).reshape(-1, 2).T
    if warning := warning_of_equal(captions, images, batch_of(view.total or LARGE), view.of_shards, view.each):
        yield warning
    if warning := view.first_captions.flat_warning():
        yield warning
    if view.long:
        share = f"{view.long:,} captions ({view.long / view.used:.0%})"
        yield f"{share} have more than {CONTEXT} tokens, which is what CLIP models read: the rest is cut off"
    if view.large:
        yield whole.large_note(view.large, LARGE_PIXELS)
    if warning := view.first_captions.languages_warning(caption):
        yield warning
    if warning := view.profile.tags(caption):
        yield warning


def _further(view: CheckReport, total: int | None) -> list[str]:
    """Flags of the suggested command besides those of the data."""
    same = view.first_captions.warning()  # as of classes, which are no captions to hold out
    few = total is not None and total < FEW
    return [
        *([] if same else ["--val-split", "0.1"]),
        *(["--model", "ViT-B-32", "--pretrained", "openai"] if few else []),
    ]


def check_all(settings: Settings, flags: list[str], command: Sequence[str], options: argparse.Namespace) -> None:
    """Read all samples of the source `train`, print what was found, and write the files that are asked for.

    Args:
        flags: of the data, with which `settings` were made.
        command: trains with these settings, in words.
        options: of the verb.

    Raises:
        SettingsError: the caption settings do not fit together, the shards cannot be listed, or files not be written.
        DataError: no sample is usable, or `--strict` does not accept the data.
    """
    key, outputs = SHORT_FLAGS.rpartition(".")[2], {flag: getattr(options, flag) for flag in ("json", "html", "yaml")}
    for flag, path in outputs.items():
        if path is not None and (flag, path) != ("json", "-"):
            output_file({f"--{flag}": path}, f"--{flag}")
    section = settings.data.sources[key]
    view = look(section, PROFILED)
    folder = None if options.table is None else Path(options.table)
    executor = executors.checked(options.executor)
    source = Source(section, SourceContext(cache=settings.data.cache, key=SHORT_FLAGS))
    with contextlib.redirect_stdout(sys.stderr if outputs["json"] == "-" else sys.stdout):
        found = whole.examine(source, settings.data, headers=options.headers, folder=folder, executor=executor)
    used, read = found.figures["used"], found.figures["samples"]
    if not used:
        print_checked(section, command, None)
    broken = len(found.figures["broken_shards"])
    further = [] if broken else _further(view, used)  # an evaluation ends at a broken shard
    if (share := broken / found.figures["shards"]) > settings.data.max_shard_failures:
        further.append(f"--data.max-shard-failures={math.ceil(100 * share) / 100}")
    if read and 1 - used / read > settings.data.max_sample_failures:  # which would end training
        further.append(f"--data.max-sample-failures={math.ceil(100 * (1 - used / read)) / 100}")
    trains = load([*flags, *further])
    model = {"name": trains.model.name, **changed(trains.model)}
    mend = "# No data.val_split, as shards are broken: `clipstream pack` mends them.\n" if broken else ""
    head, tree = f"# clipstream train --config FILE\n{mend}", {"model": model, "data": changed(portable(trains.data))}
    examples = {f"{one.member}.{one.path}": one.example for one in view.profile.fields()[1].values()}
    tables = whole.tables(found, examples)
    if outputs["json"] != "-":
        console = ResultConsole(OFF_TERMINAL, markup=False)
        _show_all(found, view, tables, console)
        view.long = 0  # which is told already, of all
        for warning in (*_warnings(view, section.caption), *filter(None, [view.profile.layout()])):
            console.print(f"note: {warning}", soft_wrap=True)
        trains_with = printable(shlex.join([*command, *further]), MESSAGE)
        console.print(f"train on them with: {trains_with}", soft_wrap=True)
    text = json.dumps(found.figures, indent=1, ensure_ascii=False) + "\n"
    if outputs["json"] is not None:
        if outputs["json"] == "-":
            print(text, end="")
        else:
            atomic_write.replace(Path(outputs["json"]), text.encode(errors="backslashreplace"))
    if outputs["html"] is not None:
        whole.write_page(
            found, Path(outputs["html"]), settings.data, {**tables, "yaml": head + to_yaml(redact_tree(tree))}
        )
    if outputs["yaml"] is not None:
        content, private = (head + to_yaml(tree)).encode(errors="surrogateescape"), bool(secrets(trains))
        atomic_write.replace(Path(outputs["yaml"]), content, private=private)
    if options.strict is not None and (failures := found.failures(options.strict)):
        raise DataError(lines(f"--strict: {counted(len(failures), 'problem')}", *failures))


def _show_all(found: whole.Examined, view: CheckReport, tables: dict[str, Any], console: Console) -> None:
    """Print the figures of all samples as tables."""
    figures, captions, images = found.figures, found.figures["captions"], found.figures["images"]
    read, rows = max(1, figures["samples"]), tables
    console.print(f"{figures['data']}: {figures['samples']:,} samples read, {figures['used']:,} used by training")
    shown = {suffix: one.example for suffix, one in view.profile.fields()[0].items()}
    shown |= {suffix: "image" for suffix in figures["members"] if view.profile.images[suffix]}
    members = [(name, count, shown.get(name, "JSON" * name.endswith("json"))) for name, count in rows["members"]]
    _table(console, "Members", ("suffix", "samples", "content"), members)
    _table(console, "JSON fields", ("field", "filled", "types", "example"), rows["fields"])
    _table(console, "Lengths and sizes", ("", "least", "5%", "median", "95%", "most"), rows["quantiles"])
    listings = [("formats", images["formats"]), ("languages", captions["languages"])]
    for title, counts in listings:
        if counts:
            shares = [f"{name} {count / sum(counts.values()):.1%}" for name, count in counts.items()]
            console.print(f"{title}: {listed(shares, 10)}", soft_wrap=True)
    _table(console, "Speed of one core", ("stage", "samples/s"), rows["stages"])
    columns = ("model", "samples/s of an A100, published", "cores for 1 GPU", "cores for 8 GPUs")
    _table(console, f"Cores that feed GPUs (here are {cores()})", columns, rows["needed"])
    problems = []
    for one in found.problems:
        share = (f"{one.samples:,}", percent(one.samples / read)) if one.samples else ("", "")
        example = found.name(one.rows[0]) if one.rows else ""
        problems.append((*share, one.says, "note" if one.is_note else "problem", example))
    _table(console, "Problems: samples that …", ("samples", "share", "problem", "kind", "example"), problems)
    if not problems:
        console.print("no problem was found")
    if rows["skipped"]:
        console.print(f"note: {rows['skipped']}", soft_wrap=True)


def print_checked(source: SourceSettings, command: Sequence[str], samples: int | None) -> None:
    """Print the contents of the shards and the flags to train on them.

    Args:
        command: trains with these settings, in words.
        samples: see `look`.

    Raises:
        SettingsError: the caption settings do not fit together, or the shards cannot be listed.
        DataError: no sample is usable; the message names flags that change that, if there are any.
    """
    loading.show("reading samples")
    view = look(source, samples)
    loading.end()
    profile = view.profile
    console = ResultConsole(OFF_TERMINAL, markup=False)
    show(view, console)
    if note := profile.layout():
        console.print(f"note: {note}", soft_wrap=True)
    if not view.tried:
        why = absent(view.missing[0]) if view.missing else "see the faults in the table above"
        raise DataError(f"no sample of {view.shards} could be read: {why}")
    if view.used:
        for warning in _warnings(view, source.caption):
            console.print(f"warning: {warning}", soft_wrap=not console.is_terminal)
        command = [*command, *_further(view, view.total)]
        console.print(f"train on them with: {printable(shlex.join(command), MESSAGE)}", soft_wrap=True)
        return
    reason, count = view.drops.most_common(1)[0]
    hint = profile.hint(source.image_key, source.caption)
    if reason in ("no_image", MISSING_IMAGE) and "image-key" not in hint and not hint.startswith("member "):
        hint = ""  # a caption alone does not help
    scattered = next((fault for fault in view.faults.values() if fault.startswith(SCATTERED)), None)
    useful = hint.startswith(("use ", "member "))
    if not useful and (scattered or note):
        hint = scattered or "see the note above"
    elif not useful:
        hint = f"e.g. {view.examples[reason]}" + (f"; {hint}" if hint and reason == "no_caption" else "")
    if reason == MISSING_IMAGE and "; " not in view.examples[reason]:  # the example has no advice of its own
        hint += "; if the paths of the images begin in another folder, set --folder"
    raise DataError(f"none of {view.tried:,} samples is usable, {count:,} of them dropped as {reason}: {hint}")
