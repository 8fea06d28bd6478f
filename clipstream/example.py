"""Owns what the rooms that work with pictures hand to those that show them: pictures beside words, tables of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Example:
    """A picture and what is said of it.

    Attributes:
        pixels: uint8 [3, H, W], on any device.
        text: its caption, as the model sees it, or the name of its class.
        key: 'SHARD_BASENAME/KEY' of the sample.
        guesses: (text, score), best first: what the model says of it.
        group: heading that it stands under, such as 'best' or 'worst'; empty for none.
        note: a few words on it, such as 'place 17 of 1000'.
    """

    pixels: torch.Tensor
    text: str
    key: str = ""
    guesses: tuple[tuple[str, float], ...] = ()
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Words in rows.

    Attributes:
        title: what it tells.
        header: of its columns.
        rows: a cell a column each.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
