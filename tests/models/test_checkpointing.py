"""Activation checkpointing: equal gradients, equal names, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import to_2tuple
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipstream.errors import SettingsError
from clipstream.models.execution.checkpointing import fit_budgets
from clipstream.models.precision import autocast
from clipstream.models.settings import TOWERS, ModelSettings, Tower
from tests.support.model_files import VIT, build, write, write_text_tower
from tests.support.peak_memory import PeakMemory
from tests.support.steps import assert_close

TIMM = {"timm_model_name": "test_vit", "image_size": 160, "timm_pool": "token", "timm_proj": "linear"}


def _step(towers: Any, context: Callable[[], Any] = nullcontext) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one pass with random numbers, and the memory that it holds before the backward pass, which runs
    outside of the pass's context.
    """
    torch.manual_seed(3)
    size = to_2tuple(towers.clip.visual.image_size)
    pixels, ids = torch.rand(4, 3, *size), torch.randint(4, 60, (4, 12))
    torch.manual_seed(5)
    with PeakMemory() as made, context():
        features = towers(pixels, ids)
    held = made.held()
    (features.image @ features.text.T).square().sum().backward()
    return {name: p.grad for name, p in towers.clip.named_parameters() if p.grad is not None}, held


@pytest.mark.parametrize(
    "vision", [{**VIT, "patch_dropout": 0.5}, {**TIMM, "timm_drop_path": 0.2}], ids=["vit", "timm"]
)
def test_gradients_are_equal_and_memory_falls_with_the_policy(tmp_path: Path, vision: dict[str, Any]) -> None:
    name = write(tmp_path, vision)
    gradients, memory = {}, {}
    for policy in ("off", 2, "matmuls", "all"):
        towers = build(name, grad_checkpointing=policy, text_buckets="off").train()
        copied = deepcopy(towers)
        gradients[policy], memory[policy] = _step(towers)
        assert all(parameter.grad is None for parameter in copied.parameters())
        assert _step(copied)[0].keys() == gradients[policy].keys()  # a copy runs its own weights
        assert_close(gradients[policy], gradients["off"], 0)
    assert memory["off"] > memory["matmuls"] > memory["all"]
    assert memory["off"] > memory[2] > memory["all"]


@pytest.mark.parametrize("vision", [VIT, TIMM], ids=["vit", "timm"])
@pytest.mark.parametrize("context", ["bf16", "flash"])
def test_the_recomputation_runs_as_its_pass(tmp_path: Path, context: str, vision: dict[str, Any]) -> None:
    flash, bf16 = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION), partial(autocast, "cpu", "bf16")
    entered = flash if context == "flash" else bf16
    name = write(tmp_path, vision)
    wanted, held = _step(build(name, text_buckets="off").train(), entered)
    for policy in ("all", "matmuls", 0.4):
        settings = ModelSettings.model_validate({"name": name, "grad_checkpointing": policy})
        towers = build(name, grad_checkpointing=policy, text_buckets="off").train()
        fit_budgets(towers, settings, 4, entered)
        found, less = _step(towers, entered)
        assert less < held
        assert_close(found, wanted, 0)


@pytest.mark.parametrize("policy", ["all", "matmuls"])
def test_passes_that_share_the_casts_of_weights_recompute(tmp_path: Path, policy: str) -> None:
    """Text buckets are such passes: autocast casts a weight in the first one, and not in the second."""
    name, gradients = write(tmp_path, VIT), []
    pixels, ids = torch.rand(4, 3, 32, 32), torch.randint(4, 60, (4, 12))
    for each in ("off", policy):
        towers = build(name, grad_checkpointing=each, text_buckets="off").train()
        with autocast("cpu", "bf16"):
            first, second = (towers(pixels[rows], ids[rows]) for rows in (slice(2), slice(2, 4)))
        (first.image @ second.text.T + second.image @ first.text.T).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in towers.clip.parameters() if p.grad is not None]))
    wanted, found = gradients
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_a_hugging_face_tower_recomputes_with_its_dropout(tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg=write_text_tower(tmp_path / "bert"))
    off, matmuls, recomputed = (
        _step(build(name, text={"grad_checkpointing": policy}).train()) for policy in ("off", "matmuls", "all")
    )
    assert off[1] > matmuls[1] > recomputed[1]
    for found in (matmuls[0], recomputed[0]):
        assert_close(found, off[0], 0)


@pytest.mark.parametrize("vision", [{**VIT, "layers": 4, "patch_dropout": 0.5}, TIMM], ids=["vit", "timm"])
def test_a_budget_is_kept_with_equal_gradients(tmp_path: Path, vision: dict[str, Any]) -> None:
    name = write(tmp_path, vision)
    whole, at_most = _step(build(name, text_buckets="off").train())
    parts = {tower: _blocks_memory(build(name, text_buckets="off").train(), tower) for tower in TOWERS}
    before = at_most + 1
    for share in (0.99, 0.8, 0.4, 0.2):
        settings: dict[str, Any] = {"grad_checkpointing": share}
        if share == 0.4:  # the same, in bytes of a tower
            settings = {tower: {"grad_checkpointing": f"{share * parts[tower] / 2**20:.9f}MiB"} for tower in TOWERS}
        towers = build(name, text_buckets="off", **settings).train()
        kept = [(tensor, tensor.clone()) for tensor in (*towers.parameters(), *towers.buffers())]
        lines = fit_budgets(towers, ModelSettings.model_validate({"name": name, **settings}), 4, nullcontext)
        assert [line.split(":")[0] for line in lines] == [f"model.{tower}.grad_checkpointing" for tower in TOWERS]
        assert all(torch.equal(*pair) and pair[0].grad is None for pair in kept)
        gradients, held = _step(towers)
        assert_close(gradients, whole, 0)
        assert held < before
        assert at_most - held >= sum((1 - share) * part for part in parts.values()) - 1e-6 * at_most
        before = held


def _blocks_memory(towers: Any, tower: Tower) -> float:
    """Bytes that the blocks of a tower hold for four samples, as the difference of no blocks and all, with inputs."""
    lines = fit_budgets(towers, ModelSettings.model_validate({"grad_checkpointing": 0.999}), 4, nullcontext)
    line = next(line for line in lines if line.startswith(f"model.{tower}."))
    return float(line.rpartition(" ")[2]) * 2**30


def test_a_budget_below_the_inputs_of_the_blocks_is_an_error(tmp_path: Path) -> None:
    settings = {"name": write(tmp_path), "text": {"grad_checkpointing": 0.001}}
    towers = build(**settings).train()
    with pytest.raises(SettingsError, match=r"model\.text\.grad_checkpointing: 0\.001 is less than the inputs"):
        fit_budgets(towers, ModelSettings.model_validate(settings), 8, nullcontext)
    locked = build(**settings, lock_text=True).train()
    assert fit_budgets(locked, ModelSettings.model_validate(settings), 8, nullcontext) == []


@pytest.mark.parametrize("value", ["some", 1, 1.5, 0.0, "12GB", "-3GiB"])
def test_policies_that_are_none_are_told(value: object) -> None:
    told = r"expected off, all, matmuls, .* or memory such as 12GiB" if isinstance(value, str) else "grad_checkpointing"
    with pytest.raises(ValueError, match=told):
        ModelSettings.model_validate({"grad_checkpointing": value})


def test_each_tower_may_have_its_own_policy(tmp_path: Path) -> None:
    name = write(tmp_path)
    held = [
        _step(build(name, text_buckets="off", **settings).train())[1]
        for settings in (
            {},
            {"text": {"grad_checkpointing": "all"}},
            {"grad_checkpointing": True, "image": {"grad_checkpointing": False}},
            {"grad_checkpointing": True},
        )
    ]
    assert held[0] > held[1] == held[2] > held[3]
    resnet = write(tmp_path, {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16})
    build(resnet, text={"grad_checkpointing": "all"})
    with pytest.raises(SettingsError, match=r"model\.image\.grad_checkpointing.*no repeated blocks"):
        build(resnet, grad_checkpointing="all")
