"""Runs the examples of docstrings and of pages in a folder like their reader's, with a small model."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
from pathlib import Path
from typing import Any

from clipstream.config.value_tree import to_yaml
from tests.support.pictures import make_shards, picture
from tests.support.runs import MODEL

MY = {
    "model": {"name": "model.json"},
    "data": {"global_batch_size": 8, "workers": 1},
    "optim": {"type": "adamw"},
    "train": {"precision": "fp32"},
    "schedule": {"warmup": 1},
    "run": {"device": "cpu", "threads": 1},
    "log": {"every": 3, "tensorboard": False},
}


def furnish_reader(folder: Path) -> Path:
    """What the examples take to be there: shards/, val/, cat.jpg, dog.jpg, model.json and my.yaml."""
    make_shards(folder / "shards", [13, 11])
    make_shards(folder / "val", [9, 7], start=100)
    for number, name in enumerate(("cat", "dog")):
        (folder / f"{name}.jpg").write_bytes(picture(number))
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "my.yaml").write_text(to_yaml(MY))
    return folder


def run_examples(docstring: str, names: dict[str, Any] | None = None) -> int:
    """Run the `>>>` examples and compare what they show; returns their number. What progress prints is not compared."""
    names = {} if names is None else names
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    examples = doctest.DocTestParser().get_examples(docstring)
    for example in examples:
        printed = io.StringIO()
        body = ast.parse(example.source).body[0]
        if not isinstance(body, ast.Expr):
            exec(example.source, names)
            assert not example.want, example.source
            continue
        prints = example.source.startswith(("print(", "for "))
        with contextlib.redirect_stdout(printed) if prints else contextlib.nullcontext():
            value = eval(example.source, names)
        got = printed.getvalue() if prints else "" if value is None else f"{value!r}\n"
        assert checker.check_output(example.want, got, flags), f"{example.source} gives {got}, not {example.want}"
    return len(examples)
