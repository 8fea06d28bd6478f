"""Features of images and texts by transformers: `Encoder(folder).images([Image.open(path).convert("RGB")])`."""

from typing import Any

import torch
from transformers import AutoModel, AutoProcessor


class Encoder:
    """The model in a folder. Features are arrays [n, D] with rows of length 1."""

    def __init__(self, folder: str, variant: str = "") -> None:
        self.model = AutoModel.from_pretrained(folder).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.tokenizer = self.processor.tokenizer

    def images(self, images: list[Any]) -> Any:
        """Features of images of Pillow, in mode RGB."""
        return self.pixels(self.processor.image_processor(images, return_tensors="pt").pixel_values)

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
