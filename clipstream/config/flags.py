"""The reading of a command line: `--section.key VALUE`, short flags, and a verb's own flags.

An argument list enters; the names of `--config` files and a tree of settings leave. Unknown keys are found later, when
the whole tree is validated. A value is a YAML scalar, list or mapping; where text is wanted it is the text itself.
Lists are written `'[a, b]'`; a flag given again replaces its earlier value. A flag without a value means true.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from clipstream.config.config_sources import Node, merged
from clipstream.data.settings import SPLIT_FILE
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, errors_as, nearest
from clipstream.open_clip.flags import BY_FLAG, CAPTION, SOURCE, notice, refusal
from clipstream.open_clip.translate import READING, Around, Typed, translate, with_defaults
from clipstream.utils import atomic_write
from clipstream.utils.section import Path, Section, child, dotted, entries_of, leaves, with_home, with_shipped


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
