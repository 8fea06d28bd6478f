"""Text buckets and packed texts: features and gradients of the padded pass, for each kind of tower where that holds."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from clipstream.errors import SettingsError
from clipstream.models.execution import text_buckets as module
from clipstream.models.execution.compile import compile_towers
from clipstream.models.execution.text_buckets import PASS_TOKENS, TextBuckets, row_length
from clipstream.models.frozen import arithmetic
from clipstream.models.towers import Towers
from tests.support.model_files import build, write, write_text_tower
from tests.support.steps import assert_close
from tests.support.text_batches import TEXT_CFG, TOKENS, make_texts

WORDS = 60
KINDS = ("clip", "custom", "eos", "checkpointed", "Roberta", "Bert")
BATCHES = {"mixed": (2, 9, 3, 20, 8, 2, 17), "equal": (5, 5, 5), "single": (7,), "full": (20, 20)}
UNLIKE: list[tuple[dict[str, Any], str]] = [  # text towers whose features depend on padding
    ({"no_causal_mask": True, "pool_type": "last"}, "no causal mask"),
    ({"pool_type": "last"}, "at the last token"),
    ({"embed_cls": True, "pool_type": "last"}, "class token"),
]


def config_of(kind: str, folder: Path) -> dict[str, Any]:
    """The model's config; of Hugging Face towers, the folder of the base model is written."""
    if kind in ("clip", "checkpointed"):
        return {"text_cfg": TEXT_CFG}
    if kind == "custom":
        return {"text_cfg": {**TEXT_CFG, "proj_bias": True, "ls_init_value": 0.5}, "custom_text": True}
    if kind == "eos":
        return {"text_cfg": {**TEXT_CFG, "pool_type": "eos", "eos_id": 2}, "custom_text": True}
    text = write_text_tower(folder / kind, kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pooler = "mean_pooler" if kind == "Roberta" else "cls_last_hidden_state_pooler"
    return {"text_cfg": {**text, "hf_pooler_type": pooler, "context_length": TOKENS}}


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Towers]:
    """A tiny model of each kind, in float64."""
    folder = tmp_path_factory.mktemp("models")
    return {
        kind: build(write(folder, **config_of(kind, folder)), grad_checkpointing=kind == "checkpointed").double()
        for kind in KINDS
    }


def make_ids(kind: str, words: list[list[int]]) -> torch.Tensor:
    """Texts with start, words, end-of-text token and padding, as the tokenizer of the kind of tower writes them."""
    end = 2 if kind in ("eos", "Roberta", "Bert") else 63
    ids = torch.full((len(words), TOKENS), int(kind == "Roberta"), dtype=torch.int32)
    for row, text in zip(ids, words, strict=True):
        row[: len(text) + 2] = torch.tensor([61, *text, end])
    return ids


def text_pass(model: Towers, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Features, and the gradients of their sum with random weights."""
    model.zero_grad(set_to_none=True)
    features = model.encode_text(ids)
    wanted = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(features)
    (features * wanted).sum().backward()
    return features.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model: Towers, ids: torch.Tensor, truth: Any, atol: float = 1e-10) -> None:
    """Compare features and gradients with those of another pass."""
    found, gradients = text_pass(model, ids)
    torch.testing.assert_close(found, truth[0], rtol=0, atol=atol, equal_nan=True)
    assert_close(gradients, truth[1], atol)


texts = st.lists(st.lists(st.integers(3, WORDS), max_size=TOKENS - 2), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(words=texts, most=st.sampled_from([None, 1, 2, 5, "packed"]), exactly=st.booleans())
def test_features_and_gradients_are_those_of_padded_texts(
    kind: str, towers: dict[str, Towers], words: list[list[int]], most: Any, exactly: bool
) -> None:
    model, ids = copy.copy(towers[kind]), make_ids(kind, words)
    buckets = model.text_buckets
    assert buckets is not None and buckets.lengths(ids) == tuple(len(text) + 2 for text in words)
    assert buckets.rule == {"Roberta": "padding", "Bert": "padding", "eos": "eos"}.get(kind, "argmax")
    model.text_buckets = None
    truth = text_pass(model, ids)
    if most == "packed" and buckets.rule != "padding":
        packed = TextBuckets(buckets.rule, buckets.token, packed="all")
        model.text_buckets = packed.for_shards() if exactly else packed
    else:
        most = None if most == "packed" else most
        exactly = exactly and most is not None
        model.text_buckets = TextBuckets(buckets.rule, buckets.token, most, exactly, buckets.embeddings)
    assert any("position" in name for name in truth[1])
    check(model, ids, truth)


def test_texts_without_an_end_and_of_padding_alone(towers: dict[str, Towers]) -> None:
    for kind in ("clip", "eos", "Roberta"):
        ids = torch.randint(3, WORDS, (3, TOKENS), dtype=torch.int32)
        ids[1] = 1 if kind == "Roberta" else 0
        ids[2, ::2] = 1  # padding inside of a text
        model = copy.copy(towers[kind])
        found = model.encode_text(ids)
        model.text_buckets = None
        torch.testing.assert_close(found, model.encode_text(ids), rtol=0, atol=1e-10, equal_nan=True)
    assert TextBuckets("padding", 1).lengths(torch.ones(1, TOKENS, dtype=torch.int32)) == (TOKENS,)


@pytest.mark.parametrize("buckets", [None, TextBuckets("argmax", 0, 2)])
def test_attention_is_told_that_it_is_causal(
    tmp_path: Path, buckets: TextBuckets | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels without a mask can run: of padded texts, and of those in buckets."""
    told: list[bool] = []
    attention = F.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, mask: Any, dropout: float, is_causal: bool) -> torch.Tensor:
        told.append(mask is None and is_causal)
        return attention(q, k, v, mask, dropout, is_causal)

    name, ids = write(tmp_path, text_cfg=TEXT_CFG), make_texts()[1]
    truth, model = text_pass(build(name, text_buckets="off"), ids), build(name)
    model.text_buckets = buckets
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    check(model, ids, truth, 1e-4)
    assert told and all(told)


@given(
    lengths=st.lists(st.integers(1, 77), min_size=1, max_size=200),
    most=st.sampled_from([None, 1, 2, 3]),
    device=st.sampled_from(["cpu", "cuda"]),
)
@settings(max_examples=60, deadline=None)
def test_buckets_cost_least(lengths: list[int], most: int | None, device: str) -> None:
    buckets = TextBuckets("argmax", 0, most).plan(lengths, 77, device)
    assert sum(bucket.rows for bucket in buckets) == len(lengths) and len(buckets) <= (most or 10)
    at, ordered = 0, sorted(lengths)
    for bucket in buckets:
        assert bucket.length == 77 or bucket.length % 8 == 0
        assert bucket.length >= ordered[at + bucket.rows - 1]
        at += bucket.rows
    sizes = sorted({min(-(-length // 8) * 8, 77) for length in lengths})

    def cost(ends: tuple[int, ...]) -> int:
        rows = [sum(before < length <= end for length in lengths) for before, end in itertools.pairwise((0, *ends))]
        return sum(PASS_TOKENS[device] + count * end for count, end in zip(rows, ends, strict=True))

    cuts = [
        (*inner, sizes[-1])
        for count in range(min(most or len(sizes), len(sizes)))
        for inner in itertools.combinations(sizes[:-1], count)
    ]
    found = sum(PASS_TOKENS[device] + bucket.rows * bucket.length for bucket in buckets)
    assert found == min(cost(ends) for ends in cuts)


@given(lengths=st.lists(st.integers(1, 77), min_size=1, max_size=200))
def test_buckets_for_compiled_blocks_have_few_sizes(lengths: list[int]) -> None:
    found = TextBuckets("argmax", 0, portions=8).plan(lengths, 77, "cpu")
    unit, ordered, at = -(-len(lengths) // 8), sorted(lengths), 0
    for bucket in found:
        at += bucket.rows
        assert ordered[at - 1] <= bucket.length
    assert at == len(lengths) and all(bucket.rows % unit == 0 for bucket in found[:-1])


@pytest.mark.parametrize(("text", "reason"), UNLIKE)
def test_towers_that_padding_reaches_are_refused(text: dict[str, Any], reason: str, tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg={**TEXT_CFG, **text}, custom_text=True)
    assert build(name).text_buckets is None
    for setting in (2, "packed"):
        with pytest.raises(SettingsError, match=rf"model\.text_buckets: .*{reason}"):
            build(name, text_buckets=setting)


def test_the_states_of_siglips_padding_are_those_of_its_text_after_the_first_block(tmp_path: Path) -> None:
    """Why padding is not computed once: it is the same in all texts before the first block alone."""
    name = write(tmp_path, text_cfg={**TEXT_CFG, **UNLIKE[0][0]}, custom_text=True)
    tower, states = build(name).double().clip.text, list[torch.Tensor]()
    for block in tower.transformer.resblocks:
        block.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    _, ids = make_texts(BATCHES["mixed"])
    padded = (ids == 0).nonzero()[:, 1].bincount(minlength=TOKENS) > 1  # positions that are padding in several texts
    features = tower(ids)
    for number, state in enumerate(states):
        spread = [state[ids[:, place] == 0, place].std(dim=0).max().item() for place in padded.nonzero()[:, 0].tolist()]
        assert max(spread) == 0 if number == 0 else min(spread) > 1e-6
    # Of the last block, the last position alone is used.
    last = tower.transformer.resblocks[-1]
    keys = last.ln_1(states[-1])
    query = states[-1][:, -1:] + last.attention(keys[:, -1:], keys, keys)
    pooled = tower.ln_final(query + last.mlp(last.ln_2(query)))[:, 0]
    projection = tower.text_projection
    found = projection(pooled) if isinstance(projection, torch.nn.Linear) else pooled @ projection
    torch.testing.assert_close(found, features, rtol=0, atol=1e-12)


def test_the_setting(tmp_path: Path) -> None:
    name = write(tmp_path)
    assert build(name, text_buckets="off").text_buckets is None
    ways = [build(name, text_buckets=setting).text_buckets for setting in ("auto", "packed", 2)]
    assert [way.packed if way else None for way in ways] == ["auto", "all", None]
    two = build(name, text_buckets=2).text_buckets
    assert two is not None and (two.most, two.exactly) == (2, False)
    shards = TextBuckets("argmax", 0).for_shards()
    assert (shards.most, shards.exactly) == (1, True)


@pytest.mark.parametrize("varlen_here", [False, True])
def test_auto_packs_on_cpus_and_with_variable_length_attention(
    varlen_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers, asked = build(write(tmp_path, text_cfg=TEXT_CFG)).bfloat16(), []
    monkeypatch.setattr(module, "takes_varlen", lambda *given: asked.append(given) or varlen_here)
    gpu, auto = torch.device("cuda:0"), towers.text_buckets
    assert auto is not None and auto._packs(towers.clip, gpu) == varlen_here
    head = TEXT_CFG["width"] // TEXT_CFG["heads"]
    assert asked == [(gpu, torch.bfloat16, head)]
    assert auto._packs(towers.clip, torch.device("cpu")) and not auto._packs(towers.clip, torch.device("meta"))
    assert all(replace(auto, packed="all")._packs(towers.clip, torch.device(kind)) for kind in ("cuda", "meta"))
    assert not replace(auto, packed=None)._packs(towers.clip, torch.device("cpu"))


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("policy", ["off", "matmuls"])
def test_packed_texts_with_activation_checkpointing(lengths: tuple[int, ...], policy: Any, tmp_path: Path) -> None:
    name, ids = write(tmp_path, text_cfg=TEXT_CFG), make_texts(lengths)[1]
    truth = text_pass(build(name, text_buckets="off").double().train(), ids)
    model = build(name, text_buckets="packed", grad_checkpointing=policy).double().train()
    for towers in (model, copy.deepcopy(model)):
        check(towers, ids, truth)
    assert model.encode_text(ids[:0]).shape == (0, 24)
    # Without lengths, texts on a device are whole: their features are still those at the end-of-text token.
    torch.testing.assert_close(model.encode_text(ids, (TOKENS,) * len(ids)), truth[0], rtol=0, atol=1e-10)


def test_rows_of_packed_texts_have_few_shapes(tmp_path: Path) -> None:
    """Memory stays flat: layers see few numbers of tokens, and attention, whose shapes differ, none in 16 bits."""
    for tokens in range(1, 3000):
        assert tokens <= row_length(tokens) <= max(tokens + 15, tokens * 17 / 16)
    assert len({row_length(tokens) for tokens in range(1024, 2048)}) <= 17
    model = build(write(tmp_path, text_cfg=TEXT_CFG), text_buckets="packed")
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
            model.encode_text(make_texts(torch.randint(1, TOKENS, (200,), generator=draw).tolist())[1])
    assert len(rows) <= 5 and narrow and not any(narrow)


def varlen_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *,
    window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """varlen_attn's result, text by text, from its arguments; torch's documentation says what they must be."""
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and window_size == (-1, 0)
    assert all(x.is_contiguous() and x.shape == q.shape and x.dtype == q.dtype for x in (q, k, v))
    borders = list(itertools.pairwise(cu_q.tolist()))
    assert borders[0][0] == 0 and borders[-1][1] == len(q)
    assert max_q == max_k == max(stop - start for start, stop in borders)
    parts = []
    for start, stop in borders:
        query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


def test_the_arguments_of_variable_length_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(write(tmp_path, text_cfg=TEXT_CFG), text_buckets="packed").double(), make_texts()[1]
    truth, calls = text_pass(model, ids), []

    def called(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args[3])
        return varlen_reference(*args, **options)

    monkeypatch.setattr(module, "takes_varlen", lambda *_: True)
    monkeypatch.setattr(module, "row_length", int)  # as on a GPU
    monkeypatch.setattr(varlen, "varlen_attn", called)
    check(model, ids, truth)
    assert len(calls) == 2 and calls[0] is calls[1], "made once for all layers"


def test_towers_that_take_no_packed_texts(tmp_path: Path) -> None:
    own = write(tmp_path, text_cfg={**TEXT_CFG, "qk_norm": True}, custom_text=True)
    theirs = write(tmp_path, text_cfg=write_text_tower(tmp_path / "base"))
    for name, reason in (
        (own, r"packed is not supported, as .* attention layers of its own \(Attention\)"),
        (theirs, "as a Hugging Face text tower takes padded texts"),
    ):
        buckets = build(name).text_buckets
        assert buckets is not None and buckets.packed is None
        with pytest.raises(SettingsError, match=rf"model\.text_buckets: .*{reason}.*: use auto"):
            build(name, text_buckets="packed")
    causal = write(tmp_path, text_cfg=TEXT_CFG)
    with pytest.raises(SettingsError, match=r"packed texts are not supported with train.compile"):
        compile_towers(build(causal, text_buckets="packed"), "blocks", "eager")
    auto = build(causal).train()
    compile_towers(auto, "blocks", "eager")
    assert auto.text_buckets is not None and auto.text_buckets.packed is None
