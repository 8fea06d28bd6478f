"""Retrieval and zero-shot in several languages: the layouts of public sets, and clip-benchmark's metrics of each."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from pydantic import ValidationError

from clipstream.data.decode.labels import LanguagesField
from clipstream.data.source_settings import LANG, JsonCaption, SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.evals.classes import unreadable
from clipstream.evals.retrieval_and_loss import Retrieval
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import EvalSettings, RetrievalSettings
from clipstream.evals.statistics import bounds, chance_of, is_minor, is_share
from clipstream.evals.zero_shot import ZeroShot
from clipstream.models.towers import Towers
from tests.support import clipbenchmark
from tests.support.evaluating import context_of, evaluated, open_clip_features, tiny_towers
from tests.support.forks import ROOT
from tests.support.pictures import ByteTokenizer, picture
from tests.support.ranks import run_ranks
from tests.support.tars import write_tar

SUITE = yaml.safe_load((ROOT / "configs/evals/languages.yaml").read_text(encoding="utf-8"))["evals"]
TRANSFORM = image_transform_v2(PreprocessCfg(size=16), is_train=False)
N = 23


@lru_cache
def spread_towers() -> Towers:
    """A model whose answers spread over all images, captions and classes."""
    towers = deepcopy(tiny_towers())
    with torch.no_grad():
        for weight in towers.clip.parameters():
            weight *= 2 if weight.ndim > 1 else 1
    return towers


Texts = dict[str, list[list[str]]]  # by language, the captions of each picture


def texts_of(languages: Sequence[str], most: int = 1) -> Texts:
    """Captions that differ in their first bytes, which the model sees."""
    return {
        code: [[f"{(i * 7 + j) % 97:02d}{code} {i} ü" for j in range(1 + (i + number) % most)] for i in range(N)]
        for number, code in enumerate(languages)
    }


def suite_entry(name: str, folder: Path, languages: list[str], **more: Any) -> EvalSettings:
    """A suite's evaluator with its data in a folder."""
    text = json.dumps({key: value for key, value in SUITE[name].items() if key != "fetch"})
    section = json.loads(text.replace("${CLIPSTREAM_EVALS}", str(folder)))
    return EvalSettings.model_validate({**section, "languages": languages, "batch_size": 8, **more})


def convert(name: str, folder: Path) -> None:
    """Run what the suite's command does after the downloads."""
    steps = SUITE[name]["fetch"].split(" && ")
    own = [step for step in steps if step.split()[0] in ("printf", "sed", "python3")]
    assert own and len(steps) > len(own)
    subprocess.run(["bash", "-c", " && ".join(own)], cwd=folder, check=True)


def write_lines(path: Path, lines: Sequence[str], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(end.join(lines), encoding="utf-8", newline="")


def draw_xtd10(root: Path, texts: Texts) -> None:
    """As adobe-research/Cross-lingual-Test-Dataset-XTD10: some files end lines with CR LF, none the last one."""
    folder = root / "xtd10"
    write_lines(folder / "XTD10/test_image_names.txt", [f"{i}.jpg" for i in range(N)] + [""])
    for number, (code, captions) in enumerate(texts.items()):
        home = {"de": "MIC", "jp": "STAIR"}.get(code, "XTD10")
        path = folder / home / f"test_1kcaptions_{code}.txt"
        write_lines(path, [one[0] for one in captions], ("\n", "\r\n")[number % 2])
    draw_pictures(folder / "images")
    convert("xtd10", folder)


def draw_flickr30k_200(root: Path, texts: Texts) -> None:
    folder = root / "nllb-clip/data/flickr30k-200"
    write_lines(folder / "filenames.txt", [f"{i}.jpg" for i in range(N)] + [""])
    write_lines(folder / "eng_captions.txt", ["not read"])
    for code, captions in texts.items():
        write_lines(folder / f"{code}.txt", [*(one[0] for one in captions), ""])
    draw_pictures(folder / "images")
    convert("flickr30k_200", folder)


def draw_crossmodal3600(root: Path, texts: Texts) -> None:
    folder = root / "xm3600"
    rows = []
    for i in range(N):
        of_languages = {
            code: {"caption": captions[i], "caption/tokenized": [one.split() for one in captions[i]]}
            for code, captions in texts.items()
            if captions[i]
        }
        rows.append(json.dumps({"image/key": str(i), "image/locale": "de", **of_languages}, ensure_ascii=False))
    write_lines(folder / "captions.jsonl", [*rows, ""])
    draw_pictures(folder / "images")
    convert("crossmodal3600", folder)


def draw_pictures(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i in range(N):
        (folder / f"{i}.jpg").write_bytes(picture(i))


def reference(texts: Texts) -> dict[str, float]:
    """clip-benchmark's figures of each language, with our names, over the pictures that have a caption in it."""
    found: dict[str, float] = {}
    for code, captions in texts.items():
        samples = [(Image.open(io.BytesIO(picture(i))), some) for i, some in enumerate(captions) if some]
        loader = clipbenchmark.batches(samples, TRANSFORM)
        theirs = clipbenchmark.retrieval(spread_towers().eval().clip, loader, clipbenchmark.tokenize)
        for way, other in (("image_to_text", "text"), ("text_to_image", "image")):
            found |= {f"{code}_{way}_R@{k}": theirs[f"{other}_retrieval_recall@{k}"] for k in (1, 5, 10)}
        found |= {f"n_{code}": len(samples), f"captions_{code}": sum(map(len, captions))}
    for name in (f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)):
        found[f"mean_{name}"] = sum(found[f"{code}_{name}"] for code in texts) / len(texts)
    return {**found, "languages": len(texts), "n": N}


def evaluate(world: World, section: EvalSettings) -> tuple[dict[str, float], int]:
    """The metrics, and how many pictures the tower has encoded."""
    towers, count = spread_towers(), [0]

    def add(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        count[0] += len(given[0])

    handle = towers.clip.visual.register_forward_pre_hook(add)
    found = evaluated(section, context_of(world, towers=towers))
    handle.remove()
    return found, count[0]


def without_chance(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not name.startswith("chance")}


@pytest.mark.parametrize("name", ["xtd10", "flickr30k_200"])
def test_a_text_file_for_each_language(name: str, tmp_path: Path) -> None:
    """1 and 3 ranks; each picture is encoded once."""
    texts = texts_of(["de", "en", "jp", "zh"] if name == "xtd10" else ["deu_Latn", "zho_Hans", "yue_Hant"])
    {"xtd10": draw_xtd10, "flickr30k_200": draw_flickr30k_200}[name](tmp_path, texts)
    section, expected = suite_entry(name, tmp_path, list(texts)), reference(texts)
    by_language = {tuple(value for name, value in expected.items() if name.startswith(f"{code}_")) for code in texts}
    assert len(by_language) > 1
    for size in (1, 3):
        results = run_ranks(size, evaluate, section)
        assert sum(count for _, count in results) == N
        for found, _ in results:
            assert without_chance(found) == pytest.approx(expected, abs=1e-6)
    for code in texts:
        assert chance_of(found, f"{code}_image_to_text_R@1") == pytest.approx(1 / N)


def test_several_captions_in_a_language_and_none(tmp_path: Path) -> None:
    """Crossmodal-3600's layout, of which clip-benchmark reads the first caption; here all count, and one as it does."""
    texts = texts_of(["en", "no", "quz"], most=3)
    for i in (0, 4, 5, N - 1):
        texts["quz"][i] = []
    draw_crossmodal3600(tmp_path, texts)
    section = suite_entry("crossmodal3600", tmp_path, list(texts))
    for found, _ in (*run_ranks(1, evaluate, section), *run_ranks(3, evaluate, section)):
        assert without_chance(found) == pytest.approx(reference(texts), abs=1e-6)
    assert found["n_quz"] == N - 4 and chance_of(found, "quz_text_to_image_R@1") == pytest.approx(1 / (N - 4))
    first = {code: [some[:1] for some in captions] for code, captions in texts.items()}
    found, _ = evaluate(World(), suite_entry("crossmodal3600", tmp_path, list(texts), captions="one"))
    assert without_chance(found) == pytest.approx(reference(first), abs=1e-6)


def test_a_language_alone_is_evaluated_as_without_languages(tmp_path: Path) -> None:
    """Members of tars, of which some pictures are equal, and some captions."""
    samples = [
        {"__key__": f"{i}", "jpg": picture(i // 2), "de.txt": f"{i % 7} a", "en.txt": f"{i:02d} {'b' * (i % 3)}"}
        for i in range(20)
    ]
    samples[3].pop("en.txt")
    write_tar(tmp_path / "0.tar", samples)

    def found(**more: Any) -> dict[str, float]:
        data = {"shards": f"{tmp_path}/0.tar", "caption": {"type": "text", "key": more.pop("key")}}
        section = {"type": "retrieval", "data": data, "batch_size": 6, **more}
        return evaluated(section, context_of(World(), towers=spread_towers()))

    both = found(key="{lang}.txt", languages=["de", "en"])
    alone = {code: found(key=f"{code}.txt") for code in ("de", "en")}
    for code, metrics in alone.items():
        for name, value in metrics.items():
            if "_R@" in name and not name.startswith("chance"):
                assert both[f"{code}_{name}"] == pytest.approx(value, abs=1e-12), name
        assert both[f"n_{code}"] == metrics["n"] and both[f"captions_{code}"] == metrics["captions"]


def test_what_is_shown_is_of_the_first_language(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = texts_of(["de", "en"])
    texts["de"][0] = []
    draw_crossmodal3600(tmp_path, texts)
    context = context_of(World(), 6, spread_towers())
    context.name = "xm"
    with caplog.at_level("INFO"):
        evaluated(suite_entry("crossmodal3600", tmp_path, ["de", "en"], prompts=["x"]), context)
    assert f"evaluation 'xm': of {N} images some have no text in a language: de 1" in caplog.text
    shown = [one for one in context.examples if one.group in ("best", "worst")]
    assert len(shown) >= 4
    words = {text for captions in texts["de"] for text in captions}
    by_key = {one.key.rpartition("/")[2]: one.text for one in shown}
    for key, text in by_key.items():
        assert key != "0" and text[:14] == texts["de"][int(key)][0][:14]
    assert {text[:4] for one in shown for text, _ in one.guesses} <= {text[:4] for text in words}


CLASSES = 6
NAMES = {
    "DE": {0: "rot", 1: "grün", 3: "blau", 5: "weiß"},
    "NE": {1: "hariyo", 2: "kalo"},
    "XX": dict(enumerate("abcdef")),
}
TEMPLATES = {"DE": ["ein {}", " {}  hier"], "NE": ["yo {} ho"], "XX": ["{}"]}


def draw_babel(root: Path) -> None:
    folder = root / "babel"
    for part in ("classes", "templates"):
        (folder / part).mkdir(parents=True)
    names = {code: [list(of), list(of.values())] for code, of in NAMES.items()}
    (folder / "babel_imagenet.json").write_text(json.dumps(names))
    (folder / "nllb_dist13b_prompts.json").write_text(json.dumps(TEMPLATES))
    convert("babel_imagenet", folder)


def draw_labelled(root: Path) -> Path:
    samples = [{"__key__": f"{i}", "jpg": picture(i), "cls": f"{i % CLASSES}"} for i in range(40)]
    write_tar(root / "0.tar", samples)
    return root / "0.tar"


def babel_reference(code: str) -> dict[str, float]:
    """clip-benchmark's data set: pictures of the classes that have a name, their place among these as target."""
    numbers, names = list(NAMES[code]), list(NAMES[code].values())
    own = [i for i in range(40) if i % CLASSES in numbers]
    targets = torch.tensor([numbers.index(i % CLASSES) for i in own])
    prompts = [text.replace("{}", name).strip() for name in names for text in TEMPLATES[code]]
    images, texts = open_clip_features(own, prompts, spread_towers())
    classifier = torch.nn.functional.normalize(texts.view(len(names), -1, texts.shape[1]).mean(dim=1), dim=1)
    logits = images @ classifier.T
    right = (logits.argmax(dim=1) == targets).double()
    best = logits.topk(min(5, len(names)), dim=1).indices
    return {
        f"{code}_top1": float(right.mean()),
        f"{code}_top5": float((best == targets[:, None]).any(dim=1).double().mean()),
        f"{code}_mean_per_class_recall": float(np.mean([right[targets == c].mean() for c in range(len(names))])),
        f"n_{code}": len(own),
        f"chance_{code}_top1": 1 / len(names),
    }


def test_classes_and_templates_of_each_language(tmp_path: Path) -> None:
    """Babel-ImageNet's layout, where a language has names for some of the classes; 1 and 3 ranks."""
    draw_babel(tmp_path)
    shards = draw_labelled(tmp_path)
    section = suite_entry("babel_imagenet", tmp_path, ["DE", "NE", "XX"], data={"shards": str(shards)})
    assert unreadable(section) == {}  # type: ignore[arg-type]
    expected = {name: value for code in NAMES for name, value in babel_reference(code).items()}
    for name in ("top1", "top5", "mean_per_class_recall"):
        expected[f"mean_{name}"] = sum(expected[f"{code}_{name}"] for code in NAMES) / 3
    expected |= {"n": 40, "languages": 3, "chance_mean_top1": (1 / 4 + 1 / 2 + 1 / 6) / 3}
    assert 0 < expected["DE_top1"] < 1
    for size in (1, 3):
        results = run_ranks(size, evaluate, section)
        assert sum(count for _, count in results) == 40
        for found, _ in results:
            assert found == pytest.approx(expected, abs=1e-6)


def test_zero_shot_shows_the_first_language(tmp_path: Path) -> None:
    draw_babel(tmp_path)
    section = suite_entry("babel_imagenet", tmp_path, ["NE", "DE"], data={"shards": str(draw_labelled(tmp_path))})
    context = context_of(World(), 8, spread_towers())
    evaluated(section, context)
    assert context.examples and {one.text for one in context.examples} <= {"hariyo", "kalo"}
    for one in context.examples:
        assert one.text == NAMES["NE"][int(one.key.rpartition("/")[2]) % CLASSES]


def test_a_dry_run_of_few_samples_needs_no_text_in_each_language(tmp_path: Path) -> None:
    texts = texts_of(["en", "quz"])
    texts["quz"] = [[] for _ in range(N)]
    draw_crossmodal3600(tmp_path, texts)
    section = suite_entry("crossmodal3600", tmp_path, ["en", "quz"], on_error="raise")
    runner = EvalRunner({"xm": section}, context_of(World()))
    assert "mean_image_to_text_R@1" in runner.dry_run()["xm"]
    with pytest.raises(DataError, match="the source has no usable caption in quz"):
        runner(1, last=True)


def test_a_dry_run_needs_no_image_of_a_class_with_a_name(tmp_path: Path) -> None:
    draw_babel(tmp_path)
    write_tar(tmp_path / "0.tar", [{"__key__": f"{i}", "jpg": picture(i), "cls": "0"} for i in range(3)])
    data = {"shards": f"{tmp_path}/0.tar"}
    section = suite_entry("babel_imagenet", tmp_path, ["DE", "NE"], data=data, on_error="raise")
    runner = EvalRunner({"babel": section}, context_of(World()))
    assert {"mean_top1", "DE_top1", "NE_top1"} <= set(runner.dry_run()["babel"])
    with pytest.raises(DataError, match="evals\\.babel: the source has no usable image with a class of NE"):
        runner(1, last=True)


def test_what_metrics_of_languages_mean() -> None:
    record = {
        "n": 50,
        "n_de": 40,
        "captions_de": 80,
        "chance_de_text_to_image_R@1": 0.025,
        "chance_mean_text_to_image_R@1": 0.03,
        **dict.fromkeys(("de_image_to_text_R@1", "de_text_to_image_R@1", "mean_text_to_image_R@1", "de_top1"), 0.5),
    }
    assert all(is_share(name, 0.5) for name in record if "R@" in name or "top" in name)
    assert bounds(record, "de_image_to_text_R@1") == bounds({"n": 40, "top1": 0.5}, "top1") == bounds(record, "de_top1")
    assert bounds(record, "de_text_to_image_R@1") == bounds({"n": 80, "top1": 0.5}, "top1")
    assert bounds(record, "mean_text_to_image_R@1") is None
    assert chance_of(record, "de_text_to_image_R@1") == 0.025 and chance_of(record, "mean_text_to_image_R@1") == 0.03
    main = ("mean_image_to_text_R@1", "mean_top1", "image_to_text_R@1", "top1", "own_R@1")
    assert not any(map(is_minor, main)) and all(map(is_minor, ("de_image_to_text_R@1", "de_top1", "mean_top5")))


def section_of(**more: Any) -> EvalSettings:
    return EvalSettings.model_validate({"type": "retrieval", "data": {"shards": "a.tar"}, **more})


def with_caption(**caption: Any) -> dict[str, Any]:
    return {"data": {"shards": "a.tar", "caption": caption}}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"languages": ["de"]}, "languages: .*requires {lang}, which stands for the language, in data.caption.key"),
        (with_caption(type="text", key="{lang}.txt"), "data.caption.key.*has {lang}: set languages to the codes"),
        (with_caption(type="json", path="c.{lang}"), "data.caption.path.*has {lang}: set languages to the codes"),
        ({**with_caption(type="label", label="cls"), "languages": ["de"]}, "languages: .*requires {lang}"),
        ({"type": "zero_shot", "languages": ["de"], "classes": "a.txt"}, "requires {lang}.*in classes or templates"),
        ({"type": "zero_shot", "templates": "{lang}.txt"}, "has {lang}: set languages"),
        ({"languages": ["de", "de"]}, "de is given 2 times"),
        ({"languages": ["mean"]}, "'mean' is no code of a language"),
        ({"languages": ["../x"]}, "'../x' is no code of a language"),
    ],
)  # fmt: skip
def test_wrong_settings_of_languages_are_told(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        section_of(**section)
    (one,) = error.value.errors()
    assert re.search(told, f"{'.'.join(map(str, one['loc']))}: {one['msg']}"), one


def test_a_field_of_that_name_is_no_language() -> None:
    caption = {"type": "json", "path": "{title} in {lang}"}
    assert section_of(data={"shards": "a", "caption": caption}).data is not None


def test_what_is_found_late_is_told(tmp_path: Path) -> None:
    held_out = RetrievalSettings(languages=["de"]).model_copy(update={"data": SourceSettings(shards="a.tar")})
    with pytest.raises(SettingsError, match=r"languages: requires \{lang\}"):
        Retrieval(held_out)
    draw_babel(tmp_path)
    section = suite_entry("babel_imagenet", tmp_path, ["DE", "FR"], data={"shards": "a.tar"})
    assert "FR.json" in unreadable(section)["classes"]  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"FR\.json"):
        ZeroShot(section)  # type: ignore[arg-type]
    labels = suite_entry("babel_imagenet", tmp_path, ["DE"], data={"shards": "a.tar"}, labels="list")
    with pytest.raises(SettingsError, match="languages: not supported with labels: list"):
        ZeroShot(labels)  # type: ignore[arg-type]


def test_a_training_source_has_no_languages(tmp_path: Path) -> None:
    from clipstream.data.loader.reading_recipe import ModelInputs, build_recipe
    from clipstream.data.source_settings import TextCaption

    source = SourceSettings(shards="a.tar", caption=TextCaption(key="{lang}.txt"))
    with pytest.raises(SettingsError, match=r"\{lang\} requires an evaluator with languages"):
        build_recipe("train", source, ModelInputs(ByteTokenizer(), tiny_towers().image), None)


def test_captions_by_language_of_a_sample() -> None:
    field = LanguagesField(JsonCaption(path=f"t.{LANG}"), ["de", "en", "fr"], every=True)
    sample = {"json": json.dumps({"t": {"fr": ["a", "b\nc"], "de": "d"}}).encode()}
    assert json.loads(field(sample, None)) == [["d"], [], ["a", "b c"]] and field.members == ("json",)
