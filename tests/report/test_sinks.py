"""Metrics files, TensorBoard and the terminal: content after a resume, and messages."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tensorboard import plugin_util

from clipstream.evals.context import Example, Table
from clipstream.report import sinks
from clipstream.report.records import markdown_table, scalars
from clipstream.report.sinks import QUARANTINE_FILE, MetricsFile, QuarantineFile, TensorBoard
from clipstream.report.terminal import ProgressDisplay, table
from clipstream.text import duration, percent


def train_line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "samples": step * 64, "loss": 4.0 / step, "lr": 4.9e-4, "samples_per_s": 800.0,
            "data_wait": 0.031, **more}  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_on_disk_as_soon_as_written_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path, resume_step=3)  # of a file that is gone
    sink.write({"step": 1, "loss": math.nan, "name": "ä", "deep": {"x": [math.inf, 1.0]}})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "name": "ä", "deep": {"x": [None, 1.0]}}]
    sink.close()


@pytest.mark.parametrize("torn", ["", '{"step": 15, "lo', '{"step": 15}'])
@pytest.mark.parametrize(
    ("resumed", "kept"),
    [
        ({}, []),
        ({"resume_step": 20}, [(10, None), (10, "val"), (20, None), (20, "val")]),
        ({"resume_step": 20, "ended": True}, [(10, None), (10, "val"), (20, None)]),  # it evaluates again
    ],
)
def test_a_resume_cuts_later_steps_and_a_torn_line(
    tmp_path: Path, torn: str, resumed: dict[str, Any], kept: list[tuple[int, str | None]]
) -> None:
    first = MetricsFile(tmp_path)
    for step in (10, 20, 30):
        first.write(train_line(step))
        first.write({"step": step, "eval": "val", "top1": 0.5})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    again = MetricsFile(tmp_path, **resumed)
    again.write(train_line(25))
    again.close()
    assert [(r["step"], r.get("eval")) for r in read(tmp_path / "metrics.jsonl")] == [*kept, (25, None)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_wait_for_a_folder_that_is_away_as_far_as_the_memory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sinks, "WAITING", 2000)
    run, aside = tmp_path / "run", tmp_path / "aside"
    run.mkdir()
    sink = MetricsFile(run)
    sink.write({"step": 0})
    run.rename(aside)
    for step in range(1, 200):
        sink.write({"step": step})
    assert not run.exists() and read(aside / "metrics.jsonl") == [{"step": 0}]
    shutil.copytree(aside, run)  # another file of the same content
    sink.write({"step": 200})
    sink.write({"step": 201})
    with pytest.raises(OSError, match=r"bytes of .*metrics.jsonl are lost"):
        sink.close()
    steps = [line["step"] for line in read(run / "metrics.jsonl")]
    assert 100 < len(steps) < 200 and steps == [*range(len(steps) - 1), 201]


def test_tensorboard_tags() -> None:
    assert dict(scalars({"step": 3, "loss": 1.5, "note": "x", "fine": True})) == {"train/loss": 1.5}
    assert dict(scalars({"step": 3, "eval": "val", "top1": 0.25})) == {"eval/val/top1": 0.25}
    health = {"step": 3, "health": {"train": {"used": 9, "dropped": {"no_caption": 2}}}}
    assert dict(scalars(health)) == {"health/train/used": 9, "health/train/dropped/no_caption": 2}
    assert not list(scalars({"step": 1, "quarantine": [{"key": "a"}]}))


def test_tensorboard_is_purged_on_resume_and_shows_images_and_their_words(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write({"step": 0, "start": {"ranks": 2, "versions": {}}})
    for step in (10, 20, 30):
        board.write(train_line(step))
    board.close()
    board = TensorBoard(tmp_path, resume_step=20)
    board.write(train_line(25))
    red = torch.zeros((3, 8, 8), dtype=torch.uint8)
    red[0] = 255
    board.show(27, "val", [Example(red, "a | b", guesses=(("c", 0.5), ("d", 0.4)), note="place 2", group="best")] * 3)
    board.show(27, "kinds", [], [Table("the worst", ("class", "right"), (("a | b", "1 of 2"),))])
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [10, 20, 25]
    (image,) = events.Images("pictures/val")
    assert (image.step, image.width, image.height) == (27, 24, 8)
    corner = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB").getpixel((5, 5))
    assert corner == (255, 0, 0)
    (text,) = events.Tensors("pictures/val/text_summary")
    assert b"a \\| b | c; d | place 2 | best |" in text.tensor_proto.string_val[0]
    (text,) = events.Tensors("tables/kinds/the worst/text_summary")
    assert text.tensor_proto.string_val[0] == b"| class | right |\n| --- | --- |\n| a \\| b | 1 of 2 |"


@pytest.mark.parametrize("before", ["", "\\", "`", "|", "a "])
@pytest.mark.parametrize(
    "text",
    [
        "![x](http://host/x.png)",
        "[x](http://host)",
        "![x][y] [y]: http://host",
        "<http://host>",
        "<img src='http://x'>",
    ],
)
def test_tensorboard_makes_no_image_and_no_link_of_a_caption(before: str, text: str) -> None:
    """TensorBoard (2.20) lets images and links of Markdown and of HTML pass to the page."""
    html = plugin_util.markdown_to_safe_html(markdown_table(("text", "note"), [[before + text, "note"]]))
    assert html.count("<td>") == 2 and not re.search("<img|<a ", html)
    assert before + text in unescape(html)


def test_lines_off_a_terminal() -> None:
    counts: dict[str, Any] = {"read": 100, "used": 100, "dropped": {}, "shards": 3, "shard_faults": 0}
    worse = {**counts, "read": 200, "dropped": {"no_caption": 7, "not_kept": 25}, "shard_faults": 1}
    records = [
        train_line(120, loss=2.3149),
        train_line(130, mfu=0.413, gpu={"memory_peak_gib": 12.34}),
        *({"step": 140, "health": {"train": one}} for one in (counts, worse, {**worse, "read": 195})),
        {"step": 140, "eval": "val", "top1": 1.0},
    ]
    said = {}
    for mode in ("lines", "none"):
        stream = io.StringIO()
        progress = ProgressDisplay(1000, mode=mode, stream=stream)
        for record in records:
            progress.write(record)
        progress.close()
        said[mode] = stream.getvalue().splitlines()
    # (1000 - 120) x 64 samples at 800 a second
    line = "step 120/1000  loss 2.315  lr 4.9e-04  800 samples/s  data wait 3%  eta 1m10s"
    health = "data at step 140: train: 4.0% of the samples read are dropped (no_caption 4.0%), shard_faults 1"
    evaluation = "val at step 140: top1 100.0%"
    assert said["lines"][0] == line and "data wait 3%  MFU 41%  12.3 GiB  eta" in said["lines"][1]
    assert said["lines"][2:] == [health, evaluation], "what is wrong is said once"
    staged = ProgressDisplay(1000, stage_end=200, later=8000.0, mode="lines", stream=(stream := io.StringIO()))
    staged.write(train_line(120))
    assert stream.getvalue().endswith("eta 16s\n"), "(200 - 120) x 64 samples, and 8,000 that cost as much"
    assert said["none"][-1] == said["lines"][-1] and not any("loss" in one for one in said["none"])


def test_an_evaluation_is_one_line_and_all_its_metrics_are_a_table_in_the_end() -> None:
    ways = ("image_to_text", "text_to_image")
    figures = {f"{way}_{name}": 0.123 for way in ways for name in ("median_rank", "R@1", "R@5")}
    record = {"step": 40, "eval": "val", **figures, "chance_R@1": 0.0005, "n": 2000, "dropped": 3, "seconds": 2.34}
    kinds = {"step": 40, "eval": "kinds", "top1": 0.91, "chance": 1 / 12, "n": 100}
    own = {"step": 40, "eval": "own", "loss": 0.51239, "mine": 2, "chance_mine": 0.25}
    stream = io.StringIO()
    progress = ProgressDisplay(40, mode="lines", stream=stream)
    for one in ({**record, "step": 20}, record, kinds, own, {"step": 40, "end": {"status": "done"}}):
        progress.write(one)
    said = stream.getvalue().splitlines()
    assert said[1:4] == [
        "val at step 40: image->text R@1 12.3%, text->image R@1 12.3% (chance 0.05%)",
        "kinds at step 40: top1 91.0% (chance 8.3%)",
        "own at step 40: loss 0.5124",
    ]
    assert "\n".join(said[4:]) == table([record, kinds, own]) and len(said) == 4 + 1 + 9 + 2 + 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [80, 140])
def test_the_bar_fits_the_terminal_and_shows_what_is_done_besides(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    progress = ProgressDisplay(1000, stream=stream)
    assert stream.getvalue() == "", "no bar before the first step"
    progress.step(1)
    assert "1/1000" in stream.getvalue()
    for step in range(10, 500, 10):
        progress.write(train_line(step, loss=500.0 / step))
    progress.write({"step": 490, "eval": "val", "top1": 0.5, "chance": 0.1})
    progress.status("evaluating val")
    progress.status("")
    progress.close()
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]+", stream.getvalue())]
    assert max(map(len, drawn)) <= width
    assert any("[evaluating val]" in line for line in drawn) and "[evaluating val]" not in drawn[-1]
    assert any("490/1000" in line and "loss 1.02" in line for line in drawn)
    assert "val at step 490: top1 50.0% (chance 10.0%)" in map(str.rstrip, drawn)


def test_durations_and_shares() -> None:
    assert [duration(s) for s in (0.0, 9.96, 42.4, 250, 7530)] == ["0.0s", "10.0s", "42s", "4m10s", "2h05m"]
    assert [percent(share) for share in (0.0, 0.00054, 0.0833, 1.0)] == ["0.0%", "0.054%", "8.3%", "100.0%"]


def test_what_could_not_be_used_has_a_file_of_its_own(tmp_path: Path) -> None:
    metrics, quarantine = MetricsFile(tmp_path), QuarantineFile(tmp_path / QUARANTINE_FILE)
    loss = {"source": "train", "shard": "a/00.tar", "key": "k1", "reason": "no_caption", "detail": "no txt"}
    for record in (train_line(1), {"step": 1, "quarantine": [loss, {**loss, "key": None}]}, train_line(2)):
        assert (tmp_path / QUARANTINE_FILE).exists() == (record["step"] == 2)
        metrics.write(record)
        quarantine.write(record)
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1, 2]
    assert read(tmp_path / QUARANTINE_FILE) == [{"step": 1, **loss}, {"step": 1, **loss, "key": None}]
    QuarantineFile(tmp_path / QUARANTINE_FILE, resume_step=0).close()
    assert not (tmp_path / QUARANTINE_FILE).read_text()


def test_the_list_of_losses_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "LISTED", 5)
    for first, done in ((1, None), (4, 3)):
        quarantine = QuarantineFile(tmp_path / QUARANTINE_FILE, done)
        for step in range(first, first + 3):
            quarantine.write({"step": step, "quarantine": [{"key": f"{step}a"}, {"key": f"{step}b"}]})
        quarantine.close()
        found = read(tmp_path / QUARANTINE_FILE)
        assert [line.get("key") for line in found] == ["1a", "1b", "2a", "2b", "3a", None]
        assert found[-1] == {"step": 3, "reason": "full", "detail": "the rest is in metrics.jsonl, counted"}


def test_lines_in_the_terminal_may_be_fewer_and_have_an_averaged_loss() -> None:
    """The average is open_clip's: a decay of exp(-n / horizon) over n samples, which begins with the first loss."""
    stream = io.StringIO()
    progress = ProgressDisplay(100, every=20, ema_samples=640, stream=stream)
    losses = {step: 3.0 - step / 100 for step in range(10, 101, 10)}
    for step, loss in losses.items():
        progress.write(train_line(step, loss=loss))
    shown = [line.split("  ")[:2] for line in stream.getvalue().splitlines()]
    assert [line[0] for line in shown] == [f"step {step}/100" for step in (10, 20, 40, 60, 80, 100)]
    average, kept = losses[10], math.exp(-1)
    for step in range(20, 41, 10):
        average = kept * average + (1 - kept) * losses[step]
    assert shown[2][1] == f"loss 2.6 ({average:.4g})"
