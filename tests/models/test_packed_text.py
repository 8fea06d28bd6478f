"""Packed texts: true tokens only, the arguments of variable-length attention, and what packing goes together with."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from clipstream.errors import SettingsError
from clipstream.models.execution import text_buckets as packed_text
from clipstream.models.execution.compile import compile_towers
from clipstream.models.execution.text_buckets import row_length
from clipstream.models.frozen import arithmetic
from clipstream.models.towers import Towers
from tests.support.model_files import TEXT, VIT, build, write

TOKENS = 20
CAUSAL = {**TEXT, "context_length": TOKENS, "vocab_size": 64, "layers": 3}
BATCHES = {"mixed": (2, 9, 3, 20, 8, 2, 17), "equal": (5, 5, 5), "single": (7,), "full": (20, 20)}


def make_ids(lengths: tuple[int, ...]) -> torch.Tensor:
    """Texts of these lengths with their end-of-text token."""
    ids = torch.zeros(len(lengths), TOKENS, dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, 60, (length,), generator=draw)
        row[length - 1] = 63
    return ids


def features(model: Towers, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Features, and the gradients of a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    found = model.encode_text(ids)
    wanted = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    torch.autograd.backward((found * wanted).sum())
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *,
    window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """varlen_attn's result, text by text, from its arguments; torch's documentation says what they must be."""
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and window_size == (-1, 0)
    assert all(x.is_contiguous() and x.shape == q.shape and x.dtype == q.dtype for x in (q, k, v))
    borders = cu_q.tolist()
    assert borders[0] == 0 and borders[-1] == len(q)
    assert max_q == max_k == max(stop - start for start, stop in itertools.pairwise(borders))
    parts = []
    for start, stop in itertools.pairwise(borders):
        query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        weights = (query @ key.transpose(1, 2)) / q.shape[-1] ** 0.5
        later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        parts.append((weights.masked_fill(later, float("-inf")).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("policy", ["off", "matmuls"])
def test_gradients_with_activation_checkpointing(lengths: tuple[int, ...], policy: Any, tmp_path: Path) -> None:
    name, ids = write(tmp_path, text_cfg=CAUSAL), make_ids(lengths)
    truth, padded = features(build(name, text_buckets="off").double().train(), ids)
    model = build(name, text_buckets="packed", grad_checkpointing=policy).double().train()
    for towers in (model, copy.deepcopy(model)):
        found, gradients = features(towers, ids)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)
        assert gradients.keys() == padded.keys()
        for key, gradient in padded.items():
            torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=1e-10, msg=key)
    assert model.encode_text(ids[:0]).shape == (0, 24)
    # Without lengths, texts on a device are whole: their features are still those at the end-of-text token.
    torch.testing.assert_close(model.encode_text(ids, (TOKENS,) * len(ids)), truth, rtol=0, atol=1e-10)


def test_rows_have_few_shapes(tmp_path: Path) -> None:
    """Memory stays flat: layers see few numbers of tokens, and attention, whose shapes differ, none in 16 bits."""
    for tokens in range(1, 3000):
        assert tokens <= row_length(tokens) <= max(tokens + 15, tokens * 17 / 16)
    assert len({row_length(tokens) for tokens in range(1024, 2048)}) <= 17
    model = build(write(tmp_path, text_cfg=CAUSAL), text_buckets="packed")
    rows, narrow = set(), []
    model.clip.transformer.resblocks[0].ln_1.register_forward_hook(lambda module, args, output: rows.add(output.shape))

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is F.scaled_dot_product_attention:
                narrow.append(args[0].dtype != torch.float32 or torch.is_autocast_enabled("cpu"))
            return function(*args, **(kwargs or {}))

    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        with arithmetic("cpu", torch.bfloat16, cast=True), Watch(), torch.no_grad():
            model.encode_text(make_ids(tuple(torch.randint(1, TOKENS, (200,), generator=draw).tolist())))
    assert len(rows) <= 5 and narrow and not any(narrow)


def test_bfloat16_is_that_of_padded_texts(tmp_path: Path) -> None:
    name, ids = write(tmp_path, text_cfg=CAUSAL), make_ids(BATCHES["mixed"])
    found = []
    for setting in ("packed", "off"):
        with arithmetic("cpu", torch.bfloat16, cast=True):
            found.append(features(build(name, text_buckets=setting).train(), ids))
    (packed, gradients), (padded, truth) = found
    assert packed.dtype == torch.float32
    torch.testing.assert_close(packed, padded, rtol=0, atol=0.02)
    for key, gradient in truth.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=0.05 * float(gradient.abs().max()), msg=key)


def test_the_arguments_of_variable_length_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(write(tmp_path, text_cfg=CAUSAL), text_buckets="packed").double(), make_ids(BATCHES["mixed"])
    truth, padded = features(model, ids)
    calls = []

    def called(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args[3])
        return reference(*args, **options)

    monkeypatch.setattr(packed_text, "takes_varlen", lambda q: True)
    monkeypatch.setattr(packed_text, "row_length", int)  # as on a GPU
    monkeypatch.setattr(varlen, "varlen_attn", called)
    found, gradients = features(model, ids)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)
    for key, gradient in padded.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=0, atol=1e-10, msg=key)
    assert len(calls) == 3 and all(borders is calls[0] for borders in calls), "made once for all layers"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"no_causal_mask": True, "pool_type": "last"}, "no causal mask"),
        (
            {"qk_norm": True},
            r"packed is not supported, as .* attention layers of its own \(Attention\)",
        ),
    ],
)
def test_towers_that_take_no_packed_texts(text: dict[str, Any], reason: str, tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg={**CAUSAL, **text}, custom_text=True)
    buckets = build(name).text_buckets
    assert buckets is None or buckets.packed is None
    with pytest.raises(SettingsError, match=rf"model\.text_buckets: .*{reason}.*: use auto"):
        build(name, text_buckets="packed")


def test_hugging_face_towers_take_no_packed_texts(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    from tests.support import hubtree

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path / "base")
    hubtree.write_tokenizer(tmp_path / "base")
    here = str(tmp_path / "base")
    text = {"hf_model_name": here, "hf_tokenizer_name": here, "context_length": TOKENS}
    name = tmp_path / "hf.json"
    name.write_text(json.dumps({"embed_dim": 24, "vision_cfg": VIT, "text_cfg": text}))
    assert build(str(name)).text_buckets is not None
    with pytest.raises(SettingsError, match="as a Hugging Face text tower takes padded texts: use auto"):
        build(str(name), text_buckets="packed")


def test_compiled_towers_take_buckets_instead(tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg=CAUSAL)
    with pytest.raises(
        SettingsError, match=r"packed texts are not supported with train.compile.*use auto.*or --train\.compile off"
    ):
        compile_towers(build(name, text_buckets="packed"), "blocks", "eager")
    auto = build(name).train()
    compile_towers(auto, "blocks", "eager")
    assert auto.text_buckets is not None and auto.text_buckets.packed is None
