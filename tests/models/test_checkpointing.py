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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clipstream.errors import SettingsError
from clipstream.models.execution.checkpointing import Held, chosen, fit_budgets
from clipstream.models.settings import TOWERS, ModelSettings, Tower
from clipstream.training.precision import autocast
from tests.support import hubtree
from tests.support.model_files import VIT, build, write

TIMM = {"timm_model_name": "test_vit", "image_size": 160, "timm_pool": "token", "timm_proj": "linear"}


class Made(TorchDispatchMode):
    """Counts the storages made in its context that are still alive, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return made

    def alive(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def _step(towers: Any, context: Callable[[], Any] = nullcontext) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one pass with random numbers, and the memory that it holds before the backward pass, which runs
    outside of the pass's context.
    """
    torch.manual_seed(3)
    size = to_2tuple(towers.clip.visual.image_size)
    pixels, ids = torch.rand(4, 3, *size), torch.randint(4, 60, (4, 12))
    torch.manual_seed(5)
    with Made() as made, context():
        features = towers(pixels, ids)
    held = made.alive()
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
        assert gradients[policy].keys() == gradients["off"].keys()
        assert all(torch.equal(gradients[policy][key], wanted) for key, wanted in gradients["off"].items()), policy
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
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), policy


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
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, vocab_size=64, max_position_embeddings=40)).save_pretrained(tmp_path / "bert")
    hubtree.write_tokenizer(tmp_path / "bert")
    here = str(tmp_path / "bert")
    text = {"hf_model_name": here, "hf_tokenizer_name": here, "hf_pooler_type": "mean_pooler", "context_length": 12}
    name = write(tmp_path, text_cfg={**text, "hf_proj_type": "linear"})
    off, matmuls, recomputed = (
        _step(build(name, text={"grad_checkpointing": policy}).train()) for policy in ("off", "matmuls", "all")
    )
    assert off[1] > matmuls[1] > recomputed[1]
    for found in (matmuls[0], recomputed[0]):
        assert found.keys() == off[0].keys()
        assert all(torch.equal(found[key], wanted) for key, wanted in off[0].items())


@pytest.mark.parametrize("vision", [{**VIT, "layers": 4, "patch_dropout": 0.5}, TIMM], ids=["vit", "timm"])
def test_a_budget_is_kept_with_equal_gradients(tmp_path: Path, vision: dict[str, Any]) -> None:
    name = write(tmp_path, vision)
    whole, at_most = _step(build(name, text_buckets="off").train())
    parts = {}
    for tower in TOWERS:
        parts[tower] = _blocks_memory(build(name, text_buckets="off").train(), tower)
    before = at_most + 1
    for share in (0.99, 0.8, 0.4, 0.2):
        policy = share
        if share == 0.4:  # the same, in bytes of a tower
            settings = {tower: {"grad_checkpointing": f"{share * parts[tower] / 2**20:.9f}MiB"} for tower in TOWERS}
        else:
            settings = {"grad_checkpointing": policy}
        towers = build(name, text_buckets="off", **settings).train()
        chosen = ModelSettings.model_validate({"name": name, **settings})
        kept = [(tensor, tensor.clone()) for tensor in (*towers.parameters(), *towers.buffers())]
        lines = fit_budgets(towers, chosen, 4, nullcontext)
        assert [line.split(":")[0] for line in lines] == [f"model.{tower}.grad_checkpointing" for tower in TOWERS]
        assert all(torch.equal(*pair) and pair[0].grad is None for pair in kept)
        gradients, held = _step(towers)
        assert all(torch.equal(gradients[key], wanted) for key, wanted in whole.items()), share
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


def test_the_first_blocks_recompute_first_and_cheapest() -> None:
    held: Held = {"off": [10.0] * 3, "matmuls": [6.0] * 3, "all": [1.0] * 3}
    assert chosen(held, 30) == ["off"] * 3
    assert chosen(held, 23) == ["matmuls", "matmuls", "off"]
    assert chosen(held, 18) == ["matmuls"] * 3
    assert chosen(held, 10) == ["all", "all", "matmuls"]
    assert chosen(held, 2) is None
    unlike: Held = {"off": [10.0, 2.0], "matmuls": [6.0, 2.0], "all": [1.0, 3.0]}
    assert chosen(unlike, 3) == ["all", "off"]


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
