"""report.html: its content, that it needs no network, and how a browser renders it."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.checkpoint.store import lock_folder
from clipstream.cli.verbs.compare import main as compare
from clipstream.errors import SettingsError
from clipstream.evals.context import Example
from clipstream.report import html_report
from clipstream.report.html_report import REPORT_FILE, Report, read_run, render, write_page
from clipstream.report.pages import Chart, Series, fewer, nice_ticks, short, step_times
from clipstream.report.records import FORMER_FILE, METRICS_FILE, add
from clipstream.report.sinks import EvaluationTable, ImageFiles, MetricsFile, SinkGroup
from clipstream.training.settings import AUDIT_FILE
from tests.support.browser import look_in_frames, needs_browser
from tests.support.json_values import JSON, changed, places
from tests.support.run_folders import EXAMPLES, make_run, picture


def test_it_says_what_the_run_was(tmp_path: Path) -> None:
    page = render([read_run(make_run(tmp_path / "mine"))]).replace("<wbr>", "")
    for said in ("<h1>mine</h1>", "2000 steps", "resumed 1 time, last at step 500", "2 × cpu (x86_64)", "animals",
                 "best 50.0% at 1000", "step 2000, 120 samples, 3 dropped, 2.5s", "waiting for data", "optim.lr",
                 "2.15.0", "8960", "missing_end", *EXAMPLES.values(), "right", "wrong", "dog &amp; bone"):  # fmt: skip
        assert said in page, said
    assert page.count("data:image/jpeg;base64,") == 13
    for said in (
        "the worst classes",
        "cat &amp; co",
        "3 of 9",
        "dog (4), a fox (2)",
        "“a &lt;red&gt; cat”",
        "match 0.312",
    ):
        assert said in page, said
    groups = ("<h4>Classified wrongly</h4>", "<h4>Classified correctly</h4>", "“a &lt;red&gt; cat”")
    assert sorted(groups, key=page.index) == [*groups], "as shown"
    order = ('class="status', 'id="results"', "<b>40.0%</b>", "chance 5.0%", "95% interval 31.7-48.9%", "<nav>",
             'id="images"', "Examples of animals", 'id="curves"', "<svg", 'id="data"', "Training images",
             'id="settings"', 'id="machine"', "samples a second", 'id="environment"')  # fmt: skip
    places = [page.index(part, page.index("<main>")) for part in order]
    assert places == sorted(places), "results and images are on top, the machine is behind"
    assert page.count('width="32" height="48" alt=') == 13, "nothing moves when an image is loaded"
    assert "<tr><td>" not in page[page.index('id="settings"') :], "names of keys and packages are not broken anywhere"
    assert re.findall(r'href="#(\w+)"', page) == re.findall(r' id="(\w+)"', page)
    assert "a &lt;b&gt;small&lt;/b&gt; cat 4" in page and "<b>small" not in page
    assert page.startswith("<!doctype html>"), "it needs no network"
    assert not re.findall(r"(?:src|href|url|import)\s*[=(]\s*[\"']?(?!data:)(?:https?:)?//", page)
    assert all(match.startswith(("data:", "#")) for match in re.findall(r'(?:src|href)="([^"]*)"', page))


def test_it_shows_no_credentials_and_no_control_characters(tmp_path: Path) -> None:
    config = make_run(tmp_path / "mine\x1b[31m\x07") / "config.yaml"
    url = "https://me:hunter2@host/{0..9}.tar?sig=hunter2"
    pipe = "pipe:curl -H 'Authorization: Bearer hunter2' host/0.tar"
    config.write_text(json.dumps({"data": {"sources": {"one": {"shards": url}, "two": {"shards": [pipe, url]}}}}))
    page = html.unescape(render([read_run(config.parent)]))
    assert "https://***@host/{0..9}.tar" in page and "pipe:curl" in page
    assert "hunter2" not in page
    assert "<title>mine" in page and "<h1>mine" in page.replace("<wbr>", "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


def test_several_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "a" / "base"), make_run(tmp_path / "b" / "base", lr=1e-3, steps=1000)]
    out = tmp_path / "both.html"
    assert compare([*map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text().replace("<wbr>", "")
    assert "base (2)" in page and "2 runs" in page and "1 of them different" in page
    assert page.index("optim.lr") < page.index("optim.wd"), "what differs comes first"
    assert "50.0%<small>+10.0 points</small></td>" in page and "+0.0 points" in page, "differences to the first run"
    assert page.count(": animals, step") == 2 and "base (2): animals, step 1000" in page
    assert page.count('class="s1" data-name="base (2)"') >= 6, "the second run has its line in each chart"
    assert compare([str(runs[0]), "--out", str(tmp_path / "gone" / "x.html")]) == 2


def test_a_run_that_was_killed_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    (folder / "config.yaml").unlink()
    (folder / "pictures" / "val.json").write_text('{"name": "val", "st')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2010, "lo')
    run = read_run(folder)
    assert run.steps == 2000 and [page.name for page in run.pages] == ["train", "animals"]
    assert "<h1>mine</h1>" in render([run])
    (folder / "metrics.jsonl").write_text("")
    assert "0 steps" in render([read_run(folder)])
    with pytest.raises(SettingsError, match="is not a run folder"):
        read_run(tmp_path)


def test_what_was_evaluated_afterwards_is_in_it_if_it_was_made_alike(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")

    def told(step: int, name: str, top1: float, pictures: str, texts: str = "plain") -> None:
        data = [{"shards": f"{step}.tar", "samples": 9, "pictures": pictures, "pairs": "cd"}]
        section = {"type": "zero_shot", "every": step, "data": {"shards": f"{step}.tar"}}
        record = {"step": step, "eval": name, "top1": top1, "metrics": ["top1"], "data": data, "settings": section}
        record["texts"] = texts
        own = step % 500 == 0 and name == "animals"
        add(folder / METRICS_FILE, record if own else {**record, "checkpoint": "c"})

    told(500, "animals", 0.4, "ab")
    told(700, "animals", 0.6, "ab")
    told(800, "animals", 0.9, "other data")
    told(900, "animals", 0.9, "ab", texts="openai")
    told(1200, "animals", 0.7, "ab")
    told(1300, "animals", 0.9, "other data")
    for step, top1, pictures in ((1000, 0.1, "ab"), (1000, 0.2, "newer data"), (500, 0.3, "newer data")):
        told(step, "birds", top1, pictures)
    run = read_run(folder)
    found = [(500, 0.4), (700, 0.6), (1000, 0.5), (1200, 0.7), (1500, 0.4), (2000, 0.4)]
    assert run.evaluated["animals"].curves["top1"] == found, "the run's own where there are both"
    assert run.evaluated["birds"].curves["top1"] == [(500, 0.3), (1000, 0.2)], "the last one of a step"


def test_an_evaluation_that_failed_is_in_it_until_it_succeeds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    sink = MetricsFile(folder, 2000)
    sink.write({"step": 2000, "eval": "animals", "error": "no <shard>", "dropped": 0, "seconds": 0.1})
    sink.write({"step": 2000, "eval": "never", "error": "no class", "dropped": 0, "seconds": 0.1})
    page = render([read_run(folder)])
    assert "failed at step 2000: no &lt;shard&gt;" in page and "failed at step 2000: no class" in page
    assert "step 2000, 120 samples, 3 dropped, 2.5s" in page, "of the last one that has figures"
    for name in ("animals", "never"):
        sink.write({"step": 2000, "eval": name, "top1": 0.5})
    sink.close()
    broken = {"step": 1500, "eval": "animals", "error": "no memory", "metrics": ["dropped"], "dropped": 0}
    add(folder / METRICS_FILE, {**broken, "checkpoint": "c"})
    page = render([read_run(folder)])
    assert page.count("failed at") == 1 and "failed at step 1500: no memory" in page


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "mine")
    (folder / REPORT_FILE).mkdir()
    sinks = SinkGroup(())
    sinks.sinks = {REPORT_FILE: Report(folder)}
    sinks.write({"step": 5, "eval": "val"})
    sinks.close()
    assert capsys.readouterr().err.count("report.html failed, and the run goes on: [Errno 21] Is a directory") == 1


def test_a_report_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And equals one that is made of the whole file."""
    monkeypatch.setattr(html_report, "INTERVAL", -1.0)
    folder = make_run(tmp_path / "mine")
    metrics, report = folder / METRICS_FILE, Report(folder)
    evaluation = {"step": 2100, "eval": "val", "image_to_text_R@1": 0.75, "n": 8}
    report.write(evaluation)
    whole = metrics.read_bytes()
    with metrics.open("ab") as file:
        for line in ({"step": 2100, "samples": 1, "loss": 1.25}, evaluation):
            file.write(json.dumps(line).encode() + b"\n")
        file.write(b'{"step": 2100, "lo')  # not whole yet
    report.write(evaluation)
    page = (folder / REPORT_FILE).read_text()
    assert page == render([read_run(folder)]) and "75.0%" in page
    end = metrics.read_bytes()[len(whole) :]
    metrics.write_bytes(whole.replace(b'"loss": ', b'"l0ss": ') + end + b'ss": 1.0}\n')
    report.close()
    assert [step for step, _ in report._seen.curves["loss"]][-2:] == [2100, 2100] and "l0ss" not in report._seen.curves
    metrics.write_bytes(whole)  # as of a copy that was put back
    report.close()
    assert (folder / REPORT_FILE).read_text() == render([read_run(folder)])


def test_curves_of_a_long_run_are_means_over_spans_of_steps(tmp_path: Path) -> None:
    parts = ({"data": 0.25, "forward": 0.5}, {"data": 0.25, "forward": 0.5, "backward": 1.0})
    records = [{"step": 10 * n, "loss": n / 1000 if n % 7 else None, "time": parts[n % 2]} for n in range(1, 30_001)]
    (tmp_path / METRICS_FILE).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = read_run(tmp_path)
    points = run.curves["loss"]
    assert html_report.MOST_POINTS // 3 < len(points) <= html_report.MOST_POINTS
    assert points[0] == (10, 0.001) and points[-1] == (300_000, 30.0) and run.steps == 300_000
    assert all(abs(loss - step / 10_000) < 0.05 for step, loss in points if math.isfinite(loss))
    assert len(fewer(points)) <= 401
    chart, rows = step_times(run.curves)
    seconds = {part: mean for part, mean, *_ in rows}
    assert seconds == pytest.approx({"data": 0.25, "forward": 0.5, "backward": 0.5}, rel=0.01) and chart.svg()


def test_it_is_made_at_evaluations_not_too_often(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    path = folder / REPORT_FILE
    report = Report(folder)
    report.write({"step": 5, "loss": 2.0})
    assert not path.exists()
    report.write({"step": 5, "eval": "val"})
    path.unlink()
    report.write({"step": 6, "eval": "val"})
    assert not path.exists()
    report.close()
    assert path.exists()


def test_an_album_keeps_the_newest_of_each_name(tmp_path: Path) -> None:
    album = ImageFiles(tmp_path)
    for step in (1, 2):
        for name in ("a/b", "a%2fb", "train", "ä:1"):
            album.show(step, name, [Example(picture(step), f"{name} at {step}")])
    pages = album.pages()
    assert [page.name for page in pages] == ["train", "a%2fb", "a/b", "ä:1"]
    assert all(page.step == 2 and page.pictures[0]["text"] == f"{page.name} at 2" for page in pages)
    assert len(list((tmp_path / "pictures").iterdir())) == 4


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_are_round_and_hold_the_values(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-6, abs=1e-9) and min(gaps) > 0
    slack = 1e-6 * max(gaps)
    assert ticks[0] <= low + slack and ticks[-1] >= low + span - slack


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(3, 50))
def test_fewer_points_span_the_same(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    few = fewer([(float(x), y) for x, y in points], most)
    assert len(few) <= max(most, 2) and few[0] == points[0] and few[-1] == points[-1]
    assert [x for x, _ in few] == sorted({x for x, _ in few})
    assert min(values) - 1e-6 <= min(y for _, y in few) and max(y for _, y in few) <= max(values) + 1e-6


def test_a_chart_leaves_a_gap_where_a_value_is_no_number() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 1.0), (4.0, 1.5)]
    drawing = Chart("loss <1>", (Series("run", points),)).svg()
    assert drawing.count("<polyline") == 2 and "nan" not in drawing and "loss &lt;1&gt;" in drawing
    assert Chart("loss", (Series("run", points[:1]),)).svg() == "", "a single value is no curve"
    assert Chart("loss", (Series("run", [(1.0, math.nan), (2.0, math.nan)]),)).svg() == ""
    assert 'class="chance"' in Chart("top1", (Series("run", points),), chance=0.1).svg()


def test_numbers_are_short() -> None:
    numbers = (0, 12345, 2e9, 0.00012, 1.2e-7, -3.5, math.nan)
    assert [short(number) for number in numbers] == ["0", "12.35k", "2G", "0.00012", "1.2e-7", "-3.5", "–"]


def test_the_time_of_a_step_by_part_is_a_chart_and_a_table(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "mine", steps=40))
    chart, found = step_times(run.curves)
    parts = ["data", "image_forward", "text_forward", "loss", "backward", "communication", "optimizer"]
    assert [part for part, *_ in found] == parts
    rows = {part: (seconds, share) for part, seconds, share, _ in found}
    assert rows["backward"] == (pytest.approx(0.18), pytest.approx(0.6)), "without the first line"
    assert rows["communication"] == (pytest.approx(0.02), pytest.approx(0.02 / 0.3))
    assert sum(share for _, share in rows.values()) == pytest.approx(1)
    lines = {series.name: dict(series.points) for series in chart.series}
    assert [*lines] == [part.replace("_", " ") for part in parts] and lines["optimizer"][20] == 0
    assert lines["backward"][20] == pytest.approx(0.6)
    assert all(sum(line[step] for line in lines.values()) == pytest.approx(1) for step in (10, 20, 30, 40))
    chart, found = step_times({})
    assert chart.svg() == "" and found == []
    page = render([run, read_run(make_run(tmp_path / "other", steps=40))])
    assert page.count("time of a step by part") >= 2 and "other: Where the step's time goes" in page
    assert "GPU utilisation" in page and "time/data" not in page and "allocated" not in page
    assert "the dearest operations of steps 6 to 8" in page.lower() and "profile/steps_6-8.json.gz" in page


MEASURE = """
const svg = document.querySelector("figure.card svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 5}));
const hover = svg.parentElement.querySelector("output").textContent;
const cut = [...document.querySelectorAll("p, h1, h2, h3, figure")].filter(
  element => element.getBoundingClientRect().right > innerWidth).length;
const rows = element => Object.values(Object.groupBy(element.children, child => child.offsetTop)).map(r => r.length);
const unsized = [...document.images].filter(image => getComputedStyle(image).aspectRatio === "auto").length;
addEventListener("load", () => tell({
  page: document.documentElement.scrollWidth, cut, hover, unsized,
  columns: rows(document.querySelector("div.grid"))[0],
  loaded: [...document.images].filter(i => i.complete && i.naturalWidth > 0).length, images: document.images.length,
  ground: getComputedStyle(document.body).backgroundColor}));
"""


@needs_browser
def test_a_browser_shows_it(tmp_path: Path) -> None:
    """Once its images, which are lazy, are loaded: a page's load event, for which the browser waits, is after them."""
    page, widths = render([read_run(make_run(tmp_path / "mine"))]), (400, 700, 1280, 2560)
    page = page.replace('loading="lazy"', "")
    seen = look_in_frames(tmp_path / "page.html", [(width, page) for width in widths], MEASURE, dark=True)
    assert [one["columns"] for one in seen] == [1, 1, 3, 3]
    for one, width in zip(seen, widths, strict=True):
        assert one["page"] <= width and one["cut"] == 0, "nothing is wider than the window"
        assert one["unsized"] == 0, "an image has its place before it is loaded: nothing moves"
        assert one["loaded"] == one["images"] == 13
        assert re.fullmatch(r"0\.9\d+ at 2000", one["hover"]), "the loss, which has a gap"
        assert one["ground"] == "rgb(22, 24, 28)", "dark where dark is asked for"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ({"total_steps": 2000}, "done", ">done</b>"),  # as earlier versions wrote it
        ({"status": "done", "code": 0, "error": None}, "done", ">done</b>"),
        ({"status": "failed", "code": 3, "error": "no <caption>\nset it"}, "failed", "(exit code 3) at step 2000"),
        (None, "unrecorded", "ended without a record</b>"),
        ("running", "running", ">running</b>"),
    ],
)
def test_the_status_is_on_top(tmp_path: Path, end: Any, status: str, said: str) -> None:
    folder = make_run(tmp_path / "mine")
    with MetricsFile(folder, 2000).path.open("a") as file:
        if isinstance(end, dict):
            file.write(json.dumps({"step": 2000, "seconds": 125.0, "end": end}) + "\n")
    with lock_folder(folder) if end == "running" else nullcontext():
        page = render([read_run(folder)])
    assert f'class="status {status}"' in page and said in page
    assert ("took 2m05s" in page) == isinstance(end, dict)
    assert ("<pre>no &lt;caption&gt;\nset it</pre>" in page) == (status == "failed")


STOP = {"metric": "val/top1", "evaluations": 3, "best": 0.5, "best_step": 20}
STARTED = {"time": "2026-11-21", "ranks": 1, "device": "cpu", "versions": {"torch": "2"}, "command": "x", "folder": "y",
           "git": {"commit": "ab", "dirty": False}, "hardware": {"host": "a", "cores": 2, "gpus": ["H"]}}  # fmt: skip
MADE = {"step": 20, "eval": "val", "file": "x", "metrics": ["top1"], "top1": 0.5, "checkpoint": "y", "texts": "t",
        "data": [{"shards": "a.tar", "samples": 9, "pictures": "ab", "pairs": "cd"}], "tokenizer": "t",
        "settings": {"type": "zero_shot", "shards": "a", "s": {"shards": "b"}}, "model": {"name": "m"},
        "versions": {"torch": "2"}}  # fmt: skip
FINDING = {"severity": "error", "where": "a.b", "what": "c", "advice": "d", "count": 2, "seconds": 0.1}


@given(data=st.data())
@settings(max_examples=100)
def test_records_with_any_value_are_shown_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    if not (folder := tmp_path / "run").exists():
        make_run(folder, steps=500)
        make_run(tmp_path / "other", steps=20)
        add(tmp_path / "other" / METRICS_FILE, MADE)
    kinds = {tuple(record): record for record in map(json.loads, (folder / METRICS_FILE).read_text().splitlines())}
    rest = {"rollback": {"to": 10, "skipped": 3}, "start": STARTED, "end": {"status": "done", "early_stop": STOP},
            "stages": {"decode": {"seconds": 1.0, "count": 9, "p50": 0.01, "p99": 0.02}}}  # fmt: skip
    whole = [[*kinds.values(), *({"step": 20, key: value} for key, value in rest.items())], [MADE],
             {"precision": "bf16", "findings": [FINDING]}]  # fmt: skip
    at = data.draw(st.sampled_from([path for path in places(whole) if len(path) > 1]))
    metrics, made, audit = changed(whole, at, data.draw(JSON))
    (tmp_path / "new").mkdir(exist_ok=True)
    for name, found in ((METRICS_FILE, metrics), (FORMER_FILE, made)):
        (tmp_path / "new" / name).write_text("".join(f"{json.dumps(one)}\n" for one in found))
    (tmp_path / "new" / AUDIT_FILE).write_text(json.dumps(audit))
    new = tmp_path / "new"
    for read in (
        lambda: write_page(tmp_path / "page.html", [read_run(tmp_path / "other"), read_run(new)]),
        lambda: EvaluationTable(new).close(),
        lambda: MetricsFile(new, 30).close(),
    ):
        try:
            read()
        except SettingsError as error:
            assert "is not what clipstream wrote" in str(error)
