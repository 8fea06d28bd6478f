"""Owns the files of evaluations that can be traced: each figure with its model, weights, data, settings and versions.

`evaluations.jsonl` holds an evaluation a line, and a file named `.csv` a figure a line. Lines are only added, but for
those that a resumed run writes anew. metrics.jsonl has the same figures without all that.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clipstream import durable
from clipstream.data.shards import redact
from clipstream.report.sinks import Growing, JsonLines, Record, json_line, lines
from clipstream.versions import versions

FIGURES_FILE = "evaluations.jsonl"
TABLE_FILE = "evaluations.csv"
WATCH_FOLDER = "watch"  # in a run's folder: the same files of those who evaluate its checkpoints meanwhile
NO_PART = ("every", "every_epochs", "fetch", "on_error", "weights", "batch_size", "prompts")  # settings, in figures
NO_METRIC = ("step", "eval", "error")
TABLE = (
    "step", "eval", "metric", "value", "run", "checkpoint", "model", "pretrained", "weights", "shards", "samples",
    "pictures", "pairs", "precision", "ranks", "time", "clipstream", "torch", "open_clip_torch", "settings", "texts",
)  # fmt: skip


def traced(record: Record, about: Record, subject: Record) -> dict[str, Any]:
    """An evaluation with all that says where its figures come from.

    Args:
        record: step, eval and metrics.
        about: what EvalRunner tells: weights, data, texts, settings, precision, ranks.
        subject: what was evaluated: run, model, checkpoint, as far as there is one.
    """
    return {
        **record,
        **subject,
        **about,
        "settings": _without_credentials(about["settings"]),
        "metrics": [name for name in record if name not in NO_METRIC],
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "versions": versions(),
    }


def way_of(evaluation: Record) -> tuple[Any, Any]:
    """What the figures of a traced evaluation depend on besides the model: what was read, and how.

    Where the data lie is no part of it, as they may be staged elsewhere.
    """
    data = [(part["pictures"], part["pairs"]) for part in evaluation.get("data", [])]
    settings = {key: value for key, value in evaluation.get("settings", {}).items() if key not in NO_PART}
    return (data, evaluation.get("texts")), {
        key: _without(value, "shards", "index", "folder") for key, value in settings.items()
    }


def add(path: Path, *evaluations: Record) -> None:
    """Add traced evaluations to a file: to one called `.csv` a line a figure, to any other a JSON line each.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if path.suffix.lower() == ".csv":
            text = "".join(_row(row) for one in evaluations for row in _figures(one))
            text = text if before else _HEAD + text
        else:
            text = "".join(map(json_line, evaluations))
        left = text.encode()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:  # the next line must not be joined to a torn one
            file.truncate(before)
            raise


class FiguresFile:
    """FOLDER/evaluations.jsonl and evaluations.csv of a run that trains.

    Args:
        folder: the run's.
        resume_step: the checkpoint's step of a resumed run: its later evaluations are cut off, but not those of
            `clipstream evaluate`. None starts anew.
        ended: whether that step is the run's last, after which it evaluates again.
    """

    def __init__(self, folder: Path, resume_step: int | None = None, *, ended: bool = False) -> None:
        path, table = folder / FIGURES_FILE, folder / TABLE_FILE
        self._lines = JsonLines(path, resume_step, ended=ended, keep=lambda record: "checkpoint" in record)
        if path.exists():  # the table once more, of what is kept
            table.unlink(missing_ok=True)
            add(table, *(record for _, record in lines(path)))
            durable.flush(table)
        self._table = Growing(table)
        self._headed = table.exists()

    def add(self, evaluation: Record) -> None:
        """Add a traced evaluation to both; what a full disk does not take comes with the next one."""
        self._lines.append(evaluation)
        self._table.add(("" if self._headed else _HEAD) + "".join(map(_row, _figures(evaluation))))
        self._headed = True

    def close(self) -> None:
        """Write out what is left."""
        for file in (self._lines, self._table):
            file.close()


def _figures(one: Record) -> list[dict[str, Any]]:
    """A row for each metric of a traced evaluation."""
    data, model, packages = one.get("data", []), one.get("model", {}), one.get("versions", {})
    rest = {
        **{
            key: one.get(key)
            for key in ("step", "eval", "run", "checkpoint", "weights", "precision", "ranks", "time", "texts")
        },
        "model": model.get("name"),
        "pretrained": model.get("pretrained"),
        **{key: " + ".join(str(part[key]) for part in data) for key in ("shards", "samples", "pictures", "pairs")},
        **{package: packages.get(package) for package in ("clipstream", "torch", "open_clip_torch")},
        "settings": json.dumps(one.get("settings")),
    }
    return [{**rest, "metric": name, "value": one[name]} for name in one.get("metrics", [])]


def _row(values: Mapping[str, Any]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([values.get(name) for name in TABLE])
    return out.getvalue()


def _without_credentials(tree: Any) -> Any:
    """Settings whose shards are shown as in messages."""
    if isinstance(tree, dict):
        return {key: _shown(value) if key == "shards" else _without_credentials(value) for key, value in tree.items()}
    return tree


def _without(value: Any, *keys: str) -> Any:
    """A source's settings without some."""
    return {k: v for k, v in value.items() if k not in keys} if isinstance(value, dict) and "shards" in value else value


def _shown(shards: Any) -> Any:
    return [redact(spec) for spec in shards] if isinstance(shards, list) else redact(shards)


_HEAD = _row(dict(zip(TABLE, TABLE, strict=True)))
