"""The input path: samples per second of clipstream, open_clip's trainer and webdataset, and an upper bound ("floor").

    make bench-input                                            # generated images: half an hour on two cores
    python benchmarks/input.py 'shards/{00000..00007}.tar'      # your own shards
    python benchmarks/input.py 'emoji/*.tar' --size 64 --caption-json caption.en

The streams (see `streams.py`) alternate over several rounds in one run, and medians are compared, because machines
are shared and noisy. `make peers` installs the webdataset version that open_clip's trainer needs, and spdl, which
needs FFmpeg's libraries; without them their streams are skipped. Ratios are clipstream's rate divided by the other's.
Memory is a worker's private dirty memory, minus that of an idle process with the same imports.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made import KINDS, make
from steps import STEPS
from streams import Options

from clipstream.data.decode.captions import build_caption
from clipstream.data.source_settings import CaptionSettings
from clipstream.data.sources import expand
from clipstream.errors import Dropped

BUILD = Path(__file__).parent.parent / "build"
PEERS = {"open_clip": BUILD / "peers", "spdl": BUILD / "spdl"}  # stream -> packages of its own
STREAMS = ["clipstream", "open_clip", "webdataset", "spdl", "floor"]
COLUMNS = ("samples_per_s", "first_batch_s", "cpu_ms_per_sample", "bytes_per_sample", "worker_dirty_mib")
Medians = dict[str, dict[str, float]]  # stream -> column -> value


@dataclass
class Work:
    """One set of shards and the size that its pictures are brought to."""

    name: str
    shards: list[str]
    size: int
    caption: str | None = None
    results: Medians = field(default_factory=dict)


class Stream:
    """A process that measures when it is asked."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        path = str(PEERS.get(name, ""))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, str(Path(__file__).with_name("streams.py")), name, json.dumps(vars(options))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, **pipes)

    def measure(self) -> dict[str, float]:
        """One measurement."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the stream {self.name} ended: see above")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run(work: Work, args: argparse.Namespace, scratch: Path) -> None:
    """Measure all streams on one work, in turns."""
    captioned = work.shards if work.caption is None else write_captioned(work, scratch / work.name)
    options = Options(work.shards, captioned, work.caption, work.size, args.workers, args.batch_size, args.seconds)
    names = [name for name in args.streams if _runs(name)]
    streams = {name: Stream(name, options) for name in names}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, stream in streams.items():
            found[name].append(stream.measure())
    for name, stream in streams.items():
        stream.close()
        work.results[name] = {column: statistics.median(one[column] for one in found[name]) for column in COLUMNS}


def _runs(name: str) -> bool:
    """Whether what a stream needs is here; spdl is no use without FFmpeg's libraries."""
    return PEERS.get(name, BUILD.parent).is_dir() and (name != "spdl" or find_library("avfilter") is not None)


def write_captioned(work: Work, folder: Path) -> list[str]:
    """The shards with the caption as their `txt` member, which is all that the peers read.

    Another `txt` is left out: webdataset ends at a suffix that occurs twice in a sample.
    """
    folder.mkdir(parents=True)
    extract = build_caption(CaptionSettings.model_validate({"type": "json", "path": work.caption}))
    written = []
    for number, shard in enumerate(work.shards):
        path = folder / f"{number:05d}.tar"
        with tarfile.open(shard) as source, tarfile.open(path, "w") as target:
            for member in source:
                file = source.extractfile(member)
                data = b"" if file is None else file.read()
                suffix = member.name.rpartition("/")[2].partition(".")[2]
                if suffix.lower() != "txt":
                    target.addfile(member, io.BytesIO(data))
                if suffix.lower() == "json":
                    try:
                        text = extract({"__key__": "", "__url__": "", "json": data}, None).encode()
                    except Dropped:
                        continue
                    about = tarfile.TarInfo(member.name[: -len(suffix)] + "txt")
                    about.size = len(text)
                    target.addfile(about, io.BytesIO(text))
        written.append(str(path))
    return written


def show(works: Sequence[Work]) -> None:
    """Print the table."""
    print(f"{'work':<14}{'stream':<12}{'samples/s':>10}{'ratio':>7}{'first s':>9}{'CPU ms':>8}{'bytes':>9}{'MiB':>6}")
    for work in works:
        ours = next(iter(work.results.values()))
        for name, one in work.results.items():
            ratio = "1" if one is ours else f"{ours['samples_per_s'] / one['samples_per_s']:.2f}"
            print(
                f"{work.name:<14}{name:<12}{one['samples_per_s']:>10,.0f}{ratio:>7}{one['first_batch_s']:>9.2f}"
                f"{one['cpu_ms_per_sample']:>8.2f}{one['bytes_per_sample']:>9,.0f}{one['worker_dirty_mib']:>6.0f}",
                flush=True,
            )


def write_csv(works: Sequence[Work], path: Path) -> None:
    """A row a work and stream."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("work", "size", "stream", *COLUMNS))
        for work in works:
            for name, one in work.results.items():
                table.writerow((work.name, work.size, name, *(one[column] for column in COLUMNS)))


def read_csv(path: Path) -> list[Work]:
    """The works of a table of `write_csv`."""
    works: dict[str, Work] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            work = works.setdefault(row["work"], Work(row["work"], [], int(row["size"])))
            work.results[row["stream"]] = {column: float(row[column]) for column in COLUMNS}
    return list(works.values())


def plot(works: Sequence[Work], path: Path) -> None:
    """Bars of clipstream's samples/s relative to open_clip's, in colours that are read on a light and a dark page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grey, blue = "#7d8590", "#2f81f7"
    plt.rcParams.update({"text.color": grey, "axes.edgecolor": grey, "svg.hashsalt": "input", "font.size": 12})
    column = "samples_per_s"
    rates = [(work, work.results["clipstream"][column], work.results["open_clip"][column]) for work in works]
    ratios = [ours / theirs for _, ours, theirs in rates]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(works) + 0.9))
    axes.barh(range(len(works)), ratios, 0.62, color=blue)
    for place, (ratio, (_, ours, _)) in enumerate(zip(ratios, rates, strict=True)):
        axes.text(ratio + 0.06, place, f"{ratio:.1f}x", va="center", weight="bold")
        axes.text(ratio + 0.62, place, f"{ours:,.0f} samples/s", va="center", size=11)
    axes.axvline(1, 0.03, 1 - 0.6 / (len(works) + 0.5), color=grey, dashes=(4, 3))
    axes.text(1, -0.72, "open_clip's loader = 1", ha="center", size=11)
    labels = [f"{work.name.replace('-', ', ').upper().replace('WEBP', 'WebP')} px" for work in works]
    axes.set(xlim=(0, max(ratios) + 2), ylim=(len(works) - 0.5, -1), yticks=range(len(works)), yticklabels=labels)
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelcolor=grey)
    axes.spines[:].set_visible(False)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", help="pictures are made where none are given")
    parser.add_argument("--name", default="shards", help="of the work, for shards that are given")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--caption-json", help="path into the JSON member; the txt member unless given")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), help="of pictures to make")
    parser.add_argument("--streams", nargs="+", metavar="STREAM", default=STREAMS, choices=[*STREAMS, *STEPS])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--plot-of", type=Path, metavar="CSV", help="measure nothing: plot the figures of a table")
    args = parser.parse_args()
    if args.plot_of:
        return plot(read_csv(args.plot_of), args.plot)
    with tempfile.TemporaryDirectory(prefix="bench-input-") as folder:
        scratch = Path(folder)
        if args.shards:
            works = [Work(args.name, expand(args.shards), args.size, args.caption_json)]
        else:
            works = [Work(kind, make(kind, scratch / f"made-{kind}"), args.size) for kind in args.kinds]
        for work in works:
            run(work, args, scratch)
            show([work])
    if args.csv:
        write_csv(works, args.csv)
    if args.plot:
        plot(works, args.plot)


if __name__ == "__main__":
    main()
