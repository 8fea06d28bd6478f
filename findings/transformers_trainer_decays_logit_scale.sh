#!/usr/bin/env bash
# transformers' Trainer decays the temperature of CLIP and SigLIP: weight_decay pulls logit_scale towards 0.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0. Trainer.get_decay_parameter_names (trainer.py) leaves out
# LayerNorm modules and names with `bias` or `norm`; all else is decayed, whatever its number of dimensions. So are
# logit_scale, CLIP's class_embedding, the position embeddings, and the probe of SigLIP's pooling; logit_bias is left out, by
# its name. open_clip and timm decay no scalar. AdamW takes lr * weight_decay of the value each step: at 5e-4
# and 0.2, usual for CLIP, a scale of 4.6052 (100 as a factor) without a gradient is 4.1669 (64.5) after 1,000 steps, and
# a scale with one settles where gradient and decay are equal, not where the loss is least. Override the method.
#
# Seen 2026-11-29: decayed parameters besides weights, and exp(logit_scale) after 1,000 steps without a gradient
#   CLIPModel: class_embedding, logit_scale; 100.0 -> 64.5; SiglipModel: logit_scale, probe; 100.0 -> 64.5
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.1 torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$work"
CUDA_VISIBLE_DEVICES='' HF_HUB_OFFLINE=1 venv/bin/python -W ignore - 2> log <<'EOF' || { tail -20 log; exit 1; }
import math

import torch
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel, Trainer, TrainingArguments

tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
vision = {**tower, "image_size": 32, "patch_size": 16}
text = {**tower, "vocab_size": 100, "max_position_embeddings": 16, "bos_token_id": 98, "eos_token_id": 99}
clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
siglip = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
for model in (clip, siglip):
    arguments = TrainingArguments(output_dir="out", learning_rate=5e-4, weight_decay=0.2, report_to=[])
    optimizer = Trainer(model, arguments).create_optimizer()
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in decayed and not name.endswith("weight")]
    assert "logit_bias" not in names
    with torch.no_grad():
        model.logit_scale.fill_(math.log(100))
    for parameter in model.parameters():
        parameter.grad = None
    model.logit_scale.grad = torch.zeros_like(model.logit_scale)
    before = model.logit_scale.exp().item()
    for _ in range(1000):
        optimizer.step()
    after = model.logit_scale.exp().item()
    names = sorted(name.rsplit(".", 1)[-1] for name in names)
    print(f"{type(model).__name__}: {', '.join(names)}; {before:.1f} -> {after:.1f}")
    assert names == (["class_embedding", "logit_scale"] if model is clip else ["logit_scale", "probe"])
    assert abs(after - 64.5) < 0.1, after
EOF
