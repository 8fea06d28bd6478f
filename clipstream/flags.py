"""Owns the reading of a command line: `--section.key VALUE`, and what the short flags mean together.

Never validates a value, and never looks at what is valid: an unknown key is found with the rest of the tree.

A value is a YAML scalar, list or mapping; where text is wanted it is the text as it stands. Lists are written
`'[a, b]'`; a flag given again replaces its earlier value. A flag without a value means true.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clipstream.errors import did_you_mean
from clipstream.layers import Layer
from clipstream.schema import Path, child, dotted, entries_of, leaves
from clipstream.section import Section
from clipstream.shorts import BY_FLAG, CAPTION, IMAGENETS, MEMBERS, NEEDLESS, READING, TOGETHER, caption


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
        if value is not None and not equals and (short := BY_FLAG.get(flag)) is not None and short.many:
            while rest and not rest[0].startswith("--"):
                value = f"{value}\n{rest.pop(0)}"
        if flag == "--config":
            if value is None:
                problems.append("--config: needs a file")
            else:
                configs.append(value)
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
    """The layer of all flags but `--config`.

    Args:
        root: the class of the whole tree.
        files: the layers of the YAML files, which decide whether `--caption-key` is the validation source's as well.
        ranks: processes of the run, for `--batch-size`.
        problems: gets what is wrong, in words.
        trains: whether there is a source to train on.
    """
    layer = Layer()
    shorts: dict[str, str] = {}
    for one in given:
        short = BY_FLAG.get(one.flag) or BY_FLAG.get(one.flag.replace("_", "-"))
        if short is not None:
            text = one.text
            if text is None and not short.switch:
                problems.append(f"{short.flag}: needs a value, {short.value}")
                continue
            shorts[short.flag] = "true" if text is None else text
        elif "." not in one.flag and one.flag.removeprefix("--") not in root.model_fields:
            needless = NEEDLESS.get(one.flag.replace("_", "-"))
            said = f"is always so here, leave it out ({needless})" if needless else "unknown flag"
            meant = "" if needless else _meant(root, one.flag) or "; --help lists all"
            problems.append(f"{one.flag}: {said}{meant}")
        else:
            path = _path(root, one.flag)
            layer.put_text(path, "true" if one.text is None else one.text, one.flag)
            (layer.bare.add if one.text is None else layer.bare.discard)(path)
    _put_shorts(shorts, layer, files, ranks, problems)
    if not trains:
        _leave_to_val(shorts, layer, problems)
    return layer


def _meant(root: type[Section], flag: str) -> str:
    """The flag that was meant: the key of this name in some section, or the nearest short flag."""
    name = flag.removeprefix("--").replace("-", "_")
    keys = [key for key, _ in leaves(root) if key.rpartition(".")[2] == name and "NAME" not in key]
    if keys:
        return f"; did you mean '--{keys[0].replace('_', '-')}'?"
    return did_you_mean(flag, [*BY_FLAG, "--config", "--help"])


def _path(root: type[Section], flag: str) -> Path:
    """Kebab case becomes snake case, but not in the names that users give to sources and evaluators."""
    annotation: Any = root
    path: Path = ()
    for part in flag.removeprefix("--").split("."):
        name = part if entries_of(annotation) is not None else part.replace("-", "_")
        annotation = child(annotation, None, name)
        path = (*path, name)
    return path


def _put_shorts(shorts: dict[str, str], layer: Layer, files: Sequence[Layer], ranks: int, problems: list[str]) -> None:
    """Lay the short flags into the layer, after all others, so that a key given twice is noticed."""
    writer: dict[Path, str] = {}

    def put(path: Path, value: Any, flag: str, *, as_text: bool = False) -> None:
        before = writer.get(path) or (layer.places[path] if layer.has(path) and path not in writer else None)
        if before is not None and path not in (CAPTION, ("tokenizer",)) and before != flag:
            problems.append(f"{flag} and {before} both set {dotted(path)}: give one of them")
        writer[path] = flag
        if as_text:
            layer.put_text(path, value, flag)
        else:
            _put_tree(layer, path, value, flag)

    for flag, short in BY_FLAG.items():
        text = shorts.get(flag)
        if text is None:
            continue
        if short.convert is not None:
            try:
                sets = short.convert(text)
            except ValueError as error:
                problems.append(f"{flag}: {error}")
                continue
            for path, value in sets:
                put(path, value, flag)
        elif flag not in TOGETHER:
            put(tuple(short.keys[0].split(".")), text, flag, as_text=True)
    together = (
        *_caption_sets(shorts, problems),
        *_batch_sets(shorts, ranks, problems),
        *_beta_sets(shorts, problems),
        *_zero_shot_sets(shorts, files, problems),
    )
    for path, value, flag in together:
        put(path, value, flag)
    if "--val-data" in shorts:
        _share_with_val(shorts, layer, files)


def _put_tree(layer: Layer, path: Path, value: Any, place: str) -> None:
    """Like `Layer.put`, but a mapping is laid key by key over what is there."""
    if isinstance(value, dict):
        for key, part in value.items():
            layer.put((*path, key), part, place)
        layer.places[path] = place
    else:
        layer.put(path, value, place)


def _caption_sets(shorts: dict[str, str], problems: list[str]) -> list[tuple[Path, Any, str]]:
    """Where the caption is, of the flags that say so together."""
    members = {flag: shorts[flag] for flag in MEMBERS if flag in shorts}
    if len(set(members.values())) > 1:
        problems.append(f"{' and '.join(members)} name different members: give one of them")
    csv = shorts.get("--dataset-type") == "csv"
    if csv and not _any_manifest(shorts.get("--train-data", "a.csv")):
        problems.append("--dataset-type csv: what a file is, its name says: --train-data must end in .csv or .tsv")
    paths, member = shorts.get("--caption-json"), next(iter(members.values()), "title" if csv else None)
    if paths is None and member is None:
        return []
    flag = "--caption-json" if paths is not None else next(iter(members), "--dataset-type")
    return [(CAPTION, caption(paths, member if members or paths is None else None), flag)]


def _any_manifest(shards: str) -> bool:
    from clipstream.data.manifest import kind_of  # here, as it imports much that --help has no need of

    return any(kind_of(name) is not None for name in shards.split("::"))


def _batch_sets(shorts: dict[str, str], ranks: int, problems: list[str]) -> list[tuple[Path, Any, str]]:
    """open_clip's arithmetic: b samples a rank, k times, on N ranks make a global batch of b k N."""
    counts: dict[str, int] = {}
    for flag in ("--batch-size", "--accum-freq"):
        text = shorts.get(flag)
        if text is None:
            continue
        if not text.isdecimal() or int(text) < 1:
            problems.append(f"{flag}: expected a whole number, at least 1, not {text!r}")
            return []
        counts[flag] = int(text)
    if "--accum-freq" in counts and "--batch-size" not in counts:
        problems.append("--accum-freq: give --batch-size as well, the samples that a rank takes at once")
    if "--batch-size" not in counts:
        return []
    batch, repeats = counts["--batch-size"], counts.get("--accum-freq", 1)
    sets: list[tuple[Path, Any, str]] = [(("data", "global_batch_size"), batch * repeats * ranks, "--batch-size")]
    if "--accum-freq" in counts:
        sets.append((("train", "micro_batch_size"), batch if repeats > 1 else None, "--accum-freq"))
    return sets


def _beta_sets(shorts: dict[str, str], problems: list[str]) -> list[tuple[Path, Any, str]]:
    """Both betas of AdamW; one that is not given stays the model's."""
    flags = [flag for flag in ("--beta1", "--beta2") if flag in shorts]
    betas: dict[str, float] = {}
    for flag in flags:
        try:
            betas[flag] = float(shorts[flag])
        except ValueError:
            problems.append(f"{flag}: expected a number, not {shorts[flag]!r}")
            return []
    return [(("optim", "betas"), [betas.get("--beta1"), betas.get("--beta2")], flags[0])] if flags else []


def _zero_shot_sets(shorts: dict[str, str], files: Sequence[Layer], problems: list[str]) -> list[tuple[Path, Any, str]]:
    """How often ImageNet is evaluated, in each of its forms that is given; 0 is at the end only."""
    flag = "--zeroshot-frequency"
    if flag not in shorts or shorts[flag] == "0":
        return []
    named = [
        name for one, name in IMAGENETS.items() if one in shorts or any(file.has(("evals", name)) for file in files)
    ]
    if not named:
        problems.append(f"{flag}: there is nothing to evaluate: give --imagenet-val FOLDER")
    return [(("evals", name, "every_epochs"), shorts[flag], flag) for name in named]


def _share_with_val(shorts: dict[str, str], layer: Layer, files: Sequence[Layer]) -> None:
    """`--val-data` is read as the training data are, where nothing says how it is read."""
    for key in ("caption", "image_key", "folder", "separator", "background"):
        path: Path = ("evals", "val", "data", key)
        if any(one.has(path) for one in (*files, layer)):
            continue
        source: Path = ("data", "sources", "train", key)
        for one in (*files, layer):
            if one.has(source):
                value: Any = one.tree
                for part in source:
                    value = value[part]
                _put_tree(layer, path, value, one.places[source])


def _leave_to_val(shorts: dict[str, str], layer: Layer, problems: list[str]) -> None:
    """Where nothing is trained, the flags of training's source are those of `--val-data` alone."""
    used = [flag for flag in READING if flag in shorts]
    if used and "--val-data" not in shorts:
        problems.append(f"{used[0]}: says how --val-data is read, which is not given")
    sources = layer.tree.get("data", {}).get("sources", {})
    if used and "shards" not in sources.get("train", {"shards": ""}):
        del sources["train"]
