"""A model as ONNX: a graph of each tower with a dynamic batch, the tokenizer, and what the pixels are prepared with.

image.onnx      normalised [n, 3, H, W] float32, uint8 [n, 3, H, W], or image [h, w, 3] uint8 of any size
text.onnx       ids [n, T] int64
*-int8.onnx     the same with weights of int8, and inputs quantised as they come

All give features [n, D] with rows of length 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import compose, parser
from onnxruntime.quantization import QuantType, quant_pre_process, quantize_dynamic
from torch import nn
from torch.nn.functional import normalize

from clipstream.errors import SettingsError
from clipstream.export.files import fast_tokenizer
from clipstream.models.towers import Towers

OPSET = 20
FORMS = {"none": "normalised", "normalize": "uint8", "resize": "uint8"}


class _Image(nn.Module):
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, towers: Towers, form: str) -> None:
        super().__init__()
        self.clip, self.form = towers.clip, form
        self.register_buffer("mean", towers.mean.clone())
        self.register_buffer("std", towers.std.clone())

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.form == "uint8":
            pixels = (pixels.float() / 255 - self.mean) / self.std
        return normalize(self.clip.encode_image(pixels), dim=-1)


class _Text(nn.Module):
    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.clip = towers.clip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return normalize(self.clip.encode_text(ids), dim=-1)


def write_onnx(towers: Towers, folder: Path, preprocess: str, int8: bool) -> str:
    """Write the folder; returns a note for the model card. Raises SettingsError: a tower that torch cannot export."""
    backend, _ = fast_tokenizer(towers)
    form = FORMS[preprocess]
    pixels = torch.zeros(2, 3, *towers.image.size, dtype=torch.uint8 if form == "uint8" else torch.float32)
    ids = torch.ones(2, towers.context_length, dtype=torch.int64)
    _export(_Image(towers, form), pixels, form, folder / "image.onnx")
    _export(_Text(towers), ids, "ids", folder / "text.onnx")
    if preprocess == "resize":
        graph = compose.merge_models(_resizing(towers), onnx.load(folder / "image.onnx"), io_map=[("resized", "uint8")])
        own = {opset.domain.removeprefix("ai.onnx"): opset for opset in graph.opset_import}  # each graph's, merged
        del graph.opset_import[:]
        graph.opset_import.extend(own.values())
        onnx.save(graph, folder / "image.onnx")
    for name in ("image", "text") if int8 else ():
        source, target = folder / f"{name}.onnx", folder / f"{name}-int8.onnx"
        # Convolutions stay: onnxruntime computes quantised ones in more time than float32.
        kinds: dict[str, Any] = {
            "op_types_to_quantize": ["MatMul", "Gemm"],
            "weight_type": QuantType.QInt8,
            "per_channel": True,
        }
        quant_pre_process(source, target, skip_symbolic_shape=True)
        quantize_dynamic(target, target, **kinds, extra_options={"MatMulConstBOnly": True})
    backend.save(str(folder / "tokenizer.json"))
    scale, bias = (None if value is None else float(value.detach()) for value in towers.scalars())
    return f"ONNX graphs of both towers. Logits are {scale:.6g} * cosine" + ("." if bias is None else f" + {bias:.6g}.")


def _export(module: nn.Module, example: torch.Tensor, name: str, path: Path) -> None:
    shapes: Any = ({0: torch.export.Dim("n", min=1)},)
    names: dict[str, Any] = {"input_names": [name], "output_names": ["features"], "dynamic_shapes": shapes}
    try:
        program = torch.onnx.export(module.eval(), (example,), dynamo=True, opset_version=OPSET, verbose=False, **names)
    except Exception as error:  # torch's exporter raises its own and those of the code that it follows
        why = " ".join(str(error).split())[:300]
        raise SettingsError(f"torch cannot export the tower of {path.name} to ONNX: {why}") from error
    assert program is not None, "the exporter of dynamo returns its result"
    program.save(path, external_data=False)


def _resizing(towers: Towers) -> onnx.ModelProto:
    """The graph of an image's resize and centre crop, as torchvision does them on images of Pillow."""
    spec = towers.image
    (height, width), filters = spec.size, {"bicubic": "cubic", "bilinear": "linear"}
    if spec.resize_mode == "longest" or spec.floor_crop or (spec.resize_mode == "shortest" and height != width):
        raise SettingsError(
            f"--preprocess resize: images of {height} x {width} pixels by model.image_resize_mode {spec.resize_mode}"
            f"{' as in transformers' * spec.floor_crop} "
            "are not resized in the graph: use --preprocess normalize"
        )
    goal = f"size = Constant <value_ints = [{height}, {width}]> ()"
    if spec.resize_mode == "shortest":  # rounded down; the crop's offset to even
        goal = f"""
            hw = Shape <start = 0, end = 2> (image)
            short = ReduceMin <keepdims = 1> (hw)
            side = Constant <value_ints = [{height}]> ()
            scaled = Mul (hw, side)
            size = Div (scaled, short)"""
    text = f"""<ir_version: 10, opset_import: ["": {OPSET}]>
        resize (uint8[h, w, 3] image) => (uint8[1, 3, {height}, {width}] resized) {{
            {goal}
            chw = Transpose <perm = [2, 0, 1]> (image)
            zero = Constant <value_ints = [0]> ()
            nchw = Unsqueeze (chw, zero)
            sized = Resize <mode = "{filters[spec.interpolation]}", cubic_coeff_a = -0.5, antialias = 1, axes = [2, 3],
                coordinate_transformation_mode = "half_pixel", exclude_outside = 1> (nchw, , , size)
            out = Constant <value_ints = [{height}, {width}]> ()
            more = Sub (size, out)
            wide = Cast <to = 1> (more)
            two = Constant <value_float = 2.0> ()
            half = Div (wide, two)
            even = Round (half)
            start = Cast <to = 7> (even)
            end = Add (start, out)
            axes = Constant <value_ints = [2, 3]> ()
            resized = Slice (sized, start, end, axes)
        }}"""
    return parser.parse_model(text)
