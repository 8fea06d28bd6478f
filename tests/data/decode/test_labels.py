"""Targets of evaluators: one label, several labels, all captions, and their ids."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from clipstream.data.decode.labels import (
    NO_CAPTION,
    CaptionsEncoder,
    CaptionsField,
    LabelEncoder,
    LabelField,
    LabelsEncoder,
    LabelsField,
)
from clipstream.data.settings import CaptionSettings
from clipstream.errors import DataError, Dropped
from tests.support.pictures import ByteTokenizer


def raw(**members: Any) -> dict[str, Any]:
    return {"__key__": "0", "__url__": "a.tar", **members}


def array(values: Any, dtype: type) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values, dtype=dtype))
    return out.getvalue()


def outcome(field: Any, members: dict[str, Any]) -> str:
    """What a field gives, or why it drops the sample."""
    try:
        return str(field(raw(**members), None))
    except Dropped as drop:
        return drop.reason


@pytest.mark.parametrize(
    ("label", "members", "expected"),
    [
        ("cls", {"cls": b" 3\n"}, "3"),
        ("CLS;label", {"label": "tabby cat"}, "tabby cat"),
        ("json:a.class", {"json": b'{"a": {"class": 4}}'}, "4"),
        ("json:a", {"json": b'{"a": true}'}, "true"),
        ("json:a", {"json": b'{"a": [4]}'}, "4"),
        ("json:a", {"json": b'{"a": NaN}'}, "no_label"),
        *(("cls", {"cls": value}, "3") for value in (3, 3.0, "3", np.int64(3), np.float32(3), b"b'3'", b'"3"', b"[3]")),
        *(("cls", {"cls": value}, "no_label") for value in (b"nan", b"-1", -1.0, "-1.0", "-100")),
        ("cls", {"cls": b"-2"}, "-2"),
        ("npy", {"npy": array(3, np.int64)}, "3"),
        ("json:a", {"json": b'{"a": 1.5}'}, "no_label"),
        ("json:a", {}, "no_label"),
        ("cls", {}, "no_label"),
    ],
)
def test_labels(label: str, members: dict[str, Any], expected: str) -> None:
    assert outcome(LabelField(label), members) == expected
    with pytest.raises(Dropped, match=r"no_label: .*labels: list"):  # what takes several
        LabelField("json:a")(raw(json=b'{"a": ["cat", "red"]}'), None)


@pytest.mark.parametrize(
    ("label", "members", "expected"),
    [
        ("json:a", {"json": b'{"a": [0, "cat", 2]}'}, ["0", "cat", "2"]),
        ("json:a", {"json": b'{"a": "cat"}'}, ["cat"]),
        ("json:a", {"json": b'{"a": []}'}, []),
        ("json:a", {"json": b'{"a": [true, false, 1.0]}'}, [1, 0, 1]),
        ("json:a", {"json": b'{"a": [0.5]}'}, "no_label"),
        ("json:a", {"json": b'{"b": []}'}, "no_label"),
        ("cls", {"cls": b"3\n tabby cat \n\n"}, ["3", "tabby cat"]),
        ("cls", {"cls": b'[3, "dog"]'}, ["3", "dog"]),
        ("cls", {"cls": b"[3,"}, "json_invalid"),
        ("cls", {"cls": b""}, []),
        ("cls", {}, "no_label"),
        ("npy", {"npy": array([0, 1, 1], np.int64)}, ["0", "1", "1"]),
        ("npy", {"npy": array([0, 1], np.float32)}, [0, 1]),
        ("npy", {"npy": array([True, False], np.bool_)}, [1, 0]),
        ("npy", {"npy": array([1, 2, 3], np.int64)[:40]}, "no_label"),
    ],
)
def test_several_labels(label: str, members: dict[str, Any], expected: list[Any] | str) -> None:
    found = outcome(LabelsField(label), members)
    assert found == expected or json.loads(found) == expected


def test_labels_become_class_numbers() -> None:
    encoder = LabelEncoder(["tabby cat", "Dog", "crane", "crane", "1"])
    ids = encoder.encode(["0", " DOG", "1", "Tabby Cat", "3"])
    assert ids.tolist() == [[0], [1], [1], [0], [3]] and ids.dtype == np.int32
    assert encoder.encode([]).shape == (0, 1) and encoder.decode([2]) == "crane"
    for label, why in [("5", "no class"), ("-1", "no class"), ("cat", "no class"), ("crane", "the name of 2 classes")]:
        with pytest.raises(DataError, match=f"'{label}' is {why}"):
            encoder.index(label)
    assert LabelEncoder(["false", "3.0", "x", "y"]).index("3.0") == 1, "a name comes first"
    assert [LabelEncoder(["fake", "real"]).index(x) for x in ("true", "False")] == [1, 0]
    with pytest.raises(DataError, match="'cat' is not a whole number: set the evaluator's classes"):
        LabelEncoder(None).encode(["cat"])


def test_all_forms_of_a_number_are_one_label() -> None:
    classes = ["a", "b", "c", "d"]
    for form in ("3", "3.0", " 3\n", "03", "3.", "3e0", "3.000000000000000000e+00", "+3"):
        assert LabelEncoder(classes).index(form) == int(LabelEncoder(None).encode([form])[0, 0]) == 3
    for wrong in ("3.5", "4.0", "-1.0", "1e400", "inf"):
        with pytest.raises(DataError):
            LabelEncoder(classes).index(wrong)


def test_several_labels_become_zeros_and_ones() -> None:
    classes = ["cat", "dog", "eel"]
    lists = LabelsEncoder(classes, multi_hot=False)
    ids = lists.encode(['["0", "eel"]', "[]", '["dog", "1"]'])
    assert ids.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]] and ids.dtype == np.int32
    assert lists.decode(ids[0].tolist()) == "cat, eel"
    with pytest.raises(DataError, match="'fox' is no class"):
        lists.encode(['["fox"]'])
    hot = LabelsEncoder(classes, multi_hot=True)
    assert hot.encode(['["0", "1.0", "true"]', "[1, 0, 0]"]).tolist() == [[0, 1, 1], [1, 0, 0]]
    for wrong in ("[1, 0]", '["0", "2", "1"]'):
        with pytest.raises(DataError, match="not a list of 0 or 1 for each of the 3 classes"):
            hot.encode([wrong])


@pytest.mark.parametrize(
    ("settings", "members", "expected"),
    [
        ({}, {"txt": b" a cat\r\n\nthe cat \n"}, "a cat\nthe cat"),
        ({}, {"txt": b" \n "}, "empty_caption"),
        ({}, {}, "no_caption"),
        ({"type": "json", "path": "t"}, {"json": b'{"t": ["a", " b\\nc ", "", 3]}'}, "a\nb c"),
        ({"type": "json", "path": ["x", "t"]}, {"json": b'{"t": "a"}'}, "a"),
        ({"type": "json", "path": "t", "fallback": "txt"}, {"json": b"{}", "txt": b"a\nb"}, "a\nb"),
        ({"type": "json", "path": "t"}, {"json": b'{"t": []}'}, "no_caption"),
        ({"type": "json", "path": "t"}, {"json": b'{"t": ["a", "\\ud800"]}'}, "a"),
        ({"type": "json", "path": "t"}, {"json": b'{"t": ["", "\\ud800"]}'}, "caption_not_utf8"),
        ({"type": f"{__name__}:Own"}, {"txt": b"x"}, "one\ntwo"),
    ],
)
def test_all_captions(settings: dict[str, Any], members: dict[str, Any], expected: str) -> None:
    assert outcome(CaptionsField(CaptionSettings.model_validate(settings)), members) == expected


class Own:
    """A user's extractor that gives several lines."""

    def __init__(self, settings: CaptionSettings) -> None:
        self.members = ("txt",)

    def __call__(self, sample: Any, rng: Any) -> str:
        return "one\ntwo"


def test_the_ids_of_all_captions() -> None:
    encoder = CaptionsEncoder(ByteTokenizer(), 3)
    assert encoder.context_length == 48
    ids = encoder.encode(["a\nbc", "d"])
    assert ids.dtype == np.int32 and ids.shape == (2, 48)
    places = ids.reshape(2, 3, 16)
    assert np.array_equal(places[0, :2], ByteTokenizer().encode(["a", "bc"]))
    assert np.array_equal(places[1, :1], ByteTokenizer().encode(["d"]))
    assert (places[0, 2] == NO_CAPTION).all() and (places[1, 1:] == NO_CAPTION).all()
    assert encoder.decode(ids[1].tolist()) == "d" and encoder.encode([]).shape == (0, 48)
    with pytest.raises(DataError, match="an image has 4 captions, more than 3"):
        encoder.encode(["a\nb\nc\nd"])
