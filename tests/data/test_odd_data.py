"""Odd and hostile data in `check`, `index` and the training loader: each gets a short, clear diagnosis."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clipstream.cli.verbs.check import main as check
from clipstream.cli.verbs.index import main as index
from clipstream.data.decode.sample_profile import Profile
from clipstream.data.source_settings import CaptionSettings, JsonCaption, TextCaption
from clipstream.errors import DataError
from clipstream.storage.shard_url import in_braces
from clipstream.storage.tar import scan
from tests.support.hostile_text import HOSTILE, obeyed
from tests.support.loaders import data, loader
from tests.support.pictures import picture
from tests.support.ranks import TIMEOUT
from tests.support.tars import write_tar

WORDS = ["a", "brown", "dog", "red", "cat", "runs", "sits", "on", "the", "grass", "house", "tree", "blue", "small"]
KEY = HOSTILE[:-1].replace(".", "")  # without the half of a character, and without a dot
PNG = b"\x89PNG\r\n\x1a\n"
GNU_TAR = shutil.which("tar") is not None and "GNU" in subprocess.run(
    ["tar", "--version"], capture_output=True, text=True, timeout=TIMEOUT
).stdout  # fmt: skip
Told = Callable[..., tuple[int, str, str]]


def prose(number: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=7))


def texts(number: int) -> bytes:
    languages, one = ("de", "en", "fr", "ja"), f"{number:08x}"
    said = [{"lang": lang, "t": f"{lang} {prose(9 * number + n)}", "id": one} for n, lang in enumerate(languages)]
    return json.dumps({"texts": said, "url": f"http://x/{number}", "n": number, "key": f"{number:05d}"}).encode()


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Told:
    """Calls `check`; its code, standard output and standard error, with line breaks of tables taken out."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = check(list(argv))
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def listed(tmp_path: Path) -> str:
    samples = [{"__key__": f"{i:02d}", "jpg": picture(i), "json": texts(i)} for i in range(40)]
    return str(write_tar(tmp_path / "listed.tar", samples))


def test_all_positions_of_a_list_are_seen_and_its_text_is_advised(listed: str, told: Told) -> None:
    code, out, err = told(listed)
    assert code == 3 and "texts.*.lang" in out and "up to 4 a sample" in out and '"de" | "en" | "fr"' in out
    assert "use --caption-json 'texts.*.t'" in err and ".lang'" not in err and "texts.0" not in err and ".id" not in err
    code, out, err = told(listed, "--caption-json", "texts[lang=en].t")
    assert code == 0 and "listed.tar/00: en " in out and "warning" not in out
    code, _, err = told(listed, "--caption-json", "texts[lang=xx].t")
    assert code == 3 and "use --caption-json 'texts.*.t'" in err, "a value that no element has is no caption"


@pytest.mark.parametrize("workers", [0, 2])
def test_captions_that_are_all_the_same_are_told_once_with_the_first_samples(
    listed: str, told: Told, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = told(listed, "--caption-json", "texts.0.lang")
    assert code == 0 and "captions of 40 samples are nearly constant: 40 of them are 'de'" in out
    assert "fields with text: --caption-json 'texts.*.t'" in out and "--loss.duplicates mask" in out
    for path, count in (("texts.0.lang", 1), ("texts.*.t", 0)):  # these differ
        source = {"shards": listed, "caption": {"type": "json", "path": path}}
        for rank in range(2):
            with loader(data(None, global_batch_size=80, sources={"train": source}, workers=workers), rank, 2) as it:
                for _ in range(6):
                    next(it)
        err = capfd.readouterr().err
        assert err.count("warning: source 'train': the captions of ") == count == err.count("nearly constant"), err
        assert ("--caption-json" in err) == bool(count)


@pytest.mark.parametrize(
    ("caption", "said"),
    [
        ("2024-01-{}", "numbers or dates, not texts: 40 of them"), ("['a {}' ... 'b']", "lists or objects, not texts"),
        ("[5 dogs and {} cats]", ""), ("a/cat {}.jpg", ""), ("images/{}.jpg", "paths or URLs, not texts"),
        ("a\0 \0{}\0", "UTF-16 or bytes, not texts: 40 of them"), ("https://x.org/a?id={}", "paths or URLs"),
    ],
)  # fmt: skip
def test_captions_that_are_no_texts_are_told_by_check_and_in_training(
    caption: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = [{"__key__": f"{i:02d}", "jpg": picture(i), "txt": caption.format(i)} for i in range(40)]
    shards = str(write_tar(tmp_path / "0.tar", samples))
    assert check([shards]) == 0
    out = capfd.readouterr().out
    assert said in out and ("warning" in out) == bool(said) and "--caption-key txt" not in out
    with loader(data(None, sources={"train": {"shards": shards}})) as batches:
        for _ in range(10):
            next(batches)
    err = capfd.readouterr().err
    assert said in err and ("warning" in err) == bool(said)


def fields(**samples: Any) -> dict[str, bytes]:
    return {"png": PNG, "json": json.dumps(samples).encode()}


@pytest.mark.parametrize(
    ("sample", "flags"),
    [
        (lambda i: fields(a=f"0a1b2c3d{i:08x}", b=prose(i), c=f"http://x/{i}", d=str(i)), ["--caption-json b"]),
        (lambda i: fields(caption="photo", story=prose(i)), ["--caption-json story", "--caption-json caption"]),
        (lambda i: fields(x="dog", y=prose(i), z=f"IMG_{i}.jpg"), ["--caption-json y", "--caption-json x"]),
        (lambda i: fields(a=f"图片里有一只{i}猫在草地上", b="en", c="de-DE"), ["--caption-json a"]),
        (lambda i: fields(rows=[{"n": i, "who": "ab"[k], "say": prose(i + k)} for k in range(2)]),
         ["--caption-json 'rows.*.say'", "--caption-json 'rows.*.who'"]),
        (lambda i: fields(**{"it's; $(rm)": prose(i)}),
         ["--data.sources.train.caption '{type: json, path: \"it'\"'\"'s; $(rm)\"}'"]),
        (lambda i: fields(**{HOSTILE: prose(i), "": prose(i), "x" * 999: prose(i)}), []),
        (lambda i: fields(caption=i, alt=None, n=[1, 2], ok=True), []),
    ],
)  # fmt: skip
def test_fields_are_ranked_by_language_and_difference(
    sample: Callable[[int], dict[str, bytes]], flags: list[str]
) -> None:
    profile = Profile()
    for i in range(30):
        profile.add(sample(i))
    assert profile.captions(TextCaption()) == flags
    for caption in (TextCaption(), JsonCaption(path="nothing[a=b].*")):
        advice = profile.advice("png", caption)
        assert obeyed(advice.replace("\n", "")) == []
        assert ("looks like a caption" in advice) == (not flags)


def test_a_path_is_found_whatever_its_positions_and_case() -> None:
    profile = Profile()
    for i in range(8):
        profile.add({"png": PNG, "json": texts(i)})
    for path in ("texts.*.t", "TEXTS.3.T", "texts[lang=de].t", "*.*.t"):
        assert profile.suggestion("png", JsonCaption(path=path)) == []
    for path in ("texts[lang=xx].t", "texts.t", "texts.*", "url.0", "n"):
        assert profile.suggestion("png", JsonCaption(path=path)) == ["--caption-json 'texts.*.t'"]


def dotted(path: Path) -> str:
    """A tar of four keys with five pictures and texts each."""
    samples = [{"__key__": f"photo_{i // 5}.{i % 5}", "png": picture(i), "txt": prose(i)} for i in range(20)]
    return str(write_tar(path, samples))


def test_members_named_by_what_follows_the_first_dot(tmp_path: Path, told: Told) -> None:
    shard = dotted(tmp_path / "a.tar")
    assert "--image-key" not in told(shard)[2]
    code, out, _ = told(shard, "--image-key", "0.png", "--caption-key", "0.txt")
    assert code == 0 and "note: images are members 0.png, 1.png" in out
    samples = [{"__key__": f"{i}", "left.png": picture(i), "right.png": picture(i), "txt": prose(i)} for i in range(9)]
    code, out, err = told(str(write_tar(tmp_path / "views.tar", samples)))
    assert code == 3 and "use --image-key left.png" in err and "first dot" not in out


def in_folders(path: Path) -> str:
    """A tar with a folder for each sample."""
    parts = (("image", lambda i: {"jpg": picture(i)}), ("caption", lambda i: {"txt": prose(i)}))
    samples = [{"__key__": f"{i:02d}/{name}", **made(i)} for i in range(8) for name, made in parts]
    return str(write_tar(path, samples))


def apart(path: Path) -> str:
    """A tar with all pictures before all texts."""
    samples = [{"__key__": f"{i:02d}", "png": picture(i)} for i in range(30)]
    return str(write_tar(path, samples + [{"__key__": f"{i:02d}", "txt": prose(i)} for i in range(30)]))


def test_members_that_are_not_adjacent_are_told_by_index_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert index([apart(tmp_path / "a.tar")]) == 0
    out = capfd.readouterr().out
    assert "scattered_sample: 30 keys occur twice, with other keys between, the first is 00: " in out
    assert "sort the tar: mkdir out" in out
    samples = [{"__key__": key, "png": picture(0), "txt": "a"} for key in ("a", "b", "a", "c")]  # one sample twice
    assert scan(write_tar(tmp_path / "a.tar", samples)).fault is None


@pytest.mark.skipif(not GNU_TAR, reason="the commands are for GNU tar")
@pytest.mark.parametrize(
    ("make", "samples", "said", "flags"),
    [
        (dotted, 20, "a key ends at the first dot", []),
        (apart, 30, "scattered_sample: 30 keys occur twice", []),
        (in_folders, 8, "each folder in the tar has the files caption.txt, image.jpg",
         ["--image-key", "image.jpg", "--caption-key", "caption.txt"]),
    ],
)  # fmt: skip
def test_the_commands_that_are_told_mend_it(
    make: Callable[[Path], str], samples: int, said: str, flags: list[str], tmp_path: Path, told: Told
) -> None:
    make(tmp_path / "SHARD.tar")
    code, out, err = told(str(tmp_path / "SHARD.tar"))
    assert code == 3 and said in out + err
    if not flags:
        settings = data(str(tmp_path / "SHARD.tar"), sampling={"mode": "indexed", "remainder": "pad"})
        with pytest.raises(DataError, match=rf"{said}(.|\n)*mkdir out"), loader(settings) as stream:
            for _ in range(100):
                next(stream)
    line = next(line for line in (out + err).splitlines() if "mkdir out" in line and "│" not in line)
    command = line[line.index("mkdir out") :].partition(" (the check of")[0]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, timeout=TIMEOUT)
    if flags:
        code, _, err = told(str(tmp_path / "NEW.tar"))
        assert code == 3 and " ".join(flags) in err
    code, out, _ = told(str(tmp_path / "NEW.tar"), *flags)
    assert code == 0 and f"{samples} samples read of {samples}" in out and "100.0%" in out and "note:" not in out


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["a/00.tar", "a/01.tar", "a/02.tar", "a/03.tar"], "a/{00..03}.tar"),
        (["a/8.tar", "a/9.tar", "a/10.tar"], "a/{8..9}.tar::a/10.tar"),
        (["a/00.tar", "a/02.tar", "b.tar", "c/{00..03}.tar"], "a/00.tar::a/02.tar::b.tar::c/{00..03}.tar"),
        (["a1/x.tar", "a2/x.tar", "s3://b/07.tar", "s3://b/08.tar"], "a{1..2}/x.tar::s3://b/{07..08}.tar"),
        (["a.tar", "a.tar"], "a.tar::a.tar"),
    ],
)
def test_several_shards_are_one_pattern(names: list[str], pattern: str) -> None:
    assert "::".join(in_braces(names)) == pattern


def test_the_command_names_all_shards(tmp_path: Path, told: Told) -> None:
    samples = [{"__key__": "0", "jpg": picture(0), "txt": "a brown dog"}]
    shards = [str(write_tar(tmp_path / f"{i:02d}.tar", samples)) for i in (0, 1, 3, 4)]
    assert f"--train-data '{tmp_path}/{{00..01}}.tar::{tmp_path}/{{03..04}}.tar' " in told(*shards)[1]


DEEP = b'{"a":' * 10_000 + b"1" + b"}" * 10_000
ODD: dict[str, tuple[list[dict[str, Any]], int]] = {
    "escapes in keys and captions": ([{"__key__": f"k{KEY}{i}", "png": picture(i), "txt": f"{KEY} a"}
                                      for i in range(3)], 0),
    "escapes in suffixes": ([{"__key__": "a", "png": picture(0), KEY: "a dog"}], 3),
    "escapes in broken pictures": ([{"__key__": KEY, "png": PNG + b"\x1b[31m", "txt": "a dog"}], 3),
    "captions of 10 MB": ([{"__key__": str(i), "png": picture(i), "txt": "x " * 5_000_000} for i in range(2)], 0),
    "JSON of 10 MB": ([{"__key__": "0", "png": picture(0), "json": json.dumps({"long": "x y " * 2_500_000})}], 3),
    "JSON nested deep": ([{"__key__": "0", "png": picture(0), "json": DEEP}], 3),
    "JSON that is none": ([{"__key__": "0", "png": picture(0), "json": b'\x1b[2J{"a'}], 3),
    "hostile JSON keys": ([{"__key__": "0", "png": picture(0), "json": json.dumps({KEY: [{KEY: "a b"}]})}],
                          3),
    "a thousand members": ([{"__key__": "0", "png": picture(0), **{f"m{i}.txt": "a dog" for i in range(1000)}}], 3),
    "no members": ([], 3),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_is_shown_of_odd_data_is_short_and_safe(name: str, tmp_path: Path, told: Told) -> None:
    samples, expected = ODD[name]
    shard = str(write_tar(tmp_path / "a.tar", samples))
    code, out, err = told(shard)
    assert code == expected and len(out) < 20_000 and len(err) < 2_000, (out, err)
    assert set(obeyed(out + err)) <= {"\n"}
    assert expected == 0 or (err.startswith("error: no") and err.count("\n") == 1)
    if samples and expected and "members" not in name:
        said = none_usable({"shards": shard})
        assert len(said) < 5_000 and set(obeyed(said)) <= {"\n"} and "members seen in" in said


def none_usable(source: dict[str, Any]) -> str:
    """What training says where no sample is usable."""
    settings = data(None, lanes=1, sources={"train": source}, sampling={"mode": "indexed", "remainder": "pad"})
    with (
        pytest.raises(DataError, match=r"none of the first 2\d\d samples is usable") as error,
        loader(settings) as stream,
    ):
        for _ in range(300):
            next(stream)
    return str(error.value)


def test_names_that_are_not_utf8(tmp_path: Path, told: Told) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for suffix, member in (("png", picture(0)), ("txt", b"a dog")):
            (source := tmp_path / "member").write_bytes(member)
            tar.add(source, f"b\xe9\x9b[31m.{suffix}")
    code, out, _ = told(str(path))
    assert code == 0 and r"b\xe9\x9b[31m: a dog" in out and set(obeyed(out)) <= {"\n"}


class Rude:
    """A user's extractor whose errors hold escape sequences and are long."""

    class Settings(CaptionSettings):
        type: str = f"{__name__}:Rude"

    def __init__(self, settings: Settings) -> None:
        self.members = ("txt",)

    def __call__(self, sample: Mapping[str, Any], rng: Any) -> str:
        raise RuntimeError(HOSTILE + "z" * 10_000)


def test_errors_of_a_users_part_are_safe_to_print(tmp_path: Path) -> None:
    shard = str(write_tar(tmp_path / "a.tar", [{"__key__": "0", "jpg": picture(0), "txt": "a"}]))
    said = none_usable({"shards": shard, "caption": {"type": f"{__name__}:Rude"}})
    assert "extractor_error, e.g. a.tar/0" in said and set(obeyed(said)) <= {"\n"} and len(said) < 3_000
