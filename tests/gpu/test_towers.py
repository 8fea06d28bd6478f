"""Towers on a GPU: packed texts, activation checkpointing, compilation, CUDA graphs, and no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.models.execution.text_buckets import takes_varlen
from clipstream.models.layers import PatchProjection, restore_layers
from tests.support.gpu_steps import assert_close, gradients, make_batch, make_step, make_towers

Gradients = dict[str, torch.Tensor]


@pytest.mark.parametrize("policy", ["off", "all", "matmuls"])
def test_packed_texts_in_bf16_are_as_near_as_padded_ones(device: str, policy: str, tmp_path: Path) -> None:
    if device != "cpu" and not takes_varlen(torch.device(device), torch.bfloat16, 32):
        pytest.skip("this GPU has no variable-length attention")
    found = {}
    for buckets, precision in (("off", "fp32"), ("off", "bf16"), ("packed", "bf16")):
        settings: dict[str, Any] = {
            "text_buckets": buckets,
            "grad_checkpointing": policy if buckets == "packed" else "off",
        }
        step = make_step(make_towers(tmp_path, device, **settings), device, precision=precision)
        found[buckets, precision] = gradients(step, make_batch())
    assert_as_near(found["packed", "bf16"], found["off", "bf16"], found["off", "fp32"])


def assert_as_near(ours: Gradients, theirs: Gradients, exact: Gradients) -> None:
    """Errors are at most twice as large as theirs, and a thousandth of the largest gradient."""
    largest = max(float(tensor.norm()) for tensor in exact.values())
    for name, wanted in exact.items():
        errors = [float((one[name].float() - wanted.float()).norm()) for one in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-3 * largest, name


@pytest.mark.parametrize("buckets", ["off", 3])
def test_layers_of_gpus_are_as_near_as_torchs(device: str, buckets: Any, tmp_path: Path) -> None:
    found = []
    for precision, own in (("bf16", True), ("bf16", False), ("fp32", False)):
        towers = make_towers(tmp_path, device, text_buckets=buckets)
        if not own:
            restore_layers(towers.clip)
        found.append(gradients(make_step(towers, device, precision=precision), make_batch()))
    assert_as_near(*found)


@pytest.mark.parametrize("patch", [14, 16, 32])
def test_patches_as_rows_are_as_near_as_a_convolution(device: str, patch: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 64, patch, stride=patch, bias=False).to(device)
    x = torch.randn(8, 3, 4 * patch, 2 * patch).to(device)
    found: list[Gradients] = []
    for kind, dtype in ((PatchProjection, torch.bfloat16), (torch.nn.Conv2d, torch.bfloat16), (torch.nn.Conv2d, None)):
        layer.__class__ = kind
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
            result = layer(x)
        result.float().square().sum().backward()
        assert layer.weight.grad is not None
        found.append({"result": result.detach(), "weight": layer.weight.grad.clone()})
        layer.zero_grad()
    assert_as_near(*found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_gives_the_same_gradients(device: str, precision: Any, tmp_path: Path) -> None:
    found = [
        gradients(
            make_step(make_towers(tmp_path, device, grad_checkpointing=policy), device, precision=precision),
            make_batch(),
        )
        for policy in ("off", "all", "matmuls")
    ]
    for other in found[1:]:
        assert_close(other, found[0], 1e-5 if precision == "fp32" else 0.05)


@pytest.fixture
def _compiler() -> Iterator[None]:
    """Compiled code, which holds its towers, goes at the end."""
    yield
    torch._dynamo.reset()


def compiled(folder: Path, device: str, parts: Any, mode: str | None = None) -> Any:
    """A step with compiled towers; on the CPU they are captured alone, which needs no compiler."""
    towers = make_towers(folder, device)
    backend = "eager" if device == "cpu" else "inductor"
    step = make_step(towers, device, compile=parts, compile_backend=backend, compile_mode=mode)
    assert step.compilation is not None
    step.compilation.strict = True
    return step


@pytest.mark.usefixtures("_compiler")
def test_compiled_blocks_give_the_losses_of_eager_ones(device: str, tmp_path: Path) -> None:
    step, eager = compiled(tmp_path, device, "blocks"), make_step(make_towers(tmp_path, device), device)
    for number in range(4):
        batch = make_batch(seed=number)
        assert step(batch, lr=1e-4).loss == pytest.approx(eager(batch, lr=1e-4).loss, rel=1e-3)
    graphs = step.compilation.graphs
    for number in range(4):
        step(make_batch(seed=number), lr=1e-4)
    assert 2 <= graphs == step.compilation.graphs <= 20


@pytest.mark.usefixtures("_compiler")
def test_cuda_graphs_give_the_losses_of_eager_steps(cuda: str, tmp_path: Path) -> None:
    step, eager = compiled(tmp_path, cuda, "step", "reduce-overhead"), make_step(make_towers(tmp_path, cuda), cuda)
    for number in range(6):
        batch = make_batch(seed=number % 3)
        assert step(batch, lr=1e-4).loss == pytest.approx(eager(batch, lr=1e-4).loss, rel=1e-3)


@contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which torch raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16", "micro_batch_size": 4}], ids=str)
@pytest.mark.parametrize("buckets", [3, "packed"])
def test_a_step_does_not_wait_for_the_gpu(cuda: str, buckets: Any, options: dict[str, Any], tmp_path: Path) -> None:
    towers = make_towers(tmp_path, cuda, text_buckets=buckets)
    step = make_step(towers, cuda, clip_norm=1.0, ema=0.9, ema_warmup=True, **options)
    while step(make_batch(), lr=1e-3).overflow:  # until the optimizer has made its moments
        pass
    with no_waiting():
        result = step.start(make_batch(seed=1), lr=1e-3)
    assert 0 < result().loss < 20
