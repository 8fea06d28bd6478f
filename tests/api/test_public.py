"""What is public, as a list of names and signatures: a change shows in public.txt, and its examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import clipstream
from tests.support.examples import furnish_reader, run_examples

LIST = Path(__file__).with_name("public.txt")


def members(cls: type) -> dict[str, Any]:
    """The public methods, properties and constructor that our classes of the class define."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("clipstream")]
    found = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    kept = ("__init__", "__call__")
    return {name: value for name, value in found.items() if not name.startswith("_") or name in kept}


def signature(value: Any) -> str:
    """As written, without the quotes of annotations."""
    return re.sub(r"'([^']*)'", r"\1", str(inspect.signature(value)))


def public() -> list[str]:
    """A line for each public name and each public member of a class."""
    lines = []
    places = [(name, getattr(clipstream, name)) for name in sorted(clipstream.__all__)]
    for module in (clipstream.errors, clipstream.losses):
        name = module.__name__.removeprefix("clipstream.")
        places += [(f"{name}.{inside}", getattr(module, inside)) for inside in sorted(getattr(module, "__all__", []))]
    for name, value in places:
        if not inspect.isclass(value):
            lines.append(f"{name}{signature(value) if callable(value) else ''}")
            continue
        lines.append(f"class {name}({', '.join(base.__name__ for base in value.__bases__)})")
        for key, member in sorted(members(value).items()) if value is not clipstream.Settings else ():
            if isinstance(member, property):
                lines.append(f"{name}.{key}: {signature(member.fget).rpartition(' -> ')[2]}")
            elif isinstance(member, classmethod | staticmethod):
                lines.append(f"{name}.{key}{signature(member.__func__)}")
            elif inspect.isfunction(member):
                lines.append(f"{name}.{key}{signature(member)}")
    return lines


def test_nothing_public_changes_unnoticed() -> None:
    """To accept a change: python -m tests.api.test_public > tests/api/public.txt, and a line in CHANGELOG.md."""
    assert public() == LIST.read_text().splitlines()


ORDER = ("train", "Run", "load_settings", "load_model", "zero_shot", "evaluate", "check", "build_loader", "search")
NO_EXAMPLE = {  # nor have the classes that a function with one returns
    "__version__", "errors", "losses", "Settings", "BatchLoader", "CheckReport", "ImageTextBatch", "Match", "Model",
    "ImageLabel", "Preprocess", "SearchResults", "TextTokenizer", "ZeroShotClassifier",
}  # fmt: skip


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order in which they lean on those before them."""
    assert {*ORDER} == {*clipstream.__all__} - NO_EXAMPLE
    monkeypatch.chdir(furnish_reader(tmp_path))
    objects = {name: getattr(clipstream, name) for name in ORDER}
    objects |= {name: getattr(clipstream.losses, name) for name in clipstream.losses.__all__}
    for name, value in objects.items():
        doc = inspect.getdoc(value)
        assert doc is not None and run_examples(doc), name


if __name__ == "__main__":
    print("\n".join(public()))
