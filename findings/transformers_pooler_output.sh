#!/usr/bin/env bash
# CLIPModel.get_image_features of transformers 5 returns an output object, whose `pooler_output` is the projected feature.
#
# Versions: transformers 5.24.0, torch 2.13.0. Until transformers 4, get_image_features and get_text_features returned a
# tensor (n, projection_dim). Now they return BaseModelOutputWithPooling: `pooler_output` is (n, projection_dim), whereas
# `pooler_output` of model.vision_model, the same class, is (n, hidden_size) before the projection; index 0 of the object
# is the hidden states of all tokens, so that `features[0]` and tuple unpacking give these without an error.
#
# Seen 2026-11-28 (hidden_size 32, projection_dim 24):
#   get_image_features: pooler_output (1, 24), [0] (1, 5, 32); vision_model: pooler_output (1, 32)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$work/venv/bin/python" -W ignore - <<'EOF'
import torch
from transformers import CLIPConfig, CLIPModel

tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
vision = {**tower, "image_size": 32, "patch_size": 16}
text = {**tower, "vocab_size": 100, "max_position_embeddings": 16, "bos_token_id": 98, "eos_token_id": 99}
model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).eval()
pixels = torch.zeros(1, 3, 32, 32)
with torch.no_grad():
    features = model.get_image_features(pixel_values=pixels)
    inner = model.vision_model(pixel_values=pixels)
    projected = model.visual_projection(inner.pooler_output)
print(f"get_image_features: pooler_output {tuple(features.pooler_output.shape)}, [0] {tuple(features[0].shape)};", end=" ")
print(f"vision_model: pooler_output {tuple(inner.pooler_output.shape)}")
assert type(features).__name__ == type(inner).__name__ == "BaseModelOutputWithPooling"
assert features.pooler_output.shape == (1, 24) and features[0].shape == (1, 5, 32) and inner.pooler_output.shape == (1, 32)
assert torch.allclose(features.pooler_output, projected)
EOF
