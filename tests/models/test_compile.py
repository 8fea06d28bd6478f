"""Compiled towers: one compilation for equal blocks, few for text buckets, and what happens where one fails."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import sdpa_kernel

from clipstream.errors import SettingsError
from clipstream.models.execution import compile as module
from clipstream.models.execution.checkpointing import enabled_backends
from clipstream.models.execution.compile import Compilation, compile_towers, compiling
from clipstream.models.precision import autocast
from clipstream.models.settings import CUDA_GRAPHS, Precision
from clipstream.models.towers import Towers
from tests.support.model_files import VIT, build, write
from tests.support.steps import assert_close
from tests.support.text_batches import LENGTHS, TEXT_CFG, TOKENS, make_texts


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """No compiled code, and the backends of attention, which towers called without `compiling` may change."""
    torch._dynamo.reset()
    counters.clear()
    with sdpa_kernel(enabled_backends()):
        yield
    torch._dynamo.reset()


def make(tmp_path: Path, vision: dict[str, Any] | None = None, **settings: Any) -> Towers:
    return build(write(tmp_path, vision, text_cfg=TEXT_CFG), **settings)


def gradients(towers: Towers, precision: Precision = "fp32") -> dict[str, torch.Tensor]:
    pixels, ids = make_texts()
    towers.zero_grad(set_to_none=True)
    with autocast("cpu", precision):
        features = towers(pixels, ids, towers.text_lengths(ids))
    (features.logit_scale * features.image * features.text).sum().backward()
    return {name: p.grad for name, p in towers.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("parts", "policy", "buckets", "backend", "graphs"),
    [
        ("blocks", "off", "auto", "eager", 3),  # that of the image blocks, and of the text blocks with two buckets
        ("blocks", "matmuls", "auto", "aot_eager", 3),
        ("towers", "all", "auto", "eager", 3),
        ("step", "off", "off", "eager", 1),  # images and texts together
        ("step", "all", "auto", "eager", 3),
    ],
)
def test_gradients_and_names_are_those_of_eager_towers(
    parts: Any, policy: str, buckets: str, backend: str, graphs: int, tmp_path: Path
) -> None:
    towers = make(tmp_path, grad_checkpointing=policy, text_buckets=buckets).double().train()
    truth, names = gradients(towers), list(towers.state_dict())
    compilation = compile_towers(towers, parts, backend)
    for _ in range(2):
        assert_close(gradients(towers), truth)
        assert compilation.graphs == graphs
    assert not counters["graph_break"] and list(towers.state_dict()) == names
    if parts == "step":
        assert_close(gradients(copy.deepcopy(towers)), truth)


@pytest.mark.parametrize("policy", ["all", "matmuls"])
def test_compiled_blocks_recompute_in_the_attention_of_their_pass(policy: str, tmp_path: Path) -> None:
    towers = make(tmp_path, grad_checkpointing=policy, text_buckets="off").train()
    truth = gradients(towers, precision="bf16")
    compilation, before = compile_towers(towers, "step", "eager"), enabled_backends()
    for context in (compiling(compilation), nullcontext()):
        assert enabled_backends() == before
        with context:
            found = gradients(towers, precision="bf16")
        assert_close(found, truth, 0)
    assert compilation.graphs == 1


def test_batches_of_many_lengths_take_few_graphs(tmp_path: Path) -> None:
    towers = make(tmp_path).train()
    compilation = compile_towers(towers, "blocks", "eager")
    for seed in range(16):
        draw = torch.Generator().manual_seed(seed)
        _, ids = make_texts(torch.randint(2, TOKENS + 1, (32,), generator=draw).tolist())
        with compiling(compilation), torch.no_grad():
            towers.encode_text(ids, towers.text_lengths(ids))
    assert towers.text_buckets is not None and compilation.graphs <= 12


@pytest.mark.slow  # inductor takes a C++ compiler's time
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_random_numbers_are_those_of_eager_towers_in_both_passes(tmp_path: Path) -> None:
    towers, (pixels, _) = make(tmp_path, patch_dropout=0.5).double().train(), make_texts()
    torch.manual_seed(1)
    truth = towers.encode_image(pixels)
    compile_towers(towers, "towers", "inductor")
    for enabled in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(towers.encode_image(pixels), truth, rtol=0, atol=1e-10)


def test_inductor_without_a_compiler_warns_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    towers = make(tmp_path).double().eval()
    _, ids = make_texts()
    no_compiler = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, torch.no_grad(), caplog.at_level(logging.WARNING, "clipstream"):
        truth = towers.encode_text(ids)
        compile_towers(towers, "blocks", "inductor")
        torch.testing.assert_close(towers.encode_text(ids), truth, rtol=0, atol=1e-10)
    assert "inductor cannot compile a part of the towers, which runs uncompiled" in caplog.text


def test_what_cannot_be_captured_falls_back_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    towers = make(tmp_path).double().train()
    truth = gradients(towers)
    compilation = compile_towers(towers, "towers", "eager")
    function = towers.clip.visual.forward.__func__

    def broken(*args: Any, **kwargs: Any) -> None:
        raise InternalTorchDynamoError("a stand-in: torch's own error")

    monkeypatch.setattr(function, "compiled", broken)
    with caplog.at_level(logging.WARNING, "clipstream"):
        assert_close(gradients(towers), truth)
        assert_close(gradients(towers), truth)
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1 and "VisionTransformer cannot be compiled and runs eagerly" in warnings[0]
    assert compilation.graphs == 2, "those of the text tower"


def test_compiled_code_is_kept_where_the_environment_says_or_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    ours, users = str(tmp_path / "ours"), str(tmp_path / "users")
    for before, after in ((default_cache_dir(), ours), (users, users)):  # torch sets its default when it is imported
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        compile_towers(make(tmp_path), "blocks", "eager", cache=Path(ours))
        assert cache_dir() == after
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    compile_towers(make(tmp_path), "blocks", "eager", cache=tmp_path / "file" / "inductor")
    assert cache_dir() == default_cache_dir()


def test_torchs_configuration_is_changed_only_while_towers_may_compile(tmp_path: Path) -> None:
    import torch._dynamo.config as config

    def configuration() -> tuple[bool, int]:
        return bool(config.optimize_ddp), config.recompile_limit

    before, towers = configuration(), make(tmp_path).train()
    compilation = compile_towers(towers, "blocks", "eager")
    assert configuration() == before
    with compiling(compilation):
        assert configuration() == (False, max(module.GRAPHS, before[1]))
    with config.patch(recompile_limit=1000), compiling(compilation):
        assert config.recompile_limit == 1000, "a higher limit of the user's own stays"
    assert configuration() == before
    with pytest.raises(RuntimeError, match="shape"):  # errors of the code itself are raised
        towers.clip.visual.transformer.resblocks[0](torch.zeros(2, 3, VIT["width"] + 1))


def test_wrong_backends_and_towers_without_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"train\.compile_backend: torch has no 'inductr' .*inductor"):
        compile_towers(make(tmp_path), "blocks", "inductr")
    towers = make(tmp_path, {**VIT, "layers": 1})
    towers.clip.transformer.resblocks = torch.nn.ModuleList([towers.clip.transformer.resblocks[0]])
    with pytest.raises(SettingsError, match="no tower has repeated blocks"):
        compile_towers(towers, "blocks", "eager")


def test_a_step_logs_the_graphs_that_it_compiled(caplog: pytest.LogCaptureFixture) -> None:
    compilation = Compilation(lambda graph, inputs: graph.forward, "eager")
    double = torch.compile(lambda x: 2 * x, backend=compilation, dynamic=False)
    with caplog.at_level(logging.INFO, "clipstream"):
        double(torch.zeros(3))
        compilation.on_step(2.0)
        compilation.on_step(0.1)
        double(torch.zeros(4))
        compilation.on_step(1.0, shown=False)
    (line,) = [record.message for record in caplog.records]
    assert line == "train.compile: compiled 1 graph with eager in a step of 2.0 s" and compilation.graphs == 2


def test_the_modes_that_record_cuda_graphs_are_torchs() -> None:
    modes = torch._inductor.list_mode_options().items()
    assert {mode for mode, options in modes if options.get("triton.cudagraphs")} == set(CUDA_GRAPHS)


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_outputs_of_cuda_graphs_are_copied_and_their_steps_are_marked(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []  # outputs of the graphs, which the next replay would overwrite
    marks: list[int] = []

    def recorded(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            found = graph.forward(*args)
            kept.extend(found)
            return found

        return run

    monkeypatch.setattr(module, "_compiler", lambda backend, mode: recorded)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(len(kept)))
    towers = make(tmp_path, lock_image=True).double().train()
    truth = gradients(towers)
    compilation = compile_towers(towers, "towers", "inductor", mode)
    records = mode in CUDA_GRAPHS
    assert towers.text_buckets is not None
    assert len(towers.text_buckets.plan(LENGTHS, TOKENS, "cpu")) == (1 if records else 2)
    results: list[torch.Tensor] = []
    for tower in (towers.clip.visual, towers.clip.transformer):
        tower.register_forward_hook(lambda _, args, found: results.append(found))
    for _ in range(2):
        with compiling(compilation):
            assert_close(gradients(towers), truth)
    assert marks == ([0, len(kept) // 2] if records else [])
    memory = {tensor.data_ptr() for tensor in kept}
    assert [result.data_ptr() in memory for result in results] == [not records] * len(results)
