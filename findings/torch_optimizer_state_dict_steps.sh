#!/usr/bin/env bash
# torch's get_optimizer_state_dict() takes an optimizer step: a checkpoint before the first step changes the training.
#
# Version: torch 2.13.0 (2.15.0 does the same). torch.distributed.checkpoint.state_dict gives the state that distributed checkpoints
# save. If the optimizer has none yet, _init_optim_state sets all gradients to zero and lr to 0, and calls step(). The
# moments stay zero, but they count as a step: AdamW's own first update is then corrected for bias as a second one, 0.74 of
# its size (0.53 / 0.71), and all later ones differ. Hooks of the step run too, so an average of weights or a counter in
# them is one ahead. NAdam's product of momenta advances as well. A run that saves at step 0, or that asks for a state to
# load into and finds no checkpoint, is thus another run than one that does not. set_optimizer_state_dict does it, too, where
# the loaded state then replaces it. Make a new optimizer after saving one that has not stepped, or save none.
#
# Seen 2026-11-29: lr, weights and gradients are unchanged; step 1.0, calls of a post-step hook 1
#   the first update of AdamW afterwards has 0.74 of its usual size; NAdam's mu_product 0.45
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.1 torch==2.13.0
CUDA_VISIBLE_DEVICES='' "$work/venv/bin/python" -W ignore - <<'EOF'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(kind, save):
    """Sizes of the first update of each weight, the state before it, and how often a hook of the step ran before it."""
    model, calls = torch.nn.Linear(4, 4, bias=False), []
    before = model.weight.detach().clone()
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.0)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    if save:
        get_optimizer_state_dict(model, optimizer)
        assert torch.equal(model.weight, before) and optimizer.param_groups[0]["lr"] == 0.01 and model.weight.grad is None
    state = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    called = len(calls)
    model.weight.grad = torch.ones(4, 4)
    optimizer.step()
    return (before - model.weight.detach()).mean().item(), state, called


usual, nothing, _ = first_update(torch.optim.AdamW, save=False)
saved, state, called = first_update(torch.optim.AdamW, save=True)
product = first_update(torch.optim.NAdam, save=True)[1]["mu_product"].item()
print(f"lr, weights and gradients are unchanged; step {state['step'].item()}, calls of a post-step hook {called}")
print(f"the first update of AdamW afterwards has {saved / usual:.2f} of its usual size; NAdam's mu_product {product:.2f}")
assert not nothing and state["step"] == 1 and called == 1 and abs(saved / usual - 0.74) < 0.01 and abs(product - 0.45) < 0.01
EOF
