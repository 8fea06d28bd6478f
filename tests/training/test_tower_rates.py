"""Learning rates per tower and layer, exceptions from weight decay, and optimizers of torch and timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.hf_model import HFTextEncoder
from torch import nn

from clipstream.checkpoint.state import load
from clipstream.checkpoint.store import find
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.layers import tower_layers
from clipstream.training.optim import OptimSettings
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep
from tests.support import model_files
from tests.support.evaluating import tiny_towers
from tests.support.savers import saver_of
from tests.support.steps import LOSSES, TinyTowers, make_batch

RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}
TIMM = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear"}


def settings(**values: Any) -> OptimSettings:
    return OptimSettings.model_validate(values)


def groups_by_name(towers: nn.Module, **values: Any) -> dict[str, dict[str, Any]]:
    """The group of each trainable parameter, by open_clip's name."""
    names = {id(p): name.removeprefix("clip.") for name, p in towers.named_parameters()}
    optimizer = settings(**values).build(towers, "ViT")
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize(
    ("vision", "layers"),
    [(model_files.VIT, model_files.VIT["layers"] + 2), (RESNET, 6), (TIMM, 14)],
    ids=["vit", "resnet", "timm"],
)
def test_each_parameter_of_a_tower_is_in_one_layer(vision: dict[str, Any], layers: int, tmp_path: Path) -> None:
    clip = model_files.build(model_files.write(tmp_path, vision)).clip
    names = {id(p): name for name, p in clip.named_parameters()}
    for tower in ("image", "text"):
        found = tower_layers(clip, tower)  # type: ignore[arg-type]
        placed = [names[id(p)] for layer in found for p in layer]
        own = [n for n in names.values() if n.startswith("visual.") == (tower == "image") and not n.startswith("logit")]
        assert sorted(placed) == sorted(own)
        if tower == "image":
            assert len(found) == layers
        else:
            ends = [[names[id(p)] for p in layer] for layer in (found[0], found[-2], found[-1])]
            assert ends[0] == ["token_embedding.weight", "positional_embedding"] and ends[2] == ["text_projection"]
            assert "ln_final.weight" in ends[1] and "transformer.resblocks.1.ln_1.weight" in ends[1]


def test_the_layers_of_a_hugging_face_tower() -> None:
    """The pooler belongs to the head, or is a layer below it."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=12,
    )  # fmt: skip
    clip: Any = nn.Module()
    clip.visual, clip.text = nn.Linear(2, 2), nn.Module()
    clip.text.transformer, clip.text.proj, clip.text.config = BertModel(config), nn.Linear(8, 4), config
    for own_pooler, sizes in ((False, [5, 16, 16, 4]), (True, [5, 16, 16, 2, 2])):
        assert [len(layer) for layer in tower_layers(clip, "text", own_pooler=own_pooler)] == sizes


def test_rates_fall_from_the_projection_to_the_embeddings() -> None:
    towers = tiny_towers()
    found = groups_by_name(towers, lr=1e-3, image_layer_decay=0.5, text_layer_decay=0.1, text_lr=1e-4)
    scales = {name: group.get("lr_scale") for name, group in found.items()}
    assert len(scales) == len(list(towers.parameters()))
    assert scales["visual.proj"] == 1 and scales["logit_scale"] == 1
    assert scales["visual.transformer.resblocks.0.mlp.c_fc.weight"] == scales["visual.ln_post.weight"] == 0.5
    assert scales["visual.conv1.weight"] == scales["visual.class_embedding"] == 0.25
    assert scales["text_projection"] == pytest.approx(0.1)
    assert scales["token_embedding.weight"] == pytest.approx(0.001)
    assert found["visual.proj"]["weight_decay"] == 0.2 and found["visual.ln_post.weight"]["weight_decay"] == 0


def test_a_tower_has_its_own_rate() -> None:
    found = groups_by_name(tiny_towers(), lr=1e-3, image_lr=1e-5)
    assert found["visual.conv1.weight"]["lr_scale"] == found["visual.proj"]["lr_scale"] == pytest.approx(0.01)
    assert found["token_embedding.weight"]["lr_scale"] == found["logit_scale"]["lr_scale"] == 1


def test_a_step_moves_each_group_by_its_rate() -> None:
    model = TinyTowers()
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr_scale": scale} for p, scale in zip(model.parameters(), (0.0, 0.5, 1.0) * 4, strict=False)]
    )
    before = [p.detach().clone() for p in model.parameters()]
    TrainStep(model, LOSSES["clip"], optimizer, World())(make_batch(0, 0, 1), lr=0.1)
    moved = [not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
    assert moved[1] and moved[2] and not moved[0]
    assert [group["lr"] for group in optimizer.param_groups][:3] == [0.0, 0.05, 0.1]


def test_names_without_weight_decay() -> None:
    found = groups_by_name(tiny_towers(), wd_exclude=["*positional_embedding", "visual.proj"])
    decays = {name for name, group in found.items() if group["weight_decay"]}
    assert not decays & {"positional_embedding", "visual.positional_embedding", "visual.proj", "visual.ln_pre.weight"}
    assert {"text_projection", "token_embedding.weight", "visual.conv1.weight"} <= decays
    with pytest.raises(SettingsError, match=r"optim.wd_exclude: no parameter's name matches 'visual.projj'"):
        groups_by_name(tiny_towers(), wd_exclude=["visual.projj"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": 0.0, "image_lr": 1e-3}, "requires optim.lr above 0"),
        ({"image_layer_decay": 1.5}, "less than or equal to 1"),
        ({"kwargs": {"weight_decay": 1}}, "weight_decay is set by --wd"),
        ({"type": "timm"}, "name"),
        ({"type": "timm", "name": "adahessian"}, "second derivatives"),
        ({"type": "timm", "name": "lamb", "fallback": ["*"]}, "requires one of timm's Muon optimizers"),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**values)


def test_an_unknown_optimizer_or_argument_is_told() -> None:
    with pytest.raises(SettingsError, match=r"optim.type: .*lambada"):
        settings(type="timm", name="lambada").build(TinyTowers(), "ViT")
    with pytest.raises(SettingsError, match=r"optim.type: .*nope"):
        settings(kwargs={"nope": 1}).build(TinyTowers(), "ViT")


def test_nadamw_is_torchs_with_decoupled_decay() -> None:
    group = settings(type="nadamw", kwargs={"momentum_decay": 0.01}).build(tiny_towers(), "ViT-B-32")
    own = group.param_groups[0]
    assert isinstance(group, torch.optim.NAdam) and own["decoupled_weight_decay"]
    assert (own["betas"], own["eps"], own["momentum_decay"]) == ((0.9, 0.98), 1e-6, 0.01)


def test_muon_takes_adamw_for_what_falls_back() -> None:
    found = groups_by_name(tiny_towers(), type="timm", name="nadamuon", fallback=["token_embedding.*"])
    assert found["token_embedding.weight"]["use_fallback"]
    assert not found["visual.proj"].get("use_fallback")


@pytest.mark.parametrize(
    "values",
    [
        {"type": "timm", "name": "lamb"},  # counts its steps in the groups, by a tensor
        {"type": "timm", "name": "adabelief"},  # counts them in the state, by a number
        {"type": "timm", "name": "lion", "betas": (0.9, 0.99)},
        {"type": "timm", "name": "sgd", "momentum": 0.9, "kwargs": {"nesterov": True}},
        {"type": "nadamw", "text_layer_decay": 1.0},
    ],
    ids=lambda values: values.get("name", values["type"]),
)
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(values: dict[str, Any], tmp_path: Path) -> None:
    def start() -> tuple[TinyTowers, torch.optim.Optimizer, TrainStep]:
        model = TinyTowers()
        optimizer = settings(**values).build(model, "ViT")
        return model, optimizer, TrainStep(model, LOSSES["clip"], optimizer, World())

    model, optimizer, step = start()
    for number in range(2):
        step(make_batch(number, 0, 1), lr=0.01)
    saver = saver_of(tmp_path, model=(model, optimizer))
    saver.save(TrainState(2))
    assert saver.finish()
    again, optimizer_again, step_again = start()
    step_again(make_batch(5, 0, 1), lr=0.01)  # as before a rollback: what is loaded counts alone
    found = find(tmp_path, "latest")
    assert found is not None
    load(found, towers=again, optimizer=optimizer_again, world=World())
    for number in range(2, 4):
        for one in (step, step_again):
            one(make_batch(number, 0, 1), lr=0.01)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [("kron", "the state 'Q' of timm's kron is list"), ("adafactorbv", "torch.bfloat16 beside weights")],
)
@pytest.mark.filterwarnings("ignore:It is highly recommended")
def test_an_optimizer_that_cannot_be_resumed_is_told_at_its_first_step(name: str, said: str) -> None:
    model = TinyTowers()
    optimizer = settings(type="timm", name=name).build(model, "ViT")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # timm compiles kron's products, for which a machine may lack a compiler
    with torch.compiler.set_stance("force_eager"), pytest.raises(SettingsError, match=said):
        optimizer.step()


def on_meta(name: str) -> nn.Module:
    """A named model of open_clip, without values."""
    config = open_clip.get_model_config(name)
    config["vision_cfg"].pop("timm_model_pretrained", None)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    towers = nn.Module()
    with torch.device("meta"):
        towers.clip = kind(**config)
    return towers


def undecayed(towers: nn.Module) -> set[int]:
    """Ids of the parameters without weight decay under open_clip's main rule."""
    optimizer = settings(wd_exclude=["open_clip-main"]).build(towers, "ViT")
    return {id(p) for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize(
    ("name", "exempt"),
    [
        ("ViT-B-32", {"positional_embedding", "visual.positional_embedding"}),
        ("RN50", {"positional_embedding"}),
        ("convnext_base", {"positional_embedding"}),
        ("ViT-B-16-SigLIP", {"text.positional_embedding", "visual.trunk.pos_embed"}),
        ("EVA02-B-16", {"text.positional_embedding", "visual.trunk.cls_token", "visual.trunk.pos_embed"}),
    ],
)
def test_the_rule_of_open_clips_main_branch(name: str, exempt: set[str]) -> None:
    """Compared with main's `make_wd_exclude` (commit 89fb801) on all its models but CoCa when it was written."""
    towers = on_meta(name)
    shapes = {name: p for name, p in towers.clip.named_parameters()}
    free = undecayed(towers)
    assert {name for name, p in shapes.items() if id(p) in free and p.ndim > 1} == exempt
    assert all(id(p) in free for p in shapes.values() if p.ndim < 2)


@pytest.mark.parametrize(
    ("name", "tower", "sizes"),
    [
        ("ViT-B-32", "image", [151, 14, *[12] * 11, 5]),
        ("ViT-B-32", "text", [154, 14, *[12] * 11, 2]),
        ("RN50", "image", [159, 30, 57, 39, 30, 9]),
        ("ViT-B-16-SigLIP", "image", [165, 14, *[12] * 11, 3]),
        ("ViT-B-16-SigLIP", "text", [166, 14, *[12] * 11, 2]),
    ],
)
def test_layers_of_open_clips_main_branch(name: str, tower: str, sizes: list[int]) -> None:
    """Parameters by depth as in main's `layer_decay_param_groups` (commit 89fb801), whose every rate was compared."""
    optimizer = settings(**{f"{tower}_layer_decay": 0.5}).build(on_meta(name), "ViT")
    found: dict[float, int] = {}
    for group in optimizer.param_groups:
        found[group["lr_scale"]] = found.get(group["lr_scale"], 0) + len(group["params"])
    assert found == {0.5**depth: size for depth, size in enumerate(sizes)}


def test_tables_of_hugging_face_towers_under_that_rule() -> None:
    from transformers import BertConfig

    sizes = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=20)
    text = HFTextEncoder("", 8, config=sizes, pooler_type="mean_pooler", proj_type="linear")
    towers = nn.Module()
    towers.clip = nn.ModuleDict({"text": text})
    free = undecayed(towers)
    found = {name.split(".")[-2] for name, p in towers.clip.named_parameters() if id(p) in free and p.ndim > 1}
    assert found == {"position_embeddings", "token_type_embeddings"}
