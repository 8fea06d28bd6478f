"""Checkpoints of open_clip's trainer are resumed with their optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from clipstream import train
from clipstream.checkpoint.open_clip import OpenClipCheckpoint
from clipstream.errors import SettingsError
from clipstream.training.optim import AdamW, build_optimizer
from tests.support import model_files


def excluded(name: str, parameter: torch.nn.Parameter) -> bool:
    """`exclude` of open_clip_train.main, 3.3.0."""
    return parameter.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name


def write(folder: Path, config: dict[str, Any], kind: str, **more: Any) -> tuple[Path, torch.optim.Optimizer, Any]:
    """A checkpoint as open_clip_train.main writes it, after two steps of its AdamW."""
    torch.manual_seed(3)
    model = open_clip.CLIP(**config)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if kind == "3.3.0":
        groups = [[p for n, p in named if excluded(n, p)], [p for n, p in named if not excluded(n, p)]]
    else:  # main: in the order in which they come first; position embeddings have no weight decay
        none = {"positional_embedding", "visual.positional_embedding", "visual.class_embedding"}
        split = [[p for n, p in named if (p.ndim <= 1 or n in none) is which] for which in (True, False)]
        groups = split
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    for number in range(2):
        for index, (_, parameter) in enumerate(named):
            generator = torch.Generator().manual_seed(100 * number + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    content = {"epoch": 2, "name": "theirs", "state_dict": state, "optimizer": optimizer.state_dict(), **more}
    path = folder / "epoch_2.pt"
    torch.save(content, path)
    return path, optimizer, model


@pytest.mark.parametrize("kind", ["3.3.0", "main"])
def test_moments_are_those_of_their_parameters(kind: str, tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    config = json.loads(Path(name).read_text())
    path, theirs, model = write(tmp_path, config, kind)
    towers = model_files.build(name)
    optimizer = build_optimizer(towers, AdamW.Settings(lr=1e-3), "ViT-B-32")
    OpenClipCheckpoint.read(path).load(towers, optimizer)
    for key, parameter in towers.clip.named_parameters():
        other = model.get_parameter(key)
        assert torch.equal(parameter, other), key
        mine, expected = optimizer.state[parameter], theirs.state[other]
        assert float(mine["step"]) == 2 and torch.equal(mine["exp_avg"], expected["exp_avg"]), key
        assert torch.equal(mine["exp_avg_sq"], expected["exp_avg_sq"]), key
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    name = model_files.write(tmp_path)
    path, _, model = write(tmp_path, json.loads(Path(name).read_text()), "3.3.0")
    locked = model_files.build(name, lock_image=True)
    with pytest.raises(SettingsError, match="lock the same towers as there"):
        OpenClipCheckpoint.read(path).load(locked, build_optimizer(locked, AdamW.Settings(), "ViT"))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SettingsError, match="by --pretrained"):
        OpenClipCheckpoint.read(tmp_path / "weights.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(SettingsError, match="no checkpoint of clipstream, nor of open_clip"):
        OpenClipCheckpoint.read(tmp_path / "text.pt")


def test_a_run_goes_on_from_open_clips_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = model_files.write(tmp_path)
    path, *_ = write(tmp_path, json.loads(Path(name).read_text()), "3.3.0")
    argv = ["--model", name, "--dataset-type", "synthetic", "--batch-size", "8", "--train-num-samples", "16"]
    argv += ["--epochs", "3", "--workers", "0", "--log.every", "1", "--device", "cpu", "--precision", "fp32"]
    argv += ["--logs", str(tmp_path / "logs"), "--name", "on", "--resume", str(path)]
    assert train.main(argv) == 0
    assert "epoch 2, step 4; the data order begins anew" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "logs/on/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [5, 6]
    saved = {folder.name for folder in (tmp_path / "logs/on/checkpoints").glob("step_*")}
    assert saved >= {"step_00000004", "step_00000006"}
