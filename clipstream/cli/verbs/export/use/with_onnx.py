"""Features of images and texts by onnxruntime: `Encoder(folder).images([Image.open(path).convert("RGB")])`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image
from tokenizers import Tokenizer


class Encoder:
    """The model in a folder; `variant` is "int8" for the quantised graphs. Features [n, D] have rows of length 1."""

    def __init__(self, folder: str, variant: str = "") -> None:
        name = f"-{variant}.onnx" if variant else ".onnx"
        self.image, self.text = (
            onnxruntime.InferenceSession(Path(folder, tower + name), providers=["CPUExecutionProvider"])
            for tower in ("image", "text")
        )
        self.tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        self.preprocess = json.loads(Path(folder, "preprocess.json").read_text(encoding="utf-8"))
        self.form = self.image.get_inputs()[0].name  # normalised, uint8, or image: what the graph takes

    def images(self, images: list[Any]) -> Any:
        """Features of images of Pillow, in mode RGB."""
        if self.form == "image":  # of any size, one at a time
            rows = [self.image.run(None, {"image": np.asarray(image)})[0] for image in images]
            return np.concatenate(rows)
        pixels = np.stack([self.resized(image) for image in images]).transpose(0, 3, 1, 2)
        return self.image.run(None, {self.form: pixels if self.form == "uint8" else self.normalised(pixels)})[0]

    def texts(self, texts: list[str]) -> Any:
        """Features of texts."""
        return self.ids([encoded.ids for encoded in self.tokenizer.encode_batch(texts)])

    def pixels(self, pixels: Any) -> Any:
        """Features of uint8 pixels [n, 3, H, W] of the model's size."""
        if self.form == "image":
            return np.concatenate([self.image.run(None, {"image": row.transpose(1, 2, 0)})[0] for row in pixels])
        return self.image.run(None, {self.form: pixels if self.form == "uint8" else self.normalised(pixels)})[0]

    def ids(self, ids: Any) -> Any:
        """Features of ids [n, T]."""
        return self.text.run(None, {"ids": np.asarray(ids, np.int64)})[0]

    def normalised(self, pixels: Any) -> Any:
        """float32 of uint8 pixels [n, 3, H, W]."""
        mean, std = (np.asarray(self.preprocess[name], np.float32).reshape(3, 1, 1) for name in ("mean", "std"))
        return (pixels.astype(np.float32) / np.float32(255) - mean) / std

    def resized(self, image: Any) -> Any:
        """uint8 [H, W, 3] of an image."""
        height, width = self.preprocess["size"]
        mode, (w, h) = self.preprocess["resize_mode"], image.size
        filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
        if mode == "squash":
            w, h = width, height
        elif mode == "shortest" and width == height:  # rounded down
            w, h = (width, int(width * h / w)) if w <= h else (int(width * w / h), width)
        else:
            ratio = (min if mode == "shortest" else max)(h / height, w / width)
            w, h = max(1, round(w / ratio)), max(1, round(h / ratio))
        image = image.resize((w, h), filters[self.preprocess["interpolation"]])
        fill = (self.preprocess["fill"] if mode == "longest" else 0,) * 3
        left, top = (round((a - b) / 2) if a >= b else -((b - a) // 2) for a, b in ((w, width), (h, height)))
        canvas = Image.new("RGB", (width, height), fill)
        canvas.paste(image, (-left, -top))
        return np.asarray(canvas)
