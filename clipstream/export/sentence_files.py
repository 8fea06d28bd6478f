"""A model as a folder of sentence-transformers: a model of transformers, or a router to the modules of each tower.

The latter where the text tower is pooled in a way that transformers' models of both towers have not.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from clipstream.export.files import (
    PROCESSOR_FILES,
    Counterpart,
    image_tower,
    text_tower,
    write_processor,
    write_tokenizer,
    write_transformers,
)
from clipstream.models.towers import Towers


def write_sentence_transformers(towers: Towers, folder: Path) -> str:
    """Write the folder; returns a note for the model card. Raises SettingsError: a tower has no counterpart."""
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    image, text = image_tower(towers), text_tower(towers)
    padded = {"processing_kwargs": {"text": {"padding": "max_length", "max_length": towers.context_length}}}
    with TemporaryDirectory() as name:
        first: nn.Module
        if text.pooling == "pooled":
            about = write_transformers(towers, Path(name))
            methods = {part: (f"get_{part}_features", "pooler_output") for part in ("image", "text")}
            first, part = _transformer(Path(name), methods, "sentence_embedding", **padded), ""
        else:
            about = "Routes images and texts to their towers."
            for inner, tower in (("image", image), ("text", text)):
                tower.model.save_pretrained(Path(name, inner))
            write_processor(towers, Path(name, "image"), "")
            write_tokenizer(towers, Path(name, "text"))
            forward = {"image": ("forward", "pooler_output")}
            row = _transformer(Path(name, "image"), forward, "sentence_embedding")
            tokens = _transformer(
                Path(name, "text"), {"text": ("forward", "last_hidden_state")}, "token_embeddings", **padded
            )
            pooling = Pooling(text.width, pooling_mode=text.pooling)
            routes = {"image": [row, *_dense(image)], "text": [tokens, pooling, *_dense(text)]}
            first, part = Router(routes, default_route="text", allow_empty_key=False), "image_0_Transformer"
        SentenceTransformer(modules=[first, Normalize()], device="cpu").save(str(folder), create_model_card=False)
        for file in PROCESSOR_FILES:  # transformers does not save timm's
            shutil.copyfile(Path(name, "image" if part else "", file), folder / part / file)
    return f"A model of sentence-transformers. {about}"


def _transformer(folder: Path, methods: dict[str, tuple[str, str]], output: str, **more: Any) -> nn.Module:
    """A model of transformers; of each modality its method, and which of the outputs is taken."""
    config = {name: {"method": method, "method_output_name": key} for name, (method, key) in methods.items()}
    found: nn.Module = Transformer(str(folder), modality_config=config, module_output_name=output, **more)
    return found


def _dense(tower: Counterpart) -> list[nn.Module]:
    if tower.projection is None:
        return []
    weight = tower.projection.clone()
    return [Dense(weight.shape[1], len(weight), bias=False, activation_function=nn.Identity(), init_weight=weight)]
