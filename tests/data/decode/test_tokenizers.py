"""Token ids equal open_clip's for every kind of tokenizer; errors name the files."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from clipstream.data.decode import tokenizers
from clipstream.data.decode.tokenizers import (
    BpeTokenizer,
    HuggingFaceTokenizer,
    OpenClipTokenizer,
    build_tokenizer,
    readable,
    wrap,
)
from clipstream.data.settings import TokenizerSettings
from clipstream.errors import SettingsError
from tests.support.hubtree import write_code
from tests.support.pictures import ByteTokenizer
from tests.support.ranks import TIMEOUT

TEXTS = [
    "a photo of a cat",
    "",
    "  Two\tTABBY   cats, sitting_down &amp; purring!\r\nand <b>more</b>  ",
    "ein Käfer fährt Ã¼ber die Straße … “quoted” ﬁn",
    "人工知能は新しい電気だ 🐼🐼 \x1b[31mred\x1b[0m don't we'll",
    "<start_of_text> inside <end_of_text> 1234567 $$$ ---",
    "every word " * 100,
    "Long, don't you think? " * 100,
]


@pytest.fixture(scope="module")
def bpe() -> SimpleTokenizer:
    return SimpleTokenizer()


def write_tokenizer(folder: Path, *, pad: bool = True, normalizer: Any = None, splitter: Any = None) -> Path:
    """A small tokenizer in the Hub's file format, its end token also its separator."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=True)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "sep_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"pad_token": "<pad>"} if pad else {})))
    (folder / "config.json").write_text("{}")
    return folder


LOAD = """
import os, socket, sys
from clipstream.data.settings import TokenizerSettings
from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.errors import SettingsError
from clipstream.models.settings import ModelSettings
from clipstream.models.build import build_towers
def refuse(*args): raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = refuse
def build(place, trust=False, **named):
    chosen = TokenizerSettings.model_validate({**named, "trust_remote_code": trust})
    try:
        towers = None
        if place:
            if named["type"] == "path":
                print(build_tokenizer(chosen, None, 8).encode(["a photo"]).shape)
            model = ModelSettings(name=f"{place}/model.json")
            towers = build_towers(model, seed=0, tokenizer=chosen).open_clip_tokenizer()
        print(build_tokenizer(chosen, towers, 16 if not place else 8).encode(["a cat"])[0].tolist())
    except SettingsError as error:
        print(str(error).replace(chr(10), " "))
    if place:
        print("has run" if os.path.exists(f"{place}/ran") else "has not run")
path, own, tower = sys.argv[1:]
for trust, place in ((False, path), (False, own), (False, tower), (True, path), (True, own)):
    named = {"type": "path", "name": f"{place}/tokenizer"} if place == path else {"type": "model"}
    build(place, trust, **named)
for name in ("org/name", "org/other"):
    build(None, type="hub", name=name)
"""


def place_with_code(place: Path) -> Path:
    """A folder with a model and a tokenizer that has Python code of its own, which leaves a file when it is run."""
    folder = write_tokenizer(place / "tokenizer")
    write_code(folder, place / "ran")
    # What the model's configuration says must not count: it comes from where the code does.
    text_cfg = {"context_length": 8, "vocab_size": 400, "width": 16, "heads": 2, "layers": 1}
    text_cfg |= {"hf_tokenizer_name": str(folder), "tokenizer_kwargs": {"trust_remote_code": True}}
    if place.name == "tower":  # the text tower's folder brings the code
        (folder / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}')
        text_cfg |= {"hf_model_name": str(folder), "hf_model_pretrained": False}
    vision_cfg = {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8}
    (place / "model.json").write_text(json.dumps({"embed_dim": 8, "vision_cfg": vision_cfg, "text_cfg": text_cfg}))
    return place


def test_own_code_is_run_only_where_it_is_allowed_and_the_hubs_cache_is_enough_without_a_network(
    tmp_path: Path, folder: Path
) -> None:
    path, model, tower = (place_with_code(tmp_path / kind) for kind in ("path", "model", "tower"))
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    write_tokenizer(repo / "snapshots" / ("a" * 40))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, (path, model, tower))],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        input="y\n" * 9, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[1:6:2] == ["has not run"] * 3
    for said in (told[0], told[2]):
        assert "Python code of its own" in said and "--tokenizer.trust-remote-code true" in said
    words = f"the text tower in {tower}/tokenizer: it has custom Python code (auto_map), which is never run"
    assert words in told[4] and (told[6], told[8], told[10]) == ("(1, 8)", "has run", "has run")
    found, missing = told[11:]
    assert json.loads(found) == HFTokenizer(str(folder))(["a cat"], context_length=16)[0].tolist()
    for word in ("'org/other'", str(tmp_path / "hub/models--org--other"), "HF_HUB_OFFLINE", "hf download org/other"):
        assert word in missing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def choose(**values: Any) -> TokenizerSettings:
    return TokenizerSettings.model_validate(values)


@pytest.mark.parametrize(("length", "clean"), [(1, "lower"), (2, "canonicalize"), (8, "whitespace"), (77, "lower")])
def test_bpe_is_open_clips(length: int, clean: str) -> None:
    theirs = SimpleTokenizer(clean=clean)
    ours = pickle.loads(pickle.dumps(wrap(SimpleTokenizer(clean=clean), length)))
    assert type(ours) is BpeTokenizer and ours.vocab_size == 49408
    ids = ours.encode(TEXTS)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, theirs(TEXTS, context_length=length).numpy())
    assert ours.encode([]).shape == (0, length)
    assert ours.decode(wrap(theirs, 77).encode(["a tabby cat"])[0]) == "a tabby cat"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80))
def test_bpe_is_open_clips_on_any_text(bpe: SimpleTokenizer, caption: str) -> None:
    np.testing.assert_array_equal(wrap(bpe, 20).encode([caption]), bpe([caption], context_length=20).numpy())


def test_the_cache_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "CACHED_WORDS", 50)
    theirs = SimpleTokenizer()
    ours = wrap(SimpleTokenizer(), 20)
    assert isinstance(ours, BpeTokenizer)
    for number in range(30):
        texts = [f"{chr(97 + number % 26)}{chr(98 + i)}word <start_of_text>" for i in range(10)]
        np.testing.assert_array_equal(ours.encode(texts), theirs(texts, context_length=20).numpy())
        assert len(ours._bpe.words) < 60


@pytest.mark.parametrize(
    "options", [{}, {"clean": "canonicalize"}, {"clean": "lower", "strip_sep_token": True}, {"tokenizer_mode": "clips"}]
)
def test_a_hugging_face_tokenizer_is_open_clips(folder: Path, options: dict[str, Any]) -> None:
    def make() -> HFTokenizer:
        made = HFTokenizer(str(folder), **options)
        if options.get("tokenizer_mode"):  # this mode puts these tokens in itself
            made.tokenizer.bos_token = made.tokenizer.cls_token = "</s>"
        return made

    for length in (5, 24):
        ours = wrap(make(), length)
        assert type(ours) is (OpenClipTokenizer if "tokenizer_mode" in options else HuggingFaceTokenizer)
        np.testing.assert_array_equal(ours.encode(TEXTS), make()(TEXTS, context_length=length).numpy())
        assert ours.encode([]).shape == (0, length)
    assert ours.decode(ours.encode(["a cat"])[0]).strip() == "a cat"


PARTS = ("a", "cat", "ΑΣ", "Ã¼ber", "&amp;", "&am", "p;", "fish&#10;es", "<b>", "!?", "_", "1234", "don't", "</s>")
WORDS = st.sampled_from([*PARTS, "😂😂", "É", "ﬁ"])
SPACES = st.sampled_from(["", " ", "\n", "  ", "\r\n", "\t", "\x85", "\u2028", " \u0308"])
LONG_TEXTS = st.lists(st.tuples(WORDS, SPACES), max_size=60).map(lambda parts: "".join(word + by for word, by in parts))
RUNS = st.lists(st.sampled_from(["a", "b", "ha", "😂", "é", "lol", "the"]), min_size=30, max_size=150).map("".join)


CLEANINGS = st.sampled_from(["lower", "whitespace", "canonicalize"])


@settings(max_examples=150, deadline=None)
@given(text=LONG_TEXTS | RUNS, clean=CLEANINGS, length=st.integers(2, 20))
def test_long_texts_are_cut_where_their_ids_stay(text: str, clean: str, length: int) -> None:
    """Of long words a beginning is tried as well: no word of these is in the cache of open_clip's own class."""
    theirs = _bpe_of(clean)
    with patch.multiple(tokenizers, _FIRST_PART=8, _LONG=16):
        found = wrap(theirs, length).encode([text])
    theirs.cache.clear()
    theirs.cache |= {theirs.decoder[i]: theirs.decoder[i] for i in theirs.all_special_ids}
    np.testing.assert_array_equal(found, theirs([text], context_length=length).numpy())


def test_the_first_pieces_of_a_long_word_are_those_of_the_word(bpe: SimpleTokenizer) -> None:
    """Of its first 12 letters, from which the places behind begin, the third piece is `di`."""
    word = "disrespectdismakeyourownlaneapprepresentativeparticipatingcworldwaterdaymancrushmonday" * 2
    ours = wrap(bpe, 4)
    assert isinstance(ours, BpeTokenizer)
    assert ours._bpe.first_pieces(word, 3)[:3] == bpe.bpe(word).split(" ")[:3] == ["dis", "respect", "dis"]


@cache
def _bpe_of(clean: str) -> SimpleTokenizer:
    return SimpleTokenizer(clean=clean)


def test_a_long_text_is_read_no_further_than_the_context() -> None:
    read: list[int] = []
    inner = SimpleTokenizer()
    ours = wrap(inner, 77)
    clean = ours._clean._full  # type: ignore[attr-defined]
    ours._clean._full = lambda text: read.append(len(text)) or clean(text)  # type: ignore[attr-defined]
    ours.encode(["a photo of a cät\n" * 100_000])
    assert sum(read) < 10_000
    bpe = inner.bpe
    inner.bpe = lambda word: read.append(len(word)) or bpe(word)
    ours.encode(["abcdefghij" * 200_000])
    assert sum(read) < 100_000 and len(max(inner.cache, key=len)) < 100


NORMALIZERS: dict[str, Any] = {
    "bert": normalizers.BertNormalizer(),
    "characters": normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[!\]\?_]"), ""), normalizers.Replace(Regex(r"\s+"), " ")]
    ),
    "runs": normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")]),
}
SPLITTERS: dict[str, Any] = {
    "bert": pre_tokenizers.BertPreTokenizer(),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    "whole": pre_tokenizers.Metaspace(split=False),  # one word: it is not cut
}


@pytest.mark.parametrize(
    ("normalizer", "splitter"),
    [("bert", "bert"), ("characters", "metaspace"), ("runs", "metaspace"), ("runs", "whole"), ("characters", "bytes")],
)
def test_long_texts_have_the_ids_of_hugging_faces_tokenizers(tmp_path: Path, normalizer: str, splitter: str) -> None:
    write_tokenizer(tmp_path, normalizer=NORMALIZERS[normalizer], splitter=SPLITTERS[splitter])
    theirs = HFTokenizer(str(tmp_path))
    ours = wrap(theirs, 12)
    assert ours._cuts is (splitter != "whole")  # type: ignore[attr-defined]

    @settings(max_examples=60, deadline=None)
    @given(text=LONG_TEXTS, longer=st.booleans())
    def check(text: str, longer: bool) -> None:
        with patch.object(tokenizers, "_FIRST_PART", 8):
            text = text * 40 if longer else text
            np.testing.assert_array_equal(ours.encode([text]), theirs([text], context_length=12).numpy())

    check()


def check_ids(tokenizer: tokenizers.Tokenizer) -> None:
    """The ids of a text are int32, within the vocabulary, and depend on that text alone."""
    ids = tokenizer.encode(TEXTS)
    assert ids.dtype == np.int32 and ids.shape == (len(TEXTS), tokenizer.context_length)
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    np.testing.assert_array_equal(np.concatenate([tokenizer.encode([text]) for text in TEXTS]), ids)


def test_the_models_tokenizer_is_wrapped(bpe: SimpleTokenizer) -> None:
    check_ids(build_tokenizer(choose(), bpe, 77))
    assert build_tokenizer(choose(context_length=12), bpe, 77).encode(TEXTS).shape == (len(TEXTS), 12)
    with pytest.raises(SettingsError, match=r"tokenizer\.context_length 99 exceeds the model's 77"):
        build_tokenizer(choose(context_length=99), bpe, 77)


def test_a_tokenizer_in_a_folder(folder: Path, bpe: SimpleTokenizer) -> None:
    canonical = HFTokenizer(str(folder), clean="canonicalize")  # the model's own reading of the same files is kept
    for name, models_own, theirs in (
        (folder, bpe, HFTokenizer(str(folder))),
        (folder / "tokenizer.json", bpe, HFTokenizer(str(folder))),
        (folder, canonical, canonical),
    ):
        tokenizer = build_tokenizer(choose(type="path", name=str(name)), models_own, 16)
        check_ids(tokenizer)
        np.testing.assert_array_equal(tokenizer.encode(TEXTS), theirs(TEXTS, context_length=16).numpy())


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path, bpe: SimpleTokenizer) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    write_tokenizer(tmp_path / "no padding", pad=False)
    for name, said in (
        ("none at all", r"none at all.* does not exist"),
        ("empty", r"no tokenizer in .*: none of tokenizer\.json"),
        ("broken", "cannot load the tokenizer in"),
        ("no padding", "padding token"),
    ):
        with pytest.raises(SettingsError, match=said):
            build_tokenizer(choose(type="path", name=str(tmp_path / name)), bpe, 16)


class Letters(ByteTokenizer):
    """A user's tokenizer."""

    class Settings(TokenizerSettings):
        type: str = f"{__name__}:Letters"
        fault: str = ""

    def __init__(self, settings: Settings) -> None:
        self.fault = settings.fault

    def encode(self, texts: Sequence[str]) -> Any:
        ids = super().encode(texts)
        return {"tensor": torch.from_numpy(ids), "wide": ids.astype(np.int64), "high": ids + 256}.get(self.fault, ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i).decode()  # raises where a letter is cut


def test_a_users_tokenizer(bpe: SimpleTokenizer) -> None:
    own = build_tokenizer(choose(type=f"{__name__}:Letters"), bpe, 16)
    check_ids(own)
    assert own.decode(own.encode(["a cat"])[0]) == "a cat"
    assert (readable(own, [97, 0]), readable(own, [97, 195, 0])) == ("a", "97 195 0")  # the second is cut in a letter
    faults = {"tensor": "not an array int32", "wide": "int64", "high": "vocab_size 256"}
    for fault, message in faults.items():
        with pytest.raises(SettingsError, match=message):
            build_tokenizer(choose(type=f"{__name__}:Letters", fault=fault), bpe, 16)
