"""Layers of towers that move less memory on a GPU: attention without copies, and patches as rows of a product.

A layer of open_clip or timm changes its class, and keeps its parameters and their names. On a CPU, and where a layer is
used in another way than in a tower's blocks, it runs as before. Results differ from before by rounding alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from clipstream.models.layers import is_convolutional

NARROW = (torch.bfloat16, torch.float16)
ALIGNED = (
    8  # numbers of 16 bits in the 16 bytes that rows of a product begin at a multiple of, to be read at full speed
)


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of products of a tensor, under autocast as well."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class SelfAttention(nn.MultiheadAttention):
    """Attention of tokens to each other.

    On a GPU, attention reads queries, keys and values where their projection wrote them. torch's layer copies the
    projection, transposes texts and tokens, and in the backward pass fills and adds three gradients of its whole size.
    """

    def forward(
        self, query: torch.Tensor, *inputs: Any, attn_mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.is_plain(query, inputs, options) and (attn_mask is None or attn_mask.ndim == 2):
            return self.attend(query, attn_mask), None
        options["attn_mask"] = attn_mask
        return super().forward(query, *inputs, **options)

    def is_plain(self, query: torch.Tensor, inputs: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call on a GPU is that of a block of open_clip's, and the layer has nothing but its projections."""
        return (
            on_gpu(query)
            and query.ndim == 3
            and options == {"need_weights": False}
            and len(inputs) == 2
            and inputs[0] is query
            and inputs[1] is query
            and self.batch_first
            and self._qkv_same_embed_dim
            and self.dropout == 0
            and self.bias_k is None
            and not self.add_zero_attn
        )

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False) -> torch.Tensor:
        """Attention of tokens [n, T, width], to those before them if `causal`."""
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        parts = projected.view(*x.shape[:2], 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return cast(torch.Tensor, self.out_proj(found.transpose(1, 2).flatten(2)))


class PatchProjection(nn.Conv2d):
    """Convolution of patches that do not overlap.

    In 16 bits on a GPU, it is one product of patches and weights. Of 1,024 images in patches of 32 x 32 pixels, such a
    product takes 0.3 ms; cuDNN's convolution takes 5 ms, and that for the gradient of the weights 9 ms (H200, bf16).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (height, width), (n, channels, *size) = self.kernel_size, input.shape
        if input.ndim != 4 or size[0] % height or size[1] % width or not on_gpu(input):
            return super().forward(input)
        if (dtype := compute_dtype(input)) not in NARROW:
            return super().forward(input)
        high, wide = size[0] // height, size[1] // width
        patches = input.view(n, channels, high, height, wide, width).permute(0, 2, 4, 1, 3, 5)
        rows = patches.to(dtype, memory_format=torch.contiguous_format).reshape(
            n, high * wide, channels * height * width
        )
        weight = self.weight.flatten(1)
        if missing := -rows.shape[2] % ALIGNED:
            rows, weight = F.pad(rows, (0, missing)), F.pad(weight, (0, missing))
        return F.linear(rows, weight, self.bias).transpose(1, 2).view(n, self.out_channels, high, wide)


def suit_gpus(clip: nn.Module) -> None:
    """Let the layers of open_clip's model, in place, compute on GPUs as this module has it."""
    for module in clip.modules():
        attention = getattr(module, "attn", None)
        if type(attention) is nn.MultiheadAttention:
            attention.__class__ = SelfAttention
    visual = cast(nn.Module, clip.visual)
    for module in [] if is_convolutional(visual) else visual.modules():
        if type(module) is nn.Conv2d and _takes_patches(module):
            module.__class__ = PatchProjection


def restore_layers(clip: nn.Module) -> None:
    """Give the layers of a model, in place, the classes that open_clip builds it with; not those with an adapter."""
    for module in clip.modules():
        theirs = nn.MultiheadAttention if isinstance(module, SelfAttention) else nn.Conv2d
        if isinstance(module, SelfAttention | PatchProjection) and not parametrize.is_parametrized(module):
            module.__class__ = theirs  # type: ignore[assignment]


def _takes_patches(layer: nn.Conv2d) -> bool:
    """Whether a convolution is one of patches that do not overlap."""
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding in ((0, 0), "valid")
    return plain and layer.kernel_size == layer.stride and min(layer.kernel_size) > 1
