"""The verb check: content of shards, used and dropped samples, and the flag that reads them."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from clipstream.cli.verbs.check import main
from clipstream.curation.check import look
from clipstream.data.batch import ImageSpec
from clipstream.data.decode.sample_profile import Profile
from clipstream.data.decode.train_transform import TrainTransform
from clipstream.data.order.rng import SampleRNG
from clipstream.data.settings import AugmentSettings
from clipstream.data.source_settings import CaptionSettings, JsonCaption, SourceSettings, TextCaption
from clipstream.errors import Dropped
from tests.support.image_files import save, smooth
from tests.support.tars import write_tar

JPG, PNG = b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n"
EMOJI = {"caption": {"en": "panda face", "alt": ["panda"]}, "category": "Animals", "unified": "1F43C"}


RED = save(Image.new("RGB", (8, 8), "red"))


def profile_of(*samples: dict[str, bytes | str]) -> Profile:
    profile = Profile()
    for sample in samples:
        profile.add({k: v.encode() if isinstance(v, str) else v for k, v in sample.items()})
    return profile


@pytest.mark.parametrize(
    ("sample", "caption", "flags"),
    [
        ({"png": PNG, "json": json.dumps(EMOJI)}, TextCaption(), ["--caption-json caption.en"]),
        ({"png": PNG, "json": json.dumps(EMOJI)}, JsonCaption(path="Caption.EN"), []),
        ({"png": PNG, "txt": "a dog", "json": '{"caption": "a"}'}, TextCaption(key="cap"), ["--caption-key txt"]),
        ({"img": JPG, "cls": "3", "caption.txt": "a dog"}, TextCaption(),
         ["--image-key img", "--caption-key caption.txt"]),
        ({"png": PNG, "json": '{"texts": [{"t": "a b"}, {"t": "c"}], "url": "u"}'}, TextCaption(),
         ["--caption-json 'texts.*.t'"]),
        ({"png": PNG, "json": '{"url": "http://x/a.jpg", "status": "ok", "w": 3}'}, TextCaption(), []),
        ({"png": PNG, "json": '[{"caption": "a red dog"}, {"caption": "a cat"}]'}, TextCaption(),
         ["--caption-json '*.caption'"]),
        ({"png": PNG, "json": '{"caption": "{\\"en\\": \\"a red dog\\"}"}'}, TextCaption(),
         ["--caption-json caption.en"]),
        ({"png": PNG, "txt": '{"en": "a red dog"}'}, TextCaption(),
         ["--data.sources.train.caption '{type: json, key: txt, path: en}'"]),
        ({"png": PNG, "cap": '["a red dog", "a cat"]'}, TextCaption(), ["--caption-key cap"]),
        ({"png": PNG, "json": '{"tags": ["red", "wall", "old house"]}'}, TextCaption(), ["--caption-json '{tags}'"]),
        ({"png": PNG, "json": '{"texts": ["a red wall", "a house", "old"]}'}, TextCaption(), ["--caption-json texts"]),
        ({"png": PNG, "txt": '[{"en": 1}]'}, TextCaption(), []), ({"png": PNG, "ok": "true"}, TextCaption(), []),
    ],
)  # fmt: skip
def test_the_flag_that_reads_it(sample: dict[str, bytes | str], caption: CaptionSettings, flags: list[str]) -> None:
    assert profile_of(sample, sample).suggestion("jpg;png", caption) == flags


def test_tags_of_which_one_is_drawn_are_told() -> None:
    profile = profile_of(*[{"png": PNG, "json": '{"tags": ["red", "wall", "old house"]}'}] * 3)
    said = "training draws one of 3 short texts of a sample: --caption-json '{tags}' joins them"
    assert [profile.tags(JsonCaption(path=path)) for path in ("tags", "{tags}", "tags.0")] == [said, "", ""]


def test_advice_says_what_was_seen() -> None:
    assert profile_of().advice("jpg;png", TextCaption()) == "no sample could be read"
    advice = profile_of(*[{"png": PNG, "json": json.dumps(EMOJI)}] * 3).advice("jpg;png", TextCaption())
    for part in ("3 samples", "png (3)", "json (3)", '"panda face"', "member txt", "use --caption-json caption.en"):
        assert part in advice


def test_profiles_merge_as_if_all_samples_had_gone_into_one() -> None:
    samples: list[dict[str, bytes | str]] = [
        {"png": PNG, "json": '{"a": null, "b": "x"}'}, {"PNG": PNG, "json": '{"a": "late"}'}, {"json": "no json"},
    ]  # fmt: skip
    one, first, rest = profile_of(*samples), profile_of(samples[0]), profile_of(*samples[1:])
    first.merge(pickle.loads(pickle.dumps(rest)))
    assert vars(first) == vars(one)
    field = one.fields()[1]["a"]
    assert (field.samples, field.type, field.example) == (2, "str", '"late"')
    assert one.suffixes == {"png": 2, "json": 3}


@pytest.fixture
def shards(tmp_path: Path) -> str:
    samples = [
        {"__key__": f"{i:02d}", "png": RED if i else b"\x89PNG\r\n\x1a\nbroken", "json": json.dumps(EMOJI)}
        for i in range(6)
    ]
    write_tar(tmp_path / "0.tar", samples[:3])
    write_tar(tmp_path / "1.tar", samples[3:])
    return f"{tmp_path}/{{0..2}}.tar"


def test_a_view_with_the_right_settings(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shards, "--caption-json", "caption.en"]) == 0
    out = capsys.readouterr().out
    for part in ("3 shards: 6 samples read", "missing: 1 of them", "caption.alt", "83.3%", "panda face",
                 "undecodable_image", "0.tar/00", "--caption-json caption.en"):  # fmt: skip
        assert part in out


def test_nothing_usable_is_exit_code_3(shards: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shards]) == 3
    captured = capsys.readouterr()
    assert "use --caption-json caption.en" in captured.err and "caption.en" in captured.out
    assert main([shards.replace("{0..2}", "9")]) == 3


def test_wrong_usage_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([f"{tmp_path}/a.tar", "--caption-json", "a..b"]) == 2
    assert main([]) == 2
    assert "holds no tar, no table and no image" in capsys.readouterr().err


def test_a_manifest_is_seen_with_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(RED)
    rows = [{"filepath": "a.png" if n % 3 else f"{n}.png", "caption": {"en": f"text {n}"}} for n in range(300)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([f"{tmp_path}/pairs.jsonl", "--caption-json", "caption.en", "--samples", "100"]) == 0
    out = capsys.readouterr().out
    assert "1 manifest, 300 samples: 100 samples read" in out and "caption.en" in out
    assert "missing_picture" in out and "100.0%" not in out
    assert main([f"{tmp_path}/pairs.jsonl", "--caption-json", "caption.en", "--folder", f"{tmp_path}/none"]) == 3
    assert "set --folder" in capsys.readouterr().err
    (tmp_path / "one.jsonl").write_text('{"filepath": {"a": 1}, "title": "a dog"}')
    assert main([f"{tmp_path}/one.jsonl"]) == 3
    assert "no_image" in (err := capsys.readouterr().err) and "--caption" not in err, "it would not help"
    assert main([f"{tmp_path}/pairs.jsonl", "--image-key", "path"]) == 3
    assert " among filepath, caption " in (err := capsys.readouterr().err) and "with --image-key" in err


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"source.jpg": "", "target.jpg": ""}, "use --image-key source.jpg"),
        ({"0.jpg": "", "1.jpg": ""}, "To use one of them alone: --image-key 0.jpg"),
        ({"dcm": bytes(128) + b"DICM"}, "member dcm is a DICOM file (medical), which is not decoded: convert it to"),
        ({"npy": b"\x93NUMPY\1\0"}, "member npy is a NumPy array (.npy), which is not decoded: convert it to PNG"),
    ],
)
def test_images_under_other_suffixes_are_named(
    tmp_path: Path, members: dict[str, bytes | str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {name: data or RED for name, data in members.items()}
    write_tar(tmp_path / "0.tar", [{"__key__": f"{n:03d}", **own, "txt": f"a red thing {n}"} for n in range(4)])
    assert main([f"{tmp_path}/0.tar"]) == 3
    out, err = capsys.readouterr()
    found = " ".join((out + err).split())
    assert said in found and ".jpeg" not in found
    assert f"(--image-key): it has {', '.join(f'.{name}' for name in [*own, 'txt'])}" in re.sub(" │ │ │ ", " ", found)


def test_large_images_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("check", "problems"):
        monkeypatch.setattr(f"clipstream.curation.{module}.LARGE_PIXELS", 1000)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    large = save(Image.fromarray(smooth(50, 40)))
    samples = [{"__key__": f"{n:03d}", "png": large if n == 2 else RED, "txt": f"thing {n}"} for n in range(4)]
    write_tar(tmp_path / "0.tar", samples)
    for flags in ([], ["--all"]):
        assert main([f"{tmp_path}/0.tar", *flags]) == 0
        found = " ".join(capsys.readouterr().out.split())
        assert "0.tar/002" in found and "of more than 1,000 pixels" in found and "pack OUT SHARDS --size" in found


def test_pictures_are_used_and_dropped_as_training_does(tmp_path: Path) -> None:
    transform = TrainTransform(ImageSpec((16, 16)), AugmentSettings(), "white")
    samples, dropped = [], Counter[str]()
    sizes = [(10, 30_000), (30_000, 10), (10, 200), (10, 201), (1, 1), (40, 30)]
    pictures = [save(Image.new("RGB", size), kind) for size in sizes for kind in ("PNG", "JPEG")]
    for number, data in enumerate([*pictures, save(Image.new("P", (40, 30))), pictures[-1][:-300], b"none"]):
        samples.append({"__key__": f"{number}", "jpg": data, "txt": "a caption"})
        try:
            transform(data, SampleRNG(number))
        except Dropped as drop:
            dropped[drop.reason] += 1
    view = look(SourceSettings(shards=str(write_tar(tmp_path / "0.tar", samples))), 0)
    assert view.drops == dropped == {"image_too_thin": 6, "undecodable_image": 2}
    assert view.used == len(samples) - 8


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ("ACAA", "note: images: 75% transparent, laid on white"),
        ("A" + 299 * "C", "images: less than 1% transparent"),
        ("CSC", ""),
    ],
)
def test_transparent_pictures_are_told(
    modes: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an alpha channel (A) that is not 255 throughout (S)."""
    colours = Image.fromarray(smooth(9, 9))
    images = {"A": Image.fromarray(smooth(9, 9, 4)), "C": colours, "S": colours.convert("RGBA")}
    samples = [{"__key__": str(i), "png": save(images[mode]), "txt": "a"} for i, mode in enumerate(modes)]
    path = write_tar(tmp_path / "0.tar", samples)
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert said in text and ("transparent, laid" in text) == bool(said)
    black = look(SourceSettings(shards=[str(path)], background="black"), None)
    assert ("laid on black" in str(black)) == bool(said)


def test_pictures_of_one_colour_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = [
        Image.fromarray(smooth(20, 20)) if n % 9 == 0 else Image.new("RGB", (20, 20), (200, n, 7)) for n in range(30)
    ]
    samples = [{"__key__": f"{n}", "png": save(one), "txt": f"text {n}"} for n, one in enumerate(pictures)]
    shard = write_tar(tmp_path / "0.tar", samples)
    assert main([str(shard)]) == 0
    assert "26 of the first 30 images have (nearly) a single color, such as 0.tar/1" in capsys.readouterr().out


def test_long_captions_and_several_languages_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The columns of a table are listed once, not as members and as fields of their JSON."""
    (tmp_path / "a.png").write_bytes(RED)
    captions = (
        "a word " * 40,
        "A frog.\nde.utf8=Ein Frosch.\nfr.utf8=Une grenouille.",
        "a frog, лягушка, ضفدع",
        "犬とイヌ dog",
        "a frog",
    )
    lines = [json.dumps({"path": "a.png", "caption": text, "source": "made"}) for text in captions]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    assert main([f"{tmp_path}/pairs.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "1 captions (20%) have more than 77 tokens" in out and "2 captions (40%) are in several languages" in out
    assert out.count("│ source ") == 1 and "JSON fields" not in out
    assert main([f"{tmp_path}/pairs.jsonl", "--caption-lines", "first"]) == 0
    out = capsys.readouterr().out
    assert "1 captions (20%) are in several languages" in out and out.rstrip().endswith(
        "pairs.jsonl --caption-lines first --val-split 0.1 --model ViT-B-32 --pretrained openai"
    )


def shouted(sample: dict[str, bytes]) -> str | None:
    """A user's function for captions."""
    return None if sample["txt"].startswith(b"a") else sample["txt"].decode().upper()


def test_all_settings_of_the_source_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("abc"[number % 3])
    own = f"--data.sources.train.caption.type={__name__}:shouted"
    for words in ([own, str(tmp_path)], [str(tmp_path), *own.split("=")], [str(tmp_path), own, "--all"]):
        assert main(words) == 0
        told = capsys.readouterr().out
        assert "no_caption" in told and "train on them with" in told and f"{__name__}:shouted" in told
    assert main([str(tmp_path), "--data.sources.train.captoin.type", "json"]) == 2
    assert "did you mean 'caption'" in capsys.readouterr().err
