"""Features of images and texts by transformers: `Encoder(folder).images(["a.png", "b.jpg"])`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pixels import Pixels  # type: ignore[import-not-found]
from transformers import AutoModel, AutoProcessor


class Encoder:
    """The model in a folder. Features are arrays [n, D] with rows of length 1."""

    def __init__(self, folder: str | Path = Path(__file__).parent, variant: str = "") -> None:
        self.model = AutoModel.from_pretrained(folder).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.tokenizer = self.processor.tokenizer
        self.prepared = Pixels(folder)

    def images(self, images: list[Any]) -> Any:
        """Features of image files, or of images as Pillow opens them."""
        parts = [[self.prepared(image) for image in images[i : i + 16]] for i in range(0, len(images), 16)]
        processed = (self.processor.image_processor(part, return_tensors="pt").pixel_values for part in parts)
        return np.concatenate([self.pixels(part) for part in processed])

    def texts(self, texts: list[str]) -> Any:
        """Features of texts, padded to the length that the model was trained with."""
        found = self.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        return self.ids(found.input_ids)

    def pixels(self, pixels: Any) -> Any:
        """Features of normalised pixels [n, 3, H, W]."""
        return self._features(self.model.get_image_features, pixel_values=torch.as_tensor(pixels))

    def ids(self, ids: Any) -> Any:
        """Features of ids [n, T]."""
        inputs = {"input_ids": torch.as_tensor(ids)}
        if "attention_mask" in self.tokenizer.model_input_names:
            inputs["attention_mask"] = (inputs["input_ids"] != self.tokenizer.pad_token_id).long()
        return self._features(self.model.get_text_features, **inputs)

    def _features(self, encode: Any, **inputs: Any) -> Any:
        with torch.no_grad():
            found = encode(**inputs)
        found = getattr(found, "pooler_output", found)  # transformers 5 returns it among others, 4 alone
        return torch.nn.functional.normalize(found, dim=-1).numpy()
