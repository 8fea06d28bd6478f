"""Text buckets: features and gradients of the padded pass, for every kind of tower where that holds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clipstream.errors import SettingsError
from clipstream.models.execution.text_buckets import PASS_TOKENS, TextBuckets
from clipstream.models.towers import Towers
from tests.support import hubtree
from tests.support.model_files import TEXT, VIT, build, write

TOKENS, WORDS = 20, 60
CAUSAL = {**TEXT, "context_length": TOKENS, "vocab_size": 64}
HUGGING_FACE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
KINDS = ("clip", "custom", "eos", "checkpointed", "roberta", "bert")


def config_of(kind: str, folder: Path) -> dict[str, Any]:
    """The model's config; of Hugging Face towers, the folder of the base model is written."""
    if kind in ("clip", "checkpointed"):
        return {"text_cfg": CAUSAL}
    if kind == "custom":
        return {"text_cfg": {**CAUSAL, "proj_bias": True, "ls_init_value": 0.5}, "custom_text": True}
    if kind == "eos":
        return {"text_cfg": {**CAUSAL, "pool_type": "eos", "eos_id": 2}, "custom_text": True}
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    made = {"roberta": (RobertaConfig, RobertaModel), "bert": (BertConfig, BertModel)}
    config, model = made[kind]
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    base = model(config(**HUGGING_FACE, **no_dropout, vocab_size=64, max_position_embeddings=40))
    base.save_pretrained(folder / kind)
    hubtree.write_tokenizer(folder / kind)
    here, pooler = str(folder / kind), "mean_pooler" if kind == "roberta" else "cls_last_hidden_state_pooler"
    names = {"hf_model_name": here, "hf_tokenizer_name": here, "hf_pooler_type": pooler, "hf_proj_type": "linear"}
    return {"text_cfg": {**names, "context_length": TOKENS}}


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Towers]:
    """A tiny model of each kind, in float64."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for kind in KINDS:
        (folder / f"{kind}.json").write_text(
            json.dumps({"embed_dim": 24, "vision_cfg": VIT, **config_of(kind, folder)})
        )
        name = str(folder / f"{kind}.json")
        made[kind] = build(name, grad_checkpointing=kind == "checkpointed").double()
    return made


def make_ids(kind: str, words: list[list[int]]) -> torch.Tensor:
    """Texts with start, words, end-of-text token and padding, as the tokenizer of the kind of tower writes them."""
    pad = 1 if kind == "roberta" else 0
    end = 2 if kind in ("eos", "roberta", "bert") else 63
    ids = torch.full((len(words), TOKENS), pad, dtype=torch.int32)
    for row, text in zip(ids, words, strict=True):
        row[: len(text) + 2] = torch.tensor([61, *text, end])
    return ids


def text_pass(model: Towers, ids: torch.Tensor, buckets: TextBuckets | None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Features, and the gradients of their sum with random weights."""
    before, model.text_buckets = model.text_buckets, buckets
    model.zero_grad(set_to_none=True)
    features = model.encode_text(ids)
    wanted = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(features)
    (features * wanted).sum().backward()
    model.text_buckets = before
    return features.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


texts = st.lists(st.lists(st.integers(3, WORDS), max_size=TOKENS - 2), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(words=texts, most=st.sampled_from([None, 1, 2, 5, "packed"]), exactly=st.booleans())
def test_features_and_gradients_are_those_of_padded_texts(
    kind: str, towers: dict[str, Towers], words: list[list[int]], most: Any, exactly: bool
) -> None:
    model, ids = towers[kind], make_ids(kind, words)
    assert model.text_buckets is not None
    rule, token, weight = model.text_buckets.rule, model.text_buckets.token, model.text_buckets.embeddings
    assert rule == {"roberta": "padding", "bert": "padding", "eos": "eos"}.get(kind, "argmax")
    lengths = model.text_buckets.lengths(ids)
    assert lengths == tuple(len(text) + 2 for text in words)
    if most == "packed" and rule != "padding":
        buckets = TextBuckets(rule, token, packed="all")
        buckets = buckets.for_shards() if exactly else buckets
    else:
        most = None if most == "packed" else most
        buckets = TextBuckets(rule, token, most, exactly and most is not None, weight)
    found, gradients = text_pass(model, ids, buckets)
    truth, padded = text_pass(model, ids, None)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)
    assert gradients.keys() == padded.keys() and any("position" in name for name in gradients)
    for name, gradient in padded.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("buckets", [None, TextBuckets("argmax", 0, 2)])
def test_attention_is_told_that_it_is_causal(
    tmp_path: Path, buckets: TextBuckets | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels without a mask can run: of padded texts, and of those in buckets."""
    name, ids, told = write(tmp_path, text_cfg=CAUSAL), make_ids("clip", [[3] * 5, [4] * 18]), []
    attention = F.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, mask: Any, dropout: float, is_causal: bool) -> torch.Tensor:
        told.append(mask is None and is_causal)
        return attention(q, k, v, mask, dropout, is_causal)

    truth, padded = text_pass(build(name, text_buckets="off"), ids, None)
    model = build(name)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found, gradients = text_pass(model, ids, buckets)
    assert told and all(told)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-6)
    for parameter, gradient in padded.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-4, atol=1e-5)


def test_texts_without_an_end_and_of_padding_alone(towers: dict[str, Towers]) -> None:
    full = torch.randint(3, WORDS, (3, TOKENS), dtype=torch.int32)
    for kind in ("clip", "eos", "roberta"):
        ids = full.clone()
        ids[1] = 1 if kind == "roberta" else 0
        ids[2, ::2] = 1  # padding inside of a text
        model = towers[kind]
        for tensor in zip(*(text_pass(model, ids, some)[0] for some in (model.text_buckets, None)), strict=True):
            torch.testing.assert_close(*tensor, rtol=0, atol=1e-10, equal_nan=True)
    assert TextBuckets("padding", 1).lengths(torch.ones(1, TOKENS, dtype=torch.int32)) == (TOKENS,)


@given(
    lengths=st.lists(st.integers(1, 77), min_size=1, max_size=200),
    most=st.sampled_from([None, 1, 2, 3]),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_the_cut_is_the_cheapest(lengths: list[int], most: int | None, device: str) -> None:
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"no_causal_mask": True, "pool_type": "last"}, "no causal mask"),
        ({"pool_type": "last"}, "at the last token"),
        ({"embed_cls": True, "pool_type": "last"}, "class token"),
    ],
)
def test_towers_that_padding_reaches_are_refused(text: dict[str, Any], reason: str, tmp_path: Path) -> None:
    name = write(tmp_path, text_cfg={**CAUSAL, **text}, custom_text=True)
    assert build(name).text_buckets is None
    with pytest.raises(SettingsError, match=rf"model\.text_buckets: .*{reason}"):
        build(name, text_buckets=2)


def test_the_setting(tmp_path: Path) -> None:
    name = write(tmp_path)
    assert build(name, text_buckets="off").text_buckets is None
    ways = [build(name, text_buckets=setting).text_buckets for setting in ("auto", "packed", 2)]
    assert [way.packed if way else None for way in ways] == ["cpu", "all", None]
    two = build(name, text_buckets=2).text_buckets
    assert two is not None and (two.most, two.exactly) == (2, False)
    shards = TextBuckets("argmax", 0).for_shards()
    assert (shards.most, shards.exactly) == (1, True)
