"""What each stage of the pipeline made of one of the first samples, for people (`--data.trace N`)."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipstream.data.decode.captions import RawSample
from clipstream.text import printable

MAX_TEXT = 200  # characters of a caption that are printed


class SampleTrace:
    """Collects the lines on one sample and prints them together, as other processes print too."""

    def __init__(self, title: str) -> None:
        self._lines = [title]

    def members(self, stage: str, sample: RawSample) -> None:
        """Add names and sizes of a sample's members after a stage."""
        parts = []
        for name, value in sample.items():
            size = type(value).__name__
            if isinstance(value, bytes | str):
                size = f"{len(value):,} {'bytes' if isinstance(value, bytes) else 'characters'}"
            parts += [] if name.startswith("__") else [f"{name} {size}"]
        self._add(stage, ", ".join(parts) or "no members that the settings read")

    def image(self, data: bytes, pixels: np.ndarray[Any, Any]) -> None:
        """Add an image file and the uint8 [H, W, 3] made of it."""
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            stored = f"{image.format} {image.width} x {image.height} {image.mode}"
        levels = " ".join(f"{level:.0f}" for level in pixels.reshape(-1, 3).mean(axis=0))
        self._add("image", f"{stored} -> {pixels.shape[1]} x {pixels.shape[0]}, mean of the channels {levels}")

    def caption(self, caption: str, ids: Sequence[int], text: str) -> None:
        """Add a caption, its ids, and the text that these decode to."""
        used = len(ids) - next((n for n, number in enumerate(reversed(ids)) if number), len(ids))
        shown = " ".join(map(str, ids[: min(used, 16)])) + (" …" if used > 16 else "")
        self._add("caption", repr(caption[:MAX_TEXT]))
        self._add("ids", f"{used} of {len(ids)}: {shown} = {text[:MAX_TEXT]!r}")

    def end(self, stage: str, text: str) -> None:
        """Add the outcome and print the trace."""
        self._add(stage, text)
        sys.stderr.write("\n".join(printable(line, 2000) for line in self._lines) + "\n")
        sys.stderr.flush()

    def _add(self, stage: str, text: str) -> None:
        self._lines.append(f"  {stage:<10} {text}")
