"""Features of images and texts by open_clip: `Encoder(folder).images(["a.png", "b.jpg"])`."""

from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from pixels import Pixels  # type: ignore[import-not-found]


class Encoder:
    """The model in a folder. Features are arrays [n, D] with rows of length 1."""

    def __init__(self, folder: str | Path = Path(__file__).parent, variant: str = "") -> None:
        self.model, _, self.preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        self.model.eval()
        self.prepared = Pixels(folder)
        self.tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")

    def images(self, images: list[Any]) -> Any:
        """Features of image files, or of images as Pillow opens them."""
        parts = [images[i : i + 16] for i in range(0, len(images), 16)]
        pixels = (torch.stack([self.preprocess(self.prepared(image)) for image in part]) for part in parts)
        return np.concatenate([self.pixels(part) for part in pixels])

    def texts(self, texts: list[str]) -> Any:
        """Features of texts."""
        return self.ids(self.tokenizer(texts))

    def pixels(self, pixels: Any) -> Any:
        """Features of normalised pixels [n, 3, H, W]."""
        with torch.no_grad():
            return self.model.encode_image(torch.as_tensor(pixels), normalize=True).numpy()

    def ids(self, ids: Any) -> Any:
        """Features of ids [n, T]."""
        with torch.no_grad():
            return self.model.encode_text(torch.as_tensor(ids), normalize=True).numpy()
