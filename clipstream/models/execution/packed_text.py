"""Packed texts: the true tokens of a pass as one row, so that only attention knows where a text ends.

Token ids sorted by length and the lengths enter; the last block's result at each text's end leaves. Embeddings, norms,
projections and MLPs run once over all tokens, without padding. The blocks are called as they are, with a `Packing` in
place of their causal mask, so that hooks, FSDP and activation checkpointing work as in other passes.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from open_clip.hf_model import HFTextEncoder
from torch import nn
from torch.nn.attention import varlen

# torch 2.10 has another keyword for causal attention.
VARLEN = "window_size" in inspect.signature(varlen.varlen_attn).parameters


@dataclass(frozen=True, eq=False)
class Packing:
    """The texts of a row of tokens, shortest first, given to open_clip's blocks for a causal mask.

    Attributes:
        lengths: of each text, ascending.
        borders: int32 [texts + 1] on the device, the place of each text's first token, and the number of tokens.
    """

    lengths: tuple[int, ...]
    borders: torch.Tensor

    def to(self, dtype: torch.dtype) -> Packing:
        """Itself: open_clip's blocks convert their mask to the dtype of the tokens."""
        return self

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention within each text; all [tokens, heads, head dim].

        One call of torch's variable-length attention where it can run: 16 bits on NVIDIA GPUs from compute capability
        8.0. Elsewhere one call for the texts of each length, which are a view (torch 2.15 has no causal attention of
        nested tensors on the CPU).
        """
        if takes_varlen(q):
            longest = self.lengths[-1]
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            borders = self.borders
            found = varlen.varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0))
            return cast(torch.Tensor, found)
        groups = Counter(self.lengths)  # in order, as lengths ascend
        sizes = [length * texts for length, texts in groups.items()]
        total, dtype = sum(sizes), q.dtype
        context: AbstractContextManager[object] = nullcontext()
        if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            # In 16 bits, oneDNN would keep a kernel for each pair of a length and a number of texts, and be slower.
            q, k, v, context = q.float(), k.float(), v.float(), torch.autocast("cpu", enabled=False)
        attended = []
        with context:
            for length, *parts in zip(groups, *(torch.split(x[:total], sizes) for x in (q, k, v)), strict=True):
                query, key, value = (part.view(-1, length, *part.shape[1:]).transpose(1, 2) for part in parts)
                part = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                attended.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat([*attended, v.new_zeros(len(v) - total, *v.shape[1:])]).to(dtype)


def takes_varlen(q: torch.Tensor) -> bool:
    """Whether torch's variable-length attention takes tensors [tokens, heads, head dim] like this one."""
    narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return VARLEN and q.is_cuda and narrow and _flash(q.device.index)


@cache
def _flash(device: int) -> bool:
    """Whether a GPU has the kernels that variable-length attention falls back on."""
    available: bool = torch.backends.cuda.is_flash_attention_available()
    return torch.version.hip is None and available and torch.cuda.get_device_capability(device) >= (8, 0)


def why_unpackable(tower: Any) -> str | None:
    """Why texts cannot be packed in a tower whose features do not depend on padding; None if they can."""
    if isinstance(tower, HFTextEncoder):
        return "a Hugging Face text tower takes padded texts"
    for block in tower.transformer.resblocks:
        attn = getattr(block, "attn", None)
        if not isinstance(attn, nn.MultiheadAttention):
            return f"this text tower has attention layers of its own ({type(attn).__name__})"
        if not attn._qkv_same_embed_dim or attn.bias_k is not None or attn.add_zero_attn or attn.dropout:
            return "the attention of this text tower has dropout, or other keys than those of its tokens"
        if not attn.batch_first:
            return "the blocks of this text tower take tokens of shape [length, texts, width]"
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def row_length(tokens: int) -> int:
    """Length of the row on a CPU: up to 15 or 1/16 more than its tokens, so that few shapes occur in a run. Each new
    shape would leave memory behind, in the allocator and in oneDNN's cache of kernels.
    """
    step = 1 << max((tokens - 1).bit_length() - 5, 4)
    return -(-tokens // step) * step


def ends_of_packed(tower: Any, ids: torch.Tensor, lengths: tuple[int, ...], ends: torch.Tensor) -> torch.Tensor:
    """The last block's result [n, width] at the place in each text that its feature is taken from.

    Args:
        tower: open_clip's CLIP or TextTransformer, that `why_unpackable` has nothing against.
        ids: int [n, T], shortest texts first.
        lengths: of each text, ascending, known on the host so that no step waits for the device.
        ends: [n], the place in each text.
    """
    total, dtype = sum(lengths), tower.transformer.get_cast_dtype()
    counts = torch.tensor(lengths).to(ids.device, non_blocking=True)
    borders = F.pad(counts.cumsum(0), (1, 0))
    texts = torch.repeat_interleave(counts, output_size=total)
    places = torch.arange(total, device=ids.device) - borders[texts]
    unused = row_length(total) - total if ids.device.type == "cpu" else 0
    tokens, places = F.pad(ids[texts, places], (0, unused)), F.pad(places, (0, unused))
    x = tower.token_embedding(tokens).to(dtype)
    x = x + F.embedding(places, tower.positional_embedding.to(dtype))
    x = tower.transformer(x[None], attn_mask=Packing(lengths, borders.int()))
    places = borders[:-1] + ends
    return cast(torch.Tensor, x[0].index_select(0, places))


class CausalAttention(nn.MultiheadAttention):
    """Attention of tokens to those before them, which torch computes without reading the mask where it has a kernel."""

    def forward(
        self, query: torch.Tensor, *inputs: Any, attn_mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See nn.MultiheadAttention; `attn_mask` is causal, or a Packing."""
        if isinstance(attn_mask, Packing):
            return _packed(self, query[0], attn_mask)[None], None
        options |= {"attn_mask": attn_mask, "is_causal": attn_mask is not None}
        return super().forward(query, *inputs, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(layer: nn.MultiheadAttention, x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """A layer's attention of tokens [tokens, width] to those before them in their text. torch.compile leaves it as it
    is: the lengths differ from batch to batch.
    """
    projected = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = projected.view(len(x), 3, layer.num_heads, -1).unbind(1)
    return cast(torch.Tensor, layer.out_proj(packing.attend(q, k, v).flatten(1)))
