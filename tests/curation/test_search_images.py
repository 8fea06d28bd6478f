"""`clipstream search RUN DATA QUERY…` with a small real model: cache, paths, gallery, and features without torch."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import clipstream
from clipstream.api.model import load_model
from clipstream.cli.verbs.search import main
from clipstream.curation import images, indexing, topics
from clipstream.curation.image_index import ENDS, ImageSearch, NumpyText
from clipstream.errors import Stopped
from tests.support.browser import look, needs_browser
from tests.support.forks import ROOT
from tests.support.image_files import save
from tests.support.model_files import TEXT, build, write
from tests.support.ranks import TIMEOUT
from tests.support.savers import small_files
from tests.support.tars import write_tar

HOSTILE = '</script><img src=x onerror="alert(1)"> “quoted” & \x1b[31m'
CAPTIONS = ["a red bird", HOSTILE, "a green fish", "", "a house", "two boats"]
Found = list[tuple[float, str, str]]


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 4), dtype=np.uint8).repeat(9, 0).repeat(7, 1)
    return save(Image.fromarray(pixels, "RGBA"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pictures/0.png …, and them as a table, a tar, and a table that has the images itself."""
    place = tmp_path_factory.mktemp("place")
    build(write(place)).save_pretrained(place / "model")
    (place / "pictures").mkdir()
    for number in range(len(CAPTIONS)):
        (place / f"pictures/{number}.png").write_bytes(png(number))
    with (place / "table.csv").open("w", newline="") as file:
        rows = [(f"pictures/{number}.png", caption) for number, caption in enumerate(CAPTIONS)]
        csv.writer(file).writerows([("filepath", "title"), *rows])
    samples = [{"__key__": f"k{n}", "png": png(n), "txt": text} for n, text in enumerate(CAPTIONS)]
    write_tar(place / "shard.tar", samples)
    images = [{"bytes": png(n), "path": None} for n in range(len(CAPTIONS))]
    parquet.write_table(pa.table({"image": images, "caption": CAPTIONS}), place / "inside.parquet")
    return place


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(place / "cache"))


def search(*words: Any, capsys: pytest.CaptureFixture[str], code: int = 0) -> list[str]:
    """Run the verb; the lines that it printed last."""
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    return capsys.readouterr()[code > 0].splitlines()


@pytest.mark.parametrize(
    ("data", "name"),
    [("table.csv", "pictures/{}.png"), ("shard.tar", "shard.tar/k{}"), ("inside.parquet", "inside.parquet/{}")],
)
def test_matches_have_the_model_s_scores_and_the_paths_of_files(
    data: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("-k", 6, "--precision", "fp32")
    lines = search("local-dir:model", data, "a red bird", "pictures/2.png", *flags, capsys=capsys)[-14:]
    model, _, _ = load_model("local-dir:model")
    features = model.encode_image([f"pictures/{number}.png" for number in range(6)])
    for query, own in (("a red bird", model.encode_text), ("pictures/2.png", model.encode_image)):
        assert lines.pop(0) == query
        scores = (features @ own(query).T)[:, 0].tolist()  # type: ignore[operator]
        for number in sorted(range(6), key=lambda i: -scores[i]):
            score, path, *caption = lines.pop(0).split(maxsplit=2)
            assert float(score) == pytest.approx(scores[number], abs=2e-4) and path == name.format(number)
            assert "".join(caption).split() == CAPTIONS[number].replace("\x1b", "\\x1b").split()


def test_later_calls_compute_nothing_and_changed_data_are_computed_again(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = place / "some.csv"
    data.write_text("filepath,title\npictures/0.png,one\npictures/1.png,two\n")

    def interrupted(*_: Any) -> None:
        raise Stopped("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(topics, "_images", interrupted)
        search("local-dir:model", data, "a bird", capsys=capsys, code=Stopped.exit_code)
    printed = search("local-dir:model", data, "a bird", capsys=capsys)
    assert not any("samples read now" in line for line in printed), "what was computed is there"
    code = (
        "import sys\nfrom clipstream.cli.verbs.search import main\n"
        "for query in ('a bird', 'another 2 birds, flying'): main([*sys.argv[1:], query, '--html', 'torchfree.html'])\n"
        "print('torch' in sys.modules)"
    )  # the first from the cache, the second by numpy
    words, env = [sys.executable, "-c", code, "local-dir:model", str(data)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, env=env)
    said = [line for line in done.stdout.splitlines() if "torch" in line or line == "False"]
    assert said == ["torchfree.html"] * 2 + ["False"], done.stderr
    assert len(search("local-dir:model", data, "a bird", capsys=capsys)) == 2
    call = ImageSearch("local-dir:model", str(data))
    first = images.index_of(call)
    with (place / "model/open_clip_model.safetensors").open("ab") as file:
        file.write(b"\0")
    with monkeypatch.context() as patch:  # other weights at the path of the known ones are not used
        patch.setattr(images, "import_compute", lambda: SimpleNamespace(encode=lambda *_: [np.zeros(3)]))
        assert not images.encode_queries(call, ["a text that is new"], first).any()
    os.truncate(file.name, os.path.getsize(file.name) - 1)
    data.write_text(data.read_text() + "pictures/2.png,three\n")
    assert len([line for line in search("local-dir:model", data, "a bird", capsys=capsys) if ".png" in line]) == 3


def test_what_a_call_depends_on_is_watched(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, files of settings, the model's configuration, and folders in which a new file would match."""
    (place / "sets/one").mkdir(parents=True)
    (place / "sets/two").mkdir()
    for name in ("one/a.csv", "b.csv"):
        (place / "sets" / name).write_text(f"filepath,title\n{place}/pictures/0.png,one\n")
    (place / "own.yaml").write_text("data: {workers: 0}\n")
    monkeypatch.setenv("SETS", str(place / "sets"))
    call = ImageSearch("local-dir:model", "${SETS}/*/*.csv", ("--config", "own.yaml"))
    _, watched = indexing.index_folder(call)
    wanted = {"sets", "sets/one", "sets/two", "sets/one/a.csv", "own.yaml", "model/open_clip_config.json"}
    assert {str(place / name) for name in wanted} <= {*watched}
    first = images.index_of(call)
    monkeypatch.setenv("SETS", str(place / "sets/.."))
    monkeypatch.setattr(images, "import_compute", lambda: SimpleNamespace(make_index=lambda *_: None))
    assert images.index_of(call) != first


def test_images_are_upright_and_old_indexes_are_removed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, exif = Image.open("pictures/1.png"), Image.Exif()
    exif[0x0112] = 6
    (place / "turned").mkdir()
    image.transpose(Image.Transpose.ROTATE_90).save("turned/1.png", exif=exif)
    (place / "turned/1.txt").write_text("turned")
    (place / "turned/again").symlink_to(place / "turned")  # a circle
    folders = [place / f"cache/search/{number:024}" for number in range(12)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / ENDS).touch()
        os.utime(folder, (0, 0))
    flags = ("--image-mean", "0.1", "0.5", "0.9", "--precision", "fp32")  # of queries as of images
    for query in ("pictures/1.png", "turned/1.png"):
        assert search("local-dir:model", "turned", query, *flags, capsys=capsys) == ["1.0000  turned/1.png  turned"]
    assert len([folder for folder in folders if folder.exists()]) <= 9


def test_a_cache_that_is_read_only_or_damaged_is_no_traceback(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("local-dir:model", "table.csv", "a torn query")
    before = search(*call, capsys=capsys)[-6:]
    torn = max(place.glob("cache/search/*/queries/*.npy"), key=lambda file: file.stat().st_mtime_ns)
    torn.write_bytes(torn.read_bytes()[:100])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(images.atomic_write, "replace", full)
        assert search(*call, capsys=capsys)[-6:] == before and torn.stat().st_size == 100
    assert search(*call, capsys=capsys) == before and torn.stat().st_size > 100
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", full)
        patch.setattr(indexing, "index_folder", full)
        assert search(*call, capsys=capsys) == before, "a read-only index is used at once"
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(place / "table.csv"))
    (line,) = search(*call, capsys=capsys, code=2)[-1:]
    assert line.startswith("error: ") and "CLIPSTREAM_CACHE" in line


def test_wrong_calls_end_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, part in (
        (("local-dir:model", "table.csv"), "missing QUERY: clipstream search RUN DATA QUERY..."),
        (("local-dir:model", "table.csv", "a", "-k", "no"), "-k"),
        (("local-dir:model", "table.csv", "gone.png"), "gone.png"),
        (("local-dir:model", "none.csv", "gone.png"), "gone.png"),  # before images are computed
        (("local-dir:model", "none.csv", "a dog", "table.csv"), "the query 'table.csv' is a file, not an image: give"),
        (("local-dir:model", "none.csv", "."), "the query '.' is a folder, not an image: give words"),
        (("local-dir:model", "none.csv", "a"), "none.csv"),
        (("ViT-B-32", "table.csv", "a"), "without weights"),
        (("ViT-B-32", "table.csv", "a", "--pretrained=no-such-tag"), "no-such-tag"),
        (("local-dir:model", "table.csv", "a", "--html", "no/where.html"), "no/where.html"),
    ):
        (line,) = search(*words, capsys=capsys, code=main([*words]))
        assert line.startswith("error: ") and part in line


def test_the_gallery_is_one_safe_page(place: Path) -> None:
    found = clipstream.search("local-dir:model", "shard.tar", ["a red bird", HOSTILE, "pictures/1.png"], k=6)
    assert found.matches[2][0].path == "shard.tar/k1"
    found.save("out.html")
    page = Path("out.html").read_text()
    assert len(page) < 5e6 and "<img src=x" not in page and "\x1b" not in page and html.escape(HOSTILE[:20]) in page
    assert not re.search(r"""(src|href)=["']?(https?:|//)|@import|url\(""", page)
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    near = json.loads(re.findall(r'id="cards">(.*?)</script>', page, re.S)[0])
    assert {len(found) for found in near.values()} == {5}
    assert "<iframe" in found._repr_html_() and repr(found) == "SearchResults(3 queries, 18 matches)"


def test_a_page_that_the_disk_does_not_take(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search("local-dir:model", "table.csv", "a red bird", capsys=capsys)
    with small_files(2000):
        (said,) = search("local-dir:model", "table.csv", "a red bird", "--html", "full.html", capsys=capsys, code=1)
    assert said == "error: cannot write full.html.tmp: File too large; choose a place with more room"
    assert not [*place.glob("full*")]


def test_thumbnails_end_where_the_page_would_exceed_5_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipstream.report.pages.Thumbnails.left", 3000)
    page = clipstream.search("local-dir:model", "table.csv", "a red bird", k=6)._page()
    assert 0 < page.count("data:image/jpeg") < 6 and "no thumbnail" in page


@needs_browser
def test_a_browser_shows_what_was_found_and_what_is_near_it(place: Path) -> None:
    found = clipstream.search("local-dir:model", "table.csv", "a red bird", k=3)
    found.save("seen.html")
    page = (place / "seen.html").read_text()
    images = 'document.querySelectorAll("main section:not([hidden]) img").length'
    reach = f"document.title = [{images}, innerWidth, document.documentElement.scrollWidth].join()"
    row = re.findall(r'href="#near-(\d+)"', page)[0]
    for width, dark, fragment, count in ((400, True, "", 3), (1280, False, f"#near-{row}", 6), (2560, True, "", 3)):
        script = f'<script>location.hash = "{fragment}"; setTimeout(() => {{ {reach} }}, 300)</script>'
        free = re.sub("<meta http-equiv[^>]*>", "", page)
        (place / "looked.html").write_text(free.replace("</body>", f"{script}</body>"))
        dom, complaints = look(place / "looked.html", width, dark=dark)
        seen, inner, wide = map(int, re.findall(r"<title>([\d,]+)</title>", dom)[0].split(","))
        assert (seen, complaints) == (count, []) and wide <= inner
    assert look(place / "seen.html", 1280)[1] == [], "the policy allows the page's own style and script"


@pytest.mark.parametrize("more", [{}, {"quick_gelu": True}, {"custom_text": True}])
def test_features_without_torch_equal_torch_s(more: dict[str, Any], tmp_path: Path) -> None:
    towers = build(write(tmp_path, **more))
    with torch.no_grad():  # of trained weights, biases and projections are not zeros
        for parameter in towers.clip.parameters():
            seeded = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(torch.randn(parameter.shape, generator=seeded) * 0.05)
    towers.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/open_clip_config.json").read_text())["model_cfg"]
    weights = tmp_path / "saved/open_clip_model.safetensors"
    tower = NumpyText.of(weights, config)
    assert tower is not None
    model, _, _ = load_model(f"local-dir:{tmp_path / 'saved'}")
    texts = ["a red bird", "", "It's 12 o'clock, isn't it?  " * 4, "x", "ein Vögelchen &amp; 🐦", "a <end_of_text> b"]
    ours = np.stack([tower.encode(text) for text in texts])
    assert np.abs(ours - model.encode_text(texts).cpu().numpy()).max() < 1e-4
    assert NumpyText.of(None, config) is NumpyText.of(weights, {"text_cfg": {**TEXT, "pool_type": "last"}}) is None


@pytest.mark.parametrize("data", ["replaced", "replaced.csv"])
def test_a_replaced_image_is_computed_again(place: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by one of the same size and date, as `cp -p` and `rsync -t` leave it."""
    (folder := place / "replaced").mkdir(exist_ok=True)
    for n in range(2):
        Image.open(io.BytesIO(png(n))).convert("RGB").save(folder / f"{n}.bmp")
        (folder / f"{n}.txt").write_text(f"text {n}")
    (place / "replaced.csv").write_text("filepath,title\nreplaced/0.bmp,a\nreplaced/1.bmp,b\n")
    found = []
    for _ in range(2):
        lines = search("local-dir:model", data, "a red bird", "--image-key", "bmp;filepath", capsys=capsys)
        found.append(sorted({line.split()[0] for line in lines if ".bmp" in line}))
        times = (folder / "0.bmp").stat()
        (folder / "0.bmp").write_bytes((folder / "1.bmp").read_bytes())
        os.utime(folder / "0.bmp", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert list(map(len, found)) == [2, 1], "both images are the same now"
