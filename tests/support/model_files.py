"""Model configurations and weights in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from tests.support import hubtree

TEXT = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VIT = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
# Of a tower of transformers.
SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def write(folder: Path, vision: Any = None, preprocess: dict[str, Any] | None = None, **more: Any) -> str:
    """A model's configuration, with that of its images where `preprocess` is given."""
    path = folder / f"model{len(list(folder.iterdir()))}.json"
    config = {"embed_dim": 24, "vision_cfg": vision or VIT, "text_cfg": TEXT, **more}
    path.write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess} if preprocess else config))
    return str(path)


def write_text_tower(folder: Path, kind: str = "Bert", *, half: bool = False, **changes: Any) -> dict[str, Any]:
    """A folder with a small text tower of Hugging Face and its tokenizer; the text_cfg of a model that has it."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 40, **changes}
    base = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    (base.half() if half else base).save_pretrained(folder)
    hubtree.write_tokenizer(folder)
    names = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "context_length": 12}
    return {**names, "hf_pooler_type": "mean_pooler", "hf_proj_type": "linear"}


def lively(model: Any) -> Any:
    """A model of transformers with larger weights, so that a small difference in its arithmetic shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model.eval()


def clip_model(act: str = "quick_gelu", text: Any = (), vision: Any = ()) -> Any:
    """transformers' CLIPModel, with changes of its two configurations."""
    import transformers

    torch.manual_seed(0)
    sections = {
        "vision_config": {**SIZES, "image_size": 32, "patch_size": 8, "hidden_act": act, **dict(vision)},
        "text_config": {**SIZES, "max_position_embeddings": 12, "hidden_act": act, **dict(text)},
    }
    return lively(transformers.CLIPModel(transformers.CLIPConfig(projection_dim=24, **sections)))


def build(name: str, *, seed: int = 0, loss_type: str | None = None, tokenizer: Any = None, **settings: Any) -> Towers:
    chosen = ModelSettings.model_validate({"name": name, **settings})
    return build_towers(chosen, seed=seed, loss_type=loss_type, tokenizer=tokenizer)
