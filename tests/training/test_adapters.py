"""Adapters: what they train, what they write, runs in all layouts, and runs that are killed and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from clipstream.api.model import load_model
from clipstream.errors import SettingsError
from clipstream.models.layers import restore_layers
from clipstream.models.towers import Towers
from tests.support import pairs
from tests.support.model_files import build

LORA = {"rank": 3, "alpha": 5.0}
CASES: dict[str, dict[str, Any]] = {
    "vit": {"image": LORA, "text": {**LORA, "rank": 2, "targets": "all"}},
    "siglip": {"image": {**LORA, "targets": ["*.mlp.*"], "dora": True}},
    "convnext": {"image": {**LORA, "targets": "all", "dora": True}},
    "resnet": {"image": {**LORA, "targets": "all"}, "text": {**LORA, "tokens": __file__}},
    "hf": {"image": LORA, "text": {**LORA, "targets": "all", "tokens": __file__}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and models."""
    folder = tmp_path_factory.mktemp("adapters")
    pairs.furnish(folder)
    return folder


def adapted(place: Path, kind: str, lora: dict[str, Any], **more: Any) -> Towers:
    towers = {tower: {"lora": settings} for tower, settings in lora.items()}
    name = f"local-dir:{place}/{kind}"
    return build(f"{place}/{kind}.json", pretrained=name, allow_mismatch=True, **towers, **more)


def inputs(towers: Towers) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (4, towers.context_length), generator=draw, dtype=torch.int32)
    ids[:, -1] = towers.vocab_size - 1
    return torch.randint(0, 256, (4, 3, *towers.image.size), generator=draw, dtype=torch.uint8), ids


def move(towers: Towers) -> None:
    """Give the trained parameters other values, as training does."""
    draw = torch.Generator().manual_seed(2)
    for parameter in towers.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("kind", CASES)
def test_the_model_is_the_merged_one_and_the_adapter_is_peft_s(kind: str, place: Path, tmp_path: Path) -> None:
    towers, plain = adapted(place, kind, CASES[kind]), build(f"local-dir:{place}/{kind}", allow_mismatch=True)
    given = inputs(towers)
    for ours, theirs in zip(towers.eval()(*given)[:2], plain.eval()(*given)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    trained = {name for name, parameter in towers.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} <= {
        "lora_A",
        "lora_B",
        "magnitude",
        "rows",
        "logit_scale",
        "logit_bias",
    }
    loss = sum(part.square().sum() for part in (*towers(*given)[:2], *towers.scalars()) if part is not None)
    torch.as_tensor(loss).backward()
    assert {name for name, parameter in towers.named_parameters() if parameter.grad is not None} == trained

    move(towers)
    state = towers.saved_tensors()
    assert state.keys() == plain.clip.state_dict().keys()
    expected = towers(*given)
    assert not torch.allclose(expected.image, plain(*given).image)
    plain.clip.load_state_dict(state)
    for ours, theirs in zip(plain(*given)[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs)

    peft = pytest.importorskip("peft", reason="peft reads the adapter")
    assert towers.adapters is not None
    save_file(towers.adapters.tensors(towers.clip), tmp_path / "adapter_model.safetensors")
    for name, content in towers.adapters.files().items():
        (tmp_path / name).write_bytes(content)
    base = build(f"local-dir:{place}/{kind}", allow_mismatch=True, text_buckets="off")
    restore_layers(base.clip)
    model = peft.PeftModel.from_pretrained(base.clip, tmp_path).eval()
    assert {name for name in model.state_dict() if "lora_" in name and "default" in name}
    for ours, theirs in zip(base.eval()(*given)[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_run_writes_the_merged_model_and_resumes_on_its_own_start_alone(place: Path) -> None:
    row = pairs.simplest() | {"adapters": "lora", "ema": "0.9"}
    run = pairs.go(place, row, "run")
    assert run.code == 0, run.said
    checkpoint = place / "runs" / "run" / "checkpoints" / f"step_{pairs.STEPS:08d}"

    theirs, _ = open_clip.create_model_from_pretrained(f"local-dir:{checkpoint}")
    start, ours = build(f"local-dir:{place}/vit").clip.state_dict(), load_model(checkpoint, device="cpu")[0]
    changed = {name for name, tensor in theirs.state_dict().items() if not torch.equal(tensor, start[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"in_proj_weight", "logit_scale"}
    assert torch.equal(ours.encode_text(["red dog"]), ours.encode_text(["red dog"]))
    for folder in ("adapter", "adapter_averaged"):
        saved = load_file(checkpoint / folder / "adapter_model.safetensors")
        assert sum(tensor.nbytes for tensor in saved.values()) < 0.02 * sum(t.nbytes for t in start.values())
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert sum(tensor.numel() for tensor in moments.values()) < 2.1 * sum(t.numel() for t in saved.values())

    other = build(f"local-dir:{place}/vit")
    move(other)
    other.save_pretrained(place / "other")
    again = ("--checkpoint.resume", str(checkpoint))
    for more, words in (
        (("--pretrained", f"local-dir:{place}/other"), "belongs to other weights than those that the run starts"),
        (("--lora", "3"), "other layers or another rank"),
    ):
        refused = pairs.go(place, row, f"refused{len(words)}", *again, *more)
        assert refused.code == 2
        assert words in refused.error()


@pytest.mark.parametrize(
    ("kind", "lora", "more", "words"),
    [
        ("vit", {"image": {"rank": 64}}, {}, "rank: 64 is larger than .* use at most 32"),
        ("vit", {"text": {"targets": ["*.mpl.*"]}}, {}, r"matches \*\.mpl\.\*; its layers are transformer"),
        ("vit", {"image": {"tokens": __file__}}, {}, "image.lora.tokens: the image tower has no embedding of tokens"),
        ("vit", {"text": {"tokens": "/none"}}, {}, "text.lora.tokens: /none cannot be read as text: No such file"),
        ("resnet", {"image": {}}, {}, "matches attention; its layers are visual.conv1, "),
        ("resnet", {"image": {"targets": "all", "dora": True}}, {}, "no layer that takes an adapter"),
        ("convnext", {"image": {}}, {}, "matches attention; its layers are visual"),
        ("vit", {"image": {"dora": True}}, {}, "peft has no DoRA"),
        ("vit", {"image": {}}, {"lock_image": True}, "model.lock_image freezes it"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    kind: str, lora: dict[str, Any], more: dict[str, Any], words: str, place: Path
) -> None:
    with pytest.raises((SettingsError, ValueError), match=words):
        adapted(place, kind, lora, **more)
