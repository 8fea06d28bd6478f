"""Optimizers and learning-rate schedules.

Settings and towers enter; a torch optimizer and the learning rate as a function of the step leave. Built-in ones are
registered on their classes; a user's own is named `module:Name`. Importing this does not import torch.

A step sets the learning rate of a parameter group to `lr_scale` times the schedule's, where the group has such a key:
learning rates per tower and layer are scales of `optim.lr`. Optimizers are made with `optim.lr`, as timm has some that
keep a tensor without one, or take other steps from it.

Schedules give the rate after the warm-up, from `peak` towards `min_lr` at step `total_steps`. With min_lr = 0, cosine
and constant equal open_clip's; const-cooldown equals it for every `min_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, field_validator

from clipstream.errors import ClipstreamError, SettingsError, errors_as
from clipstream.training.optimizer_state import check_each_step, remember_construction, try_step
from clipstream.utils.plugins import describe_error
from clipstream.utils.section import GIVEN, SET, Conflict, Is, PluginSection, make_part, part

if TYPE_CHECKING:
    import torch
    from torch import nn

UNDECAYED = ("bn", "ln", "bias", "logit_scale")  # parts of names, from open_clip_train.main of release 3.3.0
MAIN_RULE = "open_clip-main"  # in wd_exclude: the rule of open_clip's main branch
# What main's HFTextEncoder declares; release 3.3.0 does not.
HF_EMBEDDINGS = ("position_embeddings", "token_type_embeddings", "relative_attention_bias", "embed_positions")
Betas = tuple[float | None, float | None]  # None: the model's default


class OptimSettings(PluginSection):
    """The optimizer. `type` may be a user's own `package.module:Name`."""

    type: str = "adamw"
    lr: float = Field(5e-4, ge=0, description="peak learning rate")
    wd: float = Field(0.2, ge=0, description="weight decay")
    grad_clip_norm: float | None = Field(
        None, gt=0, allow_inf_nan=True, description="maximum gradient norm; default: no clipping"
    )

    l2_start: float = Field(
        0.0,
        ge=0,
        description="decay towards the starting weights: after each update w -= lr * l2_start * (w - start), decoupled "
        "as in AdamW; L2-SP (arXiv:1802.01483) adds it to the loss; not of single numbers, as the logit scale",
    )

    def summary(self, model: str) -> str:
        """Further values for the line at the start of a run, each after a comma."""
        return ""

    def build(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        """The optimizer that `type` names; arguments as `Optimizer`.

        Raises SettingsError: nothing is trainable, or a user's optimizer failed.
        """
        import torch

        if not any(p.requires_grad for p in towers.parameters()):
            raise SettingsError("nothing is left to train: unset model.lock_image or model.lock_text")
        optimizer = _build("optim.type", self)(towers, model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SettingsError(f"optim.type: {self.type} gave {type(optimizer).__name__}, not a torch.optim.Optimizer")
        if self.type not in ("adamw", "nadamw"):
            _check_parameters(towers, optimizer, self.type)
            check_each_step(optimizer, self.type)
        if self.l2_start:
            _pull_to_start(optimizer, self.l2_start)
        remember_construction(optimizer)
        return optimizer


class ScheduleSettings(PluginSection):
    """The learning rate over the steps. `type` may be a user's own `package.module:Name`."""

    type: str = "cosine"
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of cosine, linear and const-cooldown")

    def build(self, *, peak: float, total_steps: int) -> Callable[[int], float]:
        """The learning rate of a step (from 0): peak * (step + 1) / warmup during the warm-up, then as `Schedule`.

        Raises SettingsError: a user's schedule failed.
        """
        after_warmup = _build("schedule.type", self)

        def lr(step: int) -> float:
            if step < self.warmup:
                return peak * (step + 1) / self.warmup
            return float(after_warmup(step, peak=peak, total_steps=total_steps))

        return lr


class Optimizer(Protocol):
    """Builds a torch optimizer; constructed with its settings, `Name(settings)`.

    `Name.Settings` (a subclass of `OptimSettings`) declares further keys.
    """

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        """A torch optimizer over all trainable parameters of the towers, each exactly once.

        Training sets `lr` of every parameter group before each step. The optimizer's state must consist of tensors
        and numbers by parameter, and of values of the parameter groups that its steps change or add: checkpoints store
        both. It must call the constructor of torch.optim.Optimizer.

        Args:
            towers: on their device and in their final dtype; parameters may be sharded (DTensor).
            model: the model's name.
        """


class Schedule(Protocol):
    """The learning rate over the steps; constructed with its settings, `Name(settings)`.

    `Name.Settings` (a subclass of `ScheduleSettings`) declares further keys.
    """

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        """The learning rate of step `step` (from 0): a function of the step alone, so a resume needs no state.

        Only called after the warm-up, for steps from `settings.warmup` on.

        Args:
            peak: `optim.lr`.
            total_steps: of the whole run.
        """


def parameter_groups(
    module: nn.Module, wd: float, settings: TowerRates | None = None, fallback: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The trainable parameters in groups, as torch optimizers take them.

    At each learning rate there are up to three groups. The first has weight decay `wd` (by the rule of open_clip's
    open_clip_train.main); the second has none; the third holds single numbers, which have none either, and which FSDP
    never shards. Empty groups are left out.

    Args:
        module: the towers; any other module where no tower has a learning rate of its own.
        settings: learning rates per tower and layer, and names without weight decay.
        fallback: patterns of names whose groups have `use_fallback`, by which timm's Muon takes AdamW for them.

    Raises SettingsError: the layers of a tower are not known, or a pattern matches no parameter.
    """
    named = [] if settings is None else settings.wd_exclude
    excluded = [pattern for pattern in named if pattern != MAIN_RULE]
    declared = exempt_patterns(module) if MAIN_RULE in named else None
    scales = {} if settings is None else _scales(module, settings)
    groups: dict[tuple[float, bool, int], list[nn.Parameter]] = {}
    unmatched = {"wd_exclude": set(excluded), "fallback": set(fallback)}
    for full, parameter in module.named_parameters():
        name = full.removeprefix("clip.")  # the names are those of open_clip's model

        def matches(key: str, patterns: Sequence[str], name: str = name) -> bool:
            found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
            unmatched[key].difference_update(found)
            return bool(found)

        exempt, falls_back = matches("wd_exclude", excluded), matches("fallback", fallback)
        if not parameter.requires_grad:
            continue
        by_rule = (part in full for part in UNDECAYED) if declared is None else (fnmatchcase(full, p) for p in declared)
        decays = parameter.ndim >= 2 and not exempt and not any(by_rule)
        kind = 0 if decays else 1 if parameter.numel() > 1 else 2
        groups.setdefault((scales.get(id(parameter), 1.0), falls_back, kind), []).append(parameter)
    for key, patterns in unmatched.items():
        absent = [name for tower in getattr(module, "stored", {}).values() for name in tower.names]
        patterns = {one for one in patterns if not any(fnmatchcase(name, one) for name in absent)}
        if patterns:
            text = f"optim.{key}: no parameter's name matches {sorted(patterns)[0]!r}; names are open_clip's"
            raise SettingsError(f"{text}, such as visual.proj and *.positional_embedding; * stands for any characters")
    made = []
    for scale, falls_back, kind in sorted(groups, key=lambda one: (-one[0], *one[1:])):
        group: dict[str, Any] = {"params": groups[scale, falls_back, kind], "weight_decay": 0.0 if kind else wd}
        made.append(group | ({"lr_scale": scale} if scales else {}) | ({"use_fallback": True} if falls_back else {}))
    return made


def exempt_patterns(module: nn.Module) -> set[str]:
    """Patterns of the parameters that the parts of a model declare to have no weight decay.

    As in open_clip_train/optim.py of the main branch: the names of each part's `no_weight_decay` (open_clip and timm),
    timm's keywords at the ends of names, and the embedding tables of Hugging Face's text towers.
    """
    from open_clip.hf_model import HFTextEncoder

    found: set[str] = set()
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        for declare, form in (("no_weight_decay", "{}"), ("no_weight_decay_keywords", "*{}")):
            if callable(declared := getattr(inner, declare, None)):
                found |= {prefix + form.format(name) for name in declared()}
        if isinstance(inner, HFTextEncoder):
            found |= {f"{prefix}*{name}*" for name in HF_EMBEDDINGS}
    return found


def _scales(towers: Any, settings: TowerRates) -> dict[int, float]:
    """The scale of the learning rate by the id of the parameter, in towers with rates of their own.

    Raises SettingsError: the layers of a tower are not known.
    """
    from clipstream.models.layers import tower_layers, tower_parameters

    scales: dict[int, float] = {}
    for tower in ("image", "text"):
        peak, decay = getattr(settings, f"{tower}_lr"), getattr(settings, f"{tower}_layer_decay")
        scale = 1.0 if peak is None else peak / settings.lr
        if decay == 1 and peak is not None:
            scales |= {id(parameter): scale for _, parameter in tower_parameters(towers.clip, tower)}
        elif decay != 1:
            with errors_as(SettingsError, f"optim.{tower}_layer_decay", SettingsError):
                layers = tower_layers(towers.clip, tower, own_pooler=settings.text_pooler_own_group)
            for depth, layer in enumerate(reversed(layers)):
                scales |= {id(parameter): scale * decay**depth for parameter in layer}
    return scales


class TowerRates(OptimSettings):
    """Learning rates per tower and layer, and exceptions from weight decay, of the built-in optimizers."""

    image_lr: float | None = Field(None, ge=0, description="peak learning rate of the image tower; default: lr")
    text_lr: float | None = Field(None, ge=0, description="peak learning rate of the text tower; default: lr")
    image_layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="layer-wise learning rate decay of the image tower: factor from each layer to the layer below",
    )
    text_layer_decay: float = Field(1.0, gt=0, le=1, description="layer-wise learning rate decay of the text tower")
    text_pooler_own_group: bool = Field(
        False,
        description="for layer decay, treat the pooler of a Hugging Face text tower as a layer below the projection",
    )
    wd_exclude: list[str] = Field(
        default_factory=list,
        description="patterns of parameter names without weight decay, in addition to gains, biases and scales; names "
        "as in open_clip: '*positional_embedding', 'visual.proj'; open_clip-main: the rule of open_clip's main branch, "
        "which includes position embeddings",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="additional arguments of the optimizer class of torch or timm"
    )

    pairs: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict({key: SET, "lr": 0}, f"--optim.{flag} requires optim.lr above 0")
            for key, flag in (("image_lr", "image-lr"), ("text_lr", "text-lr"))
        ),
        Conflict(
            {"text_pooler_own_group": True, "text_layer_decay": 1},
            "has no effect without layer decay: remove it, or set --text-layer-decay",
            notice=True,
        ),
    )  # fmt: skip

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Arguments with a setting of their own."""
        for key in sorted({"lr", "weight_decay", "params"} & self.kwargs.keys()):
            yield "kwargs", f"{key} is set by --{'wd' if key == 'weight_decay' else 'lr'}"

    def summary(self, model: str) -> str:
        told = ""
        for tower in ("image", "text"):
            peak, decay = getattr(self, f"{tower}_lr"), getattr(self, f"{tower}_layer_decay")
            told += "" if peak is None else f", {tower} lr {peak:g}"
            told += "" if decay == 1 else f", {tower} layer decay {decay:g}"
        return told


class AdamSettings(TowerRates):
    """Betas and eps of the Adam family, with open_clip's defaults."""

    betas: Betas | None = Field(None, description="default: 0.9 0.98 if the model name contains vit, else 0.9 0.999")
    eps: float | None = Field(None, gt=0, description="default: 1e-6 if the model name contains vit, else 1e-8")

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: Betas | None) -> Betas | None:
        if value is not None and not all(beta is None or 0 <= beta < 1 for beta in value):
            raise ValueError("each beta must be at least 0 and below 1")
        return value

    def defaults(self, model: str) -> tuple[tuple[float, float], float]:
        """Betas and eps; those that are not set follow open_clip's rule (open_clip_train.params) by the model's name; a
        configuration file counts by its stem, as in open_clip.add_model_config.
        """
        name = Path(model).stem if model.endswith(".json") else model
        usual, eps = ((0.9, 0.98), 1e-6) if "vit" in name.lower() else ((0.9, 0.999), 1e-8)
        beta1, beta2 = (own if given is None else given for given, own in zip(self.betas or usual, usual, strict=True))
        return (beta1, beta2), self.eps or eps

    def summary(self, model: str) -> str:
        (beta1, beta2), eps = self.defaults(model)
        return f", betas {beta1:g} {beta2:g}, eps {eps:g}{super().summary(model)}"


class _Builtin:
    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def _adam(self, name: str, towers: nn.Module, model: str, **options: Any) -> torch.optim.Optimizer:
        import torch

        own, (betas, eps) = self.settings, self.settings.defaults(model)
        options = {"betas": betas, "eps": eps, **options, **own.kwargs}
        groups = parameter_groups(towers, own.wd, own)
        made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=own.lr, **options)
        return made


@part(OptimSettings, "adamw")
class AdamW(_Builtin):
    """AdamW (arXiv:1711.05101) with open_clip's defaults: torch.optim.AdamW, fused unless set otherwise."""

    class Settings(AdamSettings):
        """AdamW. Gains, biases and scales have no weight decay, as in open_clip."""

        type: Literal["adamw"] = "adamw"
        fused: bool = Field(True, description="use torch's fused implementation")

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        return self._adam("AdamW", towers, model, fused=self.settings.fused)


@part(OptimSettings, "nadamw")
class NAdamW(_Builtin):
    """NAdam with decoupled weight decay: torch.optim.NAdam, as `--opt nadamw` of open_clip's main branch."""

    class Settings(AdamSettings):
        """NAdam with decoupled weight decay. Gains, biases and scales have none."""

        type: Literal["nadamw"] = "nadamw"

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        return self._adam("NAdam", towers, model, decoupled_weight_decay=True)


@part(OptimSettings, "timm")
class Timm(_Builtin):
    class Settings(TowerRates):
        """An optimizer of timm. Gains, biases and scales have no weight decay."""

        type: Literal["timm"] = "timm"
        name: str = Field(min_length=1, description="name of the optimizer in timm, e.g. lamb")
        betas: tuple[float, float] | None = Field(None, description="default: that of the optimizer")
        eps: float | None = Field(None, gt=0, description="default: that of the optimizer")
        momentum: float | None = Field(None, ge=0, description="default: that of the optimizer")
        fallback: list[str] = Field(
            default_factory=list,
            description="patterns of parameter names that timm's Muon optimizers update with AdamW",
        )

        pairs = (
            *TowerRates.pairs,
            Conflict({"fallback": SET, "name": Is("not a Muon optimizer", lambda name: "muon" not in name.lower())},
                     "requires one of timm's Muon optimizers, such as nadamuon, not {1}"),
        )  # fmt: skip

        def conflicts(self) -> Iterator[tuple[str, str]]:
            """An optimizer that cannot train here."""
            yield from super().conflicts()
            if "hessian" in self.name.lower():
                yield "name", f"{self.name} requires second derivatives, which are not supported: use another optimizer"

        def summary(self, model: str) -> str:
            return f", {self.name}{super().summary(model)}"

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        own = self.settings
        groups = parameter_groups(towers, own.wd, own, own.fallback)
        options = {key: value for key in ("betas", "eps", "momentum") if (value := getattr(own, key)) is not None}
        options |= {"lr": own.lr, "weight_decay": own.wd, **own.kwargs}
        try_step(lambda groups: create_optimizer_v2(groups, own.name, **options), groups, f"timm's {own.name}")
        made: torch.optim.Optimizer = create_optimizer_v2(groups, own.name, **options)
        return made


@part(ScheduleSettings, "constant")
class Constant:
    class Settings(ScheduleSettings):
        """The peak learning rate throughout."""

        type: Literal["constant"] = "constant"

    def __init__(self, settings: ScheduleSettings) -> None:
        self.warmup, self.min_lr = settings.warmup, settings.min_lr

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        return peak


@part(ScheduleSettings, "cosine")
class Cosine(Constant):
    class Settings(ScheduleSettings):
        """Half a cosine wave down to min_lr."""

        type: Literal["cosine"] = "cosine"

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        done = (step - self.warmup) / max(1, total_steps - self.warmup)
        return self.min_lr + (peak - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


@part(ScheduleSettings, "linear")
class Linear(Constant):
    class Settings(ScheduleSettings):
        """A straight line down to min_lr."""

        type: Literal["linear"] = "linear"

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        done = (step - self.warmup) / max(1, total_steps - self.warmup)
        return self.min_lr + (peak - self.min_lr) * (1 - done)


@part(ScheduleSettings, "const-cooldown")
class ConstCooldown:
    class Settings(ScheduleSettings):
        """The peak learning rate, and at the end a polynomial decay to min_lr."""

        type: Literal["const-cooldown"] = "const-cooldown"
        cooldown_power: float = Field(1.0, gt=0, description="power of the decay in const-cooldown; 1: linear")
        cooldown: int | None = Field(
            None, ge=0, description="final steps in which const-cooldown decays the learning rate"
        )
        cooldown_epochs: float | None = Field(
            None, ge=0, description="final epochs in which const-cooldown decays the learning rate, instead of cooldown"
        )

        pairs = (
            Conflict({"cooldown_epochs": None, "cooldown": None},
                     "const-cooldown requires --epochs-cooldown, or --schedule.cooldown in steps"),
            Conflict({"cooldown_epochs": GIVEN, "cooldown": GIVEN},
                     "cooldown and cooldown_epochs are mutually exclusive"),
        )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        assert settings.cooldown is not None, "the plan turns epochs into steps"
        self.cooldown, self.power, self.min_lr = settings.cooldown, settings.cooldown_power, settings.min_lr

    def __call__(self, step: int, *, peak: float, total_steps: int) -> float:
        start = total_steps - self.cooldown
        if step < start:
            return peak
        left: float = (1 - (step - start) / self.cooldown) ** self.power
        return self.min_lr + (peak - self.min_lr) * left


def _check_parameters(towers: nn.Module, optimizer: torch.optim.Optimizer, type: str) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if left := [name for name, p in towers.named_parameters() if p.requires_grad and id(p) not in held]:
        what = f"{type} leaves out {len(left)} of the trainable parameters, such as {left[0]}"
        advice = "parameter_groups(towers, wd), and the settings model.lock_image and model.lock_text to train less"
        raise SettingsError(f"optim.type: {what}: use {advice}")


def _pull_to_start(optimizer: torch.optim.Optimizer, strength: float) -> None:
    """After each update, move the parameters towards their present values, unless the step is skipped."""
    import torch

    def local(tensor: Any) -> Any:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.numel() > 1]
    starts = {id(p): local(p.detach()).clone() for p in parameters}

    @torch.no_grad()
    def pull(optimizer: Any, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # 1 on the device if the step changed nothing
        for group in optimizer.param_groups:
            share = group["lr"] * strength
            for weight, start in ((local(p), starts[id(p)]) for p in group["params"] if id(p) in starts):
                weight.lerp_(start, share if found_inf is None else (share * (1 - found_inf)).to(weight.dtype))

    optimizer.register_step_post_hook(pull)


def rate_change(optimizer: torch.optim.Optimizer, lr: Callable[[int], float], done: int) -> str:
    """How the learning rate goes on after a resume at step `done`, where the schedule is another one than before."""
    group = optimizer.param_groups[0]
    if not (scale := group.get("lr_scale", 1.0)) or not done or math.isclose(group["lr"], lr(done - 1) * scale):
        return ""
    return f"learning rate: {group['lr'] / scale:.2g} at step {done} -> {lr(done):.2g} at step {done + 1}"


def _build(key: str, settings: OptimSettings | ScheduleSettings) -> Callable[..., Any]:
    """The part that `settings.type` names, whose own errors are raised as SettingsError."""
    made = make_part(key, settings)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except ClipstreamError:
            raise
        except Exception as error:  # whatever a user's part raises
            raise SettingsError(f"{key}: {describe_error(settings.type, error)}") from error

    return call
