"""Figures of all samples of a data set, and what is wrong with them, for `clipstream check --all`.

A source enters, whose sample table is made unless it is there; its figures leave, as JSON values (`Examined.figures`),
as tables, and as a page (`report.pages`). Imports no torch.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from clipstream.curation.duplicates import near_groups
from clipstream.curation.sample_table import EMPTY, NULL, Columns, SampleTable, detector, sample_table
from clipstream.data.decode.images import FACTORS, decode, read_header
from clipstream.data.decode.key_lists import NOT_KEPT
from clipstream.data.decode.sample_profile import Profile
from clipstream.data.settings import LARGE_PIXELS, DataSettings
from clipstream.data.sources import Source
from clipstream.errors import Dropped
from clipstream.report.pages import SMALL, Bars, Thumbnails, fill, short
from clipstream.storage.shard_cache import ShardCache
from clipstream.text import counted, percent, shortened
from clipstream.utils import atomic_write
from clipstream.utils.content import IMAGE_NAME
from clipstream.utils.processes import cores

CONTEXT = 77  # tokens that CLIP models read of a caption
LARGE_ADVICE = "decoding one takes seconds; `clipstream pack OUT SHARDS --size 512` writes smaller ones"
SIDE = 224  # pixels of a side that most models see
SHOWN = 8  # samples of a problem
EXAMPLES = 24  # of the data, on the page
TIMED = 48  # images whose crop is timed
QUANTILES = {"least": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "most": 1.0}
# Samples/s of one A100 in published training: LAION's logs, see docs/benchmarks.md.
RATES = {"ViT-B-32": 850, "ViT-B-16": 390, "ViT-L-14": 79}
_ODD = r"(?i)^\S+$|^[a-z][a-z+.-]*://|\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif)\s*$"  # captions that are looked into
_CODE = re.compile(r"(?i:true|false|none|null|nan)|(?=.*[\d_=/\\@:])[!-~]+|[!-~]{25,}|[\W\d_]+")
_ADDRESS = re.compile(r"(?i)\s*(?:[a-z][a-z+.-]*://|www\.)\S+\s*$")


class ReportTable(NamedTuple):
    """A table of a report: rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Problem:
    """What is wrong with some samples."""

    name: str  # such as 'cut_captions'
    says: str  # the end of a sentence that begins with the number of samples, unless it is 0
    samples: int  # how many it concerns; 0 for shards
    rows: list[int] = field(default_factory=list)  # of the table: the worst ones
    is_note: bool = False  # whether `--strict` accepts it


@dataclass
class Examined:
    """What was found in all samples of a source."""

    source: Source
    table: SampleTable
    rows: pa.Table  # of the table
    figures: dict[str, Any]  # as JSON values
    problems: list[Problem]
    charts: list[Bars]

    def name(self, row: int) -> str:
        """SHARD/KEY of a row."""
        return f"{self.rows['shard'][row].as_py()}/{self.rows['key'][row].as_py()}"

    def failures(self, tolerated: float) -> list[str]:
        """The problems that concern more than a share of the samples, in words."""
        least = tolerated * self.rows.num_rows
        return [self.tell(one) for one in self.problems if not one.is_note and (one.samples > least or not one.samples)]

    def tell(self, problem: Problem) -> str:
        """A problem as a sentence."""
        if not problem.samples:
            return problem.says
        share = percent(problem.samples / max(1, self.rows.num_rows))
        return f"{counted(problem.samples, 'sample', ',')} ({share}) {problem.says}"

    @property
    def skipped(self) -> str:
        """What was not looked at, and how it is; '' for nothing."""
        if "duplicates" not in self.figures or detector() is not None:
            return ""
        return "languages of captions were not detected: pip install 'clipstream[languages]'"

    def tables(self, profile: Profile) -> dict[str, ReportTable]:
        """Tables of the figures: `members`, `fields`, `sizes`, `stages`, `cores` and `problems`.

        Args:
            profile: of some samples, for examples.
        """
        figures, (texts, values) = self.figures, profile.fields()
        shown = {suffix: one.example for suffix, one in texts.items()}
        shown |= {suffix: "image" for suffix in figures["members"] if profile.images[suffix]}
        examples = {f"{one.member}.{one.path}": one.example for one in values.values()}
        lengths = {
            "characters of a caption": figures["captions"]["characters"],
            "tokens of a caption": figures["captions"]["tokens"],
            "width, pixels": figures["images"]["width"],
            "height, pixels": figures["images"]["height"],
            "width / height": figures["images"]["aspect"],
            "bytes of an image file": figures["images"]["file_bytes"],
        }
        stages = {
            "read": "read members",
            "caption": "captions and tokens",
            "language": "languages",
            "image": "decode and hash the image" if "duplicates" in figures else "read the header of the image",
            "crop": f"decode and resize for training, {SIDE} px",
        }
        members = [
            (name, f"{count:,}", shown.get(name, "JSON" * name.endswith("json")))
            for name, count in figures["members"].items()
        ]
        fields = [
            (name, percent(one["filled"]), ", ".join(one["types"]), examples.get(name, ""))
            for name, one in figures["json_fields"].items()
        ]
        sizes = [(name, *map(short, values.values())) for name, values in lengths.items() if values]
        speeds = [(stages[name], f"{1 / took:,.0f}") for name, took in figures["stages"].items() if took]
        problems = []
        for one in self.problems:
            share = (f"{one.samples:,}", percent(one.samples / max(1, figures["samples"]))) if one.samples else ("", "")
            example = self.name(one.rows[0]) if one.rows else ""
            problems.append((*share, one.says, "note" if one.is_note else "problem", example))
        models = ("model", "samples/s of an A100, published", "cores for 1 GPU", "cores for 8 GPUs")
        a_sample = sum(figures["stages"].get(stage, 0.0) for stage in ("read", "caption", "crop"))
        rates = RATES if figures["used"] else {}
        needed = [
            (model, f"{rate:,}", *(f"{math.ceil(gpus * rate * a_sample):,}" for gpus in (1, 8)))
            for model, rate in rates.items()
        ]
        columns = ("samples", "share", "problem", "kind", "example")
        return {
            "members": ReportTable("Members", ("suffix", "samples", "content"), members),
            "fields": ReportTable("JSON fields", ("field", "filled", "types", "example"), fields),
            "sizes": ReportTable("Lengths and sizes", ("", "least", "5%", "median", "95%", "most"), sizes),
            "stages": ReportTable("Speed of one core", ("stage", "samples/s"), speeds),
            "cores": ReportTable(f"Cores that feed GPUs (here are {cores()})", models, needed),
            "problems": ReportTable("Problems: samples that …", columns, problems),
        }


def examine(
    source: Source, data: DataSettings, *, headers: bool = False, folder: Path | None = None, executor: str = "local"
) -> Examined:
    """Read all samples, unless their table is there, and compute the figures.

    Args:
        headers: whether images are not decoded, nor languages detected.
        folder, executor: see `sample_table`.

    Raises SettingsError: as `sample_table`.
    """
    columns = Columns(decode=not headers, languages=not headers and detector() is not None)
    table = sample_table(source, data, columns, folder=folder, executor=executor)
    rows = table.read([name for name in table.columns if name not in ("other_hashes", "caption_chars")])
    reasons = Counter(dict(_counts(rows["reason"])))
    used = reasons.pop("", 0)
    figures: dict[str, Any] = {"data": source.summary(), "shards": len(set(source.names)), "samples": rows.num_rows}
    figures |= {"used": used, "dropped": dict(reasons)}
    found = Examined(source, table, rows, figures, [], [])
    broken = {**table.faults, **dict.fromkeys(source.missing, "missing")}
    members, fields, seconds = Counter[str](), defaultdict[str, Counter[str]](Counter), defaultdict[str, float](float)
    for about in table.abouts():
        broken |= {about.title: about.fault} if about.fault else {}
        members.update(about.members)
        for stage, took in about.seconds.items():
            seconds[stage] += took
        for name, kinds in about.fields.items():
            fields[name].update(kinds)
    figures["broken_shards"] = broken
    if broken:
        first = next(f"{name}: {fault}" for name, fault in broken.items())
        found.problems.append(
            Problem("broken_shards", f"{counted(len(broken), 'shard')} broken or missing: {first}", 0)
        )
    for reason in reasons:
        if reason != NOT_KEPT:
            _add(found, f"dropped_{reason}", pc.equal(rows["reason"], reason), f"are dropped as {reason}")
    figures["members"] = dict(members.most_common())
    figures["json_fields"] = {
        name: {"filled": (kinds.total() - kinds[NULL] - kinds[EMPTY]) / max(1, rows.num_rows), "types": dict(kinds)}
        for name, kinds in fields.items()
    }
    _captions(found)
    _images(found)
    if not headers:
        _duplicates(found)
    figures["stages"] = {stage: took / max(1, rows.num_rows) for stage, took in seconds.items()}
    figures["stages"] |= _crop_seconds(found, data)
    figures["problems"] = [
        {"problem": one.name, "samples": one.samples, "says": found.tell(one), "note": one.is_note,
         "examples": [found.name(row) for row in one.rows]}
        for one in found.problems
    ]  # fmt: skip
    return found


def _counts(column: pa.ChunkedArray) -> Iterator[tuple[str, int]]:
    for one in pc.value_counts(column).to_pylist():
        if one["values"] is not None:
            yield str(one["values"]), int(one["counts"])


def _quantiles(values: np.ndarray[Any, Any]) -> dict[str, float] | None:
    found = np.quantile(values, list(QUANTILES.values()), method="nearest") if len(values) else []
    return {name: float(f"{value:.4g}") for name, value in zip(QUANTILES, found, strict=True)} if len(values) else None


def _add(found: Examined, name: str, mask: Any, says: str, worst: Any = None, *, is_note: bool = False) -> None:
    """Add a problem of the samples of a mask, if there are any; `worst` is a value that is highest for the worst."""
    if not isinstance(mask, np.ndarray):
        mask = mask.fill_null(False).to_numpy()
    places = np.flatnonzero(mask)
    if not len(places):
        return
    if worst is not None:
        places = places[np.argsort(-np.asarray(worst, float)[places], kind="stable")[:SHOWN]]
    elif len(places) > SHOWN:  # spread over the data
        places = places[:: len(places) // SHOWN]
    count = int(np.count_nonzero(mask))
    found.problems.append(Problem(name, says, count, places[:SHOWN].tolist(), is_note))


def _captions(found: Examined) -> None:
    """Lengths, languages, and captions that are no texts."""
    rows, there = found.rows, found.rows.filter(pc.is_valid(found.rows["caption"]))
    tokens, texts = rows["caption_tokens"].fill_null(0).to_numpy(), there["caption"]
    characters = pc.utf8_length(texts).to_numpy()
    cut = int(np.count_nonzero(tokens > CONTEXT))
    found.figures["captions"] = {
        "samples": len(texts), "characters": _quantiles(characters), "tokens": _quantiles(tokens[tokens > 0]),
        "context": CONTEXT, "cut": cut, "languages": dict(Counter(dict(_counts(there["language"]))).most_common()),
    }  # fmt: skip
    if not len(texts):
        return
    found.charts.append(Bars.of("tokens of a caption", tokens[tokens > 0], mark=CONTEXT))
    if found.figures["captions"]["languages"]:
        found.charts.append(Bars.of_counts("languages", found.figures["captions"]["languages"]))
    says = f"have captions of more than {CONTEXT} tokens, which is what CLIP models read: the rest is cut off"
    _add(found, "cut_captions", tokens > CONTEXT, says, tokens)
    odd = np.zeros(rows.num_rows, bool)
    kinds = Counter[str]()
    looked = pc.fill_null(pc.match_substring_regex(rows["caption"], _ODD), False).to_numpy()
    for row in np.flatnonzero(looked).tolist():
        text = rows["caption"][row].as_py()
        kind = "addresses" if _ADDRESS.match(text) else "file names" if IMAGE_NAME.search(text) else ""
        if kind := kind or ("codes or numbers" if _CODE.fullmatch(text) else ""):
            odd[row] = True
            kinds[kind] += 1
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    _add(found, "captions_no_text", odd, f"have captions that are no text ({listed}): read another member or field")


def _images(found: Examined) -> None:
    """Formats, sizes and shapes."""
    there = found.rows.filter(pc.is_valid(found.rows["width"]))
    width, height = there["width"].to_numpy().astype(float), there["height"].to_numpy().astype(float)
    formats = dict(Counter(dict(_counts(there["format"]))).most_common())
    found.figures["images"] = {
        "samples": len(width), "formats": formats, "width": _quantiles(width), "height": _quantiles(height),
        "aspect": _quantiles(width / height), "file_bytes": _quantiles(there["bytes"].to_numpy()),
    }  # fmt: skip
    if not len(width):
        return
    found.charts.append(Bars.of_counts("formats", formats))
    for title, values, mark in (
        ("shorter side, pixels", np.minimum(width, height), float(SIDE)),
        ("width / height", width / height, 1.0),
        ("bytes of an image file", there["bytes"].to_numpy(), None),
    ):
        if values.min() < values.max():
            found.charts.append(Bars.of(title, values, mark))
    sides = np.minimum(found.rows["width"].fill_null(SIDE).to_numpy(), found.rows["height"].fill_null(SIDE).to_numpy())
    _add(found, "small_images", sides < SIDE, f"have images with a side of less than {SIDE} pixels, which models of "
         "that size enlarge", -sides, is_note=True)  # fmt: skip
    area = found.rows["width"].fill_null(0).to_numpy().astype(float) * found.rows["height"].fill_null(0).to_numpy()
    says = f"have images of more than {LARGE_PIXELS:,} pixels: {LARGE_ADVICE}"
    _add(found, "large_images", area > LARGE_PIXELS, says, area, is_note=True)
    _add(found, "one_colour", found.rows["one_colour"], "have images of one color: they show nothing")


def _duplicates(found: Examined) -> None:
    """Captions, files and images that several samples have."""
    figures, rows = found.figures.setdefault("duplicates", {}), found.rows
    for name, column, problem, what in (
        ("captions", "caption_hash", "repeated_captions", "a caption that other samples have as well"),
        ("files", "file_hash", "repeated_files", "the same image file as others"),
        ("images", "image_hash", "similar_images",
         "nearly the same image as others (encoded again, scaled, cropped a little)"),
    ):  # fmt: skip
        there, near = pc.is_valid(rows[column]).to_numpy(), name == "images"
        if near:
            there &= ~rows["one_colour"].fill_null(True).to_numpy()
        values = rows[column].fill_null(0).to_numpy()[there]
        groups = near_groups(values) if near else np.unique(values, return_inverse=True)[1]
        often, worst = np.zeros(rows.num_rows, np.int64), np.zeros(rows.num_rows)
        often[there] = sizes = np.bincount(groups, minlength=1)[groups]
        # Of images the smallest groups, each in a row: large ones are chains, whose ends may differ.
        worst[there] = -sizes * float(len(values)) - groups if near else sizes
        figures[name] = int(np.count_nonzero(often > 1))
        _add(found, problem, often > 1, f"have {what}", worst)


def _crop_seconds(found: Examined, data: DataSettings) -> dict[str, float]:
    """The measured time of one core for an image of SIDE pixels, decoded at the scale that training takes."""
    images = load_images(found, _choose_rows(found, TIMED), data)
    began, count = time.thread_time(), 0
    for image in images.values():
        with suppress(Dropped):
            header = read_header(image, True, data.max_image_pixels)
            factor = next((one for one in FACTORS if header.scales and min(header.size) >= 2 * SIDE * one), 1)
            pixels = decode(image, header, factor, (255, 255, 255))
            Image.fromarray(pixels.squeeze()).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            count += 1
    return {"crop": (time.thread_time() - began) / count} if count else {}


def load_images(found: Examined, rows: Sequence[int], data: DataSettings) -> dict[int, bytes]:
    """The image files of rows, as far as they can be read."""
    context = found.source.context
    with closing(ShardCache(data.cache, fetcher=data.fetcher)) as cache:
        source = Source(found.source.settings, replace(context, shard_cache=cache))
        return found.table.images(source, rows)


def write_page(found: Examined, path: Path, data: DataSettings, profile: Profile, yaml: str) -> None:
    """Write the page: figures, charts, the worst samples of each problem, and examples. Raises OSError."""
    some = _choose_rows(found, EXAMPLES)
    groups = [(one.name.replace("_", " "), found.tell(one), one.rows) for one in found.problems if one.rows]
    images = load_images(found, sorted({row for _, _, rows in groups for row in rows} | set(some)), data)
    thumbnails = Thumbnails()
    sheets = [
        (title, says, [(thumbnails(images.get(row), SMALL), found.name(row), *_about(found, row)) for row in rows])
        for title, says, rows in [*groups, ("examples", "spread over the samples that training uses", some)]
    ]
    told = {"tables": found.tables(profile), "skipped": found.skipped, "yaml": yaml}
    page = fill("data", found.figures["data"], figures=found.figures, charts=found.charts, sheets=sheets, **told)
    atomic_write.replace(path, page.encode(errors="backslashreplace"))


def _choose_rows(found: Examined, most: int) -> list[int]:
    """Rows that training uses, spread evenly."""
    used = np.flatnonzero(pc.equal(found.rows["reason"], "").to_numpy())
    return used[np.linspace(0, len(used) - 1, min(most, len(used))).astype(int)].tolist() if len(used) else []


def _about(found: Examined, row: int) -> tuple[str, str]:
    """The caption of a row, and why it is dropped, or its image's size and format."""
    one = {name: found.rows[name][row].as_py() for name in ("caption", "width", "height", "format", "reason", "detail")}
    size = f"{one['width']} x {one['height']} {one['format'] or ''}" if one["width"] else ""
    return shortened(one["caption"] or "", 300), ": ".join(filter(None, (one["reason"], one["detail"]))) or size
