"""A tiny real model and an EvalContext around it; the metrics of an evaluator; open_clip's features of pictures."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext
from clipstream.evals.runner import build_evaluators
from clipstream.evals.settings import EvalSettings
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from tests.support.pictures import ByteTokenizer, picture

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 256, "layers": 1, "width": 32, "heads": 2},
}


@lru_cache
def tiny_towers(seed: int = 0) -> Towers:
    """A CLIP of two one-layer towers for 16 px and 16 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tiny.json"
        config.write_text(json.dumps(CONFIG))
        return build_towers(ModelSettings.model_validate({"name": str(config)}), seed=seed)


def context_of(world: World, examples: int = 0, towers: Towers | None = None) -> EvalContext:
    """The tiny model, or another, on this rank; with a number of images to show."""
    data = DataSettings(workers=0)
    return EvalContext(towers or tiny_towers(), ByteTokenizer(), world, data, examples_wanted=examples)


def evaluated(section: EvalSettings | Mapping[str, Any], context: EvalContext | None = None) -> dict[str, float]:
    """The metrics of an evaluator, by default of the tiny model in this process."""
    made = section if isinstance(section, EvalSettings) else EvalSettings.model_validate(section)
    return dict(build_evaluators({"one": made})["one"](context or context_of(World())))


@torch.no_grad()
def open_clip_features(
    numbers: Sequence[int], texts: Sequence[str], towers: Towers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """L2-normalised float64 features of pictures with these numbers, by open_clip's own transform, and of texts."""
    transform = image_transform_v2(PreprocessCfg(size=16), is_train=False)
    clip = (towers or tiny_towers()).eval().clip
    pixels = torch.stack([transform(Image.open(io.BytesIO(picture(number)))) for number in numbers])
    ids = torch.from_numpy(ByteTokenizer().encode(texts))
    return clip.encode_image(pixels, normalize=True).double(), clip.encode_text(ids, normalize=True).double()
