"""What several short flags mean together.

Each function takes the texts of the short flags that are given, by flag, and yields (flag, path, value) of the
settings. It raises ValueError, with the flag's name, for texts that do not go together, and adds a line to `notices`
for a flag that has no effect beside the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from clipstream.config.flag_aliases import CAPTION, IMAGENETS
from clipstream.data.json_path import step_of
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import Path

Given = Mapping[str, str]
Found = Iterator[tuple[str, Path, Any]]

MEMBERS = ("--caption-key", "--text-key", "--csv-caption-key")  # name a text member
TRACKERS = ("wandb", "trackio")
# Flags that say how training data are read; --val-data is read likewise.
READING = (
    "--caption-json", "--json-text-key", "--json-text-key-probs", *MEMBERS, "--image-key", "--csv-img-key",
    "--csv-separator", "--dataset-type",
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
    "--val-frequency": (("--val-data",), ("val",)),
    "--zeroshot-frequency": (tuple(IMAGENETS), tuple(IMAGENETS.values())),
}
_LENGTHS = ("--steps", "--epochs")


def with_defaults(given: Given, *, set_otherwise: bool = False) -> dict[str, str]:
    """The flags, with open_clip's default for those that are not given, where they mean something.

    Args:
        set_otherwise: whether the run's length is set by a flag with a dotted key.
    """
    usual = {
        flag: text
        for flag, text in DEFAULTS.items()
        if flag not in _INTERVALS or any(one in given for one in _INTERVALS[flag][0])
    }
    if set_otherwise or any(flag in given for flag in _LENGTHS):
        usual.pop("--epochs", None)
    if "--train-data-upsampling-factors" in given:  # which open_clip takes with replacement only
        usual.pop("--dataset-resampled")
    return {**usual, **given}


def without_idle(given: Given, evaluators: Collection[str], notices: list[str]) -> dict[str, str]:
    """The flags that have an effect beside the others; the others are told in `notices`.

    --skip-scheduler turns the schedule off, warm-up included. An evaluation's interval has no effect without its data.

    Args:
        evaluators: names of the evaluators that files and dotted keys set.
    """
    idle: dict[str, str] = {}  # flag -> why
    if given.get("--skip-scheduler", "false").lower() != "false":
        idle = dict.fromkeys(UNSCHEDULED, ", as --skip-scheduler keeps the learning rate at --lr from the first step")
    for flag, (data, named) in _INTERVALS.items():
        if not any(one in given for one in data) and not any(name in evaluators for name in named):
            idle[flag] = f" without {data[0]}; any other evaluator has --evals.NAME.every-epochs"
    notices += [f"{flag}: has no effect{why}" for flag, why in idle.items() if flag in given]
    return {flag: text for flag, text in given.items() if flag not in idle}


def caption_sets(given: Given, notices: list[str]) -> Found:
    """The caption in a text member, or of JSON paths (separated by ';') with the member as fallback.

    --json-text-key takes names of fields at the top of the JSON member; no text member then counts, as in open_clip.
    """
    members = {flag: given[flag] for flag in MEMBERS if flag in given}
    paths, fields = (given.get(flag) for flag in ("--caption-json", "--json-text-key"))
    if paths is not None and fields is not None:
        raise ValueError("--json-text-key and --caption-json both say where the caption is: give one of them")
    weights = given.get("--json-text-key-probs")
    if fields is None and weights is not None:
        raise ValueError("--json-text-key-probs: the probabilities of which fields? Give --json-text-key as well")
    if fields is not None:
        names = [step_of(name.strip()) for name in fields.split(";") if name.strip()]
        for flag, text in members.items():
            notices.append(
                f"{flag}: has no effect, as --json-text-key takes the caption from the JSON member ({text!r})"
            )
        path: Any = names[0] if len(names) == 1 else names
        drawn = None if weights is None else _probabilities(weights, len(names))
        yield "--json-text-key", CAPTION, {"type": "json", "path": path, "weights": drawn, "fallback": None}
        return
    if len(set(members.values())) > 1:
        raise ValueError(f"{' and '.join(members)} name different members: give one of them")
    member = next(iter(members.values()), None)
    if paths is not None:
        parts = [path.strip() for path in paths.split(";")]
        # Every key is set: weights and fallback in a file belong to the paths in that file.
        path = parts[0] if len(parts) == 1 else parts
        yield "--caption-json", CAPTION, {"type": "json", "path": path, "weights": None, "fallback": member}
    elif member is not None:
        yield next(iter(members)), CAPTION, {"type": "text", "key": member}


def _probabilities(text: str, n: int) -> list[float]:
    """A weight for each of n fields: those that are not given are 0."""
    flag = "--json-text-key-probs"
    try:
        weights = [float(word) for word in text.replace(",", "\n").split()]
    except ValueError:
        raise ValueError(f"{flag}: expected numbers, not {text.replace(chr(10), ' ')!r}") from None
    if len(weights) > n:
        raise ValueError(f"{flag}: {len(weights)} numbers for {n} fields of --json-text-key")
    return [*weights, *[0.0] * (n - len(weights))]


def batch_sets(given: Given, ranks: int) -> Found:
    """open_clip's arithmetic: b samples a rank, k times, on N ranks, make a global batch of b k N."""
    counts: dict[str, int] = {}
    for flag in ("--batch-size", "--accum-freq"):
        if (text := given.get(flag)) is not None:
            if not re.fullmatch(r"0*[1-9][0-9]{0,17}", text):
                raise ValueError(f"{flag}: expected a whole number, at least 1, not {text!r}")
            counts[flag] = int(text)
    if counts and "--batch-size" not in counts:
        raise ValueError("--accum-freq: give --batch-size as well, the samples that a rank takes at once")
    if counts:
        batch, repeats = counts["--batch-size"], counts.get("--accum-freq", 1)
        yield "--batch-size", ("data", "global_batch_size"), batch * repeats * ranks
        if "--accum-freq" in counts:
            yield "--accum-freq", ("train", "micro_batch_size"), batch if repeats > 1 else None


def optimizer_sets(given: Given, notices: list[str]) -> Found:
    """The optimizer (adamw, nadamw, timm/NAME or module:Name), its betas and further arguments."""
    opt = given.get("--opt", "adamw")
    timm = opt.removeprefix("timm/") if opt.lower().startswith("timm/") else None
    if "--opt" in given:
        if timm is None and opt.lower() not in ("adamw", "nadamw") and not is_plugin(opt):
            raise ValueError(f"--opt: expected adamw, nadamw, timm/NAME or module:Name, not {opt!r}")
        yield (
            "--opt",
            ("optim", "type"),
            opt.lower() if timm is None and not is_plugin(opt) else "timm" if timm else opt,
        )
    if timm is not None:
        yield "--opt", ("optim", "name"), timm
    if "--opt-kwargs" in given and given["--opt-kwargs"] != "true":
        yield "--opt-kwargs", ("optim", "kwargs"), _arguments(given["--opt-kwargs"])
    if "--opt-fallback-list" in given:
        if timm is None:
            raise ValueError(
                "--opt-fallback-list: only timm's Muon optimizers have a fallback: give --opt timm/nadamuon"
            )
        yield "--opt-fallback-list", ("optim", "fallback"), given["--opt-fallback-list"].split("\n")
    if "--momentum" in given and timm is None:
        notices.append("--momentum: has no effect, as AdamW has --beta1; it is for --opt timm/NAME")
    elif "--momentum" in given:
        yield "--momentum", ("optim", "momentum"), given["--momentum"]
    betas: dict[str, float | None] = {"--beta1": None, "--beta2": None}
    named = [flag for flag in betas if flag in given]
    for flag in named:
        try:
            betas[flag] = float(given[flag])
        except ValueError:
            raise ValueError(f"{flag}: expected a number, not {given[flag]!r}") from None
    if len(named) == 1 and timm is not None:
        raise ValueError(f"{named[0]}: give both --beta1 and --beta2 for an optimizer of timm")
    if named:
        yield named[0], ("optim", "betas"), list(betas.values())


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


def schedule_sets(given: Given) -> Found:
    """--skip-scheduler: the learning rate of --lr from the first step to the last one."""
    if given.get("--skip-scheduler", "false").lower() != "false":
        yield "--skip-scheduler", ("schedule", "type"), "constant"
        yield "--skip-scheduler", ("schedule", "warmup"), 0


def compile_sets(given: Given, notices: list[str]) -> Found:
    """What is compiled: the blocks, unless a strategy says more; open_clip's `model` and `task` are whole towers."""
    flag = "--torchcompile"
    text = given.get(flag)
    if text is not None and text.lower() not in ("true", "false"):
        raise ValueError(f"{flag}: expected true or false, not {text!r}")
    options = {key: given[name] for key in ("strategy", "backend", "mode") if (name := f"{flag}-{key}") in given}
    if text is not None and text.lower() == "true":
        strategy = options.pop("strategy", "blocks")
        whole = strategy in ("model", "task")
        yield flag, ("train", "compile"), "towers" if whole else strategy
        yield from ((f"{flag}-{key}", ("train", f"compile_{key}"), value) for key, value in options.items())
        return
    if text is not None:
        yield flag, ("train", "compile"), "off"
    notices += [f"{flag}-{key}: has no effect without {flag}" for key in options]


def zero_shot_sets(given: Given, evaluators: Collection[str]) -> Found:
    """The interval of ImageNet's evaluators that flags or files name; 0 means at the end only."""
    if (epochs := given.get(flag := "--zeroshot-frequency", "0")) != "0":
        named = [name for one, name in IMAGENETS.items() if one in given or name in evaluators]
        yield from ((flag, ("evals", name, "every_epochs"), epochs) for name in named)


def interval_sets(given: Given) -> Found:
    """Steps between training lines in the outputs, and in the terminal where both are given."""
    console, metrics = (given.get(f"--log-{kind}every-n-steps") for kind in ("", "metric-"))
    if metrics is not None:
        yield "--log-metric-every-n-steps", ("log", "every"), metrics
        if console is not None:
            yield "--log-every-n-steps", ("log", "terminal_every"), console
    elif console is not None:
        yield "--log-every-n-steps", ("log", "every"), console


def sink_sets(given: Given, notices: list[str]) -> Found:
    """open_clip's list of backends, separated by ','; a sink of the user's own as `module:Name`."""
    flag, own = "--report-to", {"project": given.get("--wandb-project-name"), "notes": given.get("--wandb-notes")}
    wanted = [name.strip() for name in given.get(flag, "").split(",")]
    plugins = [name for name in wanted if is_plugin(name)]
    known = ("", "none", "all", "tensorboard", *TRACKERS, *plugins)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(
            f"{flag}: expected tensorboard, wandb, trackio, none, all or module:Name, not {unknown[0]!r}; "
            "metrics.jsonl, which is always written, has every figure: pandas.read_json(path, lines=True)"
        )
    trackers = [name for name in TRACKERS if name in wanted or (name == "wandb" and "all" in wanted)]
    if flag in given:
        yield flag, ("log", "tensorboard"), "tensorboard" in wanted or "all" in wanted
        sinks = {name.partition(":")[2]: name for name in plugins}
        sinks |= {name: name for name in trackers}
        yield from ((flag, ("log", "sinks", name, "type"), kind) for name, kind in sinks.items())
    for key, text in own.items():
        used = [name for name in trackers if key == "project" or name == "wandb"]
        shown = "--wandb-project-name" if key == "project" else "--wandb-notes"
        if text is not None and not used:
            notices.append(f"{shown}: has no effect without --report-to wandb")
        elif text is not None:
            yield from ((shown, ("log", "sinks", name, key), text) for name in used)
