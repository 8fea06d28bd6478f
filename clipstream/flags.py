"""Owns the command line's flags: `--section.key VALUE`, and the table of short flags with the keys that each sets.

Never validates a value, and never looks at what is valid: an unknown key is found with the rest of the tree.

A value is a YAML scalar, list or mapping; where text is wanted it is the text as it stands. Lists are written
`'[a, b]'`; a flag given again replaces its earlier value. A flag without a value means true.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clipstream.errors import did_you_mean
from clipstream.layers import Layer
from clipstream.schema import Path, child, dotted, entries_of, leaves
from clipstream.section import Section

Sets = list[tuple[Path, Any]]
CAPTION: Path = ("data", "sources", "train", "caption")
PRECISIONS = {"amp": "bf16", "amp_bf16": "bf16", "amp_bfloat16": "bf16"}


@dataclass(frozen=True)
class Short:
    """A short flag.

    Attributes:
        flag: its name, with dashes.
        keys: the keys that it sets, dotted.
        value: what stands for its value in the help.
        meaning: for the help.
        convert: text -> the values to set, where it is more than the one key with the text.
    """

    flag: str
    keys: tuple[str, ...]
    value: str
    meaning: str
    convert: Callable[[str], Sets] | None = None


def tokenizer_sets(text: str) -> Sets:
    """The tokenizer that a name means: the model's, one's own, a local path, or a name on the Hub."""
    if text == "model":
        return [(("tokenizer",), {"type": "model"})]
    if text.startswith("hf-hub:"):
        return [(("tokenizer",), {"type": "hub", "name": text.removeprefix("hf-hub:")})]
    if text.startswith((".", "/", "~")) or os.path.exists(text):
        return [(("tokenizer",), {"type": "path", "name": os.path.expanduser(text)})]
    if ":" in text:
        return [(("tokenizer",), {"type": text})]
    return [(("tokenizer",), {"type": "hub", "name": text})]


def _caption_key(text: str) -> Sets:
    return [(CAPTION, {"type": "text", "key": text})]


def _caption_json(text: str) -> Sets:
    paths = [path.strip() for path in text.split(";")]
    # All of it anew: a file's weights and fallback belong to the file's paths.
    path = paths[0] if len(paths) == 1 else paths
    return [(CAPTION, {"type": "json", "path": path, "weights": None, "fallback": None})]


def _resampled(text: str) -> Sets:
    modes = {"true": "resampled", "false": "epoch"}
    return [(("data", "sampling", "mode"), modes.get(text.lower(), text))]


def _precision(text: str) -> Sets:
    return [(("train", "precision"), PRECISIONS.get(text, text))]


SHORTS = (
    Short("--train-data", ("data.sources.train.shards",), "SHARDS", "what to train on: the source named train"),
    Short("--val-data", ("evals.val.data.shards",), "SHARDS", "what to evaluate on, by retrieval unless set"),
    Short("--image-key", ("data.sources.train.image_key",), "SUFFIXES", "suffixes of the image member, by ';'"),
    Short("--caption-key", ("data.sources.train.caption",), "SUFFIX", "the text member with the caption", _caption_key),
    Short(
        "--caption-json",
        ("data.sources.train.caption",),
        "PATHS",
        "path into the JSON member; several by ';' are tried in order, then the text member --caption-key, if given",
        _caption_json,
    ),
    Short("--dataset-resampled", ("data.sampling.mode",), "", "draw shards with replacement (the default)", _resampled),
    Short("--workers", ("data.workers",), "INT", "reading processes a rank"),
    Short("--model", ("model.name",), "NAME", "open_clip's name, a JSON config, hf-hub:ORG/NAME or local-dir:PATH"),
    Short("--pretrained", ("model.pretrained",), "TAG", "a tag, a weights file, hf-hub:ORG/NAME or local-dir:PATH"),
    Short(
        "--tokenizer",
        ("tokenizer",),
        "NAME",
        "model, a name on the Hub, a local path, or package.module:Name",
        tokenizer_sets,
    ),
    Short(
        "--batch-size",
        ("data.global_batch_size", "train.micro_batch_size"),
        "INT",
        "samples that a rank takes at once; the global batch is this x --accum-freq x ranks",
    ),
    Short(
        "--accum-freq",
        ("data.global_batch_size", "train.micro_batch_size"),
        "INT",
        "batches of --batch-size that a rank puts together for one step",
    ),
    Short("--steps", ("train.steps",), "INT", "steps of the whole run"),
    Short("--epochs", ("train.epochs",), "NUMBER", "passes over --train-num-samples samples"),
    Short("--train-num-samples", ("train.epoch_samples",), "INT", "samples that make an epoch"),
    Short("--lr", ("optim.lr",), "NUMBER", "peak learning rate"),
    Short("--wd", ("optim.wd",), "NUMBER", "weight decay"),
    Short("--grad-clip-norm", ("optim.grad_clip_norm",), "NUMBER", "largest norm of the gradients"),
    Short("--warmup", ("schedule.warmup",), "INT", "steps of linear warm-up"),
    Short("--precision", ("train.precision",), "NAME", "fp32 or bf16 (also as amp, amp_bf16)", _precision),
    Short("--seed", ("run.seed",), "INT", "fixes order, augmentation, weights and dropout"),
    Short("--device", ("run.device",), "NAME", "auto, cpu, cuda or cuda:N"),
    Short("--logs", ("run.logs",), "FOLDER", "folder of runs"),
    Short("--name", ("run.name",), "NAME", "name of the run's folder"),
    Short("--resume", ("checkpoint.resume",), "WHAT", "a checkpoint's path, latest (must exist) or auto"),
)
_BY_FLAG = {short.flag: short for short in SHORTS}


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
        short = _BY_FLAG.get(one.flag) or _BY_FLAG.get(one.flag.replace("_", "-"))
        if short is not None:
            text = one.text
            if text is None and short.flag != "--dataset-resampled":
                problems.append(f"{short.flag}: needs a value, {short.value}")
                continue
            shorts[short.flag] = "true" if text is None else text
        elif "." not in one.flag and one.flag.removeprefix("--") not in root.model_fields:
            problems.append(f"{one.flag}: unknown flag{_meant(root, one.flag) or '; --help lists all'}")
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
    return did_you_mean(flag, [*_BY_FLAG, "--config", "--help"])


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

    for flag, text in shorts.items():
        short = _BY_FLAG[flag]
        if short.convert is not None:
            for path, value in short.convert(text):
                put(path, value, flag)
        elif flag not in ("--batch-size", "--accum-freq"):
            put(tuple(short.keys[0].split(".")), text, flag, as_text=True)
    if "--caption-json" in shorts:
        # Both flags together: the paths first, then the text member.
        put(CAPTION, dict(_caption_json(shorts["--caption-json"])[0][1]), "--caption-json")
        if "--caption-key" in shorts:
            for key in ("key", "fallback"):
                layer.drop((*CAPTION, key))
            put((*CAPTION, "fallback"), shorts["--caption-key"], "--caption-key")
    for path, value, flag in _batch_sets(shorts, ranks, problems):
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
    return [
        (("data", "global_batch_size"), batch * repeats * ranks, "--batch-size"),
        (("train", "micro_batch_size"), batch if repeats > 1 else None, "--batch-size"),
    ]


def _share_with_val(shorts: dict[str, str], layer: Layer, files: Sequence[Layer]) -> None:
    """`--val-data` is read as the training data are, where nothing says how it is read."""
    for key in ("caption", "image_key", "background"):
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
    used = [flag for flag in ("--caption-json", "--caption-key", "--image-key") if flag in shorts]
    if used and "--val-data" not in shorts:
        problems.append(f"{used[0]}: says how --val-data is read, which is not given")
    sources = layer.tree.get("data", {}).get("sources", {})
    if used and "shards" not in sources.get("train", {"shards": ""}):
        del sources["train"]
