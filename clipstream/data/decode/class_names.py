"""Names of classes, and templates that make texts of them: from settings, files or open_clip.

Imports torch only for open_clip's names and templates, and no NumPy.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clipstream.data.json_path import structure
from clipstream.errors import SettingsError, each
from clipstream.text import printable
from clipstream.utils.content import read_text, to_utf8

Template = Callable[[str], str]
NAME_COLUMNS = ("name", "class_name", "classname", "class", "label", "text", "template", "prompt", "category", "title")
NUMBER_COLUMNS = ("id", "index", "idx", "number", "class_id", "class_idx", "class_index", "label_id", "label", "")
INNER = ("names", "classes", "classnames", "labels", "id2label", "templates")  # fields with the list or map
OF_OPEN_CLIP = ("imagenet", "openai", "simple")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?")


_OTHER_PLACE = re.compile(r"(?i)[{}]|%s|[<\[](?:cls|class|label|name|category|object)\w*[>\]]|\blambda\b")
_CODE = re.compile(r"[\[{(;]$|^[\]})]|^(?:#|//|lambda\b|[-*•]\s)|['\"],$|\t")  # in lines that are no names


def class_names(spec: str | Sequence[str]) -> list[str]:
    """Class names from a list, 'imagenet' (open_clip's names), or a file, see `text_list`.

    Raises SettingsError: no such file, or fewer than 2 names.
    """
    if spec == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    text = isinstance(spec, str)
    names = _lines(str(spec), "classes") if text else list(each("classes", "names, a file or imagenet", spec, str))
    if len(names) < 2:
        raise SettingsError(f"classes: expected at least 2, not {len(names)}, one a line or in a list")
    return names


def prompt_templates(spec: str | Sequence[str]) -> list[Template]:
    """Templates from a list, 'openai' (or 'imagenet', the same), 'simple', 'plain', or a file, see `text_list`.

    Raises SettingsError: no such file, or a template without {c} or {}.
    """
    if spec in OF_OPEN_CLIP:
        import open_clip

        return list(open_clip.SIMPLE_IMAGENET_TEMPLATES if spec == "simple" else open_clip.OPENAI_IMAGENET_TEMPLATES)
    if isinstance(spec, str):
        texts = ["{c}"] if spec == "plain" else _lines(spec, "templates")
    else:
        texts = list(each("templates", "texts, a file, or openai, simple or plain", spec, str))
    for text in texts:
        if not has_place(text):
            raise SettingsError(f"templates: {text!r} has no {{c}} or {{}} where the class name goes")
        if other := _OTHER_PLACE.search(text.replace("{c}", "x").replace("{}", "x")):
            raise SettingsError(
                f"templates: {text!r}: only {{c}} and {{}} are replaced by the class name, not {other[0]!r}"
            )
    if not texts:
        raise SettingsError("templates: none given")
    return [lambda name, text=text: text.replace("{c}", name).replace("{}", name) for text in texts]  # type: ignore[misc]


def unreadable_names(classes: str | Sequence[str] | None, templates: str | Sequence[str] | None) -> dict[str, str]:
    """Key -> why class names or templates cannot be read, found without an import of torch."""
    found: dict[str, str] = {}
    for key, spec, read in (("classes", classes, class_names), ("templates", templates, prompt_templates)):
        try:
            if spec is not None and spec not in OF_OPEN_CLIP:
                read(spec)
        except SettingsError as error:
            found[key] = str(error).removeprefix(f"{key}: ")
    return found


def has_place(text: str) -> bool:
    """Whether a template has a placeholder for the class name."""
    return "{c}" in text or "{}" in text


def _lines(path: str, what: str) -> list[str]:
    try:
        text = read_text(Path(path))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"no UTF-8: {to_utf8(text.encode(errors='surrogateescape'))}") from None
        return text_list(text, Path(path).suffix.lower())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{what}: cannot read the file {path!r} ({error}); write texts as a list") from error


def text_list(text: str, suffix: str = "") -> list[str]:
    """The texts of a file, in the order of their numbers.

    They are one a line (`0 cat`, `1: dog` and `n02123045 tabby` without what is before the name, `'cat',` as `cat`), a
    list, a map from numbers or to numbers (JSON, or as Python prints it; also as a field such as `id2label`, or with
    pairs of WordNet's number and name), or the column of a table with a header.

    Args:
        text: of the file.
        suffix: of its name; .json is JSON, .csv and .tsv are tables.

    Raises ValueError: it is of another form, or its numbers are not those from 0 without a gap.
    """
    text = text.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if suffix in (".yaml", ".yml"):
        raise ValueError("YAML is not supported: write one text per line, or JSON")
    if suffix == ".json" or text.startswith("[") or (text.startswith("{") and not all(map(has_place, lines))):
        try:
            found = structure(text) or json.loads(text)
        except ValueError as error:
            raise ValueError(f"invalid JSON: {error}") from None
        if isinstance(found, dict):
            found = next((found[key] for key in INNER if isinstance(found.get(key), dict | list)), found)
        if isinstance(found, dict):
            keys, values = [str(key) for key in found], list(found.values())
            if values and all(isinstance(value, int) for value in values):
                keys, values = [str(value) for value in values], keys
            found = _in_order(keys, values)
        if isinstance(found, list):  # ImageNet's class index has pairs ["n01440764", "tench"]
            found = [one[1] if isinstance(one, list) and len(one) == 2 else one for one in found]
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError("expected a JSON list of texts or a map from numbers to texts")
        return [one.strip() for one in found]
    if suffix not in (".csv", ".tsv"):
        lines = _unquoted(lines)
    rows = list(csv.reader(lines, delimiter="\t" if "\t" in (lines or [""])[0] else ","))
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    name = next((n for n, cell in enumerate(header) if cell in NAME_COLUMNS), None)
    number = next((n for n, cell in enumerate(header) if cell in NUMBER_COLUMNS and n != name), None)
    if name is not None and (suffix in (".csv", ".tsv") or number is not None):
        if any(len(row) != len(header) for row in rows):
            raise ValueError(f"expected {len(header)} columns in each row, as in the header")
        texts = [row[name].strip() for row in rows[1:]]
        return texts if number is None else _in_order([row[number] for row in rows[1:]], texts)
    if lines and all(re.match(r"n\d{8}\s+\d+\s", line) for line in lines):
        raise ValueError("lines of WordNet's numbers, other numbers and names: write the names alone, in order")
    for form in (r"(\d+)\s*[\s:;,.)]\s*(.+)", r"(n\d{8})\s+(.+)"):
        numbered = [(one[1], one[2]) for line in lines if (one := re.fullmatch(form, line))]
        if len(numbered) == len(lines) and form[1] == "n":
            return [name for _, name in numbered]
        if len(numbered) == len(lines):
            numbered.sort(key=lambda one: int(one[0]))
            if [int(n) - int(numbered[0][0]) for n, _ in numbered] == list(range(len(lines))):
                return _checked([name for _, name in numbered])
    if suffix in (".csv", ".tsv") and len(header) > 1:
        raise ValueError(f"none of its columns ({', '.join(header)}) is named {', '.join(NAME_COLUMNS[:3])}")
    return [", ".join(row).strip() for row in rows] if suffix in (".csv", ".tsv") else _checked(lines)


def _unquoted(lines: list[str]) -> list[str]:
    """Lines without the commas behind all of them (the last may have none), and without quotes around all."""
    if len(lines) > 1 and all(line.endswith(",") for line in lines[:-1]):
        lines = [line.removesuffix(",") for line in lines]
    for quote in "'\"":
        if all(len(line) > 1 and line[0] == line[-1] == quote for line in lines):
            lines = [line[1:-1] for line in lines]
    return lines


def _checked(lines: list[str]) -> list[str]:
    """The lines, without quotes around all of them. Raises ValueError: one is code."""
    for number, line in enumerate(lines := _unquoted(lines), 1):
        if _CODE.search(line) and not has_place(line):
            raise ValueError(
                f"line {number}, {printable(line, 60)!r}, is code or a comment, or of a table or list with marks: "
                "write one text a line, or JSON"
            )
    return lines


def _in_order(keys: Sequence[str], texts: Sequence[Any]) -> list[Any]:
    """The texts by their numbers. Raises ValueError: these are not all from 0, without a gap."""
    by_number = {number_of(key): text for key, text in zip(keys, texts, strict=True)}
    if set(by_number) != set(range(len(texts))):
        shown = ", ".join(map(printable, keys[:3]))
        raise ValueError(f"its {len(texts)} texts are not numbered from 0 to {len(texts) - 1}: {shown}, …")
    return [by_number[number] for number in range(len(texts))]


def folded(name: str) -> str:
    """A class name for comparisons, which ignore case and take _ as a space."""
    return name.strip().casefold().replace("_", " ")


def number_of(label: str) -> int | None:
    """The whole number that a label is: of 3, 03, 3.0 and 3e0 it is 3, of true 1, of false 0; None if it is none."""
    label = label.strip().casefold()
    if _NUMBER.fullmatch(label) and float(label).is_integer():
        return int(label) if label.isdecimal() else int(float(label))
    return {"true": 1, "false": 0}.get(label)
