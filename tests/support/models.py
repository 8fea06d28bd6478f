"""The JSON config of a tiny model."""

from __future__ import annotations

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "layers": 1, "width": 16, "heads": 1},
}
