"""Numerics of a run: dtype of the weights, autocast, random states.

`fp32` and `fp64` compute in the weights' dtype; `bf16` and `fp16` are autocast over float32 weights, `fp16` with a
scaled loss, as its smallest gradients would be 0; `pure_bf16` has weights, gradients and moments in bfloat16: half the
memory, but updates below 1/256 of a weight are lost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field, InstanceOf
from torch import nn
from typing_extensions import NotRequired, TypedDict

from clipstream.distributed.world import World, computes_bf16
from clipstream.errors import SettingsError
from clipstream.models.frozen import arithmetic, ids_of_own
from clipstream.training.settings import Precision

if TYPE_CHECKING:
    from clipstream.models.settings import ModelSettings
    from clipstream.models.towers import Towers

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TF32_CAPABILITY = (8, 0)  # of the first GPUs with TF32 (Ampere)
TWISTER = 624  # words of the state of a Mersenne Twister
KEPT_WIDE = 4  # elements of tensors that stay float32: scale and bias, which bfloat16 would freeze, and channel means


def _row(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.uint8, torch.int64) or tensor.ndim != 1:
        raise ValueError("no row of bytes or of numbers")
    return tensor


_Row = Annotated[InstanceOf[torch.Tensor], AfterValidator(_row)]
_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Words = Annotated[tuple[_Word, ...], Field(min_length=TWISTER + 1, max_length=TWISTER + 1)]  # the last one: a position


class TorchState(TypedDict):
    """Random states of torch's generators: of the CPU and of a CUDA device."""

    cpu: _Row
    cuda: NotRequired[_Row]


class RandomState(TorchState):
    """Random states of a process: as `random.getstate` has it, NumPy's with its words as a tensor, and torch's."""

    python: tuple[Literal[3], _Words, float | None]
    numpy: tuple[Literal["MT19937"], _Row, Annotated[int, Field(ge=0, le=TWISTER)], Literal[0, 1], float]


def prepare(module: nn.Module, precision: Precision) -> nn.Module:
    """Convert a module in place: to float64 for fp64, to bfloat16 for pure_bf16, else to float32.

    With pure_bf16, tensors of up to 4 elements stay float32, and so does batch norm: a running mean in bfloat16 stands
    still, as the change of a step is below its last digit. Towers in a precision of their own (`Towers.set_precision`)
    stay as they are.
    """
    own = ids_of_own(module)
    wide = torch.float64 if precision == "fp64" else torch.float32
    for part in module.modules():
        batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
        for tensor in itertools.chain(part.parameters(recurse=False), part.buffers(recurse=False)):
            if tensor.is_floating_point() and id(tensor) not in own:
                narrow = precision == "pure_bf16" and tensor.numel() > KEPT_WIDE and not batch_norm
                tensor.data = tensor.data.to(torch.bfloat16 if narrow else wide)
        if precision == "pure_bf16" and type(part).__name__ == "LayerNorm":  # torch's, open_clip's, timm's
            part.forward = MethodType(_layer_norm, part)
    return module


def _layer_norm(norm: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """LayerNorm with float32 statistics on a CPU as well, whose kernel has them in the dtype of gain and bias."""
    if input.device.type != "cpu" or input.dtype != torch.bfloat16 or norm.weight is None:
        result: torch.Tensor = type(norm).forward(norm, input)
        return result
    bias = None if norm.bias is None else norm.bias.float()
    return F.layer_norm(input, norm.normalized_shape, norm.weight.float(), bias, norm.eps)


def resolve_precision(wanted: Precision | Literal["auto"], world: World) -> Precision:
    """Resolve 'auto': bf16 if the devices of all ranks compute it; else fp16 on GPUs and fp32 on CPUs, where emulated
    bfloat16 takes ten times as long. Collective.
    """
    if wanted != "auto":
        return wanted
    narrow = all(world.gather_objects(computes_bf16(world.device)))
    return "bf16" if narrow else "fp16" if world.device.startswith("cuda") else "fp32"


def check_device(device: str, precision: str, key: str = "train.precision", *, tf32: bool = False) -> None:
    """Raises SettingsError: bfloat16 on a GPU that only emulates it, or TF32 on a CPU or a GPU that has none."""
    cuda = torch.device(device).type == "cuda"
    if "bf16" in precision and cuda and not computes_bf16(device):
        name = torch.cuda.get_device_name(device)
        raise SettingsError(f"{key}: {name} does not support bfloat16: use fp16 or fp32")
    if tf32 and (not cuda or torch.cuda.get_device_capability(device) < TF32_CAPABILITY):
        name = torch.cuda.get_device_name(device) if cuda else "the CPU"
        raise SettingsError(f"train.tf32: {name} does not support TF32: remove it")


def prepare_towers(
    towers: Towers, precision: Precision, model: ModelSettings, device: str, *, tf32: bool, keep: bool
) -> None:
    """`prepare` for a device, with the settings' own precision of a tower, and with TF32 or without.

    With TF32, products of float32 matrices on a GPU round their factors to 10 bits of mantissa. Convolutions do in
    either case, as is torch's default.

    Raises SettingsError: the device does not compute a tower's precision, or the tower is trained.
    """
    matmul = torch.backends.cuda.matmul
    if torch.device(device).type == "cuda" and (matmul.fp32_precision == "tf32") is not tf32:
        matmul.allow_tf32 = tf32  # see utils.torch_state
    for tower, own in model.own_precisions.items():
        check_device(device, own, f"model.{tower}.precision")
        towers.set_precision(tower, own, keep=keep)
    prepare(towers, precision)


@contextmanager
def autocast(device: str | torch.device, precision: Precision) -> Iterator[None]:
    dtype = torch.bfloat16 if precision == "pure_bf16" else AUTOCAST.get(precision, torch.float32)
    with arithmetic(torch.device(device).type, dtype, cast=precision in AUTOCAST):
        yield


def seed_all(seed: int, rank: int, *step: int) -> None:
    """Seed Python's, NumPy's and torch's generators, each rank with its own: dropout differs between ranks."""
    mixed = int(np.random.SeedSequence([seed, rank, *step]).generate_state(1, np.uint64)[0])
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    # torch.manual_seed formats a stack for each kind of device that is not in use (torch 2.15), which takes 1 ms.
    torch.default_generator.manual_seed(mixed >> 1)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(mixed >> 1)


def random_state(device: str | torch.device) -> RandomState:
    """All random states of this process, in types that `torch.load(weights_only=True)` accepts."""
    numpy: Any = np.random.get_state()
    name, keys, *rest = numpy
    words = torch.from_numpy(np.asarray(keys, np.int64))
    return {"python": random.getstate(), "numpy": (name, words, *rest), **torch_state(device)}


def set_random_state(state: RandomState, device: str | torch.device) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    set_torch_state(state, device)


def torch_state(device: str | torch.device) -> TorchState:
    """Random states of torch: the CPU's, and a CUDA device's."""
    state: TorchState = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_torch_state(state: TorchState, device: str | torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def same_randomness(device: str | torch.device) -> Iterator[None]:
    """Restore all random states at the end of the context."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)
