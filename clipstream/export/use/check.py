"""Features of the files in INPUTS/images, the texts in INPUTS/texts.json, and the pixels and ids in INPUTS/equal.npz.

Called by `clipstream export` as `check.py INPUTS OUT.npz [VARIANT]`, to compare them with its own: those of images are
what `example.py` computes, which stands in the model card.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main(inputs: str, out: str, variant: str = "") -> None:
    """Write features and the seconds that they took."""
    os.chdir(inputs)
    example = runpy.run_path(str(Path(__file__).with_name("example.py")))
    encoder = type(example["encoder"])(variant=variant) if variant else example["encoder"]
    found: dict[str, Any] = {} if variant else {"images": example["images"]}
    given: dict[str, Any] = {
        "images": sorted(Path("images").iterdir()),
        "texts": json.loads(Path("texts.json").read_text(encoding="utf-8")),
        **np.load("equal.npz"),
    }
    for name, values in given.items():
        if name not in found:
            encode = getattr(encoder, name)
            encode(values[:16])  # the first call may take longer
            start = time.perf_counter()
            found[name] = np.concatenate([encode(values[i : i + 16]) for i in range(0, len(values), 16)])
            found[f"{name}_seconds"] = time.perf_counter() - start
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
