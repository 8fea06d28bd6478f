"""Write the source of the documentation site into a folder: `python docs/generate.py build/docs`.

The pages of this folder are copied; the references of settings, of those that do not go together, and of the command
line are made from the settings' classes and from each verb's --help. Imports no torch.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from clipstream.cli.main import VERBS, verb_of
from clipstream.config.help import default_note, help_text, summary, value_form
from clipstream.config.settings import Settings
from clipstream.config.short_flags import ALIASES
from clipstream.config.validate import records
from clipstream.config.value_tree import generic_key
from clipstream.utils.section import (
    Conflict,
    Is,
    Section,
    all_fields,
    entries_of,
    section_of,
    types_of,
)

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 88  # of help, as wide as the page


def main(out: Path) -> None:
    """Write all pages into `out`, in place of what is there."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", out, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        (out / name.lower()).write_text(_beside((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
    (out / "reference" / "settings.md").write_text(settings_page(), encoding="utf-8")
    (out / "reference" / "conflicts.md").write_text(conflicts_page(), encoding="utf-8")
    (out / "reference" / "command-line.md").write_text(command_line_page(), encoding="utf-8")


def _beside(text: str) -> str:
    """The text of a page of the repository's root with links to pages of docs/ as they are in the site."""
    return re.sub(r"\]\(docs/", "](", text)


def settings_page() -> str:
    """The reference of all settings, from their classes: meaning, form, default, flags."""
    homes: dict[type[Section], str] = {}
    lines = [
        "# Settings",
        "",
        "Every key of the settings tree, from the package's own schema. A key stands in a YAML file (`--config`) or is",
        "a flag: `data.global_batch_size` is `--data.global-batch-size`. `NAME` stands for a name that you choose.",
        "A key without a default is not set, or is an empty list.",
        "[Settings and flags](../settings.md) describes how files and flags are merged.",
        "",
    ]
    for name, info in Settings.model_fields.items():
        inner = section_of(info.annotation) or section_of(entries_of(info.annotation))
        assert inner is not None
        prefix = name if section_of(info.annotation) else f"{name}.NAME"
        homes[inner] = prefix
        lines += [f"## {name}", "", _sentence(info.description or summary(inner)), ""]
        lines += _keys(inner, prefix, homes)
    return "\n".join(lines)


def _keys(section: type[Section], prefix: str, homes: dict[type[Section], str]) -> Iterator[str]:
    """The keys of a class and of its types; a class that is used in several places is described in the first one."""
    types = types_of(section)
    for name, info in all_fields(section).items():
        key = f"{prefix}.{name}"
        inner, entry = section_of(info.annotation), section_of(entries_of(info.annotation))
        below = inner or entry
        if below is None:
            of_types = [(kind, cls.model_fields[name]) for kind, cls in types.items() if name in cls.model_fields]
            yield from _key(key, [("", info)] if name in section.model_fields else of_types)
            continue
        place = key if inner else f"{key}.NAME"
        yield from (f"### {place} {{ #{place} }}", "")
        if below in homes:
            home = homes[below]
            yield from (f"{_sentence(info.description or summary(below))} The keys are those of [{home}](#{home}).", "")
        else:
            homes[below] = place
            yield from (_sentence(info.description or summary(below)), "")
            yield from _keys(below, place, homes)


def _key(key: str, fields: list[tuple[str, FieldInfo]]) -> Iterator[str]:
    """A key with the types of its part that have it, each meaning once."""
    flags = [f"--{key.replace('_', '-')}", *(alias.flag for alias in ALIASES if key in map(generic_key, alias.keys))]
    yield from (f"### {key} {{ #{key} }}", "")
    meanings: dict[tuple[str, str, str], list[str]] = {}
    for kind, info in fields:
        found = (info.description or "", value_form(info.annotation), default_note(info).strip(" []"))
        meanings.setdefault(found, []).append(kind)
    for (meaning, form, default), kinds in meanings.items():
        of = f"With `type: {'` or `'.join(kinds)}`: " if kinds != [""] else ""
        yield from (f"{of}{_sentence(meaning)}" if meaning else of.removesuffix(": "), "")
        standard = re.sub("^default (.*)$", r"default `\1`", default)
        yield from (
            " · ".join(filter(None, [f"`{form}`", standard, *(f"`{flag}`" for flag in flags)])),
            "{ .setting }",
            "",
        )


def _sentence(text: str) -> str:
    """A description as a sentence, with what Markdown would take for markup written out."""
    text = re.sub(r"`[^`]*`|[<*_\[\]]", lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)
    name = re.match(r"[a-z]+[^a-z' ]|(?:torch|timm|wids|auto|fsdp)\b", text)  # a word that is written small
    return f"{text[:1] if name else text[:1].upper()}{text[1:]}".rstrip(".") + "."


def conflicts_page() -> str:
    """What does not go together, from the records by which settings are refused."""
    lines = [
        "# What does not go together",
        "",
        "Settings that are right by themselves, and refused together (exit code 2), each with its reason. The list is",
        "made from the records by which they are refused. `NAME` stands for a name that you choose.",
    ]
    tables: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for prefix, pair in records():
        tables[pair.notice][conflict_row(prefix, pair)] = None  # types of a part share records
    for notice, rows in tables.items():
        if notice:
            lines += [
                "",
                "## Settings without effect",
                "",
                "A line of notice tells them, and the command goes on.",
            ]
        lines += ["", "| setting | together with | reason |", "|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def conflict_row(prefix: str, pair: Conflict) -> str:
    """A record as a row of the table."""

    def condition(key: str, wanted: object) -> str:
        values = wanted if isinstance(wanted, tuple) else (wanted,)
        named = [Is("not set") if one is None else one for one in values]
        words = [one.words if isinstance(one, Is) else f"`{str(one).lower()}`" for one in named]
        return f"{key} {' or '.join(words)}".strip()

    shown = [key if re.search("[ -]", key) or key == "ranks" else f"`{prefix}{key}`" for key in pair.when]
    first, *others = map(condition, shown, pair.when.values())
    reason = pair.text(*(_Key(key) for key in shown)).replace("|", "\\|")
    return f"| {first} | {', '.join(others) or 'any'} | {_sentence(reason)} |"


class _Key(str):
    """A key that stands for its value in a reason, whatever the value's format."""

    def __format__(self, spec: str) -> str:
        return str(self)


def command_line_page() -> str:
    """The reference of the command line: each verb's --help."""
    lines = [
        "# Command line",
        "",
        "`clipstream VERB …` and `python -m clipstream VERB …` are the same. This page shows the help of each verb.",
        "The flags that set a key of the settings tree are in [Settings](settings.md).",
        "",
    ]
    for name, meaning in VERBS.items():
        lines += [f"## clipstream {name}", "", _sentence(meaning), ""]
        for number, verb in enumerate((verb_of(name), *verb_of(name).topics)):
            lines += [f"### clipstream {verb.name}", ""] if number else []
            lines += ["```text", help_text(Settings, verb, width=COLUMNS).rstrip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
