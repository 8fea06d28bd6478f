#!/usr/bin/env bash
# timm's SigLIP towers of patch 16 at "base" and patch 14 at "so400m" compute another GELU than transformers' SigLIP.
#
# Versions: timm 1.0.31, transformers 5.24.0, torch 2.15.0. SiglipVisionConfig has `gelu_pytorch_tanh`, the approximation
# that JAX's nn.gelu is by default; timm's vit_base_patch16_siglip_* and vit_so400m_patch14_siglip_* have the exact GELU,
# its vit_so400m_patch16_siglip_* and naflexvit_* the tanh form. Weights that load without a missing name thus give
# other features: by about 1e-4 at the size of usual weights, far more where activations are large.
#
# Seen 2026-11-28:
#   transformers gelu_pytorch_tanh; timm vit_base_patch16_siglip_224 none, vit_so400m_patch14_siglip_384 none,
#   vit_so400m_patch16_siglip_384 tanh, naflexvit_base_patch16_siglip tanh
#   largest difference of the two forms: 4.7e-04, at x = 2.7 (of values from -6 to 6)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 timm==1.0.31 transformers==5.24.0
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'EOF'
import timm
import torch
from transformers import SiglipVisionConfig


def form(name):
    with torch.device("meta"):
        act = timm.create_model(name).blocks[0].mlp.act
    return getattr(act, "approximate", "tanh" if type(act).__name__ == "GELUTanh" else type(act).__name__)


names = ["vit_base_patch16_siglip_224", "vit_so400m_patch14_siglip_384", "vit_so400m_patch16_siglip_384",
         "naflexvit_base_patch16_siglip"]
forms = {name: form(name) for name in names}
act = SiglipVisionConfig().hidden_act
print(f"transformers {act}; timm", ", ".join(f"{name} {one}" for name, one in forms.items()))
x = torch.linspace(-6, 6, 12001, dtype=torch.float64)
gelu = torch.nn.functional.gelu
gap = (gelu(x) - gelu(x, approximate="tanh")).abs()
print(f"largest difference of the two forms: {gap.max():.1e}, at x = {x[gap.argmax()].abs():.1f}")
assert act == "gelu_pytorch_tanh" and [*forms.values()] == ["none", "none", "tanh", "tanh"] and 4e-4 < gap.max() < 5e-4
EOF
