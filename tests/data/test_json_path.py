"""Paths into JSON values: grammar, errors, matches, and captions by wildcards and filters."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from clipstream.data.decode.captions import build_caption
from clipstream.data.decode.labels import CaptionsField, LabelField, LabelsField
from clipstream.data.json_path import ABSENT, Each, parse_path, parse_text, step_of, texts_at, value_at, values_at
from clipstream.data.order.rng import SampleRNG
from clipstream.data.source_settings import CaptionSettings, JsonCaption, TextCaption
from clipstream.errors import Dropped
from clipstream.evals.settings import ZeroShotSettings

TEXTS = {
    "texts": [
        {"lang": "de", "t": "ein Hund", "n": 1, "about": {"kind": "long"}},
        {"lang": "en", "t": ["a dog", "the dog"], "n": 2, "about": {"kind": "short", "ok": True}},
        {"lang": "en", "t": "a brown dog"},
        "loose",
    ],
    "by": {"a": {"t": "first"}, "b": {"t": "second"}},
    "*": "star",
    "odd[name]": "odd",
}
TEXTS_OF_ALL = ["ein Hund", "a dog", "the dog", "a brown dog"]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("texts.*.t", ["ein Hund", ["a dog", "the dog"], "a brown dog"]),
        ("texts.*.t.*", ["a dog", "the dog"]),
        ("TEXTS[Lang=en].T", [["a dog", "the dog"], "a brown dog"]),
        ("texts[lang=EN].t", []),
        ("by.*.t", ["first", "second"]),
        ("texts[n=2].t", [["a dog", "the dog"]]),
        ("texts[about.kind=long].t", ["ein Hund"]),
        ("texts[lang=en][about.ok=true].t.1", ["the dog"]),
        ("by.b[t=second].t", ["second"]),
        ('by.*[t="first"].t', ["first"]),
        (r"\*", ["star"]),
        (r"odd\[name]", ["odd"]),
        ("texts.9.t", []),
        ("texts.00000000000000000000000000001", []),
        ("nothing.*", []),
    ],
)
def test_what_lies_at_a_path(path: str, found: list[Any]) -> None:
    assert values_at(TEXTS, parse_path(path)) == found
    assert value_at(TEXTS, parse_path(path)) == (ABSENT if not found else found[0] if len(found) == 1 else found)


@pytest.mark.parametrize(
    ("path", "position"),
    [("", 1), (".a", 1), ("a..b", 3), ("a.", 3), ("texts[lang.t", 6), ("texts[lang].t", 6), ("a[b=]", 2), ("a[=x]", 2),
     ("a[b=c]d", 7), ("a[*=x]", 3), ("a[b..c=x]", 3), ('a["x"="y].t', 2), ("a\\", 2), ('a[b="\\q"]', 5)],
)  # fmt: skip
def test_a_malformed_path_names_the_position(path: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"malformed at position {position}:"):
        parse_path(path)
    with pytest.raises(ValidationError, match=f"at position {position}:"):
        JsonCaption(path=["fine", path])
    with pytest.raises(ValidationError, match=f"at position {position}:"):
        ZeroShotSettings.model_validate({"label": f"json:{path}", "data": {"shards": "a.tar"}})


NAMES = st.text(min_size=1, max_size=6) | st.text("ab.*[]=\\\"'", min_size=1, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
)


def exact(name: str) -> str:
    """The step that names this very field, dots and all."""
    return re.sub(r"([].*=[\\])", r"\\\1", name)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [leaf for name, item in inner if name != "" for leaf in leaves(item, (*path, exact(str(name))))]
    return below + ([(".".join(path), value)] if path else [])


@given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_every_value_has_a_path_that_leads_to_it(value: dict[str, Any]) -> None:
    for path, found in leaves(value):
        assert values_at(value, parse_path(path)) == [found]
    for name in value:
        assert value_at({"a": {name: [2]}}, parse_path(f"a.{step_of(name)}.0")) == 2


@example("a=b", "]")
@given(NAMES.filter(lambda name: name.lower() != "t"), st.text(max_size=6))
def test_a_filter_finds_the_elements_with_its_value(field: str, value: str) -> None:
    items = [{field: value, "t": 1}, {field: f"{value}x", "t": 2}, {"t": 3}, 4, [{field: value}]]
    assert values_at({"a": items}, parse_path(f"a[{exact(field)}={json.dumps(value, ensure_ascii=False)}].t")) == [1]


@given(st.text() | st.text('ab.*[]=\\"1', max_size=12) | st.text("ab.{}|\\\\[", max_size=12))
def test_any_text_is_a_path_a_template_or_a_clear_error(text: str) -> None:
    for parse in (parse_path, parse_text):
        try:
            parsed = parse(text)
        except ValueError as error:
            assert re.search(r"malformed at position (\d+): ", str(error)) and str(error).isprintable()
            continue
        assert parsed and all(parsed)
        texts_at(TEXTS, parsed)
        assert all(isinstance(found, (str, list)) and found for found in texts_at({"a": "x", "b": ["y"]}, parsed))


def test_a_text_of_fields_may_have_lines_and_semicolons() -> None:
    assert texts_at({"a": "x", "b": [1, 2]}, parse_text(r"{a}\; {b|\n}\n.")) == ["x; 1\n2\n."]


def test_a_brace_alone_is_named_by_its_position() -> None:
    for path, position in (("a {b", 3), ("a} {b}", 2), ("{a} {", 5), ("{}", 1), ("{a..b}", 3), ("{a|", 1)):
        with pytest.raises(ValidationError, match=f"at position {position}:"):
            JsonCaption(path=["fine", path])
    assert texts_at({"a{b": 1}, parse_text(step_of("a{b"))) == [1]
    with pytest.raises(ValidationError, match=r"a caption of type json: --caption-json '\{title\} by"):
        TextCaption(key="{a} {b}")


def raw(value: Any) -> dict[str, Any]:
    return {"__key__": "0", "__url__": "a.tar", "json": json.dumps(value).encode(), "txt": b"the text"}


@pytest.mark.parametrize(
    ("path", "more", "captions"),
    [
        ("texts.*.t", {}, TEXTS_OF_ALL),  # the first one in evaluation
        ("texts[lang=en].t", {}, ["a dog", "the dog", "a brown dog"]),
        (["texts[lang=fr].t", "texts[lang=de].t"], {}, ["ein Hund"]),
        ("texts[lang=fr].t", {"fallback": "txt"}, ["the text"]),
        (["texts[lang=de].t", "texts[lang=en].t"], {"weights": [3, 1]}, TEXTS_OF_ALL),
        ("texts[lang=fr].t", {}, ["no_caption"]),
    ],
)
def test_a_wildcard_draws_one_by_the_samples_own_key(path: Any, more: dict[str, Any], captions: list[str]) -> None:
    settings = CaptionSettings.model_validate({"type": "json", "path": path, **more})
    extract = build_caption(settings)

    def caption(key: int | None) -> str:
        try:
            return extract(raw(TEXTS), None if key is None else SampleRNG(key))
        except Dropped as drop:
            return drop.reason

    drawn = Counter(caption(key) for key in range(400))
    assert set(drawn) == set(captions) and [caption(key) for key in range(9)] == [caption(key) for key in range(9)]
    assert {caption(None) for _ in range(5)} == {captions[0]}
    if "weights" in more:
        assert 0.68 < drawn["ein Hund"] / 400 < 0.82
    else:
        assert min(drawn.values()) > 60
    if not more and captions != ["no_caption"]:  # retrieval takes all that the first path with text leads to
        assert CaptionsField(settings)(raw(TEXTS), None).split("\n") == captions


def test_labels_are_found_by_the_same_paths_and_steps_can_be_compared() -> None:
    marks = {"marks": [{"by": "a", "cls": 3}, {"by": "b", "cls": 5}]}
    assert LabelField("json:marks[by=b].cls")(raw(marks), None) == "5"
    assert LabelsField("json:marks.*.cls")(raw(marks), None) == '["3", "5"]'
    with pytest.raises(Dropped, match="no_label: a list"):
        LabelField("json:marks.*.cls")(raw(marks), None)
    assert parse_path("a[b.c=d].*") in {("a", Each(("b", "c"), "d"), Each())}
