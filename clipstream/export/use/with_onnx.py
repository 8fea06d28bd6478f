"""Features of images and texts by onnxruntime: `Encoder(folder).images(["a.png", "b.jpg"])`."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from pixels import Pixels  # type: ignore[import-not-found]
from tokenizers import Tokenizer


class Encoder:
    """The model in a folder; `variant` is "int8" for the quantised graphs. Features [n, D] have rows of length 1."""

    def __init__(self, folder: str | Path = Path(__file__).parent, variant: str = "") -> None:
        name = f"-{variant}.onnx" if variant else ".onnx"
        self.image, self.text = (
            onnxruntime.InferenceSession(Path(folder, tower + name), providers=["CPUExecutionProvider"])
            for tower in ("image", "text")
        )
        self.tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        self.prepared = Pixels(folder)
        self.form = self.image.get_inputs()[0].name  # normalised, uint8, or image: what the graph takes

    def images(self, images: list[Any]) -> Any:
        """Features of image files, or of images as Pillow opens them."""
        parts = [images[i : i + 16] for i in range(0, len(images), 16)]
        return np.concatenate(
            [
                self.rows([np.asarray(self.prepared(image, resize=self.form != "image")) for image in part])
                for part in parts
            ]
        )

    def texts(self, texts: list[str]) -> Any:
        """Features of texts."""
        return self.ids([encoded.ids for encoded in self.tokenizer.encode_batch(texts)])

    def pixels(self, pixels: Any) -> Any:
        """Features of uint8 pixels [n, 3, H, W] of the model's size."""
        return self.rows(list(pixels.transpose(0, 2, 3, 1)))

    def rows(self, images: list[Any]) -> Any:
        """Features of uint8 pixels [H, W, 3], of any size where the graph resizes them."""
        if self.form == "image":
            return np.concatenate([self.image.run(None, {"image": image})[0] for image in images])
        pixels = np.stack(images).transpose(0, 3, 1, 2)
        return self.image.run(None, {self.form: pixels if self.form == "uint8" else self.normalise(pixels)})[0]

    def ids(self, ids: Any) -> Any:
        """Features of ids [n, T]."""
        return self.text.run(None, {"ids": np.asarray(ids, np.int64)})[0]

    def normalise(self, pixels: Any) -> Any:
        """float32 of uint8 pixels [n, 3, H, W]."""
        mean, std = (
            np.asarray(part, np.float32).reshape(3, 1, 1) for part in (self.prepared.spec.mean, self.prepared.spec.std)
        )
        return (pixels.astype(np.float32) / np.float32(255) - mean) / std
