"""The text of `--help`: everyday flags by theme, one section, or every setting with type, default and meaning.

A class of settings that is used in several places (a source) is described in the first one; the others refer to it.
Imports neither torch nor anything else that would delay `--help`.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from clipstream.config.short_flags import ALIASES, BY_FLAG, FlagAlias
from clipstream.config.value_tree import generic_key, meaning_of, plain_field
from clipstream.errors import SettingsError, did_you_mean
from clipstream.text import row, terminal_width
from clipstream.utils.section import Section, all_fields, entries_of, items_of, kinds, section_of, types_of

_NAMES = {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}
ALL = "all"
SHORT_DEFAULT = 40  # characters of a default that the everyday flags show

_INTRO = """\
Settings come from the defaults, then each --config file in order, then flags; later ones win. Every key is a flag,
--section.key VALUE or --section.key=VALUE; a key without a default is not set. A value is written as in YAML: 3, 1e-3,
true, null, '[a, b]'. A flag given again replaces its earlier value. NAME stands for a name of your own, and
--evals.NAME null removes an evaluator. ${NAME} in the name of a shard is that environment variable, looked up when it
is used and never written down."""

_SHORT_INTRO = """\
Settings come from the defaults, then each --config file, then flags; later ones win. Every setting is a flag,
--section.key VALUE; these are the everyday ones."""

_PRINT_CONFIG = "print settings that differ from the defaults (or all) as YAML for --config, and exit"

THEMES = {
    "Training data": ("--train-data", "--data.sampling.mode", "--workers"),
    "Captions and images": ("--caption-key", "--caption-lines", "--caption-json", "--image-key"),
    "Model": ("--model", "--pretrained", "--tokenizer", "--force-image-size"),
    "Batch": ("--data.global-batch-size", "--batch-size", "--accum-freq"),
    "Length": ("--steps", "--epochs", "--train-num-samples"),
    "Loss and optimizer": ("--siglip", "--lr", "--wd", "--warmup", "--lr-scheduler", "--grad-clip-norm"),
    "Device and precision": ("--device", "--precision"),
    "Speed and memory": ("--train.micro-batch-size", "--grad-checkpointing", "--torchcompile", "--train.parallel"),
    "Evaluation": ("--val-data", "--imagenet-val"),
    "Evaluations during training": ("--val-frequency", "--zeroshot-frequency"),
    "Run": ("--name", "--logs", "--seed", "--log-every-n-steps"),
    "Checkpoints": ("--save-frequency", "--checkpoint.keep-last", "--resume", "--remote-sync"),
}
READING = ("Training data", "Captions and images")


def help_text(root: type[Section], verb: Any, topic: str = "", width: int | None = None) -> str:
    """The help of a verb (`command_line.Verb`), `width` columns wide; of the terminal's width unless given.

    Args:
        topic: '' for the everyday flags, 'all' for every setting, or a section or key, such as 'data.sources'.

    Raises SettingsError: there is no such topic.
    """
    width = width or terminal_width()
    page = _Page(root, width)
    if topic not in ("", ALL):
        return "\n".join(page.topic(topic.removeprefix("--").strip(".").replace("-", "_"))) + "\n"
    more = ["[FLAG]..."] if verb.own.model_fields else []
    more += ["[--config\xa0FILE]...", "[--section.key\xa0VALUE]..."] if verb.themes and not verb.within else []
    lines = page.wrap(" ".join([f"usage: {usage(verb.name, verb.own)}", *more]))
    for one in verb.topics:
        lines += page.wrap(f"{'':7}{usage(one.name, one.own)} [FLAG]...")
    lines = [line.replace("\xa0", " ") for line in lines]
    lines += ["", *textwrap.wrap(summary(verb.own), width)]
    lines += ["", "Topics"] if verb.topics else []
    for one in verb.topics:
        lines += page.row(one.name.split()[-1], summary(one.own))
    fields = sorted(verb.own.model_fields.items(), key=lambda item: not trait(item[1], "argument"))
    lines += ["", f"Flags of {verb.name}"] if fields else []
    for name, info in fields:
        form = "" if trait(info, "argument") else own_form(info)
        head = f"{', '.join(spellings(name, info))} {form}".rstrip()
        lines += page.row(head, f"{info.description}{own_default(info)}")
    if verb.within:
        lines += [*page.themes(verb.themes), *page.row(f"--{verb.within}KEY VALUE", "any other key of it")]
    elif verb.themes:
        lines += ["", *(page.everything() if topic == ALL else page.everyday(verb.themes))]
    return "\n".join(lines) + "\n"


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


def own_form(field: FieldInfo) -> str:
    """The form of the value of one of a verb's own flags; empty for a switch."""
    bare = trait(field, "bare")
    form = trait(field, "form") or value_form(items_of(field.annotation) or field.annotation)
    form = f"{form}..." if trait(field, "many") else form
    return "" if bare is True else form if bare is None else f"[{form}]"


def own_default(field: FieldInfo) -> str:
    """As `default_note`; a switch, and a flag whose meaning tells it, has none."""
    told = "default" in (field.description or "") or trait(field, "bare") is not None
    return "" if told or field.is_required() else default_note(field)


@dataclass
class _Page:
    root: type[Section]  # the class of the whole tree
    width: int

    @functools.cached_property
    def homes(self) -> dict[type[Section], str]:
        """Class -> prefix of the flags that describe it. It imports the modules of all built-in parts."""
        return self._homes(self.root, "--", {})

    def _homes(self, section: type[Section], prefix: str, found: dict[type[Section], str]) -> dict[type[Section], str]:
        for name, info in all_fields(section).items():
            inner, below, _ = _inner(info, prefix + name.replace("_", "-"))
            if inner is not None and inner not in found:
                found[inner] = below
                self._homes(inner, below, found)
        return found

    def everyday(self, themes: Iterable[str]) -> Iterator[str]:
        """The flags of a verb's themes, and how to see more."""
        yield from textwrap.wrap(_SHORT_INTRO, self.width)
        yield from self.row("--config FILE", "settings in YAML; can be repeated")
        yield from self.themes(themes)
        sections = ", ".join(self.root.model_fields)
        yield from ("", "More")
        text = f"the settings of a section ({sections}) or a part of it, such as data.sources or evals.zero_shot"
        yield from self.row("--help SECTION", text)
        yield from self.row("--help all", "every setting")
        yield from self.row("--print-config [all]", _PRINT_CONFIG)

    def themes(self, themes: Iterable[str]) -> Iterator[str]:
        """The flags of these keys of `THEMES`."""
        for theme in themes:
            yield from ("", theme)
            for flag in THEMES[theme]:
                if flag in BY_FLAG:
                    yield from self.short(BY_FLAG[flag], default=True)
                else:
                    yield from self.place(flag.removeprefix("--").replace("-", "_"))

    def everything(self) -> Iterator[str]:
        """Short flags, then every key by section."""
        yield from textwrap.wrap(_INTRO, self.width)
        yield from ("", "Short flags", *self.row("--config FILE", "settings in YAML; can be repeated"))
        yield from self.row("--print-config [all]", _PRINT_CONFIG)
        for short in ALIASES:
            yield from self.short(short)
        for name in self.root.model_fields:
            yield from ("", *self.topic(name, aliases=False))

    def topic(self, path: str, *, aliases: bool = True) -> Iterator[str]:
        """A section, a part of it, a type of a part, or a key; with `aliases`, also the short flags of its keys.

        Raises SettingsError: nothing has this path.
        """
        flag = f"--{path.replace('_', '-')}"
        if path not in self.root.model_fields and flag in BY_FLAG:
            yield from self.short(BY_FLAG[flag])
            return
        place, section, prefix = self._find(path)
        if section is None:
            yield from self.place(place)
            return
        kind = next((name for name, cls in types_of(section).items() if cls is section), None)
        given = f" with {prefix}type {kind}" if kind else ""
        yield from self.wrap(f"{place}{given}: {summary(section)}")
        yield from self.fields({k: v for k, v in section.model_fields.items() if not (kind and k == "type")}, prefix)
        if kind is None:
            yield from self.types(section, prefix)
        setting = [
            short for short in ALIASES if any(f"{generic_key(key)}.".startswith(f"{place}.") for key in short.keys)
        ]
        if aliases and setting:
            yield from ("", "Short flags", *(line for short in setting for line in self.short(short)))

    def _find(self, path: str) -> tuple[str, type[Section] | None, str]:
        """(the dotted path with NAME for users' names, the class at it or None for a key, prefix of its flags)."""
        section: type[Section] | None = self.root
        place, prefix, named = "", "--", False
        for part in path.split("."):
            if section is None:
                raise SettingsError(f"--help {path}: {place} is a setting without parts")
            if named and part == "NAME":
                named = False
                continue
            types, fields = {}, {} if named else section.model_fields
            if part not in fields:  # else the modules of parts are not imported
                types, fields = types_of(section), {} if named else all_fields(section)
            if part in types:
                section, named = types[part], False
            elif named and not did_you_mean(part, types):  # a user's name
                named = False
            elif part in fields:
                place = f"{place}.{part}".strip(".")
                section, prefix, named = _inner(fields[part], prefix + part.replace("_", "-"))
                place += ".NAME" * named
            else:
                known = [*fields, *types]
                near = did_you_mean(part, known)
                there = f"{place} has no {part!r}" if place else f"unknown section {part!r}"
                raise SettingsError(f"--help {path}: {there}{near}; choose from: {', '.join(known)}")
        return place, section, prefix

    def place(self, path: str) -> Iterator[str]:
        """One key, given by its dotted path."""
        above, _, name = path.rpartition(".")
        _, section, prefix = self._find(above)
        assert section is not None
        yield from self.fields({name: all_fields(section)[name]}, prefix)

    def short(self, short: FlagAlias, *, default: bool = False) -> list[str]:
        """A short flag with the keys that it sets, or with the default of the setting that it is another name of."""
        field, note = plain_field(self.root, short), f" [sets {', '.join(short.keys)}]"
        if default:
            note = "" if field is None else default_note(field)
            note = note if note.startswith(" [default") and len(note) < SHORT_DEFAULT else ""
        switch = field is not None and bool in kinds(field.annotation)
        value = short.value or (value_form(field.annotation) if field is not None and not switch else "")
        return self.row(f"{short.flag} {value}".rstrip(), f"{meaning_of(self.root, short)}{note}")

    def fields(self, fields: Mapping[str, FieldInfo], prefix: str) -> Iterator[str]:
        """Keys with type, meaning and default; the keys of a section are listed where its class is used first."""
        for name, info in fields.items():
            flag = prefix + name.replace("_", "-")
            inner, below, _ = _inner(info, flag)
            meaning = info.description or (summary(inner) if inner else "")
            if inner is None:
                yield from self.row(f"{flag} {value_form(info.annotation)}", f"{meaning}{default_note(info)}".strip())
            elif self.homes[inner] != below:
                yield from self.row(f"{below}KEY", f"{meaning}: the same keys as {self.homes[inner]}KEY")
            else:
                yield from self.wrap(f"  {flag}: {meaning}")
                yield from self.fields(inner.model_fields, below)
                yield from self.types(inner, below)

    def types(self, section: type[Section], prefix: str) -> Iterator[str]:
        """The keys that only some types of a part have."""
        described: dict[str, str | None] = {}
        for kind, cls in types_of(section).items():
            own = {name: info for name, info in cls.model_fields.items() if name not in section.model_fields}
            again = [name for name, info in own.items() if described.get(name) == (info.description or "")]
            also = f" Also {', '.join(again)}." if again else ""
            yield from self.wrap(f"  with {prefix}type {kind}: {summary(cls)}{also}")
            yield from self.fields({name: info for name, info in own.items() if name not in again}, prefix)
            described |= {name: info.description or "" for name, info in own.items()}

    def row(self, head: str, text: str) -> list[str]:
        """A flag, and its meaning in a second column."""
        return row(head, text, min(34, self.width * 2 // 5 - 1), self.width)

    def wrap(self, text: str) -> list[str]:
        return textwrap.wrap(text, self.width, subsequent_indent="    ", break_on_hyphens=False)


def _inner(info: FieldInfo, flag: str) -> tuple[type[Section] | None, str, bool]:
    """(class of the settings in a field or None, prefix of their flags, whether the field is a mapping of names)."""
    section, entries = section_of(info.annotation), section_of(entries_of(info.annotation))
    return section or entries, f"{flag}." if section else f"{flag}.NAME.", section is None and entries is not None


def summary(section: type[Section]) -> str:
    """The first paragraph of the class's docstring, on one line."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def default_note(info: FieldInfo) -> str:
    """` [default VALUE]`, ` [required]`, or nothing where the key is not set by default."""
    if info.is_required():
        return " [required]"
    value: Any = info.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or value == []:
        return ""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, bool):
        shown = shown.lower()
    elif isinstance(value, tuple | list):
        shown = f"[{', '.join(f'{item:.4g}' if isinstance(item, float) else str(item) for item in value)}]"
    return f" [default {shown}]"


def value_form(annotation: Any) -> str:
    """The form of a value: INT, 'auto|INT', 'TEXT|[TEXT, ...]'."""
    names: list[str] = []
    for kind in kinds(annotation):
        if kind is NoneType:
            continue
        if get_origin(kind) is Literal:
            names += [str(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            names.append(f"[{', '.join(value_form(item) for item in get_args(kind))}]")
        elif get_origin(kind) is list:
            names.append(f"[{value_form(get_args(kind)[0])}, ...]")
        else:
            names.append(_NAMES.get(kind, "VALUE"))
    return "|".join(names)
