"""The reading of a command line: `--section.key VALUE`, short flags, and a verb's own flags and arguments.

An argument list enters; the names of `--config` files and a tree of settings leave. Unknown keys are found later, when
the whole tree is validated. A value is a YAML scalar, list or mapping; where text is wanted it is the text itself.
Lists are written `'[a, b]'`; a flag given again replaces its earlier value. A flag without a value means true.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from clipstream.config.config_sources import Node, enumerate_words, format_errors, merge_sources, plain
from clipstream.config.short_flags import (
    BY_FLAG,
    CAPTION,
    DEFAULTS,
    INTERVALS,
    READING_FLAGS,
    SOURCE,
    Around,
    FlagAlias,
    Typed,
    notice,
    refusal,
    translate,
)
from clipstream.data.settings import SPLIT_FILE
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, did_you_mean, errors_as, nearest
from clipstream.utils import atomic_write
from clipstream.utils.section import (
    Path,
    Section,
    child,
    dotted,
    entries_of,
    kinds,
    leaf,
    leaves,
    own_path,
    with_home,
    with_shipped,
)

Own = TypeVar("Own", bound=Section)
OutPath = Annotated[str, AfterValidator(own_path)]


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
            problems.append("--config: requires a file")
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
        if alias is not None and text is None and not is_switch(root, alias):
            problems.append(f"{alias.flag}: requires a value")
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
            path, key = _path_of(root, flag)
            if text is None and (field := leaf(root, key)) is not None and bool not in kinds(field.annotation):
                problems.append(f"{flag}: requires a value")
            else:
                tree.put(path, Node.of_text("true" if text is None else text, flag))

    # Short flags come after all others, so that a key given twice is noticed.
    section = merge_sources(root, [*files, tree]).at(("evals",))
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
    train = merge_sources(root, [*files, tree])
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
    used = [flag for flag in READING_FLAGS if flag in aliased]
    if used and not trains:  # flags of the training source describe --val-data
        if "--val-data" not in aliased:
            problems.append(f"{used[0]}: requires --val-data")
        sources = tree.at(SOURCE[:-1])
        if sources is not None and tree.at(SOURCE) is not None and tree.at((*SOURCE, "shards")) is None:
            del sources.value[SOURCE[-1]]
    return tree


def _path_of(root: type[Section], flag: str) -> tuple[Path, str]:
    """The path of a dotted flag, and its key with NAME for the names that users give to sources, evaluators and sinks.

    Kebab case becomes snake case, except in these names.
    """
    path, key, annotation = list[str](), list[str](), root
    for part in flag.removeprefix("--").split("."):
        named = entries_of(annotation) is not None
        path.append(part if named else part.replace("-", "_"))
        key.append("NAME" if named else path[-1])
        annotation = child(annotation, None, path[-1])
    return tuple(path), ".".join(key)


def generic_key(key: str) -> str:
    """A short flag's key, with NAME for the name of a source or evaluator."""
    return re.sub(r"^(data\.sources|evals)\.\w+", r"\1.NAME", key)


def plain_field(root: type[Section], alias: FlagAlias) -> FieldInfo | None:
    """The setting that a short flag is another name of; None where it means something else."""
    plain = not (alias.words or alias.convert or alias.sets or alias.together or alias.keys[1:])
    return leaf(root, generic_key(alias.keys[0])) if plain else None


def meaning_of(root: type[Section], alias: FlagAlias) -> str:
    """What a short flag means: its own text, or that of its setting."""
    field = plain_field(root, alias)
    return alias.meaning or (field and field.description) or ""


def is_switch(root: type[Section], alias: FlagAlias) -> bool:
    """Whether the flag alone means true."""
    field = plain_field(root, alias)
    return alias.switch or "true" in alias.words or (field is not None and bool in kinds(field.annotation))


def _with_defaults(aliased: dict[str, str], tree: Node, files: Sequence[Node], problems: list[str]) -> dict[str, str]:
    """The short flags, with open_clip's defaults for other ones, if --open-clip-defaults asks for them."""
    if aliased.pop(flag := "--open-clip-defaults", "false").lower() == "false":
        return aliased
    if files:
        problems.append(f"{flag}: not supported with --config")
    without = {one for one, (data, _) in INTERVALS.items() if not any(name in aliased for name in data)}
    if "--steps" in aliased or any(tree.at(("train", key)) is not None for key in ("steps", "samples", "epochs")):
        without.add("--epochs")
    if "--train-data-upsampling-factors" in aliased:  # which open_clip takes with replacement only
        without.add("--dataset-resampled")
    without |= {one for one in DEFAULTS if any(tree.at(tuple(key.split("."))) for key in BY_FLAG[one].keys)}
    return {**{one: text for one, text in DEFAULTS.items() if one not in without}, **aliased}


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
    about = {flag: f"{flag} {alias.value} {meaning_of(root, alias)}" for flag, alias in BY_FLAG.items()}
    short = {key for alias in BY_FLAG.values() for key in alias.keys}
    about |= {flags[key]: f"{flags[key]} {field.description}" for key, field in fields.items() if key not in short}
    typed = [names[one] for one in difflib.get_close_matches(name.replace("_", "-"), names, 1, 0.85)]
    near = [names[one] for one in nearest(name, names)]
    if found := typed or list(dict.fromkeys([*flags_like(name, about), *near])):
        return f"unknown flag; did you mean {' or '.join(map(repr, found))}?"
    return "unknown flag; see --help all"


def flags_like(name: str, about: Mapping[str, str]) -> list[str]:
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


def flag(
    meaning: str,
    default: Any = None,
    *,
    form: str = "",
    also: str = "",
    many: bool = False,
    bare: Any = None,
    **more: Any,
) -> Any:
    """A field of a verb's flags: `--NAME VALUE`, by its name with dashes.

    Args:
        form: its value in the help, where the annotation says too little.
        also: another spelling, such as '-k'.
        many: of a list, several values may follow the flag; else each has a flag of its own.
        bare: the value of the flag alone.
        more: arguments of pydantic's `Field`.
    """
    extra = {"form": form, "also": also, "many": many, "bare": bare}
    return Field(default, description=meaning, json_schema_extra=extra, **more)


def switch(meaning: str) -> Any:
    """A field of a verb that its flag alone makes true."""
    return flag(meaning, False, bare=True)


def argument(meaning: str, default: Any = ...) -> Any:
    """A field of a verb that is given by its position, and shown in capitals; a list takes all words that are left."""
    return Field(default, description=meaning, json_schema_extra={"argument": True})


def trait(field: FieldInfo, name: str) -> Any:
    """What `flag` or `argument` was told about the field."""
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def spellings(name: str, field: FieldInfo) -> list[str]:
    """The flags, or the argument in capitals, by which a field of a verb is given."""
    if trait(field, "argument"):
        return [name.upper()]
    return [f"--{name.strip('_').replace('_', '-')}", *filter(None, [trait(field, "also")])]


def is_list(field: FieldInfo) -> bool:
    """Whether values are collected; a value of any other field replaces an earlier one."""
    return any(get_origin(kind) is list for kind in kinds(field.annotation))


def usage(verb: str, own: type[Section]) -> str:
    """A verb with its arguments and the flags that it requires, as in `clipstream export MODEL [OUT] --to NAME`."""
    words = [f"clipstream {verb}"]
    for name, field in own.model_fields.items():
        word = spellings(name, field)[0]
        if trait(field, "argument"):
            if get_origin(field.annotation) is Literal:
                word = "|".join(get_args(field.annotation))
            word += "..." * (is_list(field))
            words.append(word if field.is_required() else f"[{word}]")
        elif field.is_required():
            words.append(f"{word} {trait(field, 'form')}")
    return " ".join(words)


def read_own(verb: str, own: type[Own], argv: Sequence[str], within: str | None) -> tuple[Own, list[str]]:
    """A verb's own flags and arguments, and the rest of the command line: flags of settings, with what follows each.

    Args:
        within: the beginning of the keys of settings whose flags the verb takes, '' for all; None: it takes none.

    Raises SettingsError: with one line for each mistake.
    """
    flags = {
        word: name for name, field in own.model_fields.items() for word in spellings(name, field) if word[0] == "-"
    }
    tree, problems, found, rest, words = Node(), list[str](), list[str](), list[str](), list(argv)

    def following(most: float = math.inf) -> list[str]:
        taken: list[str] = []
        while words and len(taken) < most and not words[0].startswith("--") and words[0].partition("=")[0] not in flags:
            taken.append(words.pop(0))
        return taken

    while words:
        word, equals, text = (token := words.pop(0)).partition("=")
        if word in flags:
            field = own.model_fields[flags[word]]
            several, bare = is_list(field), trait(field, "bare")
            given = [text] if equals else []
            kind = bool if bare is True else (int, float)  # a value may follow such a flag
            if not equals and (bare is None or (words and isinstance(Node.of_text(words[0], "").value, kind))):
                given = following(math.inf if trait(field, "many") else 1)
            nodes = [Node.of_text(one, word) for one in given] or [Node.of(bare, word)]
            if not all(given) or (bare is None and not given):
                problems.append(f"{word}: requires a value: {field.description}")
            elif several:
                before = tree.at((flags[word],))
                tree.put((flags[word],), Node([*([] if before is None else before.value), *nodes], word, word))
            else:
                tree.put((flags[word],), nodes[0])
        elif not token.startswith("-"):
            found.append(token)
        elif (
            within is not None
            and _sets(word, within)
            and (word in BY_FLAG or not difflib.get_close_matches(word, flags, 1, 0.85))
        ):
            rest += [token, *([] if equals else following())]
        else:
            near = did_you_mean(word, flags) or f"; see clipstream {verb} --help"
            problems.append(f"{word}: unknown flag{near}")
            following()
    for name, field in own.model_fields.items():
        if trait(field, "argument") and found:
            several, place = is_list(field), name.upper()
            nodes = [Node.of_text(one, place) for one in found]
            tree.put((name,), Node(nodes, place, place) if several else nodes[0])
            found = [] if several else found[1:]
    if found and within is None:
        problems.append(f"unexpected argument {found[0]!r}: {usage(verb, own)}")
    rest[:0] = found  # which `split` refuses
    values = plain(own, tree)
    try:
        made = own.model_validate(values)
    except ValidationError as error:
        lacks = [str(one["loc"][0]) for one in error.errors() if one["type"] == "missing" and not problems]
        problems += [f"missing {spellings(name, own.model_fields[name])[0]}: {usage(verb, own)}" for name in lacks]
        problems += [line for line in format_errors(own, values, error, tree) if not line.endswith("missing: required")]
    if problems:
        raise SettingsError(enumerate_words(problems))
    return made, rest


def _sets(flag: str, within: str) -> bool:
    """Whether a flag sets keys that begin with `within` only."""
    alias = BY_FLAG.get(flag)
    keys = (flag.removeprefix("--").replace("-", "_"),) if alias is None else alias.keys
    return all(f"{key}.".startswith(within) for key in keys)


def output_file(path: str | FilePath | None, flag: str, words: Iterable[bytes] = ()) -> FilePath | None:
    """The file that a flag names; None if the flag is not given.

    Raises SettingsError: the file cannot be written, or as `claim_output`, which takes the words.
    """
    if not path:
        return None
    atomic_write.claim_output(path, flag, words=words)
    with errors_as(SettingsError, f"{flag}: cannot write {path}", OSError):
        if World.from_env().is_main:
            atomic_write.probe(FilePath(path))
    return FilePath(path)
