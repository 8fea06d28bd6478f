"""The settings that short flags stand for, one by one and several together.

The texts of the flags that are given enter, by flag; (flag, path, value) of each setting leaves. A group's function
raises ValueError for texts that contradict each other. A flag without effect beside the others adds a notice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clipstream.data.json_path import step_of
from clipstream.open_clip.flags import BY_FLAG, CAPTION, IMAGENETS, SOURCE
from clipstream.storage.shard_url import parts_of, redact, table_format
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import Path

Given = Mapping[str, str]
Found = Iterator[tuple[str, Path, Any]]

MEMBERS = ("--caption-key", "--text-key", "--csv-caption-key")  # name a text member
TRACKERS = ("wandb", "trackio")
# Flags that say how training data are read; --val-data is read likewise.
READING = (
    "--caption-json", "--json-text-key", "--json-text-key-probs", *MEMBERS, "--caption-lines", "--image-key",
    "--csv-img-key", "--csv-separator", "--dataset-type",
)  # fmt: skip
UNSCHEDULED = ("--warmup", "--lr-scheduler", "--epochs-cooldown", "--lr-cooldown-end", "--lr-cooldown-power")
# open_clip's defaults (main branch; open_clip_train/params.py) where they differ from those of the settings.
DEFAULTS = {
    "--model": "RN50",
    "--batch-size": "64",
    "--epochs": "32",
    "--warmup": "10000",
    "--workers": "4",
    "--dataset-resampled": "false",
    "--max-image-pixels": "25000000",
    "--logs": "./logs/",
    "--report-to": "",
    "--log-every-n-steps": "100",
    "--log-metric-every-n-steps": "10",
    "--train-loss-ema-samples": "50000",
    "--save-frequency": "1",
    "--val-frequency": "1",
    "--zeroshot-frequency": "2",
}
# Flag of an interval -> the flags, and the names of the evaluators, that it is about.
_INTERVALS = {
    "--val-frequency": (("--val-data", "--val-split"), ("val",)),
    "--zeroshot-frequency": (tuple(IMAGENETS), tuple(IMAGENETS.values())),
}


class Typed(str):
    """A value as it was typed, to be read as YAML."""


@dataclass(frozen=True)
class Around:
    """What else the meaning of short flags depends on."""

    evaluators: Collection[str]  # names of the evaluators that files and dotted keys set
    ranks: int  # processes of the run
    notices: list[str]  # gets a line for each flag without effect


def translate(given: Given, around: Around, problems: list[str]) -> Found:
    """All settings that short flags make; their mistakes are added to `problems`, one line each."""
    given = _without_idle(given, around)
    for flag, alias in BY_FLAG.items():
        if alias.together or (text := given.get(flag)) is None:
            continue
        if alias.convert is None:
            yield flag, tuple(alias.keys[0].split(".")), Typed(text)
            continue
        try:
            yield from ((flag, path, value) for path, value in alias.convert(text))
        except ValueError as error:
            problems.append(f"{flag}: {error}")
    for group in (_data_type, _caption, _batch, _optimizer, _compile, _intervals, _sinks):
        try:
            yield from group(given, around)
        except ValueError as error:
            problems.append(str(error))


def with_defaults(given: Given, *, length_is_set: bool = False) -> dict[str, str]:
    """The flags, with open_clip's default for those that are not given, where they mean something.

    Args:
        length_is_set: whether a dotted key sets the run's length.
    """
    usual = {
        flag: text
        for flag, text in DEFAULTS.items()
        if flag not in _INTERVALS or any(one in given for one in _INTERVALS[flag][0])
    }
    if length_is_set or "--steps" in given:
        usual.pop("--epochs")
    if "--train-data-upsampling-factors" in given:  # which open_clip takes with replacement only
        usual.pop("--dataset-resampled")
    return {**usual, **given}


def _without_idle(given: Given, around: Around) -> dict[str, str]:
    """The flags that have an effect beside the others.

    --skip-scheduler turns the schedule off, warm-up included. An evaluation's interval has no effect without its data.
    """
    idle: dict[str, str] = {}  # flag -> why
    if given.get("--skip-scheduler", "false").lower() != "false":
        idle = dict.fromkeys(UNSCHEDULED, ", as --skip-scheduler keeps the learning rate at --lr from the first step")
    for flag, (data, named) in _INTERVALS.items():
        if not any(one in given for one in data) and not any(name in around.evaluators for name in named):
            idle[flag] = f" without {data[0]}; any other evaluator has --evals.NAME.every-epochs"
    around.notices.extend(f"{flag}: has no effect{why}" for flag, why in idle.items() if flag in given)
    return {flag: text for flag, text in given.items() if flag not in idle}


def _data_type(given: Given, around: Around) -> Found:
    """--dataset-type, which must agree with the names of the files, as these tell their types."""
    kind = given.get(flag := "--dataset-type")
    if kind == "synthetic":
        yield flag, (*SOURCE, "shards"), "synthetic:"
    elif kind in ("csv", "webdataset"):
        for part in parts_of(given.get("--train-data", "")):
            if table_format(part) != ("csv" if kind == "csv" else None):
                raise ValueError(
                    f"{flag} {kind}: the name of {redact(part)} says otherwise (.csv and .tsv are CSV): rename the "
                    "file, or leave the flag out"
                )
    elif kind not in (None, "auto"):
        known = "audio is not supported" if kind.endswith("-audio") else f"{kind!r} is not a type"
        raise ValueError(f"{flag}: {known}: expected webdataset, csv, synthetic or auto")


def _caption(given: Given, around: Around) -> Found:
    """The caption in a text member, or of JSON paths (separated by ';') with the member as fallback.

    --json-text-key takes names of fields at the top of the JSON member; no text member then counts, as in open_clip.
    """
    members = {flag: given[flag] for flag in MEMBERS if flag in given}
    member = next(iter(members.values()), None)
    paths, fields = (given.get(flag) for flag in ("--caption-json", "--json-text-key"))
    weights = given.get("--json-text-key-probs")
    if paths is not None and fields is not None:
        raise ValueError("--json-text-key and --caption-json both set the caption: give one of them")
    if fields is None and weights is not None:
        raise ValueError("--json-text-key-probs requires --json-text-key")
    if fields is not None:
        names = [step_of(name.strip()) for name in fields.split(";") if name.strip()]
        around.notices.extend(f"{flag}: has no effect beside --json-text-key" for flag in members)
        drawn = None if weights is None else _numbers("--json-text-key-probs", weights)
        if drawn is not None and len(drawn) > len(names):
            raise ValueError(f"--json-text-key-probs: {len(drawn)} numbers for {len(names)} fields of --json-text-key")
        if drawn is not None:  # fields without a number have weight 0
            drawn += [0.0] * (len(names) - len(drawn))
        caption: dict[str, Any] = {"path": names[0] if len(names) == 1 else names, "weights": drawn, "fallback": None}
        yield "--json-text-key", CAPTION, {"type": "json", **caption}
        return
    if len(set(members.values())) > 1:
        raise ValueError(f"{' and '.join(members)} name different members: give one of them")
    if paths is not None:
        parts = re.split(r"(?<!\\);(?![^{}]*\})", paths)  # a template's joiner may be one
        if "{" in paths and len(parts) > 1 and any(path != path.strip() for path in parts):
            raise ValueError(
                f"--caption-json: {paths!r}: ; is between paths, without spaces: write \\; for one in a text"
            )
        parts = [path.strip() for path in parts]
        # Every key is set: weights and fallback in a file belong to the paths in that file.
        caption = {"path": parts[0] if len(parts) == 1 else parts, "weights": None, "fallback": member}
        yield "--caption-json", CAPTION, {"type": "json", **caption}
    elif member is not None:
        yield next(iter(members)), CAPTION, {"type": "text", "key": member}


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.replace(",", "\n").split()]
    except ValueError:
        raise ValueError(f"{flag}: expected numbers, not {text.replace(chr(10), ' ')!r}") from None


def _batch(given: Given, around: Around) -> Found:
    """open_clip's arithmetic: b samples a rank, k times, on N ranks, make a global batch of b k N."""
    counts: dict[str, int] = {}
    for flag in ("--batch-size", "--accum-freq"):
        if (text := given.get(flag)) is not None:
            if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
                raise ValueError(f"{flag}: expected a whole number, at least 1, not {text!r}")
            counts[flag] = int(text)
    if counts and "--batch-size" not in counts:
        raise ValueError("--accum-freq requires --batch-size, the samples per rank and forward pass")
    if counts:
        batch, repeats = counts["--batch-size"], counts.get("--accum-freq", 1)
        yield "--batch-size", ("data", "global_batch_size"), batch * repeats * around.ranks
        if "--accum-freq" in counts:
            yield "--accum-freq", ("train", "micro_batch_size"), batch if repeats > 1 else None


def _optimizer(given: Given, around: Around) -> Found:
    """The optimizer (adamw, nadamw, timm/NAME or module:Name), its betas and further arguments; the schedule is off
    with --skip-scheduler.
    """
    opt = given.get("--opt", "adamw")
    timm = opt.removeprefix("timm/") if opt.lower().startswith("timm/") else None
    if "--opt" in given:
        if timm is None and opt.lower() not in ("adamw", "nadamw") and not is_plugin(opt):
            raise ValueError(f"--opt: expected adamw, nadamw, timm/NAME or module:Name, not {opt!r}")
        yield "--opt", ("optim", "type"), "timm" if timm else opt if is_plugin(opt) else opt.lower()
    if timm is not None:
        yield "--opt", ("optim", "name"), timm
    if given.get("--opt-kwargs", "true") != "true":
        yield "--opt-kwargs", ("optim", "kwargs"), _arguments(given["--opt-kwargs"])
    if "--opt-fallback-list" in given:
        if timm is None:
            raise ValueError("--opt-fallback-list requires one of timm's Muon optimizers, as --opt timm/nadamuon")
        yield "--opt-fallback-list", ("optim", "fallback"), given["--opt-fallback-list"].split("\n")
    if "--momentum" in given and timm is None:
        around.notices.append("--momentum: has no effect, as AdamW has --beta1; it is for --opt timm/NAME")
    elif "--momentum" in given:
        yield "--momentum", ("optim", "momentum"), given["--momentum"]
    named = [flag for flag in ("--beta1", "--beta2") if flag in given]
    if len(named) == 1 and timm is not None:
        raise ValueError(f"{named[0]}: give both --beta1 and --beta2 for an optimizer of timm")
    if named:
        yield named[0], ("optim", "betas"), [given.get(flag) for flag in ("--beta1", "--beta2")]
    if given.get("--skip-scheduler", "false").lower() != "false":
        yield "--skip-scheduler", ("schedule", "type"), "constant"
        yield "--skip-scheduler", ("schedule", "warmup"), 0


def _arguments(text: str) -> dict[str, Any]:
    """`name=value` pairs, with Python literals or plain text as values."""
    found: dict[str, Any] = {}
    for pair in text.split("\n"):
        name, equals, literal = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--opt-kwargs: expected NAME=VALUE, not {pair!r}")
        try:
            value = ast.literal_eval(literal)
        except (ValueError, SyntaxError):
            value = literal
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _compile(given: Given, around: Around) -> Found:
    """What is compiled: the blocks, unless a strategy says more; open_clip's `model` and `task` are whole towers."""
    flag = "--torchcompile"
    text = given.get(flag, "absent").lower()
    if text not in ("absent", "true", "false"):
        raise ValueError(f"{flag}: expected true or false, not {given[flag]!r}")
    options = {key: given[name] for key in ("strategy", "backend", "mode") if (name := f"{flag}-{key}") in given}
    if text == "true":
        strategy = options.pop("strategy", "blocks")
        yield flag, ("train", "compile"), "towers" if strategy in ("model", "task") else strategy
        yield from ((f"{flag}-{key}", ("train", f"compile_{key}"), value) for key, value in options.items())
        return
    if text == "false":
        yield flag, ("train", "compile"), "off"
    around.notices.extend(f"{flag}-{key}: has no effect without {flag}" for key in options)


def _intervals(given: Given, around: Around) -> Found:
    """Epochs between ImageNet's evaluations (0: at the end only), and steps between training lines."""
    if (epochs := given.get(flag := "--zeroshot-frequency", "0")) != "0":
        named = [name for one, name in IMAGENETS.items() if one in given or name in around.evaluators]
        yield from ((flag, ("evals", name, "every_epochs"), epochs) for name in named)
    console, metrics = (given.get(f"--log-{kind}every-n-steps") for kind in ("", "metric-"))
    if metrics is not None:
        yield "--log-metric-every-n-steps", ("log", "every"), metrics
    if console is not None:
        yield "--log-every-n-steps", ("log", "every" if metrics is None else "terminal_every"), console


def _sinks(given: Given, around: Around) -> Found:
    """open_clip's list of backends, separated by ','; a sink of the user's own as `module:Name`."""
    flag = "--report-to"
    wanted = [name.strip() for name in given.get(flag, "").split(",")]
    plugins = [name for name in wanted if is_plugin(name)]
    if unknown := {*wanted} - {"", "none", "all", "tensorboard", *TRACKERS, *plugins}:
        raise ValueError(
            f"{flag}: expected tensorboard, wandb, trackio, none, all or module:Name, not {min(unknown)!r}; "
            "metrics.jsonl, which is always written, has every figure: pandas.read_json(path, lines=True)"
        )
    trackers = [name for name in TRACKERS if name in wanted or (name == "wandb" and "all" in wanted)]
    if flag in given:
        yield flag, ("log", "tensorboard"), "tensorboard" in wanted or "all" in wanted
        sinks = {name.partition(":")[2]: name for name in plugins} | {name: name for name in trackers}
        yield from ((flag, ("log", "sinks", name, "type"), kind) for name, kind in sinks.items())
    for own, key, users in (("--wandb-project-name", "project", trackers), ("--wandb-notes", "notes", ["wandb"])):
        used = [name for name in users if name in trackers]
        if own in given and not used:
            around.notices.append(f"{own}: has no effect without --report-to wandb")
        elif own in given:
            yield from ((own, ("log", "sinks", name, key), given[own]) for name in used)
