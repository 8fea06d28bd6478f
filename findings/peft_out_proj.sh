#!/usr/bin/env bash
# LoRA on `out_proj` of torch's attention trains nothing, although peft counts its parameters as trainable.
#
# Versions: peft 0.21.2, torch 2.13.0. torch.nn.MultiheadAttention, of which open_clip's towers are built, passes
# the weight of `out_proj` to a function and never calls the module, so that a wrapper around `out_proj` is not run. With
# LoraConfig(target_modules=["out_proj", "linear1"]) the adapters of out_proj receive no gradient and do not change the
# output; no warning. target_modules=["self_attn"] (in open_clip: ["attn"]) wraps the attention as a whole and trains
# out_proj too.
#
# Seen 2026-11-28:
#   out_proj and linear1: 8 trainable tensors, 4 with a gradient; out_proj alone changes the output by 5e-07
#   self_attn: 4 trainable tensors of out_proj, all with a gradient
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'EOF'
import peft
import torch

torch.manual_seed(0)
inputs = torch.randn(2, 5, 32)


def adapted(targets):
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    tower = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    before = tower(inputs)
    model = peft.get_peft_model(tower, peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
    with torch.no_grad():  # as after training: B, which is 0 at first, is not
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    after = model.base_model.model(inputs)
    if after.requires_grad:
        after.square().sum().backward()
    trained = {name: p.grad is not None for name, p in model.named_parameters() if p.requires_grad}
    return trained, float((after - before).detach().abs().max())


both, _ = adapted(["out_proj", "linear1"])
_, alone = adapted(["out_proj"])
whole, _ = adapted(["self_attn"])
print(f"out_proj and linear1: {len(both)} trainable tensors, {sum(both.values())} with a gradient;", end=" ")
print(f"out_proj alone changes the output by {alone:.0e}")
inner = {name: grad for name, grad in whole.items() if "out_proj" in name}
print(f"self_attn: {len(inner)} trainable tensors of out_proj, {sum(inner.values())} with a gradient")
assert len(both) == 8 and not any(grad for name, grad in both.items() if "out_proj" in name)
assert all(grad for name, grad in both.items() if "linear1" in name) and alone < 1e-5
assert len(inner) == 4 and all(inner.values())
EOF
