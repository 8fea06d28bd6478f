"""The reading of a command line: `--section.key VALUE`, short flags, what several of these mean together, and a verb's
own flags.

An argument list enters; the names of `--config` files and a tree of settings leave. Unknown keys are found later, when
the whole tree is validated. A value is a YAML scalar, list or mapping; where text is wanted it is the text itself.
Lists are written `'[a, b]'`; a flag given again replaces its earlier value. A flag without a value means true.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from clipstream.config.config_sources import Node, merged
from clipstream.config.short_flags import BY_FLAG, CAPTION, IMAGENETS, SOURCE, notice, refusal
from clipstream.data.json_path import step_of
from clipstream.data.settings import SPLIT_FILE
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, errors_as, nearest
from clipstream.report.settings import SinkSettings
from clipstream.storage.shard_url import parts_of, redact, table_format
from clipstream.training.optim import OptimSettings
from clipstream.utils import atomic_write
from clipstream.utils.plugins import is_plugin
from clipstream.utils.section import (
    Path,
    Section,
    builtin_parts,
    child,
    dotted,
    entries_of,
    leaves,
    with_home,
    with_shipped,
)

Given = Mapping[str, str]
Found = Iterator[tuple[str, Path, Any]]

MEMBERS = ("--caption-key", "--text-key", "--csv-caption-key")  # name a text member
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


def split(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The `--config` files in order, and the other flags as typed, with None for the text of those without a value."""
    configs: list[str] = []
    given: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            problems.append(
                f"unexpected argument {token!r}: quote patterns, and write several values as one list, '[a, b]'"
            )
            continue
        flag, equals, text = token.partition("=")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        alias = BY_FLAG.get(flag)
        many = alias.many if alias is not None else (notice(flag) or refusal(flag)) is not None
        if value is not None and not equals and many:
            while rest and not rest[0].startswith("--"):
                value = f"{value}\n{rest.pop(0)}"
        if flag != "--config":
            given.append((flag, value))
        elif value:
            configs.append(with_shipped(with_home(value)))
        else:
            problems.append("--config: needs a file")
    return configs, given


def flag_tree(
    root: type[Section],
    given: Iterable[tuple[str, str | None]],
    files: Sequence[Node],
    ranks: int,
    problems: list[str],
    *,
    trains: bool = True,
) -> Node:
    """The tree of all flags except `--config`, with notices about those that have no effect.

    Args:
        files: the trees of the YAML files.
        ranks: processes of the run, for `--batch-size`.
        problems: mistakes are added to it.
        trains: whether there is a source to train on; if not, flags of the training source describe --val-data.
    """
    tree = Node()
    aliased: dict[str, str] = {}
    for flag, text in given:
        alias = BY_FLAG.get(flag) or BY_FLAG.get(flag.replace("_", "-"))
        if alias is not None and text is None and not alias.switch:
            problems.append(f"{alias.flag}: requires a value, {alias.value}")
        elif alias is not None:
            aliased[alias.flag] = "true" if text is None else text
            if (alias.flag, (text or "").lower()) == ("--precision", "amp"):
                why = "amp is bfloat16 without a scaler where the device supports it; fp16 is float16 with a scaler"
                tree.notices.append(f"{alias.flag}: {why}")
        elif "." not in flag and (told := notice(flag.replace("_", "-"))) is not None:
            tree.notices.append(f"{flag}: {told}")
        elif "." not in flag and flag.removeprefix("--") not in root.model_fields:
            problems.append(f"{flag}: {advice(root, flag)}")
        else:
            path: Path = ()
            annotation: Any = root
            for part in flag.removeprefix("--").split("."):
                # Kebab case becomes snake case, except in the names that users give to sources and evaluators.
                name = part if entries_of(annotation) is not None else part.replace("-", "_")
                path, annotation = (*path, name), child(annotation, None, name)
            node = Node.of_text("true" if text is None else text, flag)
            node.bare = text is None
            tree.put(path, node)

    # Short flags come after all others, so that a key given twice is noticed.
    section = merged(root, [*files, tree]).at(("evals",))
    evaluators = set(section.value) if section is not None and isinstance(section.value, dict) else set()
    aliased = _with_defaults(aliased, tree, files, problems)
    for flag, path, value in translate(aliased, Around(evaluators, ranks, tree.notices), problems):
        node = Node.of_text(str(value), flag) if isinstance(value, Typed) else Node.of(value, flag)
        before = tree.at(path)
        if before is not None and path not in (CAPTION, ("tokenizer",)) and before.place != flag:
            problems.append(f"{flag} and {before.place} both set {dotted(path)}: use one of them")
        tree.put_keys(path, node)
    # The data of --val-data, and without training those of each evaluator of the command line, are read as the training
    # source, unless their own settings say otherwise.
    train = merged(root, [*files, tree])
    read = [name for name in evaluators if not trains and tree.at(("evals", name, "data", "shards")) is not None]
    for name in [*read, *(["val"] if "--val-data" in aliased else [])]:
        for key in ("caption", "image_key", "folder", "separator", "background"):
            path, found = ("evals", name, "data", key), train.at((*SOURCE, key))
            if found is not None and not any(one.at(path) for one in (*files, tree)):
                tree.put(path, found)
    if "--val-data" in aliased:
        keep = ("evals", "val", "data", "keep")
        kept = None if tree.at(keep) else train.at(keep)
        if kept is not None and str(kept.value).endswith(f"/{SPLIT_FILE}"):  # of the run's own training data
            tree.put(keep, Node.of(None, "--val-data"))
    used = [flag for flag in READING if flag in aliased]
    if used and not trains:  # flags of the training source describe --val-data
        if "--val-data" not in aliased:
            problems.append(f"{used[0]}: requires --val-data")
        sources = tree.at(SOURCE[:-1])
        if sources is not None and tree.at(SOURCE) is not None and tree.at((*SOURCE, "shards")) is None:
            del sources.value[SOURCE[-1]]
    return tree


def _with_defaults(aliased: dict[str, str], tree: Node, files: Sequence[Node], problems: list[str]) -> dict[str, str]:
    """The short flags, with open_clip's defaults for the others if --open-clip-defaults asks for them."""
    if aliased.pop(flag := "--open-clip-defaults", "false").lower() == "false":
        return aliased
    if files:
        problems.append(f"{flag}: cannot be combined with --config")
    length = any(tree.at(("train", key)) is not None for key in ("steps", "samples", "epochs"))
    full = with_defaults(aliased, length_is_set=length)
    return {
        one: text
        for one, text in full.items()
        if one in aliased or not any(tree.at(tuple(key.split("."))) for key in BY_FLAG[one].keys)
    }


def advice(root: type[Section], flag: str) -> str:
    """Advice for an unknown flag: on one of open_clip's, the keys with this name in some section, or a near flag."""
    if (text := refusal(flag.replace("_", "-"))) is not None:
        return text
    name = flag.removeprefix("--").replace("-", "_")
    fields = {key: field for key, field in leaves(root) if "NAME" not in key}
    flags = {key: f"--{key.replace('_', '-')}" for key in fields}
    if same := [known for key, known in flags.items() if key.rpartition(".")[2] == name]:
        return f"unknown flag; did you mean {' or '.join(map(repr, same))}?"
    names = {known.rpartition(".")[2]: known for known in flags.values()}
    names |= {known.removeprefix("--"): known for known in (*BY_FLAG, "--config", "--help", "--print-config")}
    about = {alias.flag: f"{alias.flag} {alias.value} {alias.meaning}" for alias in BY_FLAG.values()}
    short = {key for alias in BY_FLAG.values() for key in alias.keys}
    about |= {flags[key]: f"{flags[key]} {field.description}" for key, field in fields.items() if key not in short}
    typed = [names[one] for one in difflib.get_close_matches(name.replace("_", "-"), names, 1, 0.85)]
    near = [names[one] for one in nearest(name, names)]
    if found := typed or list(dict.fromkeys([*described(name, about), *near])):
        return f"unknown flag; did you mean {' or '.join(map(repr, found))}?"
    return "unknown flag; see --help all"


def described(name: str, about: Mapping[str, str]) -> list[str]:
    """Up to two flags whose names and descriptions have the words of `name`, or most of them: those of other trainers.

    A word is found if one begins as the other, by at least three letters; rare words count more (inverse document
    frequency), and words of a flag's own name twice.

    Args:
        about: flag -> its name and description.
    """

    def words(text: str) -> set[str]:
        return {word[:6] for word in re.findall(r"[a-z]{2,}[0-9]*", text.lower().replace("_", " "))}

    def hits(wanted: set[str], there: set[str]) -> set[str]:
        longer = tuple(word for word in there if len(word) > 2)
        begun = {word[:size] for word in there for size in range(3, len(word) + 1)}
        return {word for word in wanted if word in there or word in begun or word.startswith(longer)}

    if not (wanted := words(name)):
        return []
    found = {flag: hits(wanted, words(text)) for flag, text in about.items()}
    count = Counter(word for there in found.values() for word in there)
    weight = {word: min(math.log(len(about) / count[word]) if count[word] else 3, 3) for word in wanted}

    def score(flag: str) -> float:
        share = sum(weight[word] for word in found[flag]) / sum(weight.values())
        own = sum(weight[word] for word in hits(found[flag], words(flag))) / sum(weight.values())
        return share + own / 2 - len(about[flag]) / 1000 - 0.2 * ("." in flag) if share > 0.65 else 0

    best = sorted(about, key=score, reverse=True)
    return [flag for flag in best[:2] if score(flag) > 0.8 * score(best[0])]


def output_file(own: Mapping[str, Any], flag: str, words: Iterable[bytes] = ()) -> FilePath | None:
    """The file that one of a verb's own flags names; None if the flag is not given.

    Raises SettingsError: the file cannot be written, or as `claim_output`, which takes the words.
    """
    if not own.get(flag):
        return None
    atomic_write.claim_output(own[flag], flag, words=words)
    with errors_as(SettingsError, f"{flag}: cannot write {own[flag]}", OSError):
        if World.from_env().is_main:
            atomic_write.probe(FilePath(own[flag]))
    return FilePath(own[flag])


def own_flags(
    argv: Sequence[str], meanings: Mapping[str, str], many: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """A verb's own flags with their values, in which a leading `~` is expanded, and the rest of the command line.

    Args:
        meanings: flag -> its help.
        many: flags whose values are joined by line ends when they are given again; of other flags the last is used.

    Raises SettingsError: a flag has no value.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, equals, value = token.partition("=")
        if flag not in meanings:
            rest.append(token)
            continue
        if not equals:
            value = tokens.pop(0) if tokens and not tokens[0].startswith("--") else ""
        if not value:
            raise SettingsError(f"{flag}: requires a value: {meanings[flag]}")
        value = with_home(value)
        own[flag] = f"{own[flag]}\n{value}" if flag in many and flag in own else value
    return own, rest


def number_flag(
    own: Mapping[str, str], flag: str, default: Any, *, least: int | None = None, most: int = 10**9 - 1
) -> Any:
    """The value of one of a verb's own flags: a whole number from `least` to `most`; without `least`, any above 0.

    Raises SettingsError: it is none.
    """
    if (text := own.get(flag)) is None:
        return default
    try:
        value = float(text) if least is None else int(text)
    except ValueError:
        value = -1
    if not (value > 0 and math.isfinite(value) if least is None else least <= value <= most):
        bounds = f", at least {least}" if most == 10**9 - 1 else f" from {least} to {most}"
        wanted = "number above 0" if least is None else f"whole number{bounds}"
        raise SettingsError(f"{flag}: expected a {wanted}, not {text!r}")
    return value


def choice_flag(own: Mapping[str, str], flag: str, choices: Sequence[str], default: str) -> str:
    """The value of one of a verb's own flags, of several words. Raises SettingsError: it is another one."""
    if (text := own.get(flag, default)) not in (*choices, default):
        expected = (" or " if len(choices) == 2 else ", ").join(choices)
        raise SettingsError(f"{flag}: expected {expected}, not {text!r}")
    return text


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
    """The optimizer (a built-in one, timm/NAME or module:Name), its betas and further arguments; the schedule is off
    with --skip-scheduler.
    """
    opt = given.get("--opt", "adamw")
    timm = opt.removeprefix("timm/") if opt.lower().startswith("timm/") else None
    if "--opt" in given:
        names = [name for name in builtin_parts(OptimSettings) if name != "timm"]
        if timm is None and opt.lower() not in names and not is_plugin(opt):
            raise ValueError(f"--opt: expected {', '.join(names)}, timm/NAME or module:Name, not {opt!r}")
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
    plugins, known = [name for name in wanted if is_plugin(name)], builtin_parts(SinkSettings)
    if unknown := {*wanted} - {"", "none", "all", "tensorboard", *known, *plugins}:
        raise ValueError(
            f"{flag}: expected tensorboard, {', '.join(known)}, none, all or module:Name, not {min(unknown)!r}; "
            "metrics.jsonl, which is always written, has every figure: pandas.read_json(path, lines=True)"
        )
    trackers = [name for name in known if name in wanted or (name == "wandb" and "all" in wanted)]
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
