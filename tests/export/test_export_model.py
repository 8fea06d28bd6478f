"""`clipstream export RUN --to TARGET`: what other programs compute from the files, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import transformers
from PIL import Image
from timm.models.vision_transformer import VisionTransformer, _create_vision_transformer

import clipstream
from clipstream.cli.verbs.export import ModelFlags, main
from clipstream.config.command_line import read_own
from clipstream.data.source_settings import SourceSettings
from clipstream.errors import ClipstreamError, SettingsError
from clipstream.export import run as export_run
from clipstream.export.proof import Line, _end, draw_samples, prove, read
from clipstream.export.run import Exported
from clipstream.utils.atomic_write import keep_inputs
from tests.support import hubserver, hubtree, model_files
from tests.support.forks import run_fork
from tests.support.image_files import png, save, smooth, tiff
from tests.support.model_files import TEXT, VIT
from tests.support.pictures import make_shards
from tests.support.savers import small_files
from tests.support.tars import write_tar


@timm.models.register_model
def vit_tiny_patch8_siglip_32(pretrained: bool = False, **more: Any) -> VisionTransformer:
    """A SigLIP image tower of 60,000 parameters."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "class_token": False}
    return _create_vision_transformer("vit_tiny_patch8_siglip_32", pretrained=pretrained, **{**sizes, **more})


def bert(folder: Path, pooler: str) -> dict[str, Any]:
    """The text_cfg of a small BERT, whose configuration and tokenizer are written."""
    hubtree.write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<pad>"}))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertConfig(**sizes, vocab_size=64, max_position_embeddings=40, pad_token_id=0).save_pretrained(folder)
    named = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_model_pretrained": False}
    return {**named, "hf_pooler_type": pooler, "hf_proj_type": "linear", "context_length": 12}


def config(kind: str, folder: Path) -> dict[str, Any]:
    """The configuration of a small model."""
    if kind == "siglip":
        hubtree.write_tokenizer(folder)
        image = {"timm_model_name": "vit_tiny_patch8_siglip_32", "timm_pool": "map", "timm_proj": "none"}
        text = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
        text |= {"hf_tokenizer_name": str(folder), "tokenizer_kwargs": {"clean": "canonicalize"}, "vocab_size": 64}
        cfg = {"embed_dim": 32, "init_logit_bias": -10, "custom_text": True, "vision_cfg": {**image, "image_size": 32}}
        return {"model_cfg": {**cfg, "text_cfg": {**TEXT, **text}}, "preprocess_cfg": {"resize_mode": "squash"}}
    timm_cfg = {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear", "image_size": 64}
    vision, text = {
        "vit": (VIT, TEXT),
        "resnet": ({"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64}, TEXT),
        "convnext": (timm_cfg, TEXT),
        "bert": (VIT, bert(folder, "mean_pooler") if kind == "bert" else TEXT),
        "pooled": (VIT, bert(folder, "cls_pooler") if kind == "pooled" else TEXT),
    }[kind]
    return {"embed_dim": 24, "quick_gelu": kind == "vit", "vision_cfg": vision, "text_cfg": text}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a saved model of a kind, with random weights."""
    made: dict[str, Path] = {}

    def saved(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            (folder / "parts").mkdir()
            (folder / "model.json").write_text(json.dumps(config(kind, folder / "parts")))
            model_files.build(str(folder / "model.json")).save_pretrained(folder / "saved")
            made[kind] = folder / "saved"
        return made[kind]

    return saved


def needs(target: str) -> None:
    missing = [name for name in export_run.EXTRAS.get(target, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")


ci = pytest.mark.ci
KINDS, TARGETS = ("vit", "resnet", "convnext", "siglip", "bert", "pooled"), ("transformers", "onnx", "open_clip")
FAST = {("siglip", "onnx"), ("bert", "sentence-transformers")}  # a vit: the example of the card, below
PAIRS = [(kind, target) for kind in KINDS[1:] for target in (*TARGETS, "sentence-transformers")]
EACH = ["transformers", *(pytest.param(one, marks=ci) for one in ("open_clip", "onnx", "sentence-transformers"))]
UNKNOWN = {("resnet", "transformers"), ("resnet", "sentence-transformers"), ("bert", "transformers")}
UNKNOWN |= {("siglip", "open_clip")}  # the test's own timm model is unknown to a process without this file


@pytest.mark.parametrize(
    ("kind", "target"), [pytest.param(*pair, marks=[] if pair in FAST else ci) for pair in PAIRS if pair not in UNKNOWN]
)
def test_exported_files_give_the_models_features(kind: str, target: str, models: Any, tmp_path: Path) -> None:
    """Towers and from end to end, in a process that has the target's packages alone."""
    needs(target)
    assert main([str(models(kind)), "--to", target, str(tmp_path / "out")]) == 0
    told = json.loads((tmp_path / "out" / "check.json").read_text())
    assert len(told["lines"]) == 6 and all(line["holds"] for line in told["lines"])
    assert "pipeline_tag" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("preprocess", [pytest.param("normalize", marks=ci), "resize"])
def test_preprocessing_in_the_graph_and_int8(preprocess: str, models: Any, tmp_path: Path) -> None:
    needs("onnx")
    out = tmp_path / "out"
    assert main([str(models("vit")), "--to", "onnx", str(out), "--preprocess", preprocess, "--int8"]) == 0
    told = {line["what"]: line["worst"] for line in json.loads((out / "check.json").read_text())["lines"]}
    assert all(told[f"int8, {name}, end to end: lowest cosine"] > 0.95 for name in ("images", "texts"))
    assert (out / "image-int8.onnx").stat().st_size < 0.9 * (out / "image.onnx").stat().st_size


def files_of_each_mode() -> dict[str, tuple[bytes, str]]:
    """A file of each mode of Pillow, with hidden colours where it is transparent, and its suffix."""
    colours, alpha = smooth(90, 70), (smooth(90, 70, 1, seed=5) > 150) * np.uint8(255)
    rgb, deep = Image.fromarray(colours), smooth(90, 70).astype(np.uint16)
    grey = deep[..., :1] * 16
    found = {
        "rgb": save(rgb), "grey": save(rgb.convert("L")), "bits": save(rgb.convert("1")),
        "palette": save(rgb.convert("P")),
        "rgba": save(Image.fromarray(np.dstack([colours, alpha]))),
        "la": save(Image.fromarray(np.dstack([colours[..., 1], alpha]))),
        "palette and tRNS": save(rgb.convert("P"), transparency=bytes(range(256))),
        "grey 16": png(grey, 16), "grey 16 and tRNS": png(grey, 16, int(grey[3, 3, 0]).to_bytes(2, "big")),
        "rgb 16, low": png(deep * 16, 16),
        "rgb 16 and tRNS": png(deep * 256, 16, (deep[3, 3] * 256).astype(">u2").tobytes()),
    }  # fmt: skip
    return {name: (data, "png") for name, data in found.items()} | {
        "cmyk": (save(rgb.convert("CMYK"), "JPEG"), "jpg"),
        "float": (tiff((colours[..., :1] / 255).astype(np.float32), photometric=1), "tif"),
    }


@pytest.fixture(scope="module")
def exported(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder with an export of a small model to a target, `out`, and the shard whose samples checked it."""
    made: dict[str, Path] = {}

    def export(target: str) -> Path:
        if target not in made:
            made[target] = folder = tmp_path_factory.mktemp(target)
            files = enumerate(files_of_each_mode().items())
            samples = [{"__key__": f"{i:02d}", end: data, "txt": name} for i, (name, (data, end)) in files]
            shard, printed = write_tar(folder / "0.tar", samples), io.StringIO()
            with contextlib.redirect_stdout(printed):
                assert main([str(models("vit")), "--to", target, str(folder / "out"), "--data", str(shard)]) == 0
            assert "images: 38% transparent, laid on white by pixels.py" in printed.getvalue()  # 5 of 13
            assert "pipeline_tag" in (folder / "out" / "README.md").read_text()
        return made[target]

    return export


@pytest.mark.parametrize("target", EACH)
def test_the_example_of_the_card_gives_the_models_features_of_images_of_each_mode(
    target: str, models: Any, exported: Any, tmp_path: Path
) -> None:
    """As it is printed in README.md: transparent pixels on white, where convert("RGB") shows the colours under them."""
    needs(target)
    files, out, work = files_of_each_mode(), exported(target) / "out", tmp_path / "work"
    (work / "images").mkdir(parents=True)
    for i, (content, end) in enumerate(files.values()):
        (work / "images" / f"{i:02d}.{end}").write_bytes(content)
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    (tmp_path / "example.py").write_text(f"{code}import numpy; numpy.savez('found.npz', images=images, texts=texts)\n")
    run_fork(str(tmp_path / "example.py"), cwd=work, env={**os.environ, "PYTHONPATH": str(out), "HF_HUB_OFFLINE": "1"})
    found, model = np.load(work / "found.npz"), clipstream.load_model(models("vit"), device="cpu")[0]
    paths = sorted((work / "images").iterdir())
    own = model.encode_image(paths).numpy()
    cosines = dict(zip(files, (own * found["images"]).sum(1), strict=True))
    assert min(cosines.values()) > 0.99999, cosines
    under = model.encode_image([Image.open(path).convert("RGB") for path in paths]).numpy()
    assert (own * under).sum(1)[[4, 5, 6, 7]].max() < 0.999  # so features tell
    texts = model.encode_text(["a photo of a cat", "a photo of a dog"]).numpy()
    assert (texts * found["texts"]).sum(1).min() > 0.99999


def test_the_samples_of_an_export_are_of_all_modes_of_the_data(tmp_path: Path) -> None:
    clear, solid = ((smooth(20, 20, 4, seed=3), 4), (np.full((20, 20, 4), 255, np.uint8), 5))
    pictures = [save(Image.fromarray(smooth(20, 20, seed=i))) for i in range(150)]
    pictures[140] = save(Image.fromarray(clear[0]))
    pictures[141] = save(Image.fromarray(solid[0]))  # with an alpha channel, and opaque
    path = write_tar(
        tmp_path / "0.tar", [{"__key__": f"{i:03d}", "png": one, "txt": "a"} for i, one in enumerate(pictures)]
    )
    found = read(SourceSettings(shards=[str(path)]))
    assert {pictures[140], pictures[141]} <= set(found.images) and len(found.images) == 100
    assert (found.transparent, found.looked_at) == (1, 150)


@pytest.mark.parametrize("target", EACH)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    target: str, models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(target)
    argv = [str(models("vit")), "--to", target, str(tmp_path / "out")]
    with small_files(50_000):
        assert main(argv) == 1
    said = capsys.readouterr().err.splitlines()
    assert "File too large; choose a place with more room" in said[-1] and "Traceback" not in "".join(said)
    assert not [*tmp_path.iterdir()]


def test_an_export_is_replaced_by_a_good_one_alone(
    models: Any, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(exported("transformers") / "out", tmp_path / "out")
    check, argv = (out / "check.json").read_bytes(), [str(models("vit")), "--to", "transformers", str(out)]
    monkeypatch.setattr(export_run, "prove", lambda *args: [Line("image", 2.0, "at most 1", False)])
    assert main(argv) == 1 and "is left as it was" in capsys.readouterr().err
    assert (out / "check.json").read_bytes() == check and [*tmp_path.iterdir()] == [out]

    def approve(_: Any, folder: Path, *args: Any) -> list[Line]:
        (folder / "check.json").write_bytes(check)
        return [Line("image", 0.0, "at most 1", True)]

    monkeypatch.setattr(export_run, "prove", approve)
    (out / "README.md").unlink()
    assert main(argv) == 0 and (out / "README.md").is_file() and [*tmp_path.iterdir()] == [out]
    (out / "mine.txt").touch()
    assert main(argv) == 2 and (out / "mine.txt").is_file()


def test_a_wrong_processor_is_found(models: Any, exported: Any, tmp_path: Path) -> None:
    """Another filter of the resize, and a tokenizer that keeps capitals; and files that cannot be used."""
    wrong = shutil.copytree(exported("transformers") / "out", tmp_path / "wrong")
    for name, before, after in (
        ("processor_config.json", '"bicubic"', '"bilinear"'),
        ("tokenizer.json", '"type": "Lowercase"', '"type": "NFC"'),
    ):
        text = (wrong / name).read_text()
        assert before in text
        (wrong / name).write_text(text.replace(before, after))
    model = clipstream.load_model(models("vit"), device="cpu")[0]
    lines = prove(model, wrong, draw_samples(), "transformers", ())
    assert [line.holds for line in lines[:2]] == [True, True], lines
    assert [all(line.holds for line in lines[i : i + 2]) for i in (2, 4)] == [False, False], lines
    (wrong / "check.py").write_text("raise OSError('no config.json')")
    with pytest.raises(ClipstreamError, match=r"cannot be used without clipstream: OSError: no config\.json"):
        prove(model, wrong, draw_samples(), "transformers", ())


def test_refusals(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit, resnet = str(models("vit")), str(models("resnet"))
    (tmp_path / "other").mkdir()
    for name in ("notes.txt", "check.py", "check.json"):
        (tmp_path / "other" / name).write_text("Called by `clipstream export`")
    monkeypatch.setattr(export_run, "find_spec", lambda name: None)
    for argv, said in (
        ([resnet, "--to", "transformers", str(tmp_path / "a")], "no counterpart of open_clip's ResNet: .* --to onnx"),
        (["ViT-B-32", "--to", "open_clip"], "a model without weights: set --pretrained TAG"),
        ([vit, "--to", "onnx"], r"requires onnx: pip install 'clipstream\[onnx\]'"),
        ([vit, "--to", "open_clip", "--push-to-hub", "a/b"], "set the licence of the model with --license"),
        ([vit, "--to", "open_clip", str(tmp_path / "other")], "holds files that are not of an export"),
        ([vit, "--to", "open_clip", vit], f"OUT: {vit} is read by this command"),
        ([vit, "--to", "open_clip", str(models("vit").parent)], f"holds {vit}, which is read by this command"),
        ([vit, "--to", "open_clip", "--int8"], "--int8 is of ONNX graphs: use --to onnx"),
        ([vit, "--to", "open_clip", "--private"], "--private requires --push-to-hub"),
        ([str(tmp_path / "none"), "--to", "open_clip"], "none does not exist"),
    ):
        with keep_inputs(), pytest.raises(SettingsError, match=said):
            export_run.export_model(parsed(argv))


def test_samples_of_the_data_and_drawn_ones(tmp_path: Path) -> None:
    """Without credentials of the data."""
    (path,) = make_shards(tmp_path, [2])
    found = read(SourceSettings(shards=[f"pipe:cat {path}; : --token abcd"]))
    assert (len(found.images), len(found.texts)) == (100, 100) and found.texts[:2] == ["picture 0", "picture 1"]
    assert "2 images and texts of" in found.origin and "and 98 drawn ones" in found.origin
    assert "abcd" not in found.origin and "--token ***" in found.origin
    same = np.ones((3, 4)) / 2
    assert len(_end("texts", same, same)) == 1 and all(line.holds for line in _end("texts", same, same))


def test_the_card_of_weights_beside_a_run(tmp_path: Path, models: Any) -> None:
    run = tmp_path / "a"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: a}\n")
    shutil.copytree(models("vit"), run / "interpolated")
    subject, settings = export_run._run_of(str(run / "interpolated"))
    assert subject is not None and subject.run == run and settings.run.name == "a"
    assert export_run._is_beside(subject)
    records = [{"step": step, "eval": "val", "metrics": ["top1"], "top1": step / 10} for step in (2, 4, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    card = Exported("a", "onnx", "", None, replace(subject, step=2), settings, draw_samples(), [])  # type: ignore[arg-type]
    assert " 20.0% " in card._evaluations() and "40.0%" not in card._evaluations()
    (run / "interpolated" / "frontier.md").write_text("| alpha 0.5 | chosen |\n")
    assert card._evaluations() == "| alpha 0.5 | chosen |"


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are those of the repository then; a Hub that refuses is told."""
    (tmp_path / "served").mkdir()
    (tmp_path / "out/1_Part").mkdir(parents=True)
    for name in ("README.md", "1_Part/model.safetensors"):
        (tmp_path / "out" / name).write_text(name)
    with hubserver.serve(tmp_path / "served") as (endpoint, behaviour):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("HF_TOKEN", behaviour.token)
        export_run._push(tmp_path / "out", "me/mine", False)
        assert capsys.readouterr().out.split() == [f"{endpoint}/me/mine/commit/{'c' * 40}"]
        served = tmp_path / "served/me/mine/main"
        found = {str(path.relative_to(served)): path.read_text() for path in served.rglob("*") if path.is_file()}
        assert found == {name: name for name in ("README.md", "1_Part/model.safetensors")}
        monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(ClipstreamError, match=r"--push-to-hub me/mine: .*401"):
            export_run._push(tmp_path / "out", "me/mine", False)


def parsed(argv: list[str]) -> ModelFlags:
    return read_own("export", ModelFlags, argv, None)[0]
