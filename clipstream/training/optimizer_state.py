"""State of an optimizer that checkpoints store beside its moments, and a check that nothing of it would be lost.

An optimizer enters; its parameter groups as JSON leave, and return. Values that its construction sets are
hyperparameters, which a resuming process takes from its own settings. Values that its steps change or add, such as the
counter of schedule-free AdamW or the step size that Prodigy estimates, are state. The learning rate is the schedule's.
Importing this does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clipstream.distributed.world import World
from clipstream.errors import SettingsError, errors_as
from clipstream.utils.section import parse_as

if TYPE_CHECKING:
    import torch

CONSTRUCTED = "constructed_groups"  # attribute of an optimizer: the encoded values of its groups before the first step
CHANGED = "__changed__"  # key of a group in a checkpoint: which of its values the steps changed
TENSOR, TUPLE, SAME = "__tensor__", "__tuple__", "__same__"  # keys of a tensor, a tuple, and an object of another group
MOST = 1000  # numbers of a tensor, as they stand in the header of a file


def remember_construction(optimizer: torch.optim.Optimizer) -> None:
    """Note the values of the parameter groups, before the first step."""
    setattr(optimizer, CONSTRUCTED, _encode_groups(optimizer.param_groups))


def _construction_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' encoded values from the construction; the present ones if they were not noted."""
    found: list[dict[str, Any]] | None = getattr(optimizer, CONSTRUCTED, None)
    return _encode_groups(optimizer.param_groups) if found is None else found


def _encode_groups(
    groups: Sequence[Mapping[str, Any]], constructed: Sequence[Mapping[str, Any]] = (), *, read: bool = True
) -> list[dict[str, Any]]:
    """The values of groups for JSON; `...` for one of the construction that JSON lacks, such as a function.

    Raises TypeError: a value that the steps added or changed cannot be stored.
    """
    found: list[dict[str, Any]] = [{} for _ in groups]
    first: dict[tuple[str, int], int] = {}  # torch gives each group the same objects of the defaults
    for number, group in enumerate(groups):
        for key in group.keys() - {"params", "lr"}:
            value = group[key]
            mutable = isinstance(value, list | dict) or hasattr(value, "numel")
            if mutable and (earlier := first.setdefault((key, id(value)), number)) != number:
                found[number][key] = {SAME: earlier}
                continue
            try:
                found[number][key] = _encode(value, read)
            except TypeError as error:
                if constructed and constructed[number].get(key) is not ...:
                    raise TypeError(f"{key!r} is {error}") from error
                found[number][key] = ...
    return found


def _encode(value: Any, read: bool = True) -> Any:
    """A value for JSON; without `read`, tensors have no numbers, which would wait for the device."""
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and not hasattr(value, "to_local") and value.numel() <= MOST:
        numbers = value.tolist() if read else None
        return {TENSOR: numbers, "dtype": str(value.dtype).removeprefix("torch."), "device": value.device.type}
    if isinstance(value, list | tuple):
        items = [_encode(item, read) for item in value]
        return items if isinstance(value, list) else {TUPLE: items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, read) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__}, neither JSON nor a tensor of at most {MOST:,} numbers on each rank")


def _decode(value: Any, device: torch.device) -> Any:
    import torch

    if isinstance(value, list):
        return [_decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if TUPLE in value:
        return tuple(_decode(value[TUPLE], device))
    if TENSOR not in value:
        return {key: _decode(item, device) for key, item in value.items()}
    dtype = getattr(torch, str(value.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of the optimizer has the type {value.get('dtype')}")
    return torch.tensor(value[TENSOR], dtype=dtype, device="cpu" if value.get("device", "cpu") == "cpu" else device)


def groups_to_json(optimizer: torch.optim.Optimizer) -> str:
    """The parameter groups for a checkpoint, as JSON: the numbers of their parameters, and what the steps changed.

    Raises TypeError: a value that the steps added or changed cannot be stored.
    """
    groups, before = optimizer.state_dict()["param_groups"], _construction_values(optimizer)
    found = []
    for group, now, then in zip(groups, _encode_groups(groups, before), before, strict=True):
        changed = {key: now[key] for key in sorted(now) if key not in then or now[key] != then[key]}
        found.append({"params": group["params"], "lr": group["lr"], **changed, CHANGED: [*changed]})
    return json.dumps(found)


@errors_as(ValueError, "damaged parameter groups", LookupError, TypeError, RuntimeError)
def groups_from_json(text: str, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups that `groups_to_json` wrote, with the present hyperparameters.

    Raises ValueError: the text is not such groups, or is damaged.
    """
    groups, before = optimizer.param_groups, _construction_values(optimizer)
    now, device = _encode_groups(groups), groups[0]["params"][0].device
    found = parse_as(list[dict[str, Any]], text)
    # load_state_dict refuses another number of groups
    for number, (saved, group, then) in enumerate(zip(found, groups, before, strict=False)):
        changed = saved.get(CHANGED, saved.keys() - then.keys() - {"params", "lr"})
        own = {"params": saved["params"], "lr": saved.get("lr", group["lr"])}
        for key, value in {**then, **{key: saved[key] for key in changed}}.items():
            if isinstance(value, dict) and SAME in value:
                own[key] = found[value[SAME]][key]
            else:  # steps of this process may have changed it, as before a rollback
                own[key] = group[key] if now[number].get(key, CHANGED) == value else _decode(value, device)
        found[number] = own
    return found


def check_each_step(optimizer: torch.optim.Optimizer, type: str) -> None:
    """Refuse a state that no checkpoint can store at the step that makes it, not at the first save.

    Raises SettingsError: the optimizer has state of its own elsewhere, or runs no hooks.
    """
    why = ""
    if not getattr(optimizer.__class__.step, "hooked", False):  # torch's constructor sets it
        why = "does not call the constructor of torch.optim.Optimizer, as wrappers of another optimizer"
    elif more := sorted(optimizer.state_dict().keys() - {"state", "param_groups"}):
        why = f"has {more[0]!r} in its state_dict, which checkpoints do not store"
    if why:
        raise SettingsError(f"optim.type: {type} {why}, and could not be resumed: take another optimizer")
    world, compared = World.of_group(), list[bool]()

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _check(optimizer, type)
        if world.size > 1 and not compared:
            compared.append(True)
            if len(set(world.gather_objects(groups_to_json(optimizer)))) > 1:  # a checkpoint has those of rank 0
                why = "differ between the ranks after a step, and could not be resumed: compute them of all shards"
                raise SettingsError(f"optim.type: the parameter groups of {type} {why}")

    optimizer.register_step_post_hook(check)


def try_step(make: Callable[[list[dict[str, Any]]], Any], groups: list[dict[str, Any]], type: str) -> None:
    """Two steps on copies of the smallest parameters of a run's groups, for what only a step shows.

    Raises SettingsError: a step fails, as that of some optimizers on sharded parameters, or its state cannot be stored.
    """
    import torch

    copies = []
    for group in groups:
        small = {p.ndim: p for p in sorted(group["params"], key=lambda p: -p.numel())}
        copies.append({**group, "params": [torch.nn.Parameter(p.detach().clone()) for p in small.values()]})
    made = [p for group in copies for p in group["params"]]
    devices = {p.device for p in made if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        trial = make(copies)
        remember_construction(trial)
        check_each_step(trial, type)
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        try:
            for _ in range(2):
                trial.step()
        except SettingsError:
            raise
        except Exception as error:  # whatever it raises
            sharded = " with --train.parallel fsdp" if any(hasattr(p, "to_local") for p in made) else ""
            why = f"{error.__class__.__name__}: {error}".splitlines()[0].removesuffix(": ")[:120]
            raise SettingsError(f"optim.type: {type} fails{sharded}: {why}; take another optimizer") from error


def _check(optimizer: torch.optim.Optimizer, type: str) -> None:
    import torch

    text = f"optim.type: the state {{}} of {type} is {{}}, and could not be resumed: {{}}"
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
            raise SettingsError(text.format(repr(parameter), "of no parameter", "keep it in the parameter groups"))
        sharding = getattr(parameter, "placements", None)
        for name, value in state.items():
            if not isinstance(value, torch.Tensor | int | float):
                what = f"{value.__class__.__name__}, and checkpoints store tensors and numbers only"
                raise SettingsError(f"optim.type: the state {name!r} of {type} is {what}: take another optimizer")
            if not (sharding and isinstance(value, torch.Tensor) and value.ndim):
                continue
            if value.shape != parameter.shape or getattr(value, "placements", None) != sharding:
                raise SettingsError(text.format(repr(name), "not sharded as its parameter", "use --train.parallel ddp"))
    with errors_as(SettingsError, f"optim.type: the parameter groups of {type} cannot be stored", TypeError):
        _encode_groups(optimizer.param_groups, _construction_values(optimizer), read=False)
