"""Features of images and texts by open_clip: `Encoder(folder).images([Image.open(path).convert("RGB")])`."""

from typing import Any

import open_clip
import torch


class Encoder:
    """The model in a folder. Features are arrays [n, D] with rows of length 1."""

    def __init__(self, folder: str, variant: str = "") -> None:
        self.model, _, self.preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        self.model.eval()
        self.tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")

    def images(self, images: list[Any]) -> Any:
        """Features of images of Pillow, in mode RGB."""
        return self.pixels(torch.stack([self.preprocess(image) for image in images]))

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
