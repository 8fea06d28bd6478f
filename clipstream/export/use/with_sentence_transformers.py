"""Features by sentence-transformers: `Encoder(folder).images(["a.png", "b.jpg"])`."""

from pathlib import Path
from typing import Any

import torch
from pixels import Pixels  # type: ignore[import-not-found]
from sentence_transformers import SentenceTransformer


class Encoder:
    """The model in a folder, of which `self.model.encode` takes both. Features [n, D] have rows of length 1."""

    def __init__(self, folder: str | Path = Path(__file__).parent, variant: str = "") -> None:
        self.model = SentenceTransformer(str(folder), device="cpu")
        self.prepared = Pixels(folder)

    def images(self, images: list[Any]) -> Any:
        """Features of image files, or of images as Pillow opens them."""
        return self.model.encode([self.prepared(image) for image in images])

    def texts(self, texts: list[str]) -> Any:
        """Features of texts."""
        return self.model.encode(texts)

    def pixels(self, pixels: Any) -> Any:
        """Features of normalised pixels [n, 3, H, W]."""
        return self._forward({"pixel_values": torch.as_tensor(pixels), "modality": "image"})

    def ids(self, ids: Any) -> Any:
        """Features of ids [n, T]."""
        inputs = {"input_ids": torch.as_tensor(ids)}
        if "attention_mask" in self.model.tokenizer.model_input_names:
            inputs["attention_mask"] = (inputs["input_ids"] != self.model.tokenizer.pad_token_id).long()
        return self._forward({**inputs, "modality": "text"})

    def _forward(self, features: dict[str, Any]) -> Any:
        with torch.no_grad():
            return self.model(features)["sentence_embedding"].numpy()
