"""FSDP2: training, evaluation, saving and resuming equal those of whole weights. DDP, batch norm over unequal ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.layers import blocks
from clipstream.models.settings import Precision
from clipstream.training.parallel import (
    ShardedTowers,
    local_tensor,
    parallelize,
    shard_like,
    synchronize_batch_norm,
    warm_up_buckets,
    wrap,
)
from clipstream.training.settings import TrainSettings
from tests.support.model_files import build, write
from tests.support.ranks import run_ranks
from tests.support.steps import LOSSES, TinyTowers, assert_close, make_batch, make_step, reference, taken


class DeepTowers(TinyTowers):
    """Towers with blocks, of which some are frozen, and one tensor under two names."""

    def __init__(self, kind: str = "clip") -> None:
        super().__init__(kind)
        with torch.random.fork_rng():
            torch.manual_seed(2)
            parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.clip.layers = nn.ModuleList(parts)
        self.clip.layers[0].requires_grad_(False)
        self.clip.again = nn.Embedding(2, 2)
        self.clip.again.weight = self.clip.words.weight
        self.register_buffer("shift", torch.full((8,), 0.25), persistent=False)
        self.watched: list[nn.Parameter] = []
        self.seen: list[bool] = []

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> Any:
        """As Towers.forward."""
        if torch.is_grad_enabled():
            self.seen.append(any(p.grad is not None for p in self.watched))
        features = super().forward(pixels, ids)
        hidden = self.clip.words(ids).mean(1) + self.shift
        for layer in self.clip.layers:
            hidden = layer(hidden)
        return features._replace(text=F.normalize(features.text + self.clip.text(hidden), dim=-1))


def sharded_gradients(world: World, kind: str, micro: int | None) -> tuple[Any, dict[str, Any]]:
    """What one step says, and the gradient that it went along."""
    model = DeepTowers(kind).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    layout = parallelize(model, world, TrainSettings(parallel="fsdp", precision="fp64"))
    model.watched = [p for p in model.parameters() if isinstance(p, DTensor) and p.requires_grad]
    step = make_step(model, world, kind, precision="fp64", micro_batch_size=micro)
    result = step(make_batch(0, world.rank, world.size), lr=1.0)
    if world.size > 1:  # gradients of a micro-batch do not wait, whole, for the last one
        assert all(model.seen[1:]) and not model.seen[0] and len(blocks(model)) == 3
    with layout.full_weights("cpu") as full:
        found = {name: before[name] - p.detach().clone() for name, p in full.named_parameters()}
        assert torch.equal(full.shift, model.shift)
    assert world.size == 1 or all(tensor.is_meta for tensor in layout.full.parameters())
    part = shard_like(torch.zeros(9, 48), next(iter(model.clip.visual.parameters())))
    assert not isinstance(part, DTensor) or part.to_local().untyped_storage().nbytes() == part.to_local().nbytes
    return result, found


def all_sharded_gradients(world: World) -> dict[tuple[str, int | None], Any]:
    cases = [(kind, micro) for kind in LOSSES for micro in (None, 2, 3)]
    return {case: sharded_gradients(world, *case) for case in cases}


def test_gradients_are_the_full_batchs() -> None:
    expected = {kind: sharded_gradients(World(), kind, None) for kind in LOSSES}
    for found in run_ranks(3, all_sharded_gradients):
        for (kind, _), (result, gradients) in found.items():
            alone, truth = expected[kind]
            assert (result.loss, result.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), abs=1e-10)
            assert_close(gradients, truth)


def held(world: World, name: str) -> tuple[int, int]:
    """Numbers that a rank holds of a model's parameters, and all of them."""
    towers = build(name)
    count = towers.n_parameters
    ShardedTowers(towers, world, "fp32")
    return sum(local_tensor(p).numel() for p in towers.parameters()), count


def test_a_rank_holds_its_part_and_blocks_are_units(tmp_path: Path) -> None:
    name = write(tmp_path)
    found = run_ranks(2, held, name)
    assert sum(part for part, _ in found) == found[0][1] + 1  # the scale is on both
    assert all(part < 0.51 * count for part, count in found)
    towers = build(name)
    assert blocks(towers) == [*towers.clip.visual.transformer.resblocks, *towers.clip.transformer.resblocks]


def refused(world: World, batch_norm: bool, precision: Precision) -> str:
    model = TinyTowers(batch_norm=batch_norm)
    try:
        ShardedTowers(model, world, precision)
        make_step(model, world, precision=precision, micro_batch_size=2)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("batch_norm", "precision", "said"),
    [(True, "fp32", "without batch norm"), (False, "fp16", "use bf16, fp32 or ddp"), (False, "bf16", "")],
)
def test_what_does_not_go_together(batch_norm: bool, precision: Precision, said: str) -> None:
    for found in run_ranks(2, refused, batch_norm, precision):
        assert said in found and bool(said) == bool(found)


def test_batch_statistics_are_as_before_where_the_first_passes_fail(alone_in_group: None) -> None:
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))

    def forward() -> None:
        wrapped(torch.ones(2, 3))
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        warm_up_buckets(wrapped, forward, World())
    assert not wrapped.module[1].running_mean.any() and wrapped.module[1].num_batches_tracked == 0


@pytest.fixture
def alone_in_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_batch_norm_over_ranks_requires_gpus() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    with pytest.raises(SettingsError, match="batch norm over several ranks requires CUDA"):
        synchronize_batch_norm(module, World(0, 2))
    synchronize_batch_norm(module, World())
    synchronize_batch_norm(module, World(0, 2), frozen=[module[1]])
    synchronize_batch_norm(module, World(0, 2, device="cuda:0"))
    assert isinstance(module[1], nn.SyncBatchNorm)


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "regnety_002", "resnet18"])
def test_synchronized_batch_norm_keeps_the_activations_in_it(name: str) -> None:
    tower = timm.create_model(name, num_classes=0).eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        before = tower(image)
        synchronize_batch_norm(tower, World(0, 2, device="cuda:0"))
        assert not any(type(norm) is nn.BatchNorm2d for norm in tower.modules())
        assert torch.equal(tower(image), before)


def gathered_after_forward(world: World, reshard: bool) -> tuple[float, bool]:
    """The loss, and whether a block's weights are whole between the forward and the backward pass."""
    model = DeepTowers("clip").double()
    layout = parallelize(model, world, TrainSettings(parallel="fsdp", precision="fp64", reshard_after_forward=reshard))
    batch = make_batch(0, world.rank, world.size)
    model(batch.images, batch.texts)
    whole = not any(isinstance(p, DTensor) for block in blocks(model)[:1] for p in block.parameters())
    with layout.full_weights("cpu"):
        pass
    return make_step(model, world, precision="fp64")(batch, lr=1.0).loss, whole


def test_gathered_weights_may_stay_until_the_backward_pass() -> None:
    freed, kept = (run_ranks(2, gathered_after_forward, reshard) for reshard in (True, False))
    assert {whole for _, whole in freed} == {False} and {whole for _, whole in kept} == {True}
    assert kept[0][0] == pytest.approx(freed[0][0], abs=1e-12)


def bf16_step(world: World, name: str, parallel: str) -> dict[str, Any]:
    """Of a step: loss, dtypes of the blocks' parameters, matrices kept for the backward pass, leaves of the options."""
    towers = build(name, lock_text=True).train()
    towers.set_precision("text", "fp32")
    parallelize(towers, world, TrainSettings(parallel=parallel, precision="bf16"))
    found: dict[str, Any] = {"matrix": set(), "vector": set(), "frozen": set()}
    saved: list[torch.Tensor] = []

    def note(block: nn.Module, inputs: Any, output: Any) -> None:
        for p in block.parameters():
            found["frozen" if not p.requires_grad else "matrix" if p.ndim > 1 else "vector"].add(p.dtype)

    for block in blocks(towers):
        block.register_forward_hook(note, prepend=True)
    towers.register_forward_hook(
        lambda module, args, options, output: found.update(leaves=len(tree_leaves(options))), with_kwargs=True
    )
    step = make_step(towers, world, precision="bf16")
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    part, ids = slice(2 * world.rank, 2 * world.rank + 2), torch.arange(24).reshape(2, 12).int()
    batch = Batch(pixels[part], ids, torch.ones(2), ("a", "b"), torch.zeros(2), 0, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        features = step.gradcache.forward(batch, step.gradcache._features)
    sizes = {p.numel() for p in towers.clip.visual.transformer.parameters() if p.ndim > 1}
    held = [tuple(tensor.shape) for tensor in saved if tensor.numel() in sizes and tensor.untyped_storage().nbytes()]
    del features
    result = step(batch, lr=0.0)
    return {**found, "held": held, "figures": (result.loss, result.grad_norm)}


@pytest.mark.skipif(not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"), reason="a torch before 2.15")
def test_blocks_are_gathered_in_bf16_and_leave_no_copy_of_their_weights(tmp_path: Path) -> None:
    name = write(tmp_path)
    whole, *_ = run_ranks(2, bf16_step, name, "ddp")
    for found in run_ranks(2, bf16_step, name, "fsdp"):
        assert found["matrix"] == {torch.bfloat16} and found["vector"] == found["frozen"] == {torch.float32}
        assert whole["held"] and not found["held"]
        assert found["figures"] == pytest.approx(whole["figures"], rel=1e-6)
        assert whole["leaves"] == 2 and found["leaves"] == 1  # of the texts' lengths, one for each text with DDP


class Unread(tuple[int, ...]):
    """Numbers that nobody may look at one by one."""

    def __iter__(self) -> Any:
        raise AssertionError("looked at")


def test_ddp_on_a_gpu_does_not_move_the_lengths_of_texts_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):  # they read parameters
        monkeypatch.setattr(torch.nn.parallel.distributed, name, lambda *args, **options: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with FakeTensorMode(), torch.no_grad():
            tower = nn.Linear(4, 4, device="cuda")
            monkeypatch.setattr(tower, "forward", lambda x, lengths: lengths)
            lengths = Unread(range(1024))
            assert (
                wrap(tower, World(0, 2, device="cuda:0"))(torch.zeros(2, 4, device="cuda"), lengths=lengths) is lengths
            )
    finally:
        dist.destroy_process_group()


def summed_in_bf16(world: World) -> tuple[int, dict[str, torch.Tensor]]:
    """The size of a bucket in bytes, and the gradients of a step."""
    settings: Any = {"precision": "fp64", "micro_batch_size": 2, "ddp_bucket_mib": 3, "ddp_hook": "bf16"}
    step = make_step(TinyTowers().double(), world, **settings)
    _, found = taken(step, make_batch(0, world.rank, world.size))
    return step.gradcache.model._get_ddp_logging_data()["bucket_cap_bytes"], found


def test_ddp_sums_in_buckets_of_a_size_and_in_bf16() -> None:
    truth = reference("clip", torch.ones(10))[1]
    for size, gradients in run_ranks(2, summed_in_bf16):
        assert size == 3 << 20
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, gradient.bfloat16().double(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(gradient, truth[name], rtol=0, atol=0.02 * float(truth[name].abs().max()))
