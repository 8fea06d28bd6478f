"""Settings files, names and models that would hang, exhaust memory, or fail late."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from open_clip import list_models

from clipstream.cli.verbs import check, compare, evaluate, pack, stage, train
from clipstream.config.settings import load
from clipstream.models.model_config import ModelConfig, builtin, check_config
from tests.support.runs import MODEL, flags
from tests.support.savers import fill, small_disk
from tests.support.settings_files import error_of, problems, write

LETTERS = "abcdefghijk"


def bomb(first: str, element: str) -> str:
    """YAML of some lines whose last one is 9^10 copies of the first."""
    lines = [f"a: &a {first}"]
    for name, inner in zip(LETTERS[1:], LETTERS, strict=False):
        lines.append(f"{name}: &{name} {element.replace('*', f'*{inner}')}")
    return "\n".join(lines)


@pytest.mark.parametrize("value", ["1000000", "10000000000", "99999999999999999999"])
@pytest.mark.parametrize("flag", ["--run.threads", "--tokenizer.context-length", "--model.image-size"])
def test_numbers_that_no_machine_holds_are_refused_with_their_setting(flag: str, value: str) -> None:
    assert error_of([flag, value]).startswith(f"{flag}: expected at most ")


@pytest.mark.parametrize(
    "text",
    [
        bomb("[x]", f"[{', '.join('*' * 9)}]"),
        bomb("{k: x}", f"{{{', '.join(f'k{n}: *' for n in range(9))}}}"),
        bomb("{k: x}", f"{{<<: [{', '.join('*' * 9)}]}}"),
    ],
    ids=["lists", "mappings", "merges"],
)
def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path, text: str) -> None:
    """Before they are copied: 9^10 copies take an hour and more memory than there is."""
    (found,) = problems(["--config", write(tmp_path / "a.yaml", text)])
    assert ".yaml:" in found and ": aliases (*NAME) expand to more than 10,000 keys and values" in found
    assert "a section of settings" in problems([f"--data.sources={text}"])[0]


def test_aliases_of_everyday_use_are_read(tmp_path: Path) -> None:
    sources = "\n".join(f"    s{n}: {{<<: *one, shards: {n}.tar}}" for n in range(500))
    text = f"data:\n  sources:\n    one: &one {{shards: a.tar, caption: {{type: json, path: [en, de]}}}}\n{sources}\n"
    assert len(load(["--config", write(tmp_path / "a.yaml", text)]).data.sources) == 501


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x00\xff" * 99)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100 << 20)
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, said in [
        ("binary", "is not UTF-8 (byte 1)"),
        *[(name, f"{name} has more than 16 MiB") for name in ("large", "device")],
        ("", "Is a directory"),
        ("a\nb", "does not exist"),
    ]:
        (found,) = problems(["--config", f"{tmp_path}/{name}"])
        assert found.startswith("--config: ") and said in found and "\n" not in found
    assert problems(["--config="]) == ["--config: requires a file"]


@pytest.mark.parametrize(
    ("vision", "text", "more", "message"),
    [
        ({"patch_size": 32}, {}, {}, "vision_cfg.image_size 16 is not a multiple of vision_cfg.patch_size 32"),
        ({"patch_size": 0}, {}, {}, "vision_cfg.patch_size: Input should be greater than or equal to 1, not 0"),
        ({"image_size": [16, 12]}, {}, {}, "vision_cfg.image_size 12 is not a multiple of vision_cfg.patch_size 8"),
        ({"head_width": 12}, {}, {}, "vision_cfg.width 32 is not a multiple of vision_cfg.head_width 12"),
        ({"width": "32"}, {}, {}, "vision_cfg.width: Input should be a valid integer, not '32'"),
        ({}, {"heads": 3}, {}, "text_cfg.width 32 is not a multiple of text_cfg.heads 3"),
        ({}, {}, {"vision_cfg": "ViT"}, "vision_cfg: Input should be a valid dictionary, not 'ViT'"),
    ],
)
def test_models_whose_sizes_do_not_fit(
    tmp_path: Path, vision: dict[str, Any], text: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    config = MODEL | {"vision_cfg": MODEL["vision_cfg"] | vision, "text_cfg": MODEL["text_cfg"] | text} | more
    (tmp_path / "model.json").write_text(json.dumps(config))
    assert message in error_of(f"--model={tmp_path}/model.json")


def test_a_picture_size_that_the_patches_do_not_divide(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    said = error_of(f"--model={tmp_path}/model.json --model.image-size=20")
    assert "image_size 20 is not a multiple of vision_cfg.patch_size 8" in said
    (tmp_path / "deep.json").write_text("[" * 50_000)
    assert "cannot read the model configuration" in error_of(f"--model={tmp_path}/deep.json")
    (tmp_path / "w.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    assert "; weights are given by --pretrained" in error_of(f"--model={tmp_path}/w.safetensors")


def test_sizes_of_all_models_of_open_clip_fit() -> None:
    names = [name for name in list_models() if "coca" not in name.lower()]
    assert len(names) > 100
    for name in names:
        check_config(name, builtin(name), None)
        ModelConfig.of(builtin(name), name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_runs_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "no write permission for the folder" in error_of(f"--logs={tmp_path}/runs")


LONG = "n" * 300


@pytest.mark.parametrize(
    ("verb", "argv", "said"),
    [
        (compare, [LONG], "invalid file name nnn"),
        (evaluate, [f"--checkpoint={LONG}"], "invalid file name nnn"),
        (stage, [LONG, "--train-data=a.tar"], ": File name too long"),
        (pack, ["out", "a.tar", f"--size={'9' * 5000}"], "--size: expected a smaller number"),
        (check, [""], "name at least one shard"),
    ],
)
def test_other_verbs(
    verb: ModuleType, argv: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verb.main(argv) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [0, 20_000])
def test_a_disk_that_is_full_at_the_start(left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run says so before it builds its model."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "100k"):
        fill(disk, left)
        assert train.main(flags(tmp_path, "new", "--logs", str(disk / "runs"), "--train-data=synthetic:16")) == 1
        said = capsys.readouterr().err
        assert said.count("error: ") == 1 and "Traceback" not in said and "warning" not in said
        assert f"cannot write {disk}/runs/new: the disk is full" in said
        assert [path.name for path in (disk / "runs/new").iterdir()] == [".lock"]
