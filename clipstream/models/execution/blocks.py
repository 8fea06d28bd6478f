"""The repeated blocks of the towers."""

from __future__ import annotations

from torch import nn


def blocks(towers: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the towers: outermost modules in a list of modules of the same class."""
    if isinstance(towers, nn.ModuleList | nn.Sequential):
        children = list(towers.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and any(children[0].children()):
            return [child for child in children if any(True for _ in child.parameters())]
    return [block for child in towers.children() for block in blocks(child)]
