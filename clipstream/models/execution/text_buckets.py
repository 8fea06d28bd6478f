"""Text towers without arithmetic on padding: texts in buckets by length, each only as long as its texts, or packed.

Token ids enter; the features that the tower gives for them at full length leave. Features and gradients are those of
the padded pass up to rounding, as no token behind a text's true length can reach its feature: in a tower with a causal
mask that takes its feature at the end-of-text token, that is the position of this token + 1; in a Hugging Face tower,
whose attention and pooling leave padding out, the position of the last token that is not padding + 1.

The texts of a pass are sorted by length and cut into buckets. A bucket's length is a multiple of `STEP` or the context
length, so that there are few shapes. The cut depends on the lengths alone: it is the same in both passes of gradient
caching and in a resumed run. Packed texts run as one row of their true tokens instead, so that only attention knows
where a text ends: the blocks are called as they are, with a `Packing` in place of their causal mask. Dropout draws
other numbers than in the padded pass, from the same distribution.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, cast

import open_clip
import torch
import torch.nn.functional as F
from open_clip.hf_model import ClsLastHiddenStatePooler, ClsPooler, HFTextEncoder, MeanPooler
from open_clip.transformer import TextTransformer, text_global_pool
from torch import nn
from torch.nn.attention import varlen

from clipstream.errors import SettingsError
from clipstream.models.layers import NARROW, SelfAttention, compute_dtype
from clipstream.models.settings import PADDING_COUNTS

# torch 2.10 has another keyword for causal attention.
VARLEN = "window_size" in inspect.signature(varlen.varlen_attn).parameters


@dataclass(frozen=True, eq=False)
class Packing:
    """The texts of a row of tokens, shortest first, given to open_clip's blocks for a causal mask."""

    lengths: tuple[int, ...]  # of each text, ascending
    borders: torch.Tensor  # int32 [texts + 1] on the device: the place of each text's first token, the number of tokens

    def to(self, dtype: torch.dtype) -> Packing:
        """Itself: open_clip's blocks convert their mask to the dtype of the tokens."""
        return self

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention within each text; all [tokens, heads, head dim].

        One call of torch's variable-length attention where it can run: 16 bits on NVIDIA GPUs from compute capability
        8.0. Elsewhere one call for the texts of each length, which are a view (torch 2.15 has no causal attention of
        nested tensors on the CPU).
        """
        if takes_varlen(q.device, q.dtype, q.shape[-1]):
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


def takes_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's variable-length attention takes tensors like these."""
    fits = dtype in NARROW and head_dim % 8 == 0 and head_dim <= 256
    return VARLEN and device.type == "cuda" and fits and _flash(device.index)


@cache
def _flash(device: int | None) -> bool:
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


class CausalAttention(SelfAttention):
    """Attention of tokens to those before them, which torch computes without reading the mask where it has a kernel."""

    def forward(
        self, query: torch.Tensor, *inputs: Any, attn_mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See nn.MultiheadAttention; `attn_mask` is causal, or a Packing."""
        if isinstance(attn_mask, Packing):
            return _attend_packed(self, query[0], attn_mask)[None], None
        if self.is_plain(query, inputs, options):
            return self.attend(query, causal=attn_mask is not None), None
        options |= {"attn_mask": attn_mask, "is_causal": attn_mask is not None}
        return super().forward(query, *inputs, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_packed(layer: nn.MultiheadAttention, x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """A layer's attention of tokens [tokens, width] to those before them in their text. torch.compile leaves it as it
    is: the lengths differ from batch to batch.
    """
    projected = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = projected.view(len(x), 3, layer.num_heads, layer.head_dim).unbind(1)
    return cast(torch.Tensor, layer.out_proj(packing.attend(q, k, v).flatten(1)))


STEP = 8  # tokens between the lengths of buckets
# Fixed cost of one more pass of a tower's blocks, forward and backward, in tokens: reading the weights and adding to
# their gradients on a CPU (both in proportion to the size of the tower, as is the cost of a token), launching kernels
# on a GPU. `benchmarks/text_buckets.py` measures the first; the second is an estimate.
PASS_TOKENS = {"cpu": 64, "cuda": 8192}

Setting = int | Literal["auto", "off", "packed"]
Lengths = Sequence[int]
Function = TypeVar("Function", bound=Callable[..., Any])


def _eager(function: Function) -> Function:
    """A function that torch.compile leaves as it is, while it compiles what the function calls: the cut differs from
    batch to batch, the blocks do not.
    """
    return cast(Function, torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


class Bucket(NamedTuple):
    """Texts that pass through the tower together."""

    rows: int
    length: int  # tokens


@dataclass(frozen=True)
class TextBuckets:
    """How a tower's texts are cut into buckets, and its pass over them."""

    rule: str  # what a text's true length is: 'argmax' and 'eos' (open_clip's pooling), or 'padding'
    token: int  # id of the end-of-text token ('eos'), or of padding ('padding')
    most: int | None = None  # most buckets of a pass; None for as many as the cost model finds
    exactly: bool = False  # whether every pass has `most` buckets, as ranks that share shards of the tower must agree
    # Parameters of a pass in proportion to those of its blocks. The embeddings of Hugging Face towers get a gradient of
    # their whole size in each pass; those of open_clip's are looked up once for all buckets.
    embeddings: float = 1.0
    # Sizes that a bucket can have, in parts of the pass, so that compiled blocks see few shapes; None for any number.
    portions: int | None = None
    packed: Literal["auto", "all"] | None = None  # packed instead (see `Packing`): all texts, or where it is faster

    @classmethod
    def of(cls, clip: Any, setting: Setting) -> TextBuckets | None:
        """The buckets of the text tower of open_clip's model; None for 'off', and for 'auto' where it is not exact.

        Raises SettingsError: a number of buckets where it is not exact, or packed texts where the tower takes none.
        """
        if setting == "off":
            return None
        tower = getattr(clip, "text", clip)
        if (reason := why_inexact(tower)) is not None:
            if setting == "auto":
                return None
            raise PADDING_COUNTS.error("model.text_buckets", setting, reason)
        packed: Literal["auto", "all"] | None = None
        if setting in ("auto", "packed") and (reason := why_unpackable(tower)) is None:
            packed = "all" if setting == "packed" else "auto"
        elif setting == "packed":
            raise SettingsError(f"model.text_buckets: packed is not supported, as {reason}: use auto")
        most = setting if isinstance(setting, int) else None
        if isinstance(tower, HFTextEncoder):
            total = sum(p.numel() for p in tower.transformer.parameters())
            table = sum(p.numel() for p in tower.transformer.get_input_embeddings().parameters())
            return cls("padding", int(tower.config.pad_token_id), most, embeddings=total / max(total - table, 1))
        for block in tower.transformer.resblocks:
            if type(getattr(block, "attn", None)) in (nn.MultiheadAttention, SelfAttention):
                block.attn.__class__ = CausalAttention
        rule, eos = _pooling(tower)
        return cls(rule, eos if rule == "eos" else 0, most, packed=packed)

    def for_shards(self) -> TextBuckets:
        """The same number of passes on all ranks: one, unless a number is set."""
        return replace(self, most=self.most or 1, exactly=True)

    def lengths(self, ids: torch.Tensor) -> tuple[int, ...] | None:
        """True length of each text of ids [n, T] on the CPU, 1 to T; None for ids on a device, which would have to
        be waited for.
        """
        if ids.device.type != "cpu":
            return None
        if self.rule == "padding":
            places = torch.arange(1, ids.shape[1] + 1)
            found = torch.where(ids != self.token, places, 0).amax(dim=1)
            found[found == 0] = ids.shape[1]  # a text of padding alone, whose attention has no definite result
        else:
            found = self._ends(ids) + 1
        return tuple(found.tolist())

    def _ends(self, ids: torch.Tensor) -> torch.Tensor:
        """Place [n] of the token that the feature of each text [n, T] is taken from, by open_clip's pooling."""
        return ids.argmax(dim=1) if self.rule == "argmax" else (ids == self.token).int().argmax(dim=1)

    def _packs(self, tower: Any, device: torch.device) -> bool:
        """Whether texts are packed on a device; 'auto' packs where that was measured to be faster: on a CPU, and with
        variable-length attention.
        """
        if self.packed != "auto" or device.type != "cuda":
            return self.packed == "all" or (self.packed == "auto" and device.type == "cpu")
        layer = tower.transformer.resblocks[0].attn
        return takes_varlen(device, compute_dtype(layer.out_proj.weight), layer.head_dim)

    def plan(self, lengths: Sequence[int], context_length: int, device: str) -> list[Bucket]:
        """The buckets for texts of these lengths, shortest first, at the least cost by `PASS_TOKENS`."""
        if self.portions is not None:  # texts of a portion are as long as its longest
            ordered, rows = sorted(lengths), -(-len(lengths) // self.portions)
            lengths = [ordered[min(place - place % rows + rows, len(ordered)) - 1] for place in range(len(ordered))]
        counts = Counter(min(-(-length // STEP) * STEP, context_length) for length in lengths)
        sizes = sorted(counts)
        fixed = PASS_TOKENS.get(device, PASS_TOKENS["cuda"]) * self.embeddings
        most = min(self.most or len(sizes), len(sizes))
        # best[j]: cost and buckets of the texts of the first j sizes, in at most as many buckets as rounds done.
        # Without a limit, a single round that reads its own results finds the best cut.
        best: list[tuple[float, list[Bucket]] | None] = [(0.0, []), *[None for _ in sizes]]
        limited = most < len(sizes)
        for _ in range(most if limited else 1):
            longer = list(best) if limited else best
            for stop in range(1, len(sizes) + 1):
                for start in range(stop):
                    if (before := best[start]) is None:
                        continue
                    bucket = Bucket(sum(counts[size] for size in sizes[start:stop]), sizes[stop - 1])
                    cost = before[0] + fixed + bucket.rows * bucket.length
                    if (known := longer[stop]) is None or cost < known[0]:
                        longer[stop] = (cost, [*before[1], bucket])
            if longer == best:
                break
            best = longer
        found = best[-1]
        assert found is not None, "one bucket takes all texts"
        return found[1]

    @_eager
    def encode(self, clip: Any, ids: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        """Features [n, D] of int [n, T] of these true lengths, not normalised, as `clip.encode_text` gives them."""
        tower = getattr(clip, "text", clip)
        packed = self._packs(tower, ids.device)
        buckets = [] if packed else self.plan(lengths, ids.shape[1], ids.device.type)
        places = None
        if len(buckets) != 1:
            order = sorted(range(len(lengths)), key=lengths.__getitem__)
            lengths = [lengths[row] for row in order]
            ids = ids.index_select(0, torch.tensor(order).to(ids.device, non_blocking=True))
            places = torch.empty(len(order), dtype=torch.long)
            places[order] = torch.arange(len(order))
        parts, start = [], 0
        for bucket in buckets:
            parts.append(ids[start : start + bucket.rows, : bucket.length])
            start += bucket.rows
        if self.exactly and buckets:  # the further passes take a text whose features nobody uses
            parts += [parts[0][:1]] * ((self.most or 1) - len(parts))
        if packed:
            features = _project(tower, ends_of_packed(tower, ids, tuple(lengths), self._ends(ids)))
        else:
            features = _encode_padded(clip, parts) if self.rule == "padding" else _causal(tower, parts)
        if places is None:
            return features[: len(lengths)]
        return features.index_select(0, places.to(ids.device, non_blocking=True))


def why_inexact(tower: Any) -> str | None:
    """Why padding reaches the features of a text tower; None if it does not."""
    if isinstance(tower, HFTextEncoder):
        if not isinstance(tower.pooler, MeanPooler | ClsPooler | ClsLastHiddenStatePooler):
            return f"the features of this text tower depend on padding ({type(tower.pooler).__name__})"
        if getattr(tower.config, "pad_token_id", None) is None:
            return "this text tower has no padding token"
        return None
    if not isinstance(tower, open_clip.CLIP | TextTransformer):
        return f"a text tower of class {type(tower).__name__} may attend to padding"
    if getattr(tower, "cls_emb", None) is not None:
        return "this text tower takes its feature at a class token behind the padding (CoCa)"
    if tower.attn_mask is None:
        return "this text tower attends to padding, as it has no causal mask (SigLIP)"
    pooling, _ = _pooling(tower)
    if pooling not in ("argmax", "eos"):
        return f"this text tower takes its feature at the {pooling} token, not at the end of the text"
    return None


def _pooling(tower: Any) -> tuple[str, int]:
    """Type of pooling of open_clip's text tower, and the id of its end-of-text token."""
    if isinstance(tower, open_clip.CLIP):
        return str(tower.text_pool_type), int(tower.text_eos_id)
    return str(tower.pool_type), int(tower.eos_id)


@_eager
def _encode_padded(clip: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([clip.encode_text(part) for part in parts])


@_eager
def _causal(tower: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """The text pass of open_clip's CLIP and TextTransformer, with one look-up of the embeddings for all parts.

    The last norm is applied after pooling: it is one of single tokens.
    """
    dtype = tower.transformer.get_cast_dtype()
    pooling, eos = _pooling(tower)
    embedded = tower.token_embedding(torch.cat([part.reshape(-1) for part in parts])).to(dtype)
    positions = tower.positional_embedding.to(dtype)
    pooled = []
    for part, tokens in zip(parts, embedded.split([part.numel() for part in parts]), strict=True):
        length = part.shape[1]
        x = tokens.view(*part.shape, -1) + positions[:length]
        x = tower.transformer(x, attn_mask=tower.attn_mask[:length, :length].contiguous())
        pooled.append(text_global_pool(x, part, pooling, eos_token_id=eos))
    return _project(tower, torch.cat(pooled))


def _project(tower: Any, pooled: torch.Tensor) -> torch.Tensor:
    """Features [n, D] from the results [n, width] of a tower's last block."""
    features = tower.ln_final(pooled)
    projection = tower.text_projection
    if projection is not None:
        features = projection(features) if isinstance(projection, torch.nn.Linear) else features @ projection
    return cast(torch.Tensor, features)
