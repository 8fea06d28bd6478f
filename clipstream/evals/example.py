"""Pictures with texts, and tables: what evaluators and training show in the report and in sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Example:
    """A picture with its texts.

    Attributes:
        pixels: uint8 [3, H, W], on any device.
        text: its caption, as the model sees it, or its class name.
        key: 'SHARD_BASENAME/KEY' of the sample.
        guesses: (text, score) of the model's answers, best first.
        group: heading that it is shown under, such as 'best'; '' for none.
        note: a short remark, such as 'rank 17 of 1000'.
    """

    pixels: torch.Tensor
    text: str
    key: str = ""
    guesses: tuple[tuple[str, float], ...] = ()
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts; each row has a cell per column of the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
