"""What all ranks of a run must have alike: compared between them at its start, with an error that names the hosts.

Values by name enter, of files their checksums; nothing leaves. A rank whose code, weights or shards are others would
train on them without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from clipstream.distributed.run_record import versions
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.text import listed, shortened
from clipstream.utils.atomic_write import checksum
from clipstream.utils.plugins import OURS, is_library, is_plugin

SHOWN = 200  # characters of a value in a message


def require_same(
    world: World,
    own: Callable[[], Mapping[str, object]],
    what: str,
    advice: str,
    shown: Callable[[object], str] = str,
) -> None:
    """Check that `own` gives the same values on all ranks. Collective; with one rank, `own` is not called.

    Raises SettingsError: they differ; names the first of them, with rank, host and both values.
    """
    if world.size == 1:
        return
    values = own()
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    found = world.gather_objects((digest, socket.gethostname()))
    other = next((rank for rank, (theirs, _) in enumerate(found) if theirs != found[0][0]), None)
    if other is None:
        return
    trees = world.gather_objects(values)
    first, second = ({key: shortened(shown(one), SHOWN) for key, one in trees[rank].items()} for rank in (0, other))
    different = [
        f"{key} is {first.get(key, 'absent')} on rank 0 and {second.get(key, 'absent')} on rank {other}"
        for key in dict.fromkeys((*first, *second))
        if trees[0].get(key) != trees[other].get(key) or (key in first) != (key in second)
    ]
    hosts = f"rank 0 is on {found[0][1]}, rank {other} on {found[other][1]}"
    raise SettingsError(f"ranks have different {what}: {listed(different)}; {hosts}: {advice}")


def software(values: Iterable[object] = ()) -> dict[str, str]:
    """The versions of packages, and the checksums of the source of clipstream and of plug-ins.

    Args:
        values: settings; those `module:Name` of which the module is loaded are plug-ins. Nothing is imported here. A
            plug-in counts with the loaded modules of its folder; one in an installed package by its file alone.
    """
    files = {f"clipstream/{path.relative_to(OURS)}": str(path) for path in sorted(Path(OURS).rglob("*.py"))}
    for plugin in filter(is_plugin, map(str, values)):
        name = plugin.partition(":")[0]
        if file := getattr(sys.modules.get(name), "__file__", None):
            folder = os.path.join(os.path.dirname(file), "")
            loaded = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
            near = (one for one in loaded if one.startswith(folder) and not is_library(one, installed=True))
            files |= {f"{name}: {os.path.relpath(one, folder)}": one for one in sorted({file, *near})}
    packages = {f"the version of {name}": found for name, found in versions().items() if name != "python"}
    return packages | {f"the source {name}": checksum(Path(file)) for name, file in files.items()}
