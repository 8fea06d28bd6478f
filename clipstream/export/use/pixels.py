"""Images as the model has seen them in training: `Pixels(folder)("a.png")` is RGB, for any image that Pillow reads.

Transparent pixels are laid on white, and 16 bits are scaled. The model's own preprocessing resizes the image then.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from clipstream.data.decode.images import convert_image, fit_image, is_smooth, load_image, opaque


class Pixels:
    """The preprocessing of the model in a folder, without the normalisation."""

    def __init__(self, folder: str | Path) -> None:
        self.spec: Any = SimpleNamespace(**json.loads(Path(folder, "preprocess.json").read_text(encoding="utf-8")))

    def __call__(self, image: Any, *, resize: bool = False) -> Image.Image:
        """An RGB image of a file, or of an image as `Image.open` gives it; with `resize` of the model's size.

        Images with a palette and in CMYK are always resized, as this has to come before they become RGB, and so are all
        where the model's own preprocessing has another centre crop, or squashes, which some libraries round otherwise.
        """
        if not isinstance(image, Image.Image):
            image = Image.open(io.BytesIO(Path(image).read_bytes()))
        image = opaque(load_image(image), (255, 255, 255))
        resize = resize or self.spec.floor_crop or self.spec.resize_mode == "squash" or not is_smooth(image)
        return convert_image(fit_image(image, self.spec) if resize else image)
