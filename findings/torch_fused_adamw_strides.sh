#!/usr/bin/env bash
# AdamW(fused=True) on a CPU pairs a parameter with its moments by place in memory, not by index: where the strides of a
# moment are others than the parameter's, each weight is moved by the moments of another one, without an error.
#
# Version: torch 2.13.0 with safetensors 0.8.0 (2.15.0 does the same). load_state_dict keeps the strides of what it is
# given. Two usual ways lead there: a convolution whose weight is channels_last in memory, and whose moments come back
# from a safetensors file, which stores tensors contiguous; and position embeddings that were resampled with
# F.interpolate(...).permute(...), moments included. The implementations without fused=True give equal weights.
#
# Seen 2026-11-28:
#   plain: same weights after a resume: True
#   fused: same weights after a resume: False, without an error; moments made contiguous as the weight: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy torch==2.13.0 safetensors==0.8.0
cat > "$work/resume.py" <<'EOF'
import sys

import torch
from safetensors.torch import load_file, save_file

IMAGES, FILE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)), sys.argv[1]


def step(model, optimizer):
    optimizer.zero_grad()
    model(IMAGES.contiguous(memory_format=torch.channels_last)).pow(2).mean().backward()
    optimizer.step()


def weights(fused, resume, like=False):
    """The weights after two steps; with `resume`, the moments pass through a file between them."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 6, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    step(model, optimizer)
    if resume:
        state = optimizer.state_dict()
        save_file({name: tensor.contiguous() for name, tensor in state["state"][0].items()}, FILE)
        state["state"][0] = load_file(FILE)
        if like:
            for name in ("exp_avg", "exp_avg_sq"):
                state["state"][0][name] = torch.empty_like(model.weight).copy_(state["state"][0][name]).detach()
        optimizer.load_state_dict(state)
    step(model, optimizer)
    return model.weight.detach()


plain = torch.equal(weights(False, True), weights(False, False))
fused = torch.allclose(weights(True, True), weights(True, False), atol=1e-3)
mended = torch.equal(weights(True, True, like=True), weights(True, False))
print(f"plain: same weights after a resume: {plain}")
print(f"fused: same weights after a resume: {fused}, without an error; moments made contiguous as the weight: {mended}")
assert (plain, fused, mended) == (True, False, True)
EOF
"$work/venv/bin/python" "$work/resume.py" "$work/moments.safetensors"
