#!/usr/bin/env bash
# Clamping logit_scale after each step, as CLIP's recipe does, leaves schedulefree's other copies of it free to run away.
#
# Versions: schedulefree 1.4.1, torch 2.15.0. In training mode a parameter is y; the optimizer keeps z, which takes the steps, and the
# average x is not stored, but computed of y and z when eval() is called (adamw_schedulefree.py). clamp_(0, ln 100) after the
# step, as in open_clip_train/train.py, changes y alone. While the loss wants a sharper temperature, z goes on rising far
# beyond the bound; y is drawn to it, and stays at the bound for about as many steps again after the gradient has turned,
# as z has to come back first. And x, as y less a part of z, is too low: the model that is evaluated and saved has another
# temperature than any in training, below the bound, and the lower the longer y has been at it. Nothing is raised. The
# same for every change in place: renormalised weights, a reset token, weights averaged over ranks. AdamW has no other
# copy and leaves the bound when its momentum is spent. Clamp state[p]["z"] too, or bound the value in the forward pass.
#
# Seen 2026-11-29 (exp of logit_scale after 2,000 steps up from 14.3, in training, after eval(), z; steps down until below 90)
#   AdamW: 100.0, 100.0, -; 58; AdamWScheduleFree: 100.0, 71.2, 2120.4; 1442; z clamped too: 88.1, 86.9, 100.0; 0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 schedulefree==1.4.1
cat > "$work/temperature.py" <<'EOT'
import math

import torch
from schedulefree import AdamWScheduleFree

BOUND = math.log(100)


def run(kind, clamp_z):
    scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    optimizer = kind([scale], lr=2.5e-3, weight_decay=0)
    free = kind is AdamWScheduleFree
    if free:
        optimizer.train()

    def step(gradient):
        scale.grad = torch.tensor(gradient)
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, BOUND)
            if clamp_z:
                optimizer.state[scale]["z"].clamp_(0, BOUND)

    for _ in range(2000):
        step(-0.1)
    found = [math.exp(scale.item())]
    if free:
        optimizer.eval()
    found.append(math.exp(scale.item()))
    if free:
        optimizer.train()
    found.append(math.exp(optimizer.state[scale]["z"].item()) if free else math.nan)
    steps = 0
    while math.exp(scale.item()) > 90:
        step(0.1)
        steps += 1
    return *found, steps


kinds = {"AdamW": (torch.optim.AdamW, False), "AdamWScheduleFree": (AdamWScheduleFree, False)}
kinds["z clamped too"] = (AdamWScheduleFree, True)
found = {name: run(*kind) for name, kind in kinds.items()}
for name, (trained, evaluated, z, steps) in found.items():
    print(f"{name}: {trained:.1f}, {evaluated:.1f}, {z:.1f}; {steps}")
trained, evaluated, z, steps = found["AdamWScheduleFree"]
assert trained > 99.9 and evaluated < 80 and z > 1000 and steps > 1000 > 10 * found["AdamW"][3], found
assert found["z clamped too"][2] < 100.1 and found["z clamped too"][3] < 100, found
EOT
"$work/venv/bin/python" -W ignore "$work/temperature.py"
