"""Features of the files in INPUTS/images, the texts in INPUTS/texts.json, and the pixels and ids in INPUTS/equal.npz.

Called by `clipstream export` as `check.py FOLDER INPUTS OUT.npz [VARIANT]`, to compare them with its own.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from encoder import Encoder  # type: ignore[import-not-found]
from PIL import Image


def opened(path: Path) -> Image.Image:
    """The image in mode RGB, on white where it is transparent."""
    image: Image.Image = Image.open(path)
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def main(folder: str, inputs: str, out: str, variant: str = "") -> None:
    """Write features and the seconds that they took."""
    encoder = Encoder(folder, variant)
    given: dict[str, Any] = {
        "images": [opened(path) for path in sorted(Path(inputs, "images").iterdir())],
        "texts": json.loads(Path(inputs, "texts.json").read_text(encoding="utf-8")),
        **np.load(Path(inputs, "equal.npz")),
    }
    found: dict[str, Any] = {}
    for name, values in given.items():
        encode = getattr(encoder, name)
        encode(values[:16])  # the first call may take longer
        start = time.perf_counter()
        found[name] = np.concatenate([encode(values[i : i + 16]) for i in range(0, len(values), 16)])
        found[f"{name}_seconds"] = time.perf_counter() - start
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
