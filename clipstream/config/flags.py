"""The reading of a command line: `--section.key VALUE`, short flags, and a verb's own flags.

An argument list enters; the names of `--config` files and a `Layer` leave. Unknown keys are found later, when the whole
tree is validated. A value is a YAML scalar, list or mapping; where text is wanted it is the text itself. Lists are
written `'[a, b]'`; a flag given again replaces its earlier value. A flag without a value means true.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipstream.config.config_sources import Layer
from clipstream.config.flag_aliases import (
    BY_FLAG,
    CAPTION,
    IMAGENETS,
    MEMBERS,
    READING,
    TOGETHER,
    Sets,
    batch_sets,
    beta_sets,
    caption,
)  # fmt: skip
from clipstream.config.refused_flags import refusal
from clipstream.config.schema import Path, child, dotted, entries_of, leaves
from clipstream.config.section import Section, with_home
from clipstream.errors import SettingsError, nearest


@dataclass(frozen=True)
class Given:
    """One flag as it was typed: `text` is None where it had no value."""

    flag: str
    text: str | None


def split(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[Given]]:
    """The `--config` files in order, and the other flags as given."""
    configs: list[str] = []
    given: list[Given] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            problems.append(
                f"unexpected argument {token!r}: quote a pattern so that the shell leaves it alone, "
                "and write several values as one list, '[a, b]'"
            )
            continue
        flag, equals, text = token.partition("=")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        if value is not None and not equals and (alias := BY_FLAG.get(flag)) is not None and alias.many:
            while rest and not rest[0].startswith("--"):
                value = f"{value}\n{rest.pop(0)}"
        if flag == "--config":
            if not value:
                problems.append("--config: needs a file")
            else:
                configs.append(with_home(value))
        else:
            given.append(Given(flag, value))
    return configs, given


def flag_layer(
    root: type[Section],
    given: Iterable[Given],
    files: Sequence[Layer],
    ranks: int,
    problems: list[str],
    *,
    trains: bool = True,
) -> Layer:
    """The layer of all flags except `--config`.

    Args:
        root: the class of the whole tree.
        files: the layers of the YAML files.
        ranks: processes of the run, for `--batch-size`.
        problems: mistakes are added to it.
        trains: whether there is a source to train on; if not, flags of the training source describe --val-data.
    """
    layer = Layer()
    aliased: dict[str, str] = {}
    for one in given:
        alias = BY_FLAG.get(one.flag) or BY_FLAG.get(one.flag.replace("_", "-"))
        if alias is not None and one.text is None and not alias.switch:
            problems.append(f"{alias.flag}: needs a value, {alias.value}")
        elif alias is not None:
            aliased[alias.flag] = "true" if one.text is None else one.text
        elif "." not in one.flag and one.flag.removeprefix("--") not in root.model_fields:
            problems.append(f"{one.flag}: {_advice(root, one.flag)}")
        else:
            path: Path = ()
            annotation: Any = root
            for part in one.flag.removeprefix("--").split("."):
                # Kebab case becomes snake case, except in the names that users give to sources and evaluators.
                name = part if entries_of(annotation) is not None else part.replace("-", "_")
                path, annotation = (*path, name), child(annotation, None, name)
            layer.put_text(path, "true" if one.text is None else one.text, one.flag)
            (layer.bare.add if one.text is None else layer.bare.discard)(path)
    _put_aliases(aliased, layer, files, ranks, problems)
    used = [flag for flag in READING if flag in aliased]
    if used and not trains:  # flags of the training source describe --val-data
        if "--val-data" not in aliased:
            problems.append(f"{used[0]}: says how --val-data is read, which is not given")
        sources = layer.tree.get("data", {}).get("sources", {})
        if "shards" not in sources.get("train", {"shards": ""}):
            del sources["train"]
    return layer


def _advice(root: type[Section], flag: str) -> str:
    """Advice for an unknown flag: on one of open_clip's, the keys with this name in some section, or a near flag."""
    if (text := refusal(flag.replace("_", "-"))) is not None:
        return text
    name = flag.removeprefix("--").replace("-", "_")
    flags = {key: f"--{key.replace('_', '-')}" for key, _ in leaves(root) if "NAME" not in key}
    if same := [known for key, known in flags.items() if key.rpartition(".")[2] == name]:
        return f"unknown flag; did you mean {' or '.join(map(repr, same))}?"
    names = {known.rpartition(".")[2]: known for known in flags.values()}
    names |= {known.removeprefix("--"): known for known in (*BY_FLAG, "--config", "--help", "--print-config")}
    if near := nearest(name, names):
        return f"unknown flag; did you mean {names[near[0]]!r}?"
    return "unknown flag; --help all lists all of them"


def _put_aliases(
    aliased: Mapping[str, str], layer: Layer, files: Sequence[Layer], ranks: int, problems: list[str]
) -> None:
    """Put the short flags into the layer, after all others, so that a key given twice is noticed."""
    writer: dict[Path, str] = {}

    def put(sets: Sets, flag: str) -> None:
        for path, value in sets:
            before = writer.get(path) or (layer.places[path] if layer.has(path) and path not in writer else None)
            if before is not None and path not in (CAPTION, ("tokenizer",)) and before != flag:
                problems.append(f"{flag} and {before} both set {dotted(path)}: give one of them")
            writer[path] = flag
            _put_tree(layer, path, value, flag)

    for flag, alias in BY_FLAG.items():
        text = aliased.get(flag)
        if text is None or flag in TOGETHER:
            continue
        if alias.convert is None:
            key: Path = tuple(alias.keys[0].split("."))
            put([(key, None)], flag)
            layer.put_text(key, text, flag)
            continue
        try:
            put(alias.convert(text), flag)
        except ValueError as error:
            problems.append(f"{flag}: {error}")

    members = {flag: aliased[flag] for flag in MEMBERS if flag in aliased}
    csv, paths = aliased.get("--dataset-type") == "csv", aliased.get("--caption-json")
    if len(set(members.values())) > 1:
        problems.append(f"{' and '.join(members)} name different members: give one of them")
    if csv:
        from clipstream.data.sources.registry import table_format  # here, as --help must not wait for its imports

        if all(table_format(name) is None for name in aliased.get("--train-data", "a.csv").split("::")):
            problems.append(
                "--dataset-type csv: the type of a file is in its name: --train-data must end in .csv or .tsv"
            )
    if paths is not None or members or csv:
        member = next(iter(members.values()), "title" if csv and paths is None else None)
        flag = "--caption-json" if paths is not None else next(iter(members), "--dataset-type")
        put([(CAPTION, caption(paths, member))], flag)
    try:
        if aliased.keys() & {"--batch-size", "--accum-freq"}:
            for key, count in batch_sets(aliased, ranks):
                put([(key, count)], "--accum-freq" if key[0] == "train" else "--batch-size")
        if betas := [flag for flag in ("--beta1", "--beta2") if flag in aliased]:
            put(beta_sets(aliased), betas[0])
    except ValueError as error:
        problems.append(str(error))
    if aliased.get(flag := "--zeroshot-frequency", "0") != "0":  # 0: at the end only
        named = [n for one, n in IMAGENETS.items() if one in aliased or any(file.has(("evals", n)) for file in files)]
        if not named:
            problems.append(f"{flag}: there is nothing to evaluate: give --imagenet-val FOLDER")
        put([(("evals", name, "every_epochs"), aliased[flag]) for name in named], flag)
    for name in ("caption", "image_key", "folder", "separator", "background") if "--val-data" in aliased else ():
        # --val-data is read as the training source, unless its own settings say otherwise.
        source, path = ("data", "sources", "train", name), ("evals", "val", "data", name)
        for one in () if any(one.has(path) for one in (*files, layer)) else (*files, layer):
            if one.has(source):
                value: Any = one.tree
                for part in source:
                    value = value[part]
                _put_tree(layer, path, value, one.places[source])


def _put_tree(layer: Layer, path: Path, value: Any, place: str) -> None:
    """As `Layer.put`, but a mapping is merged key by key into an existing one."""
    if isinstance(value, dict):
        for key, part in value.items():
            layer.put((*path, key), part, place)
        layer.places[path] = place
    else:
        layer.put(path, value, place)


def own_flags(
    argv: Sequence[str], meanings: Mapping[str, str], many: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """A verb's own flags with their values, in which a leading `~` is expanded, and the rest of the command line.

    Args:
        meanings: flag -> its help.
        many: flags whose values are joined by line ends when they are given again; of other flags the last is used.

    Raises:
        SettingsError: a flag has no value.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        flag, equals, value = tokens.pop(0).partition("=")
        if flag not in meanings:
            rest.append(flag + equals + value)
            continue
        if not equals:
            value = tokens.pop(0) if tokens and not tokens[0].startswith("--") else ""
        if not value:
            raise SettingsError(f"{flag}: needs a value: {meanings[flag]}")
        value = with_home(value)
        own[flag] = f"{own[flag]}\n{value}" if flag in many and flag in own else value
    return own, rest
