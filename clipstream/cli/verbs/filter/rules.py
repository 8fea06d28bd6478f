"""The rule language of `clipstream filter`: a text and columns of samples enter; which samples are kept leaves.

Rules are Python's expressions, read by its parser and never run: comparisons (also `200 <= width < 4000`), `and`, `or`,
`not`, `+ - * /`, `in [VALUES]`, `not in`, and the functions of `FUNCTIONS`. Further: `FIELD matches "REGEX"` (searched
by RE2, in linear time), `FIELD is missing`, and `FIELD in top 30%`, which holds for the round(0.3 n) largest of the n
values that there are, and for those equal to the least of these; `rank(FIELD)` counts the samples with a larger value.
A backslash in a text stands for itself, except before a quote. Backquotes enclose a field with unusual characters.

Any test of a missing value (null or NaN) is false, also `!=` and `not in`, so that `not` of one is true; arithmetic
with it is missing. Numbers are computed and compared in float64, integers with integers exactly.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipstream.errors import SettingsError, did_you_mean
from clipstream.text import lines, listed

FUNCTIONS = ("words", "chars", "lower", "count", "abs", "min", "max", "coalesce", "rank", "samples")
COMPARE = {ast.Lt: pc.less, ast.LtE: pc.less_equal, ast.Gt: pc.greater, ast.GtE: pc.greater_equal, ast.Eq: pc.equal,
           ast.NotEq: pc.not_equal}  # fmt: skip
COMPUTE = {ast.Add: pc.add, ast.Sub: pc.subtract, ast.Mult: pc.multiply, ast.Div: pc.divide}
HINTS = {
    "=>": ": write >=",
    "=<": ": write <=",
    "=": ": write == to compare",
    "&": ": write and",
    "|": ": write or",
    "!": ": write not",
    "": " at the end",
}
NUMBER, TEXT, NOTHING = "a number", "a text", "missing everywhere"
# What Python's parser does not read is replaced by as many characters that it reads.
_SPECIAL = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>`[^`]+`|\b[^\W\d]\w*(?:\.(?:\w+|\*)(?:\[[^]=]+=[^]]*\])*)+)"""
    r"""|\b(?P<top>top|bottom)\s+(?P<share>[\d.]+)\s*%|\b(?P<matches>(?:not\s+)?matches)\b"""
    r"""|\b(?P<word>(?i:and|or|not|in|is|true|false))\b"""
)
_ESCAPED = re.compile(r"""\\(["'])""")
Columns = Mapping[str, Any]  # pyarrow arrays of equal length by field


class Rule:
    """A parsed rule.

    Attributes:
        conjuncts: the tests that must all hold, in order.
        fields: their names, and where they are.
        ranked: parts whose values of all samples must be known before `holds`, by their texts.
        ranks: of these, the values in ascending order, float64 without NaN.
        samples: number of samples in all.

    Raises SettingsError: it is malformed; the message shows the place.
    """

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split("\n")).strip()
        self._given: dict[str, tuple[bool, str]] = {}  # stand-in -> whether it is a text; the text, or the field
        self._plain = _SPECIAL.sub(self._stand_in, self.text)
        if found := re.match(r"""[^#"']*(?=#)""", self._plain):
            self._fail(found.end(), "# has no meaning in a rule: write a text in quotes")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                root = ast.parse(self._plain, mode="eval").body
        except SyntaxError as error:
            at = error.offset - 1 if error.offset and error.lineno == 1 else len(self.text)
            self._fail(at, error.msg + HINTS.get(self.text[at : at + 2], HINTS.get(self.text[at : at + 1], "")))
        except (ValueError, RecursionError, MemoryError) as error:
            raise SettingsError(f"the rule cannot be read: {error}") from error
        self._check(root)
        self.conjuncts, self.fields = list(_conjuncts(root)), self.fields_of(root)
        self.ranked: dict[str, ast.expr] = {self.shown(node): node for node in _ranked(root)}
        self.ranks: dict[str, np.ndarray[Any, Any]] = {}
        self.samples = 0

    def _stand_in(self, match: re.Match[str]) -> str:
        word = match[0]
        if match["top"]:
            return f"{match['top']}({match['share']}".ljust(len(word) - 1) + ")"
        if match["matches"]:
            return ("is not" if word.startswith("not") else "is").ljust(len(word))
        if match["word"]:
            return word.title() if word.lower() in ("true", "false") else word.lower()
        name = chr(0x20000 + len(self._given)).ljust(len(word), "_")  # a letter for Python
        self._given[name] = (True, _ESCAPED.sub(r"\1", word[1:-1])) if match["text"] else (False, word.strip("`"))
        return name

    def _check(self, root: ast.expr) -> None:
        """Raises SettingsError: a part is never valid, whatever the fields are."""
        for node in ast.walk(root):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 1 << 1023:
                self.fail(node, "the number is too large")
            if isinstance(node, ast.Name) and node.id not in self._given and {*node.id} & {n[0] for n in self._given}:
                self.fail(node, "write a text in quotes, and a field in backquotes, without letters next to it")
            if isinstance(node, ast.Call) and _name(node) in ("top", "bottom"):
                share = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
                if not (isinstance(share, int | float) and 0 <= share <= 100) or node.keywords:
                    self.fail(node, f"write {_name(node)} 30%, with a share from 0% to 100%")

    def shown(self, node: ast.expr) -> str:
        """The text of a part."""
        return self.text[self._at(node.col_offset) : self._at(node.end_col_offset or 0)]

    def _at(self, offset: int) -> int:
        return len(self._plain.encode()[:offset].decode())

    def fields_of(self, node: ast.expr) -> dict[str, ast.expr]:
        """The fields of a part, and where each is."""
        called = {id(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
        names = [one for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in called]
        found = dict[str, ast.expr]()
        for one in names:
            is_text, name = self.given(one.id)
            if not is_text and name != "missing":
                found.setdefault(name, one)
        return found

    def fail(self, node: ast.expr, what: str) -> NoReturn:
        """Raise SettingsError about a part."""
        self._fail(self._at(node.col_offset), what)

    def _fail(self, at: int, what: str) -> NoReturn:
        raise SettingsError(lines(f"the rule, character {at + 1}: {what}", f"  {self.text}", f"  {' ' * at}^"))

    def check_fields(self, known: Sequence[str]) -> None:
        """Raises SettingsError: a field is not among the known ones."""
        for name, node in self.fields.items():
            if name not in known:
                near = did_you_mean(name, known, 3)
                self.fail(node, f"unknown field {name!r}{near}; the fields are {listed(known, 60)}")

    def values(self, node: ast.expr, columns: Columns, rows: int) -> np.ndarray[Any, Any]:
        """Those of the numbers float64 [rows] that are there."""
        return np.asarray(_Evaluation(self, columns, rows).numbers(node).drop_null())

    def holds(self, node: ast.expr, columns: Columns, rows: int) -> np.ndarray[Any, Any]:
        """Whether a test holds, bool [rows]. Raises SettingsError: it is no test, or compares unlike values."""
        return np.asarray(_Evaluation(self, columns, rows).test(node), dtype=bool)

    def given(self, name: str) -> tuple[bool, str]:
        """Whether a name of the parsed rule is a text; the text, or the field."""
        return self._given.get(name, (False, name))


def _conjuncts(node: ast.expr) -> Iterator[ast.expr]:
    for one in node.values if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) else [node]:
        yield from _conjuncts(one) if one is not node and isinstance(one, ast.BoolOp) else [one]


def _ranked(root: ast.expr) -> Iterator[ast.expr]:
    for node in ast.walk(root):
        if isinstance(node, ast.Call) and _name(node) == "rank":
            yield from node.args[:1]
        elif isinstance(node, ast.Compare):
            pairs = zip([node.left, *node.comparators], node.comparators, strict=False)
            yield from (left for left, right in pairs if _name(right) in ("top", "bottom"))


def _name(node: ast.AST) -> str:
    """The name of a called function, or ''."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


class _Evaluation:
    """The values of a rule's parts for some samples, as pyarrow arrays [rows]; those of tests have no nulls."""

    def __init__(self, rule: Rule, columns: Columns, rows: int) -> None:
        self.rule, self.columns, self.rows = rule, columns, rows

    def test(self, node: ast.expr) -> Any:
        """Whether a part holds."""
        if isinstance(node, ast.BoolOp):
            found, *others = map(self.test, node.values)
            for one in others:
                found = (pc.and_ if isinstance(node.op, ast.And) else pc.or_)(found, one)
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return pc.invert(self.test(node.operand))
        if isinstance(node, ast.Compare):
            found, left = pa.repeat(True, self.rows), node.left
            for op, right in zip(node.ops, node.comparators, strict=True):
                found, left = pc.and_(found, self._compared(left, op, right)), right
            return found
        found = self.value(node)
        if not pa.types.is_boolean(found.type) and not pa.types.is_null(found.type):
            self.rule.fail(node, f"{self.rule.shown(node)!r} is no test: compare it with a value")
        return found.cast(pa.bool_()).fill_null(False)

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(op, ast.Is | ast.IsNot) and isinstance(right, ast.Name) and right.id == "missing":
            return (pc.is_null if isinstance(op, ast.Is) else pc.is_valid)(self.value(left))
        if type(op) in COMPARE:
            return COMPARE[type(op)](*self._alike(left, right)).fill_null(False)
        if isinstance(op, ast.Is | ast.IsNot):
            found = self._regex(pc.match_substring_regex, left, right)
        elif _name(right) in ("top", "bottom"):
            found = self._extreme(left, right)
        elif isinstance(right, ast.List) and right.elts:
            found = pa.repeat(False, self.rows)
            for one in right.elts:
                found = pc.or_(found, pc.equal(*self._alike(left, one)).fill_null(False))
        else:
            self.rule.fail(right, "expected a list such as [1, 2], or top 30%")
        found = pc.invert(found) if isinstance(op, ast.IsNot | ast.NotIn) else found
        return pc.and_(found.fill_null(False), pc.is_valid(self.value(left)))

    def _extreme(self, left: ast.expr, right: Any) -> Any:
        values, known = self.numbers(left).fill_null(0).to_numpy(), self._known(left)
        count = round(right.args[0].value * len(known) / 100)
        if _name(right) == "top":
            return pa.array(len(known) - known.searchsorted(values, side="right") < count)
        return pa.array(known.searchsorted(values, side="left") < count)

    def _known(self, node: ast.expr) -> np.ndarray[Any, Any]:
        if (found := self.rule.ranks.get(self.rule.shown(node))) is None:
            self.rule.fail(node, "'rank' and 'top' cannot be parts of each other")
        return found

    def value(self, node: ast.expr) -> Any:
        """Numbers, texts or booleans, null where they are missing."""
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            is_int = type(node.value) is int and abs(node.value) < 1 << 63
            return pa.repeat(node.value if is_int or type(node.value) is bool else float(node.value), self.rows)
        if isinstance(node, ast.Name) and node.id != "missing":
            is_text, name = self.rule.given(node.id)
            return pa.repeat(name, self.rows) if is_text else self._column(node, name)
        if isinstance(node, ast.BinOp) and type(node.op) in COMPUTE:
            return _without_nan(COMPUTE[type(node.op)](self.numbers(node.left), self.numbers(node.right)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return pc.negate(self.numbers(node.operand))
        if isinstance(node, ast.Call):
            return self._called(node, _name(node), node.args)
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if is_not or isinstance(node, ast.BoolOp | ast.Compare):
            return self.test(node)
        hint = "write not" if isinstance(node, ast.UnaryOp) else "use 'and', 'or', 'not', and numbers"
        self.rule.fail(node, f"{self.rule.shown(node)!r} has no meaning in a rule: {hint}")

    def _called(self, node: ast.Call, name: str, args: list[ast.expr]) -> Any:
        if name not in FUNCTIONS:
            near = did_you_mean(name, FUNCTIONS)
            self.rule.fail(node, f"no such function{near}; the functions are {', '.join(FUNCTIONS)}")
        least, most = {"samples": (0, 0), "count": (2, 2)}.get(
            name, (1, 99 if name in ("min", "max", "coalesce") else 1)
        )
        if not least <= len(args) <= most or node.keywords:
            self.rule.fail(node, f"{name}() takes {f'{least} or more' if most > least else least} values")
        if name == "samples":
            return pa.repeat(self.rule.samples, self.rows)
        if name == "rank":
            values, known = self.numbers(args[0]), self._known(args[0])
            larger = len(known) - known.searchsorted(values.fill_null(0).to_numpy(), side="right")
            return pc.if_else(pc.is_valid(values), pa.array(larger), None)
        if name in ("abs", "min", "max"):
            numbers = [self.numbers(one) for one in args]
            either = {"min": pc.min_element_wise, "max": pc.max_element_wise}
            return pc.abs(*numbers) if name == "abs" else either[name](*numbers, skip_nulls=False)
        if name == "coalesce":
            return pc.coalesce(*self._alike(*args))
        if name == "count":
            return self._regex(pc.count_substring_regex, *args)
        texts = self._texts(args[0])
        if name == "words":
            return pa.array([None if text is None else len(text.split()) for text in texts.to_pylist()], pa.int64())
        return (pc.utf8_length if name == "chars" else pc.utf8_lower)(texts)

    def _column(self, node: ast.expr, name: str) -> Any:
        column = self.columns[name]
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        kind = column.type
        if column.null_count == len(column):
            return pa.nulls(len(column))
        if pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
            return column.cast(pa.string())
        if pa.types.is_floating(kind) or pa.types.is_uint64(kind):
            return _without_nan(column.cast(pa.float64(), safe=False))
        if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_string(kind)):
            self.rule.fail(node, f"the field {name!r} has values of type {kind}, which rules do not read")
        return column

    def numbers(self, node: ast.expr) -> Any:
        """float64, null where they are missing."""
        found = self.value(node)
        if _kind(found) not in (NUMBER, NOTHING):
            self.rule.fail(node, f"expected a number: {self.rule.shown(node)!r} is {_kind(found)}")
        return _without_nan(found.cast(pa.float64(), safe=False))

    def _texts(self, node: ast.expr) -> Any:
        found = self.value(node)
        if _kind(found) not in (TEXT, NOTHING):
            self.rule.fail(node, f"expected a text: {self.rule.shown(node)!r} is {_kind(found)}")
        return found.cast(pa.string())

    def _alike(self, *nodes: ast.expr) -> list[Any]:
        """Values of one type."""
        values = [self.value(node) for node in nodes]
        kinds = {_kind(value): node for value, node in zip(values, nodes, strict=True) if _kind(value) != NOTHING}
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            texts = f"{self.rule.shown(first)!r} is {one}", f"{self.rule.shown(second)!r} {other}"
            self.rule.fail(second, f"{' and '.join(texts)}: they cannot be compared")
        there = [value.type for value in values if _kind(value) != NOTHING] or [pa.float64()]
        kind = pa.int64() if all(map(pa.types.is_integer, there)) else pa.float64() if NUMBER in kinds else there[0]
        return [value.cast(kind, safe=False) for value in values]

    def _regex(self, search: Callable[..., Any], texts: ast.expr, pattern: ast.expr) -> Any:
        is_text, text = self.rule.given(pattern.id) if isinstance(pattern, ast.Name) else (False, "")
        if not is_text:
            self.rule.fail(pattern, "expected a regular expression in quotes")
        try:
            return search(self._texts(texts), text)
        except pa.ArrowInvalid as error:
            self.rule.fail(pattern, f"malformed regular expression: {str(error).splitlines()[0]}")


def _kind(values: Any) -> str:
    """What values are."""
    kind = values.type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return NUMBER if number else TEXT if pa.types.is_string(kind) else NOTHING if pa.types.is_null(kind) else "a test"


def _without_nan(values: Any) -> Any:
    return pc.if_else(pc.is_nan(values), None, values)
