"""Images, captions and labels of raw samples, users' own extractors, and the targets of evaluators with their ids."""

from __future__ import annotations

import io
import json
import pickle
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from clipstream.data.decode.captions import (
    LabelField,
    build_caption,
    build_transform,
    candidates,
    draw_caption,
    draw_captions,
    draw_several,
    image_bytes,
    json_object,
    split_keys,
)
from clipstream.data.decode.class_names import prompt_templates
from clipstream.data.decode.labels import (
    NO_CAPTION,
    CaptionsEncoder,
    CaptionsField,
    LabelEncoder,
    LabelsEncoder,
    LabelsField,
)
from clipstream.data.order.rng import SampleRNG, SampleRNGs, mix
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import CSV_CAPTION, CaptionSettings, JsonCaption, SourceSettings, TextCaption
from clipstream.errors import DataError, Dropped, SettingsError
from tests.support.pictures import ByteTokenizer


def raw(**members: Any) -> dict[str, Any]:
    return {"__key__": "0", "__url__": "a.tar", **members}


def caption(settings: dict[str, Any], sample: Mapping[str, Any], rng: SampleRNG | None = None) -> str:
    """The caption, or 'dropped: REASON'. The extractor goes through pickle on its way."""
    extractor = pickle.loads(pickle.dumps(build_caption(CaptionSettings.model_validate(settings))))
    try:
        return extractor(sample, rng)
    except Dropped as drop:
        return f"dropped: {drop.reason}"


def from_json(value: Any, path: str | list[str], rng: SampleRNG | None = None, **more: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return caption({"type": "json", "path": path, **more}, raw(json=data, txt=b"the text"), rng)


def test_the_first_present_image_is_taken_whatever_its_case() -> None:
    assert image_bytes(raw(png=b"1", jpg=b"2"), "jpg;png") == b"2"
    assert image_bytes(raw(png=b"1", jpg=b"2"), "webp, PNG") == b"1"
    assert image_bytes(raw(JPG=memoryview(b"3")), "jpg") == b"3"
    assert split_keys("jpg;PNG, .webp;;") == ("jpg", "png", "webp")
    with pytest.raises(Dropped, match=r"no_image: no member \.jpg or \.png \(--image-key\): it has \."):
        image_bytes(raw(txt=b""), "jpg;png")
    with pytest.raises(Dropped, match="no_image: list"):
        image_bytes(raw(jpg=[1]), "jpg")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"txt": b" a cat\n"}, "a cat"),
        ({"txt": "\ufeffein Käfer".encode()}, "ein Käfer"),
        ({"TXT": "already text "}, "already text"),
        ({"txt": b" \n"}, "dropped: empty_caption"),
        *(({"txt": "\ufeffein Käfer\n".encode(form)}, "ein Käfer") for form in ("utf-16-le", "utf-16-be")),
        ({"txt": b"\xff\xfe\xff"}, "dropped: caption_not_utf8"),
        ({"txt": repr([b"abc", b"\xff"]).encode()}, repr([b"abc", b"\xff"])),
        ({"json": b"{}"}, "dropped: no_caption"),
        *(({"txt": text.encode()}, "a cat") for text in (
            '["a cat", "a cat"]', '[null, " a cat "]', "['a cat', 'a cat']", "['a cat' 'a cat']", "('a cat',)",
            "array(['a cat',\n 'a cat'], dtype=object)", '"[\\"a cat\\"]"', "b'a cat'",
        )),
        *(({"txt": text.encode()}, "dropped: no_caption") for text in (
            "[]", "[1, 2]", '{"en": "a cat"}', "{'en': 'a cat'}", '[{"en": "a cat"}]', '"{\\"en\\": \\"a cat\\"}"',
        )),
        ({"txt": b"{'cat', 'a cat', 'b'}"}, "a cat"),  # a set has no order of its own
        ({"txt": repr({"path": None, "bytes": b"\xff\xd8\xff"}).encode()}, "dropped: no_caption"),  # of an image
        # What JSON lacks: Python 3.13's ast.literal_eval reads all of these.
        *(({"txt": text.encode()}, text) for text in (
            "{'a': b'x'}", "[...]", "[1j]", "['a', {'b': ...}]", "{(1, 2): 'x'}", "{b'a': 'b'}", f"[0x{'f' * 9000}]",
        )),
        *(({"txt": text.encode()}, text) for text in ("[a cat]", "[1] a cat", '"a" cat', "{", "(a cat)", "b'a")),
    ],
)  # fmt: skip
def test_text_captions(members: dict[str, Any], expected: str) -> None:
    assert caption({"type": "text", "key": "Txt"}, raw(**members)) == expected


@pytest.mark.parametrize(
    ("value", "path", "expected"),
    [
        ({"caption": {"en": " panda "}}, "caption.en", "panda"),
        ({"caption.en": "panda"}, "caption.en", "panda"),
        ({"a": {"b.c": {"d": "deep"}}}, "a.b.c.d", "deep"),
        ({"texts": [{"t": "0"}, {"t": "one"}]}, "texts.1.t", "one"),
        ({"texts": ["a", "b"]}, "texts.5", "dropped: no_caption"),
        ({"texts": [3, "", "b"]}, "texts", "b"),
        ({"a": None, "b": 7, "c": "see"}, ["a", "b", "c"], "see"),
        ({"a": 7}, "a", "dropped: no_caption"),
        ({"a": {}}, "a.b", "dropped: no_caption"),
        ({"a": " "}, "a", "dropped: empty_caption"),
        ({"a": "half \ud83d"}, "a", "dropped: caption_not_utf8"),
        ([{"caption": "a"}], "*.caption", "a"),
        ([], "0", "dropped: json_not_object"),
        ({"a": '{"b": "[\\"c\\"]"}'}, "a.b", "c"),
        ({"a": "{'b': ['c d']}"}, "A.B", "c d"),
        ({"a": "['c d' 'c d']"}, "a", "c d"),
        ({"a": '[{"lang": "de", "t": "ein"}, {"lang": "en", "t": "one"}]'}, "a[lang=en].t", "one"),
        (json.dumps(json.dumps({"a": "twice"})).encode(), "a", "twice"),
        (b"{'a': 'of Python'}", "a", "of Python"),
        (b"{'a': ('of', 'a tuple')}", "a.1", "a tuple"),
        ({"a": "[{'b': 1j}]"}, "a", "[{'b': 1j}]"),
        ({"a": "[{'b': 1j}]"}, "a.0.b", "dropped: no_caption"),
        ({"a": '{"b": "c"}'}, "a", "dropped: no_caption"),
        ({"title": " A cup ", "brand": "Acme", "n": 3.0}, "{Title} by {brand} ({n})", "A cup by Acme (3)"),
        ({"a": {"b": "cup"}, "tags": ["red", " ", "wall", 7]}, "{a.b}: {tags}", "cup: red, wall, 7"),
        ({"tags": "['red', 'wall']"}, "{tags| / }", "red / wall"),
        ({"t": [{"n": "x"}, {"n": "y"}, {}]}, "{t.*.n|; }", "x; y"),
        ({"t": [{"l": "en", "n": "x"}, {"l": "de", "n": "y"}]}, "{{a}} {t[l=de].n} {t.0.n} \\{", "{a} y x {"),
        ({"a": "b"}, ["{missing} of {a}", "{a}!"], "b!"),
        ({"a": "b"}, ["{missing} of {a}", "a"], "b"),
        *(
            ({"a": value}, "of {a}", "dropped: no_caption")
            for value in ("", " ", None, [], [None], {"b": "c"}, True, {})
        ),
        (b'{"a": NaN}', "of {a}", "dropped: no_caption"),
        ({"a{b}": "x"}, r"a\{b\}", "x"),
        (b"{", "a", "dropped: json_invalid"),
        (b'{"a": "\xff"}', "a", "dropped: json_invalid"),
        (b"[" * 100_000, "a", "dropped: json_invalid"),
    ],
)
def test_json_captions(value: Any, path: str | list[str], expected: str) -> None:
    assert from_json(value, path) == from_json(value, path, SampleRNG(1)) == expected


def test_the_text_member_stands_in_where_no_path_has_a_caption() -> None:
    for value in ({"b": "x"}, {"a": ""}, {"a": 3}, b"{", [1]):
        assert from_json(value, "a", fallback="txt") == "the text"
        assert from_json(value, "a", fallback="missing").startswith("dropped: ")
    assert caption({"type": "json", "path": "a", "fallback": "txt"}, raw(txt=b"alone")) == "alone"


def test_weights_draw_among_the_paths_that_have_text() -> None:
    value = {"long": "L", "short": "S", "never": "N"}
    options = {"path": ["short", "long", "never"], "weights": [1, 3, 0]}
    drawn = Counter(from_json(value, rng=SampleRNG(key), **options) for key in range(1000))
    assert set(drawn) == {"L", "S"} and 0.7 < drawn["L"] / 1000 < 0.8
    assert from_json(value, **options) == "S"
    assert {from_json({"long": "L"}, rng=SampleRNG(key), **options) for key in range(9)} == {"L"}
    for rng in (SampleRNG(1), None):  # weight 0 is used where no other has text
        assert from_json({"never": "N", "never2": "N2"}, rng=rng, **options) == "N"
        assert from_json({"never": "N", "long": "L"}, rng=rng, **options) == "L"
    with pytest.raises(ValueError, match="1 weights for 2 paths"):
        from_json(value, ["a", "b"], weights=[1])


MEMBER = json.dumps({"long": [" L ", "", "\ud800", "M"], "short": "S", "never": "N"}).encode()


@pytest.mark.parametrize(
    ("own", "members", "expected"),
    [
        ({"weights": [1, 3, 0, 1]}, {"json": MEMBER}, [["S"], ["L", "M"], [], []]),
        ({"weights": [1, 1, 0, 0]}, {"json": b'{"never": "N", "absent": "A"}'}, [[], [], ["N"], []]),
        ({}, {"json": MEMBER}, [["S"], [], [], []]),
        ({"weights": [0, 1, 1, 1], "fallback": "txt"}, {"json": b"{}", "txt": b"t"}, [["t"], [], [], []]),
        ({}, {"json": b'{"long": "\\ud800"}'}, "caption_not_utf8"),
        ({"type": "text"}, {"txt": b" a \n"}, [["a"]]),
        ({"type": "text"}, {"txt": b"a\n\nb\n"}, [["a\n\nb"]]),
        ({"type": "text", "lines": "first"}, {"txt": b"a\n\nb\n"}, [["a"]]),
        ({"type": "text", "lines": "random"}, {"txt": b"a\n\nb\n"}, [["a", "b"]]),
        ({"type": f"{__name__}:Own", "prefix": "a "}, {"txt": b"cat"}, [["a cat"]]),
        ({"type": f"{__name__}:Several"}, {"txt": b"a;b"}, [["a", "b"]]),
        ({"type": f"{__name__}:Several"}, {}, "extractor_error"),
    ],
)
def test_candidates_are_all_that_training_draws(
    own: dict[str, Any], members: dict[str, Any], expected: list[list[str]] | str
) -> None:
    settings = own if "type" in own else {"type": "json", "path": ["short", "long", "never", "absent"], **own}
    extractor = build_caption(CaptionSettings.model_validate(settings))
    if isinstance(expected, list):
        assert candidates(extractor, raw(**members)) == expected
    else:
        with pytest.raises(Dropped, match=expected):
            candidates(extractor, raw(**members))


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any), min_size=1, max_size=40),
    st.none() | st.lists(st.sampled_from([0.0, 0.1, 0.7, 3.0]), min_size=3, max_size=3).filter(any),
    st.integers(0, 2**64 - 1),
)
def test_captions_of_many_samples_are_drawn_as_those_of_one(
    counts: list[list[int]], weights: list[float] | None, key: int
) -> None:
    extractor = build_caption(JsonCaption(path=["0", "1", "2"], weights=weights))
    texts = [[[f"{path} {i}" for i in range(n)] for path, n in enumerate(row)] for row in counts]
    usable = [row for row in texts if any(row)]
    members = [{"json": json.dumps(dict(zip("012", row, strict=True))).encode()} for row in usable]
    keys = [mix(i, state=key) for i in range(len(usable))]
    # A store holds all candidates, or only those that the settings draw.
    for held in (usable, [candidates(extractor, member) for member in members]):
        drawn = draw_captions(
            np.array([list(map(len, row)) for row in held]), weights, SampleRNGs(np.array(keys, dtype=np.uint64))
        )
        expected = [extractor(member, SampleRNG(k)) for member, k in zip(members, keys, strict=True)]
        assert [list(chain(*row))[i] for row, i in zip(held, drawn.tolist(), strict=True)] == expected


def test_several_texts_of_a_sample_are_different_and_follow_from_its_random_numbers() -> None:
    texts = {
        "en": ["a red bird", "a bird", "a red bird", "the robin"],
        "wrong": ["a blue bird", "a bird", "no bird", ""],
    }
    sample = {"json": json.dumps(texts).encode()}
    given = {"type": "json", "path": "en.*", "per_image": 2, "negatives": "wrong"}
    extractor = build_caption(CaptionSettings.model_validate(given))
    drawn = [draw_several(extractor, sample, SampleRNG(key)) for key in range(200)]
    assert drawn == [draw_several(extractor, sample, SampleRNG(key)) for key in range(200)]
    assert {frozenset(captions) for captions, *_ in drawn} == {
        frozenset(pair) for pair in (("a red bird", "a bird"), ("a red bird", "the robin"), ("a bird", "the robin"))
    }
    assert {one.negative for one in drawn} == {"a blue bird", "no bird"}  # which equal no caption
    firsts = [build_caption(JsonCaption(path="en.*"))(sample, SampleRNG(key)) for key in range(200)]
    assert [one.captions[0] for one in drawn] == firsts
    many = build_caption(CaptionSettings.model_validate(given | {"per_image": 9, "negatives": "absent"}))
    captions, negative, _ = draw_several(many, sample, SampleRNG(1))
    assert sorted(captions) == ["a bird", "a red bird", "the robin"] and negative is None
    # Neither a JSON member that the fallback stands in for nor a text that is none costs the sample.
    other = build_caption(CaptionSettings.model_validate(given | {"fallback": "txt", "per_image": 1}))
    assert draw_several(other, {"json": b"[", "txt": b"a bird"}, SampleRNG(1)) == (["a bird"], None, None)
    sample = {"json": json.dumps(texts | {"wrong": ["\ud800", " a cat "]}).encode()}
    assert {draw_several(other, sample, SampleRNG(key))[1] for key in range(20)} == {"a cat"}


def test_what_a_step_draws_is_no_other_caption() -> None:
    several = {"per_image": 2, "negatives": "swap", "short": "sentence"}
    plain, drawing = (SourceSettings.model_validate({"shards": "a.csv", "caption": one}) for one in ({}, several))
    assert isinstance(drawing.caption, TextCaption) and drawing.caption.key == CSV_CAPTION
    assert plain.reading == drawing.reading  # so that stores from before these settings fit
    assert plain.reading["caption"] == {"type": "text", "key": CSV_CAPTION}
    data = DataSettings.model_validate({"sources": {"a": plain, "b": drawing}})
    assert data.texts == 4 and data.model_copy(update={"sources": {"a": plain}}).texts == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a white horse eats green grass", None),
        ("the dog and the cat", {"dog the and the cat", "and dog the the cat", "the dog and cat the"}),
        ("Dog dog", set()),
        ("grass", set()),
    ],
)
def test_a_swapped_caption_has_two_words_in_each_others_place(text: str, expected: set[str] | None) -> None:
    extractor = build_caption(CaptionSettings.model_validate({"type": "text", "negatives": "swap"}))
    found = {draw_several(extractor, {"txt": text.encode()}, SampleRNG(key))[1] for key in range(300)}
    if expected is None:  # of four letters or more
        assert len(found) == 10 and all(one and one.split()[0] == "a" for one in found)
        assert "a green horse eats white grass" in found
    else:
        assert expected <= found if expected else found == {None}
    with pytest.raises(ValueError, match=r"a text member has no paths: write swap"):
        CaptionSettings.model_validate({"type": "text", "negatives": "wrong"})


class Several:
    """A user's extractor that has all captions of a sample."""

    def __init__(self, settings: CaptionSettings) -> None:
        self.members = ("txt",)

    def __call__(self, sample: Mapping[str, Any], rng: SampleRNG | None) -> str:
        texts = self.candidates(sample)
        return texts[0] if rng is None else texts[rng.integer(len(texts))]

    def candidates(self, sample: Mapping[str, Any]) -> list[str]:
        return str(sample["txt"], "utf-8").split(";")


class Own:
    """A user's extractor that does what the sample's text says."""

    class Settings(CaptionSettings):
        type: str = "tests.data.decode.test_captions:Own"
        prefix: str = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.members = ("TXT",)

    def __call__(self, sample: Mapping[str, Any], rng: SampleRNG | None) -> str:
        text = sample["txt"].decode()
        if text == "drop":
            raise Dropped("my_reason")
        return 3 if text == "number" else self.settings.prefix + text  # type: ignore[return-value]


def test_a_users_extractor() -> None:
    settings = {"type": f"{__name__}:Own", "prefix": "a "}
    extractor = build_caption(CaptionSettings.model_validate(settings))
    assert extractor.members == ("txt",)
    for text, expected in (("cat", "a cat"), ("drop", "dropped: my_reason"), ("number", "dropped: extractor_error")):
        assert caption(settings, raw(txt=text.encode())) == expected
    with pytest.raises(Dropped, match=r"extractor_error: KeyError\('txt'\)"):
        extractor(raw(), None)


def of_text(sample: Mapping[str, Any]) -> str | None:
    """A user's function."""
    return None if sample["txt"] == b"none" else sample["txt"].decode()


def drawn(sample: Mapping[str, Any], rng: SampleRNG | None = None) -> Any:
    """A user's function of a generator."""
    return 3 if rng is None else f"{sample['txt'].decode()} {rng.integer(1)}"


def odd(a: int, b: int, c: int) -> str:
    """A function that is no caption extractor."""
    return f"{a}{b}{c}"


def test_a_users_function() -> None:
    plain = build_caption(CaptionSettings(type=f"{__name__}:of_text"))
    assert plain.members is None and plain(raw(txt=b"cat"), SampleRNG(1)) == plain(raw(txt=b"cat"), None) == "cat"
    for content, reason in ((b"none", "no_caption"), (b"\xff", "extractor_error"), (b"", "empty_caption")):
        assert caption({"type": f"{__name__}:of_text"}, raw(txt=content)) == f"dropped: {reason}"
    draws = build_caption(CaptionSettings(type=f"{__name__}:drawn"))
    assert draws(raw(txt=b"cat"), SampleRNG(1)) == "cat 0"
    assert caption({"type": f"{__name__}:drawn"}, raw(txt=b"cat")) == "dropped: extractor_error"
    with pytest.raises(SettingsError, match=r"odd\(.*\).*: expected \(sample\) or \(sample, rng\)"):
        build_caption(CaptionSettings(type=f"{__name__}:odd"))
    with pytest.raises(ValidationError, match="prefix"):  # which only a class of its own settings has
        CaptionSettings.model_validate({"type": f"{__name__}:of_text", "prefix": "a"})


def change(sample: Mapping[str, Any]) -> Any:
    """A user's transform that does what the sample's text says."""
    text = sample["txt"].decode()
    if text == "raise":
        raise ZeroDivisionError("mine")
    return {"none": None, "number": 3}.get(text, {**sample, "TXT": text.upper(), "json": {"a": ["b"]}})


def test_a_users_transform() -> None:
    assert build_transform(None) is None
    transform = pickle.loads(pickle.dumps(build_transform("tests.data.decode.test_captions:change")))
    changed = transform(raw(txt=b"cat"))
    assert changed["TXT"] == "CAT"
    assert caption({"type": "json", "path": "a.0"}, changed) == "b"
    for text, reason in [("none", "transform_none"), ("number", "transform_error"), ("raise", "transform_error")]:
        with pytest.raises(Dropped) as drop:
            transform(raw(txt=text.encode()))
        assert drop.value.reason == reason
    wrong = {f"{__name__}:nothing": "nothing", "nowhere_at_all:x": "nowhere", "pickle:__name__": "function"}
    for path, word in wrong.items():
        with pytest.raises(SettingsError, match=word):
            build_transform(path)


def outcome(parse: Any, text: str | bytes) -> str:
    try:
        return repr(parse(text))
    except (Dropped, ValueError):
        return "refused"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
TEXTS = st.one_of(
    st.builds(lambda value, ascii_only: json.dumps({"a": value}, ensure_ascii=ascii_only), VALUES, st.booleans()),
    st.text('{}[]":,aA\\ud80 e+-.0123truflsnN\n\x00é').map(lambda text: '{"a":' + text),
    st.sampled_from(['{"a":"\\ud800"}', '{"a":1,"a":2}', '{"a":1e400}', '\ufeff{"a":1}', '{"a":-Infinity}']),
)


@example('{"a":"\ud800"}', None)
@given(TEXTS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", None]))
def test_json_is_read_as_python_reads_it(text: str, encoding: str | None) -> None:
    member = text if encoding is None else text.encode(encoding, "surrogatepass")
    assert outcome(json_object, member) == outcome(json.loads, member)


def array(values: Any, dtype: type) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values, dtype=dtype))
    return out.getvalue()


def found_in(field: Any, members: dict[str, Any]) -> str:
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
    assert found_in(LabelField(label), members) == expected
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
    found = found_in(LabelsField(label), members)
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
    named = LabelEncoder(["a", "b", "c", "d"])
    for form in ("3", "3.0", " 3\n", "03", "3.", "3e0", "3.000000000000000000e+00", "+3"):
        assert named.index(form) == LabelEncoder(None).index(form) == 3
    for wrong in ("3.5", "4.0", "-1.0", "1e400", "inf"):
        with pytest.raises(DataError):
            named.index(wrong)


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
        ({"type": f"{__name__}:Own"}, {"txt": b"one\ntwo"}, "one\ntwo"),
    ],
)
def test_all_captions(settings: dict[str, Any], members: dict[str, Any], expected: str) -> None:
    assert found_in(CaptionsField(CaptionSettings.model_validate(settings)), members) == expected


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


def test_a_class_becomes_a_text_of_a_drawn_template() -> None:
    """As `draw_caption` draws among all texts; in evaluation of the first template."""
    make = lambda **more: build_caption(CaptionSettings.model_validate({"type": "label", **more}))  # noqa: E731
    every = [template("polar bear") for template in prompt_templates("imagenet")]
    caption, sample = make(templates="imagenet"), raw(**{"class": b"polar_bear"}, cls=b"3")
    assert candidates(caption, sample) == [every] and caption(sample, None) == every[0]
    drawn = [caption(sample, SampleRNG(mix(n))) for n in range(200)]
    assert drawn == [every[draw_caption([every], None, SampleRNG(mix(n)))] for n in range(200)]
    assert len(set(drawn)) > 60 and set(caption.members or ()) == {"class", "cls"}
    named = make(label="cls", classes=["tench", "red kite", "bulbul"], templates=["a {} bird"])
    labels = {b"1": "red kite", b"Bulbul": "bulbul", "0": "tench", b"Red_kite": "red kite"}
    assert [named(raw(cls=label), None) for label in labels] == [f"a {name} bird" for name in labels.values()]
    for extractor, members, detail in (
        (caption, {"cls": b"3"}, "3 is a number: set the names of the classes with caption.classes"),
        (named, {"cls": b"3"}, "'3' is not one of the 3 classes of caption.classes"),
        (named, {"txt": b"red kite"}, "no member .cls"),
    ):
        with pytest.raises(Dropped, match="no_label") as caught:
            extractor(raw(**members), None)
        assert caught.value.detail == detail
