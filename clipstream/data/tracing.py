"""Owns the words on single samples (`--data.trace N`): what each stage of a pipeline made of them.

It only looks: a traced sample is read, decoded and counted like any other.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SHOWN = 200  # characters of a text


class Tracer:
    """Chooses the samples that are traced: the first that a feeder reads, used or dropped.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count, self._done = count, 0

    def begin(self, shard: str, key: str) -> Trace | None:
        """A sample is read; None where it is not to be traced."""
        if self._done == self._count:
            return None
        self._done += 1
        return Trace(f"trace {self._done} of {self._count}: {key} in {shard}")


class Trace:
    """Takes the words on one sample, and prints them.

    Args:
        title: the first line.
    """

    def __init__(self, title: str) -> None:
        self._lines = [title]

    def members(self, stage: str, sample: Mapping[str, Any]) -> None:
        """What a sample consists of now."""
        parts = [f"{name} {_size(value)}" for name, value in sample.items() if not name.startswith("__")]
        self.say(stage, ", ".join(parts) or "nothing that the settings read")

    def picture(self, data: bytes, pixels: np.ndarray[Any, Any]) -> None:
        """A picture, and the uint8 [H, W, 3] made of it."""
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            stored = f"{image.format} {image.width} x {image.height} {image.mode}"
        levels = " ".join(f"{level:.0f}" for level in pixels.reshape(-1, 3).mean(axis=0))
        self.say("picture", f"{stored} -> {pixels.shape[1]} x {pixels.shape[0]}, mean of the channels {levels}")

    def caption(self, caption: str, ids: Sequence[int], text: str) -> None:
        """A caption, its ids, and what these say."""
        used = len(ids) - next((n for n, number in enumerate(reversed(ids)) if number), len(ids))
        self.say("caption", repr(caption[:SHOWN]))
        shown = " ".join(map(str, ids[: min(used, 16)])) + (" …" if used > 16 else "")
        self.say("ids", f"{used} of {len(ids)}: {shown} = {text[:SHOWN]!r}")

    def say(self, stage: str, text: str) -> None:
        """A line on a stage."""
        self._lines.append(f"  {stage:<10} {text}")

    def end(self, stage: str, text: str) -> None:
        """What became of it; all is printed at once, as other processes print too."""
        self.say(stage, text)
        sys.stderr.write("\n".join(self._lines) + "\n")
        sys.stderr.flush()


def _size(value: Any) -> str:
    if isinstance(value, bytes | str):
        return f"{len(value):,} {'bytes' if isinstance(value, bytes) else 'characters'}"
    return type(value).__name__
