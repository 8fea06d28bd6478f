#!/usr/bin/env bash
# Weights that change inside a torch.autocast region are used as they were before: a sweep over checkpoints measures a mixture.
#
# Versions: torch 2.15.0, open_clip_torch 3.3.0. autocast keeps the bfloat16 copy of each float32 weight that requires a gradient
# until the outermost region ends (aten/src/ATen/autocast_mode.cpp: cached_cast), by the tensor's identity; that its values
# changed is not noticed. load_state_dict, an average of weights swapped in, optimizer.step() and SAM's perturbation change
# them in place. So one region around a loop over checkpoints, WiSE-FT's alphas or "raw, averaged" gives all of them the
# matrices of the first, with the embeddings, norms and class tokens of each, which are not cast: metrics that differ a little
# and belong to no model. Training inside one region shows a falling loss of a model that nobody has; the weights are
# those of another. torch.no_grad() makes no difference; under torch.inference_mode() nothing is kept. Lightning's own
# regions keep nothing, accelerate's are one forward pass. Enter the region for each forward pass, give it
# cache_enabled=False, or call torch.clear_autocast_cache() after each change.
#
# Seen 2026-11-29 (a second model's weights loaded; mean cosine of its features with those of a region of its own)
#   one region 0.17; inference_mode 1.00; cache_enabled=False 1.00; clear_autocast_cache 1.00
#   60 steps of AdamW (last loss, loss of the weights): a region each step: 0.05, 0.05; one region: 0.08, 4.38
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 open_clip_torch==3.3.0
cat > "$work/region.py" <<'EOT'
from contextlib import nullcontext

import torch
from open_clip.model import CLIP
from torch.nn.functional import cross_entropy


def region(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


def make(seed):
    torch.manual_seed(seed)
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 32, "layers": 2}
    text = {"vocab_size": 100, "context_length": 8, "width": 64, "heads": 2, "layers": 2}
    return CLIP(32, vision, text)


def second_of(outer, inner=nullcontext, mode=torch.no_grad, between=lambda: None):
    """Loads one checkpoint after the other as in a sweep, and gives the features of the last."""
    model = make(0)
    with mode(), outer():
        for seed in (0, 1):
            model.load_state_dict(make(seed).state_dict())
            between()
            with inner():
                features = model.encode_image(images)
    return torch.nn.functional.normalize(features.float(), dim=1)


def loss_of(model):
    image_features, text_features, scale = model(images, texts)
    logits = scale * image_features @ text_features.T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def train(outer, inner):
    """Gives the loss of the last of 60 steps, and that of the weights afterwards."""
    model = make(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with outer():
        for _ in range(60):
            with inner():
                loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item(), loss_of(model).item()


torch.manual_seed(2)
images, texts = torch.randn(32, 3, 32, 32), torch.randint(1, 100, (32, 8))
truth = second_of(nullcontext, region)
ways = {"one region": second_of(region), "inference_mode": second_of(region, mode=torch.inference_mode),
        "cache_enabled=False": second_of(lambda: region(cache_enabled=False)),
        "clear_autocast_cache": second_of(region, between=torch.clear_autocast_cache)}
cosines = {way: (features * truth).sum(dim=1).mean().item() for way, features in ways.items()}
print("; ".join(f"{way} {cosine:.2f}" for way, cosine in cosines.items()))
losses = train(nullcontext, region), train(region, nullcontext)
print("a region each step: {:.2f}, {:.2f}; one region: {:.2f}, {:.2f}".format(*losses[0], *losses[1]))
wrong, *right = cosines.values()
assert wrong < 0.9 and min(right) > 0.999, cosines
(last, after), (shown, real) = losses
assert abs(last - after) < 0.1 and shown < 1 and real > 2, losses
EOT
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore "$work/region.py"
