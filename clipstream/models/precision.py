"""Numerics of a model: dtype of the weights, autocast.

`fp32` and `fp64` compute in the weights' dtype; `bf16` and `fp16` are autocast over float32 weights, `fp16` with a
scaled loss, as its smallest gradients would be 0; `pure_bf16` has weights, gradients and moments in bfloat16: half the
memory, but updates below 1/256 of a weight are lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.frozen import arithmetic, ids_of_own
from clipstream.models.settings import Precision
from clipstream.utils.processes import capabilities

if TYPE_CHECKING:
    from clipstream.models.settings import ModelSettings
    from clipstream.models.towers import Towers

_BF16 = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # of torch.cpu
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TF32_CAPABILITY = (8, 0)  # of the first GPUs with TF32 (Ampere)
KEPT_WIDE = 4  # elements of tensors that stay float32: scale and bias, which bfloat16 would freeze, and channel means


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


def products_dtype(precision: Precision) -> torch.dtype:
    """The dtype of the matrix products of a forward pass."""
    return torch.bfloat16 if precision == "pure_bf16" else AUTOCAST.get(precision, torch.float32)


@contextmanager
def autocast(device: str | torch.device, precision: Precision) -> Iterator[None]:
    with arithmetic(torch.device(device).type, products_dtype(precision), cast=precision in AUTOCAST):
        yield


def computes_bf16(device: str) -> bool:
    """Whether a device, as 'cpu' or 'cuda:1', computes bfloat16 and does not only emulate it."""
    if given := capabilities().keys() & {"bf16", "no-bf16"}:
        return "bf16" in given
    if device.startswith("cuda"):
        with torch.cuda.device(device):  # the query is about the current device
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    asked = (getattr(torch.cpu, name, None) for name in _BF16)
    has = any(ask is not None and bool(ask()) for ask in asked)
    return has and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # oneDNN may be told not to ($ONEDNN_MAX_CPU_ISA)


class WithoutBF16(TorchFunctionMode):
    """Casts to bfloat16 become casts to float32, as in a step of Muon, whose Newton-Schulz iteration is in bfloat16: a
    processor that only emulates it takes 64 times as long for a product as in float32 (torch 2.15, AVX2).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [torch.float32 if each is torch.bfloat16 else each for each in args]
        named = {key: torch.float32 if each is torch.bfloat16 else each for key, each in (kwargs or {}).items()}
        return func(*wide, **named)
