#!/usr/bin/env bash
# open_clip's ResidualAttentionBlock takes keys and values of another sequence and ignores them unless it was made for them.
#
# Versions: open_clip_torch 3.3.0, torch 2.15.0. forward(q_x, k_x, v_x) normalises k_x and v_x by ln_1_kv, which only a block made
# with is_cross_attention=True has; without it both become None, and the block attends to q_x. The shapes fit, nothing is raised:
# a cross-attention built from such blocks, as of a captioner of one's own, never sees the images. ResidualAttentionBlock has the
# flag off by default; MultimodalTransformer sets it.
#
# Seen 2026-11-29: outputs for two different sequences of keys are equal in every bit; with is_cross_attention=True they differ
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 open_clip_torch==3.3.0 numpy==2.4.1
"$work/venv/bin/python" - <<'EOF'
import open_clip
import torch
from open_clip.transformer import ResidualAttentionBlock

torch.manual_seed(0)
texts, images, others = torch.randn(2, 5, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
same = {}
for made in (False, True):
    block = ResidualAttentionBlock(32, 2, is_cross_attention=made).eval()
    with torch.no_grad():
        one, other = (block(texts, k_x=keys, v_x=keys) for keys in (images, others))
    same[made] = torch.equal(one, other)
print(open_clip.__version__, same)
assert same == {False: True, True: False}
EOF
