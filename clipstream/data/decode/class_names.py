"""Names of classes, and templates that make texts of them: from settings, files or open_clip.

Imports torch only for open_clip's names and templates, and no NumPy.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clipstream.errors import SettingsError, each
from clipstream.storage.shard_url import with_variables
from clipstream.text import listed, printable
from clipstream.utils.content import read_text, to_utf8

Template = Callable[[str], str]
NAME_COLUMNS = ("name", "class_name", "classname", "class", "label", "text", "template", "prompt", "category", "title")
NUMBER_COLUMNS = ("id", "index", "idx", "number", "class_id", "class_idx", "class_index", "label_id", "label", "")
MOST = 1 << 20  # classes of a file with gaps
AS_LIST = "; write texts as a list"
OF_OPEN_CLIP = ("imagenet", "openai", "simple")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?")
_OTHER_PLACE = re.compile(r"(?i)[{}]|%s|[<\[](?:cls|class|label|name|category|object)\w*[>\]]|\blambda\b")
_CODE = re.compile(r"[\[{(;]$|^[\]})]|^(?:#|//|lambda\b|[-*•]\s)|\t")  # in lines that are no names
_MARKS = re.compile(r"^(['\"]).*\1$|,$")
_NUMBERED = re.compile(r"(?:(\d+)\s*[\s:;,.)]|n\d{8}\s)\s*\S")


def class_names(spec: str | Sequence[str], *, gaps: bool = False) -> list[str]:
    """Class names from a list, 'imagenet' (open_clip's names), or a file, see `text_list`.

    Args:
        gaps: the numbers of a file may leave out classes, whose names are ''.

    Raises SettingsError: no such file, or fewer than 2 names.
    """
    if spec == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    if isinstance(spec, str):
        names = _lines(spec, "classes", gaps=gaps)
    else:
        names = list(each("classes", "names, a file or imagenet", spec, str))
    if (count := len([*filter(None, names)]) if gaps else len(names)) < 2:
        raise SettingsError(f"classes: expected at least 2, not {count}, one a line or in a list")
    return names


def duplicate_names(names: Sequence[str]) -> str:
    """A warning of names that are given more than once, as `fold_name` compares them; '' without any."""
    counts = Counter(map(fold_name, names))
    twice = [repr(printable(name, 80)) for name in names if counts.pop(fold_name(name), 0) > 1]
    return f"duplicate class names: {listed(twice, 5)}" if twice else ""


def prompt_templates(spec: str | Sequence[str], key: str = "templates") -> list[Template]:
    """Templates from a list, 'openai' (or 'imagenet', the same), 'simple', 'plain', or a file, see `text_list`.

    Raises SettingsError: no such file, or a template without {c} or {}.
    """
    if spec in OF_OPEN_CLIP:
        import open_clip

        return list(open_clip.SIMPLE_IMAGENET_TEMPLATES if spec == "simple" else open_clip.OPENAI_IMAGENET_TEMPLATES)
    if isinstance(spec, str):
        texts = ["{c}"] if spec == "plain" else _lines(spec, key)
    else:
        texts = list(each(key, "texts, a file, or openai, simple or plain", spec, str))
    for text in texts:
        if not has_place(text):
            raise SettingsError(f"{key}: {text!r} has no {{c}} or {{}} where the class name goes")
        if other := _OTHER_PLACE.search(text.replace("{c}", "x").replace("{}", "x")):
            raise SettingsError(
                f"{key}: {text!r}: only {{c}} and {{}} are replaced by the class name, not {other[0]!r}"
            )
    if not texts:
        raise SettingsError(f"{key}: none given")
    return [lambda name, text=text: text.replace("{c}", name).replace("{}", name) for text in texts]  # type: ignore[misc]


def unreadable_names(
    classes: str | Sequence[str] | None, templates: str | Sequence[str] | None, *, gaps: bool = False
) -> dict[str, str]:
    """Key -> why class names or templates cannot be read, found without an import of torch."""
    found: dict[str, str] = {}
    names = partial(class_names, gaps=gaps)
    for key, spec, read in (("classes", classes, names), ("templates", templates, prompt_templates)):
        try:
            if spec is not None and spec not in OF_OPEN_CLIP:
                read(spec)
        except SettingsError as error:
            found[key] = str(error).removeprefix(f"{key}: ")
    return found


def has_place(text: str) -> bool:
    """Whether a template has a placeholder for the class name."""
    return "{c}" in text or "{}" in text


def _lines(path: str, what: str, *, gaps: bool = False) -> list[str]:
    try:
        text = read_text(Path(with_variables(path)))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"no UTF-8: {to_utf8(text.encode(errors='surrogateescape'))}") from None
        return text_list(text, Path(path).suffix.lower(), gaps=gaps)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{what}: cannot read the file {path!r} ({error}){AS_LIST}") from error


def text_list(text: str, suffix: str = "", *, gaps: bool = False) -> list[str]:
    """The texts of a file: one a line, a list or a map from or to numbers in JSON, or a column of a CSV with a header.

    Args:
        text: of the file.
        suffix: of its name; .json is JSON, .csv is a table, whose column of numbers, if any, orders the texts.
        gaps: numbers may be left out, their texts are ''.

    Raises ValueError: it is of another form, or its numbers are not those from 0 without a gap.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if suffix == ".json" or text.lstrip()[:1] == "[" or (text.lstrip()[:1] == "{" and not all(map(has_place, lines))):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"invalid JSON: {error}") from None
        if isinstance(found, dict):
            keys, values = list(found), list(found.values())
            inverse = bool(values) and all(isinstance(value, int) for value in values)
            found = _in_order(map(str, values), keys, gaps) if inverse else _in_order(keys, values, gaps)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError("expected a JSON list of texts or a map from numbers to texts")
        return [one.strip() for one in found]
    if suffix == ".csv":
        header, *rows = list(csv.reader(lines)) or [[]]
        columns = [cell.strip().lower() for cell in header]
        name = next((n for n, cell in enumerate(columns) if cell in NAME_COLUMNS), None)
        number = next((n for n, cell in enumerate(columns) if cell in NUMBER_COLUMNS and n != name), None)
        if name is None:
            raise ValueError(f"none of its columns ({', '.join(columns)}) is named {', '.join(NAME_COLUMNS[:3])}")
        if any(len(row) != len(columns) for row in rows):
            raise ValueError(f"expected {len(columns)} columns in each row, as in the header")
        texts = [row[name].strip() for row in rows]
        return texts if number is None else _in_order([row[number] for row in rows], texts, gaps)
    if suffix in (".yaml", ".yml"):
        raise ValueError("YAML is not supported: write one text per line, or JSON")
    numbers = [int(one[1] or n) for n, line in enumerate(lines) if (one := _NUMBERED.match(line))]
    if numbers and sorted(numbers) == [min(numbers) + n for n in range(len(lines))]:
        raise ValueError("numbers before all texts: write the texts alone, in order")
    for number, line in enumerate(lines, 1):
        if _MARKS.search(line) or (_CODE.search(line) and not has_place(line)):
            raise ValueError(
                f"line {number}, {printable(line, 60)!r}, is code or a comment, or of a table or list with marks: "
                "write one text a line, or JSON"
            )
    return lines


def _in_order(numbers: Iterable[str], texts: Sequence[Any], gaps: bool) -> list[Any]:
    """The texts by their numbers. Raises ValueError: these are not all from 0, without a gap unless `gaps`."""
    keys = list(numbers)
    by_number = {number_of(key): text for key, text in zip(keys, texts, strict=True)}
    if gaps and len(by_number) == len(texts) and all(n is not None and 0 <= n < MOST for n in by_number):
        return [by_number.get(number, "") for number in range(1 + max((n or 0 for n in by_number), default=-1))]
    if set(by_number) != set(range(len(texts))):
        shown = ", ".join(map(printable, keys[:3]))
        raise ValueError(f"its {len(texts)} texts are not numbered from 0 to {len(texts) - 1}: {shown}, …")
    return [by_number[number] for number in range(len(texts))]


def fold_name(name: str) -> str:
    """A class name for comparisons, which ignore case and take _ as a space."""
    return name.strip().casefold().replace("_", " ")


def number_of(label: str) -> int | None:
    """The whole number of a label: of 3, 03, 3.0 and 3e0 it is 3, of true 1, of false 0; None if it is no number."""
    label = label.strip().casefold()
    if _NUMBER.fullmatch(label) and float(label).is_integer():
        return int(label) if label.isdecimal() else int(float(label))
    return {"true": 1, "false": 0}.get(label)
