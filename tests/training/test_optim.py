"""Parameter groups and rates per tower and layer, schedules, gradient clipping, optimizers of torch and timm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import open_clip
import pytest
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip_train.params import get_default_params
from open_clip_train.scheduler import const_lr_cooldown, cosine_lr
from timm.optim import list_optimizers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from clipstream.checkpoint.state import load
from clipstream.checkpoint.store import find
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.layers import tower_layers
from clipstream.training.optim import AdamW, OptimSettings, ScheduleSettings, parameter_groups
from clipstream.training.optimizer_state import groups_from_json, groups_to_json
from clipstream.training.parallel import full_tensor, local_tensor, parallelize
from clipstream.training.settings import TrainSettings
from clipstream.training.state import TrainState
from clipstream.training.step import TrainStep, clip_gradients, gradient_norm
from tests.support import model_files
from tests.support.evaluating import tiny_towers
from tests.support.ranks import run_ranks
from tests.support.savers import saver_of
from tests.support.steps import TinyTowers, assert_close, make_batch, make_step, values


class Small(nn.Module):
    """Matrices, a gain, biases and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


def on_meta(name: str) -> nn.Module:
    """A named model of open_clip, without values."""
    config = open_clip.get_model_config(name)
    config["vision_cfg"].pop("timm_model_pretrained", None)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    towers = nn.Module()
    with torch.device("meta"):
        towers.clip = kind(**config)
    return towers


def test_betas_and_eps_are_open_clips_for_every_model() -> None:
    for name in (
        *open_clip.list_models(),
        "hf-hub:timm/ViT-B-16-SigLIP",
        "hf-hub:apple/MobileCLIP-S1-OpenCLIP",
        "vit/RN50.json",
    ):
        theirs = get_default_params("RN50" if name.endswith(".json") else name)
        group = AdamW.Settings().build(Small(), name).param_groups[0]
        assert (*group["betas"], group["eps"]) == (theirs["beta1"], theirs["beta2"], theirs["eps"]), name


def test_betas_and_eps_that_are_set() -> None:
    assert AdamW.Settings(betas=(0.8, None)).defaults("ViT-B-32") == ((0.8, 0.98), 1e-6)
    assert AdamW.Settings(betas=(None, 0.95)).defaults("RN50") == ((0.9, 0.95), 1e-8)
    optimizer = AdamW.Settings(betas=(0.8, 0.95), eps=1e-4, fused=False).build(Small(), "RN50")
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, torch.optim.AdamW) and not group["fused"]
    assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-4)


def undecayed_by_open_clip(name: str, p: nn.Parameter) -> bool:
    """`exclude` of open_clip_train.main."""
    return p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name or "logit_scale" in name


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("RN50", 0), ("ViT-B-32", 0), ("ViT-B-16-SigLIP", 0), ("EVA02-B-16", 0), ("convnext_base", 0),
        ("swin_base_patch4_window7_224", 24),  # relative_position_bias_table
    ],
)  # fmt: skip
def test_what_has_no_weight_decay_is_open_clips(name: str, tables: int) -> None:
    towers = on_meta(name)
    groups = parameter_groups(towers, 0.2)
    ours = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    theirs = [p for key, p in towers.clip.named_parameters() if undecayed_by_open_clip(key, p)]
    assert ours == {id(p) for p in theirs}
    assert sum(len(group["params"]) for group in groups) == len(list(towers.parameters()))
    assert sum(p.ndim >= 2 for p in theirs) == tables


def test_nothing_to_train() -> None:
    with pytest.raises(SettingsError, match="lock_image"):
        AdamW.Settings().build(Small().requires_grad_(False), "ViT")


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedule(kind: str) -> None:
    settings = ScheduleSettings.model_validate({"type": kind, "warmup": 10, "min_lr": 0.1})
    lr = settings.build(peak=1.0, total_steps=110)
    rates = [lr(step) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    middle, end = {"cosine": (0.55, 0.1), "linear": (0.55, 0.1), "constant": (1.0, 1.0)}[kind]
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(end, abs=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("cooldown", [None, 0, 1, 20, 45, 60])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("end", [0.0, 1e-5])
def test_schedules_are_open_clips(cooldown: int | None, power: float, end: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0)
    if cooldown is None:
        theirs, settings = cosine_lr(optimizer, 3e-4, 7, 50), {"type": "cosine"}
    else:
        theirs = const_lr_cooldown(optimizer, 3e-4, 7, 50, cooldown, power, end)
        settings = {"type": "const-cooldown", "min_lr": end, "cooldown": cooldown, "cooldown_power": power}
    ours = ScheduleSettings.model_validate({**settings, "warmup": 7}).build(peak=3e-4, total_steps=50)
    for step in range(50):
        assert math.isclose(ours(step), float(theirs(step)), rel_tol=1e-12), step


@pytest.mark.parametrize(("limit", "expected"), [(None, 5.0), (0.01, 0.01), (1.0, 1.0), (10.0, 5.0)])
def test_clipping(limit: float | None, expected: float) -> None:
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    norm = gradient_norm(parameters)
    assert float(norm) == 5.0
    clip_gradients(parameters, norm, limit)
    assert float(gradient_norm(parameters)) == pytest.approx(expected, rel=1e-3)


def test_length_of_a_run() -> None:
    def steps_for(samples: int) -> int:
        return -(-samples // 10)

    assert TrainSettings(steps=7).total_steps(steps_for) == 7
    assert TrainSettings(samples=101).total_steps(steps_for) == 11
    assert TrainSettings(epochs=2, epoch_samples=55).total_steps(steps_for) == 11
    with pytest.raises(SettingsError, match="--steps"):
        TrainSettings(epochs=2).total_steps(steps_for)


class Kept(torch.optim.SGD):
    """Keeps a value in its state, beside a tensor."""

    def __init__(self, groups: Any, kept: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept


class Own:
    """A user's optimizer; `made` makes it."""

    made: Callable[[nn.Module], Any]

    def __init__(self, settings: Any) -> None:
        pass

    def __call__(self, towers: nn.Module, model: str) -> Any:
        return Own.made(towers)


def own(monkeypatch: pytest.MonkeyPatch, made: Callable[[nn.Module], Any]) -> torch.optim.Optimizer:
    monkeypatch.setattr(Own, "made", staticmethod(made), raising=False)
    model = Small()
    optimizer = OptimSettings.model_validate({"type": f"{__name__}:Own"}).build(model, "ViT")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return optimizer


@pytest.mark.parametrize(
    ("kept", "scale", "said"),
    [
        ([1, 2], None, "the state 'kept' of .*:Own is list"),
        (lambda: 0, None, "is function"),
        (torch.zeros(3), lambda: 0, r"parameter groups of .*:Own cannot be stored: 'scale' is function"),
        (torch.zeros(3), torch.ones(2000), "'scale' is Tensor, neither JSON nor a tensor of at most 1,000 numbers"),
        (torch.zeros(3), {1: 2}, "'scale' is dict"),
        (torch.zeros(3), torch.ones(2), None),
        (torch.zeros(3), None, None),
    ],
)
def test_what_no_checkpoint_can_store_is_told_at_the_first_step(
    kept: Any, scale: Any, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = own(monkeypatch, lambda towers: Kept(parameter_groups(towers, 0.1), kept))
    if scale is not None:
        optimizer.param_groups[0]["scale"] = scale
    with nullcontext() if said is None else pytest.raises(SettingsError, match=said):
        optimizer.step()
        optimizer.step()
        assert all(torch.equal(state["kept"], kept) for state in optimizer.state_dict()["state"].values())


def test_state_of_no_parameter_is_told_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = own(monkeypatch, lambda towers: Kept(parameter_groups(towers, 0.1), 1))
    optimizer.state["k"] = 3  # type: ignore[index]
    with pytest.raises(SettingsError, match=r"the state 'k' of .*:Own is of no parameter, and could not be resumed"):
        optimizer.step()


def test_parameters_that_are_left_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r":Own leaves out \d+ of the trainable parameters, such as \w+"):
        own(monkeypatch, lambda towers: torch.optim.SGD(list(towers.parameters())[:1]))


RESNET = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}
TIMM = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "timm_proj": "linear"}


def settings(**given: Any) -> OptimSettings:
    return OptimSettings.model_validate(given)


def groups_by_name(towers: nn.Module, **given: Any) -> dict[str, dict[str, Any]]:
    """The group of each trainable parameter, by open_clip's name."""
    names = {id(p): name.removeprefix("clip.") for name, p in towers.named_parameters()}
    optimizer = settings(**given).build(towers, "ViT")
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


def test_a_step_moves_each_group_by_its_rate() -> None:
    model = TinyTowers()
    scales = (0.0, 0.5, 1.0) * 4
    groups = [{"params": [p], "lr_scale": scale} for p, scale in zip(model.parameters(), scales, strict=False)]
    step, before = make_step(model, optimizer=torch.optim.SGD(groups)), values(model)
    step(make_batch(), lr=0.1)
    moved = [not torch.equal(p, was) for p, was in zip(model.parameters(), before.values(), strict=True)]
    assert moved[1] and moved[2] and not moved[0]
    assert [group["lr"] for group in step.optimizer.param_groups][:3] == [0.0, 0.05, 0.1]


def test_names_without_weight_decay() -> None:
    found = groups_by_name(tiny_towers(), wd_exclude=["*positional_embedding", "visual.proj"])
    decays = {name for name, group in found.items() if group["weight_decay"]}
    assert not decays & {"positional_embedding", "visual.positional_embedding", "visual.proj", "visual.ln_pre.weight"}
    assert {"text_projection", "token_embedding.weight", "visual.conv1.weight"} <= decays
    own = groups_by_name(tiny_towers(), lr=1e-3, image_lr=1e-5)
    assert own["visual.conv1.weight"]["lr_scale"] == own["visual.proj"]["lr_scale"] == pytest.approx(0.01)
    assert own["token_embedding.weight"]["lr_scale"] == own["logit_scale"]["lr_scale"] == 1
    with pytest.raises(SettingsError, match=r"optim.wd_exclude: no parameter's name matches 'visual.projj'"):
        groups_by_name(tiny_towers(), wd_exclude=["visual.projj"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"image_layer_decay": 1.5}, "less than or equal to 1"),
        ({"kwargs": {"weight_decay": 1}}, "weight_decay is set by --wd"),
        ({"type": "timm"}, "name"),
        ({"type": "timm", "name": "adahessian"}, "second derivatives"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**given)


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


class Grouped(torch.optim.Optimizer):
    """Keeps all of its state in the parameter groups, from the construction on, and moves weights by all of it.

    As schedule-free AdamW its `k` and `weight_sum`, Prodigy and D-Adaptation their `d` and `k`.
    """

    whole = staticmethod(full_tensor)

    def __init__(self, groups: Any) -> None:
        state = {"k": 0, "d": 1e-6, "momentum": torch.zeros(3), "best": None, "pair": (0.5, 0), "seen": [], "more": {}}
        super().__init__(groups, {"lr": 0.1, "wd": 0.1, "name": str, **state})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            slope = sum(float(self.whole(p.grad).double().sum()) for p in parameters)
            group["k"] += 1
            group["d"] = max(group["d"], abs(slope) / 3) * (1 + 1 / group["k"])
            group["momentum"].mul_(0.9).add_(torch.tensor([slope, group["d"], 1.0]))
            group["best"] = slope if group["best"] is None else min(group["best"], slope)
            group["pair"] = (group["pair"][0] / 3, group["k"])
            group["seen"].append(slope)
            group["more"] = {"last": torch.tensor(slope, dtype=torch.float64), **group["more"]}
            assert isinstance(group["pair"], tuple) and group["more"]["last"].dtype == torch.float64
            moved = (
                group["d"] + float(group["momentum"].sum()) + group["best"] + sum(group["pair"]) + sum(group["seen"])
            )
            for p in parameters:
                p.mul_(1 - group["wd"] * group["lr"]).add_(p.grad, alpha=-1e-3 * (moved + float(group["more"]["last"])))


CHOSEN = [
    {"type": f"{__name__}:Own"},  # Grouped
    {"type": "timm", "name": "lamb"},  # counts its steps in the groups, by a tensor
    {"type": "timm", "name": "adabelief"},  # counts them in the state, by a number
    {"type": "timm", "name": "adafactorbv"},  # has moments of bfloat16 beside weights of float32
    {"type": "timm", "name": "sgd", "momentum": 0.9, "kwargs": {"nesterov": True}},
    {"type": "nadamw", "text_layer_decay": 1.0},
]


def resumed(world: World, chosen: dict[str, Any], folder: Path, parallel: Literal["ddp", "fsdp"]) -> tuple[Any, Any]:
    """The weights after four steps, and after two, a save, a load over other steps, and two more."""
    Own.made = staticmethod(lambda towers: Grouped(parameter_groups(towers, 0.1)))

    def start() -> TrainStep:
        model = TinyTowers()
        parallelize(model, world, TrainSettings(parallel=parallel, precision="fp32"))
        return make_step(model, world, optimizer=settings(**chosen).build(model, "ViT"))

    def take(step: TrainStep, *numbers: int) -> None:
        for number in numbers:
            step(make_batch(number, world.rank, world.size), lr=0.01)

    step = start()
    take(step, 0, 1)
    saver = saver_of(folder, world, model=(step.towers, step.optimizer))
    saver.save(TrainState(2))
    assert saver.finish()
    again = start()
    again.optimizer.param_groups[0]["wd"] = 0.5  # that of the construction returns
    take(again, 5)  # as before a rollback: what is loaded counts alone
    world.barrier()
    found = find(folder, "latest")
    assert found is not None
    load(found, towers=again.towers, optimizer=again.optimizer, world=world)
    for one in (step, again):
        take(one, 2, 3)
    return tuple({name: full_tensor(p.detach()) for name, p in one.towers.named_parameters()} for one in (step, again))


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: chosen.get("name", chosen["type"].rpartition(":")[2]))
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(chosen: dict[str, Any], tmp_path: Path) -> None:
    undisturbed, again = resumed(World(), chosen, tmp_path, "ddp")
    assert_close(again, undisturbed, 0)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_so_has_one_of_two_ranks(parallel: str, tmp_path: Path) -> None:
    for undisturbed, again in run_ranks(2, resumed, CHOSEN[0], tmp_path, parallel):
        assert_close(again, undisturbed, 0)


def local_slopes(world: World) -> str:
    model = TinyTowers()
    parallelize(model, world, TrainSettings(parallel="fsdp", precision="fp32"))
    Own.made = staticmethod(lambda towers: Grouped(parameter_groups(towers, 0.1)))
    step = make_step(model, world, optimizer=settings(type=f"{__name__}:Own").build(model, "ViT"))
    step.optimizer.whole = local_tensor
    with pytest.raises(SettingsError) as error:
        step(make_batch(0, world.rank, world.size), lr=0.01)
    return str(error.value)


def test_groups_that_differ_between_ranks_are_told_at_the_first_step() -> None:
    for said in run_ranks(2, local_slopes):
        assert "differ between the ranks after a step" in said


def test_hyperparameters_are_those_of_the_resuming_process_and_earlier_checkpoints_are_read() -> None:
    optimizer = settings().build(TinyTowers(), "ViT")
    optimizer.param_groups[0]["k"] = 4
    saved = json.loads(groups_to_json(optimizer))
    other = settings(wd=0.3, betas=[0.8, 0.9]).build(TinyTowers(), "ViT")
    # Before `__changed__`, a group had all of its values, None for those that JSON lacks.
    earlier = [{"weight_decay": 0.2, "betas": [0.9, 0.98], "foreach": None, "lr": 5.0, **saved[0]}, *saved[1:]]
    del earlier[0]["__changed__"]
    for text in (saved, earlier):
        group = groups_from_json(json.dumps(text), other)[0]
        assert (group["k"], group["weight_decay"], group["betas"]) == (4, 0.3, (0.8, 0.9))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kron", "timm's kron has 'rng_state' in its state_dict"),
        ("lookahead_adamw", "timm's lookahead_adamw does not call the constructor"),
        ("adamw", ""),
    ],
)
def test_an_optimizer_of_timm_that_cannot_be_resumed_is_refused_before_the_first_step(name: str, said: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(SettingsError, match=said) if said else nullcontext():
        settings(type="timm", name=name).build(TinyTowers(), "ViT")
    drawn = torch.rand(3)  # the trial draws no number of the run
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.ci
def test_each_optimizer_of_timm_is_resumed_or_refused_before_the_first_step(tmp_path: Path) -> None:
    """Of timm 1.0.31: all but 3 kinds of Kron, AdaHessian, and those of APEX and bitsandbytes on a CPU."""
    refused = []
    for name in list_optimizers():
        try:
            chosen = settings(type="timm", name=name).model_dump()
            settings(**chosen).build(TinyTowers(), "ViT")
        except (SettingsError, ValueError):
            refused.append(name)
            continue
        (tmp_path / name).mkdir()
        undisturbed, again = resumed(World(), chosen, tmp_path / name, "ddp")
        assert_close(again, undisturbed, 0)
    others = [name for name in refused if not name.startswith(("bnb", "fused"))]
    assert [name for name in others if not name.startswith("kron")] == ["adahessian"]


def steps_refused(world: World, names: list[str]) -> list[str]:
    """What each optimizer of timm says to sharded weights, before the first step."""
    model, found = TinyTowers(), []
    parallelize(model, world, TrainSettings(parallel="fsdp", precision="fp32"))
    for name in names:
        with pytest.raises(SettingsError) as error:
            settings(type="timm", name=name).build(model, "ViT")
        found.append(str(error.value))
    return found


def test_an_optimizer_of_timm_that_fails_on_shards_is_refused_before_the_first_step() -> None:
    """Of torch 2.15, whose DTensor has no strategy for some operations in place; cadopt fails at its second step."""
    for said in run_ranks(2, steps_refused, ["adamp", "cadopt"]):
        assert all("fails with --train.parallel fsdp: RuntimeError: aten" in text for text in said)


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


def test_tables_of_hugging_face_towers_under_that_rule() -> None:
    from transformers import BertConfig

    sizes = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=20)
    text = HFTextEncoder("", 8, config=sizes, pooler_type="mean_pooler", proj_type="linear")
    towers = nn.Module()
    towers.clip = nn.ModuleDict({"text": text})
    free = undecayed(towers)
    found = {name.split(".")[-2] for name, p in towers.clip.named_parameters() if id(p) in free and p.ndim > 1}
    assert found == {"position_embeddings", "token_type_embeddings"}


@pytest.mark.parametrize("fused", [False, True])
def test_l2_start_moves_weights_towards_their_start_and_no_skipped_step_does(fused: bool) -> None:
    towers, lr, strength = TinyTowers(), 0.1, 0.5
    plain = TinyTowers()
    optimizers = [AdamW.Settings(l2_start=share, fused=fused).build(model, "ViT")
                  for model, share in ((towers, strength), (plain, 0.0))]  # fmt: skip
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr
    starts, draw = values(towers), torch.Generator().manual_seed(1)
    for skipped in (False, True, False):
        before = values(towers)
        for parameter, other in zip(towers.parameters(), plain.parameters(), strict=True):
            other.data.copy_(parameter)
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            other.grad = parameter.grad.clone()
        for optimizer in optimizers:
            if fused:
                optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(skipped)), None
            if fused or not skipped:
                optimizer.step()
        for name, weight in values(towers).items():
            wanted = values(plain)[name]
            if weight.numel() > 1 and not skipped:
                wanted = wanted - lr * strength * (wanted - starts[name])
            torch.testing.assert_close(weight, before[name] if skipped else wanted)


class Products(TorchDispatchMode):
    """The dtypes of the matrix products that run under it."""

    dtypes: set[torch.dtype]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.dtypes |= {args[0].dtype} if "mm" in str(func) else set()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("computed", ["bf16", "no-bf16"])
@pytest.mark.parametrize("name", ["torch", *list_optimizers("*muon*")])
def test_muon_has_no_products_in_bfloat16_where_it_is_emulated(
    name: str, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPSTREAM_CAPABILITIES", computed)
    model = TinyTowers()
    if name == "torch":
        optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    else:
        optimizer = settings(type="timm", name=name).build(model, "ViT")
    step, before = make_step(model, optimizer=optimizer), values(model)
    with Products() as products:
        products.dtypes = set()
        step(make_batch(), lr=0.01)
    assert (torch.bfloat16 in products.dtypes) == (computed == "bf16")
    assert any(not torch.equal(before[name], after) for name, after in values(model).items())
