"""The output of `--print-config`: the settings of a command line as YAML, which `--config` reads back unchanged.

Writes no file. Paths stay as they were given, unlike in the config.yaml of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from pydantic_core import PydanticUndefined

from clipstream.config.config_sources import Dumper
from clipstream.config.schema import Tree, entries_of, section_of
from clipstream.config.section import PluginSection, Section
from clipstream.config.settings import Settings, secrets
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.utils.logs import logger

FLAG, ALL = "--print-config", "all"


def take_flag(argv: Sequence[str]) -> tuple[bool | None, list[str]]:
    """(True for `--print-config all`, False for `--print-config`, None without it; the rest of the command line).

    Raises:
        SettingsError: the flag has another value than `all`.
    """
    rest = list(argv)
    places = [place for place, token in enumerate(rest) if token.partition("=")[0] == FLAG]
    if not places:
        return None, rest
    (place, *again), value = places, rest[places[0]].partition("=")[2]
    if again or value not in ("", ALL):
        raise SettingsError(f"{FLAG}: give it once, alone or as {FLAG} {ALL}")
    del rest[place]
    if rest[place : place + 1] == [ALL]:
        del rest[place]
        value = ALL
    return value == ALL, rest


def print_config(settings: Settings, verb: str, every: bool) -> int:
    """Print the settings on rank 0, and return the exit code, 0. A password is printed too, with a warning on stderr.

    Args:
        every: print all settings, and not only those that differ from the defaults.
    """
    world = World.from_env()
    if not world.is_main:
        return 0
    if keys := secrets(settings):
        logger.warning(
            f"{', '.join(keys)} holds a password or key, which this output repeats: write ${{NAME}} instead, "
            "which is taken from the environment"
        )
    what = "all settings" if every else f"settings that differ from the defaults ({FLAG} {ALL} prints all)"
    print(f"# clipstream {verb}: {what}")
    if settings.places.of(("data", "global_batch_size")) == "--batch-size":
        ranks = f"{world.size} rank{'s' * (world.size != 1)}"
        print(f"# data.global_batch_size is --batch-size x --accum-freq x {ranks}")
    tree = settings.model_dump(mode="json") if every else changed(settings)
    print(yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120), end="")
    return 0


def changed(section: Section) -> Tree:
    """The settings that differ from the defaults, as a tree for YAML; plug-ins always have their `type`."""
    dumped = section.model_dump(mode="json")
    tree: Tree = {}
    for name, field in type(section).model_fields.items():
        value, default = getattr(section, name), field.get_default(call_default_factory=True)
        # The types of a source share its class, and so need not be named.
        typed = name == "type" and isinstance(section, PluginSection) and "builtin" not in vars(type(section))
        if value == default and default is not PydanticUndefined and not typed:
            continue
        if isinstance(value, Section):
            tree[name] = changed(value)
        elif section_of(entries_of(field.annotation)) is not None:
            tree[name] = {key: changed(part) for key, part in value.items()}
        else:
            tree[name] = dumped[name]
    return tree
