"""The verb evaluate: from a run's folder or a checkpoint to a table and a file, on one rank and on two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.cli import own_flags
from clipstream.config import Settings, dump
from clipstream.errors import SettingsError
from clipstream.evals.retrieval import Retrieval
from clipstream.evals.settings import RetrievalSettings
from clipstream.evaluate import main
from clipstream.report.progress import table
from clipstream.tools.evaluate import OWN_FLAGS, locate
from clipstream.training.saving import Saver
from clipstream.training.settings import CheckpointSettings
from clipstream.world import World
from tests.evaluating import context_of, tiny_towers
from tests.pictures import ByteTokenizer, make_shards
from tests.ranks import TIMEOUT
from tests.savers import damage

OWN = Path(__file__).parent.parent
BYTES = {"type": "tests.test_evaluate:Bytes"}


class Bytes(ByteTokenizer):
    """The tests' tokenizer as a user's own."""

    def __init__(self, settings: Any) -> None:
        """Constructed with its settings."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as training leaves it, with one checkpoint."""
    folder: Path = tmp_path_factory.mktemp("logs") / "tiny"
    make_shards(folder.parent / "pairs", [9, 12])
    data = {"shards": f"{folder.parent}/pairs/*.tar"}
    settings = {
        "run": {"device": "cpu", "threads": 1},
        "data": {"workers": 0},
        "tokenizer": BYTES,
        "train": {"precision": "fp32"},
        "evals": {
            "val": {"type": "retrieval", "data": data, "batch_size": 8},
            "kinds": {"type": "zero_shot", "data": data, "classes": ["a", "b", "c"], "templates": "plain"},
        },
    }
    towers = tiny_towers()
    optimizer = torch.optim.AdamW(towers.parameters())
    kept = CheckpointSettings(keep_best="val/loss")
    saver = Saver(folder / "checkpoints", World(), kept, towers=towers, optimizer=optimizer)
    saver.save(7, {})
    saver.hear([{"step": 7, "eval": "val", "loss": 1.0}])
    assert saver.finish()
    (folder / "config.yaml").write_text(dump(Settings.model_validate(settings)))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_checkpoint_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", str(run / "checkpoints" / "step_00000007")]) == 0
    val, kinds = lines(run / "evaluations.jsonl")
    expected = dict(Retrieval(RetrievalSettings.model_validate(val["settings"]))(context_of(World())))
    assert {name: val[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert (val["step"], val["eval"], val["checkpoint"], val["n"]) == (7, "val", "step_00000007", 21)
    assert (kinds["eval"], kinds["top5"], kinds["settings"]["classes"]) == ("kinds", 1.0, ["a", "b", "c"])
    shown = capsys.readouterr().out
    assert "image_to_text_R@10" in shown and "chance" in shown and "evaluations.jsonl" in shown


@pytest.mark.slow
def test_flags_lie_over_the_runs_settings_on_two_ranks(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "figures.jsonl"
    flags = ["--evals.kinds", "null", "--evals.val.max-samples", "13", "--output", str(output)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "clipstream.evaluate", "--checkpoint", str(run / "checkpoints" / "step_00000007"), *flags],
        cwd=OWN, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = lines(output)
    assert (record["eval"], record["n"]) == ("val", 13)
    assert done.stdout.count("image_to_text_R@1 ") == 1


def test_any_folder_that_open_clip_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_towers().save_pretrained(tmp_path / "model")
    make_shards(tmp_path / "pairs", [5])
    argv = ["--checkpoint", str(tmp_path / "model"), "--val-data", f"{tmp_path}/pairs/*.tar", "--device", "cpu"]
    argv += ["--tokenizer", BYTES["type"], "--workers", "0", "--run.threads", "1", f"--output={tmp_path}/out.jsonl"]
    assert main(argv) == 2 and "tokenizer" in capsys.readouterr().err
    assert main([*argv, "--model.allow-mismatch"]) == 0
    (record,) = lines(tmp_path / "out.jsonl")
    assert (record["step"], record["n"], record["checkpoint"]) == (0, 5, "model")


def test_a_run_stands_for_its_latest_checkpoint_and_best_for_its_best(run: Path) -> None:
    for path in (run, run / "checkpoints" / "best", run / "checkpoints" / "latest"):
        assert (locate(str(path)).step, locate(str(path)).run) == (7, run)


def test_damaged_weights_are_no_model_and_damaged_moments_do_not_matter(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    folder = copy / "checkpoints" / "step_00000007"
    damage(folder / "optimizer.safetensors")
    assert locate(str(copy)).step == 7
    damage(folder / "open_clip_model.safetensors")
    with pytest.raises(SettingsError, match="damaged: open_clip_model"):
        locate(str(folder))


def test_what_is_wrong_is_told(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "--val-data" in capsys.readouterr().err
    assert main(["--checkpoint"]) == 2 and "--checkpoint: needs a value" in capsys.readouterr().err
    assert main(["--checkpoint", str(tmp_path / "no")]) == 2 and "no folder" in capsys.readouterr().err
    assert main(["--checkpoint", str(tmp_path)]) == 2 and "open_clip_config.json" in capsys.readouterr().err
    assert main(["--checkpoint", str(run), "--model", "ViT-B-32"]) == 2
    assert "--model" in capsys.readouterr().err
    torn = tmp_path / "checkpoints" / "step_00000003"
    tiny_towers().save_pretrained(torn)
    for path in (tmp_path, torn):
        with pytest.raises(SettingsError, match="whole"):
            locate(str(path))


def test_help_names_the_verbs_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--checkpoint" in shown and "--output" in shown and "--evals.NAME" in shown


def test_own_flags_are_taken_out() -> None:
    assert own_flags(["--lr", "1", "--output=x", "--checkpoint", "run", "--a.b=c=d"], OWN_FLAGS) == (
        {"--output": "x", "--checkpoint": "run"},
        ["--lr", "1", "--a.b=c=d"],
    )


def test_the_table() -> None:
    record = {"step": 7, "eval": "val", "text_to_image_R@1": 0.25, "n": 8, "chance_R@1": 0.125, "seconds": 1.5}
    assert table([record]) == (
        "evaluation  metric             value  chance\n"
        "val         text_to_image_R@1  25.0%   12.5%\n"
        "val         n                      8\n"
        "val         seconds             1.5s"
    )
