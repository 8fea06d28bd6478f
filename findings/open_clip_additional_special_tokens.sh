#!/usr/bin/env bash
# A token added by open_clip's `additional_special_tokens` ends the text: what follows it has no effect on the features.
#
# Versions: open_clip_torch 3.3.0, transformers 5.24.0, torch 2.15.0. The text tower is causal, and its feature is the output at the
# largest id (transformer.py: text_global_pool, "argmax", the default and that of CLIP's own models), which is the end of text, as
# long as no id is larger. SimpleTokenizer(additional_special_tokens=[...]) appends after it (49408, …), so the feature is taken at
# the added token; captions that agree up to there have equal features, whatever they go on to say. Training goes on, and
# retrieval of such captions is at chance among those of one beginning. transformers does the same where the config has
# eos_token_id 2, kept for the first CLIP configs (modeling_clip.py), after resize_token_embeddings. Set `pool_type: eos` and
# `eos_id: 49407` in the text_cfg, eos_token_id=49407 in transformers.
#
# Seen 2026-11-29 ("a photo of <toy> on a beach", "a photo of <toy> in a red car at night"): features equal in every bit
#   open_clip argmax True, eos False; transformers eos_token_id 2 True, 49407 False; open_clip argmax without the added token False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 timm==1.0.31 open_clip_torch==3.3.0 \
    transformers==5.24.0
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'EOT' \
    || { tail -20 "$work/log"; exit 1; }
import torch
from open_clip.model import CLIP
from open_clip.tokenizer import SimpleTokenizer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

tokenizer = SimpleTokenizer(additional_special_tokens=["<toy>"])
captions = [f"a photo of {{}} {place}" for place in ("on a beach", "in a red car at night")]
added, usual = (tokenizer([caption.format(name) for caption in captions]) for name in ("<toy>", "toy"))
assert (added == 49408).sum() == 2 and (usual == 49408).sum() == 0 and (added == 49407).sum() == 2


def equal(features):
    return torch.equal(features[0], features[1])


def open_clip(tokens, **pool):
    torch.manual_seed(0)
    text = {"vocab_size": tokenizer.vocab_size, "width": 32, "heads": 2, "layers": 2, **pool}
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16}
    return equal(CLIP(32, vision, text).eval().encode_text(tokens))


def transformers(eos):
    torch.manual_seed(0)
    model = CLIPTextModelWithProjection(CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=32,
        eos_token_id=eos)).eval()
    model.resize_token_embeddings(tokenizer.vocab_size)
    return equal(model(input_ids=added).text_embeds)


with torch.inference_mode():
    found = [open_clip(added), open_clip(added, pool_type="eos", eos_id=49407), transformers(2), transformers(49407),
             open_clip(usual)]
print("open_clip argmax {}, eos {}; transformers eos_token_id 2 {}, 49407 {}; open_clip argmax without the added token {}".format(
    *found))
assert found == [True, False, True, False, False]
EOT
