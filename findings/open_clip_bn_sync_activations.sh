#!/usr/bin/env bash
# open_clip's --use-bn-sync and --lock-image-freeze-bn-stats take the activation functions out of timm towers with batch norm.
#
# Versions: open_clip_torch 3.3.0, timm 1.0.31, torch 2.15.0. In EfficientNet, MobileNet, RegNet and ResNetV2 towers timm keeps the
# activation inside the norm: BatchNormAct2d is a BatchNorm2d with `act`. torch's SyncBatchNorm.convert_sync_batchnorm, which
# open_clip_train/main.py calls, and open_clip's freeze_batch_norm_2d (utils.py), which lock_image_tower calls, ask
# isinstance(module, BatchNorm2d) and put a plain norm in its place. Nothing warns: shapes, parameters and the keys of the state
# stay the same. So a run with these flags trains another, nearly linear network; its checkpoint loads without the flags
# as another network than the one trained; a locked, pretrained tower gives other features. timm's own functions keep the
# activations: timm.layers.convert_sync_batchnorm and timm.utils.model.freeze_batch_norm_2d. Towers with plain norms
# (ResNet, FastViT, open_clip's own) are not concerned.
#
# Seen 2026-11-29 (random weights, statistics of 16 images; activations in norms, and the mean cosine of features with the first)
#   efficientnet_b0: 33; --use-bn-sync: 0, -0.00; --lock-image-freeze-bn-stats: 0, 0.01; timm's two: 33, 1.00; 33, 1.00
#   mobilenetv2_100: 35; --use-bn-sync: 0, -0.02; --lock-image-freeze-bn-stats: 0, -0.02; timm's two: 35, 1.00; 35, 1.00
#   regnety_002: 27; --use-bn-sync: 0, 0.72; --lock-image-freeze-bn-stats: 0, 0.72; timm's two: 27, 1.00; 27, 1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 timm==1.0.31 open_clip_torch==3.3.0
cat > "$work/norms.py" <<'EOT'
import copy

import timm.layers
import timm.utils.model
import torch
from open_clip.model import CLIP


def activations(model):
    kinds = (timm.layers.BatchNormAct2d, timm.layers.SyncBatchNormAct, timm.layers.FrozenBatchNormAct2d)
    norms = [module for module in model.modules() if isinstance(module, kinds)]
    return sum(not isinstance(norm.act, torch.nn.Identity) for norm in norms)


def use_bn_sync(model):
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # as open_clip_train/main.py does


def lock_image_freeze_bn_stats(model):
    model.lock_image_tower(unlocked_groups=0, freeze_bn_stats=True)  # as open_clip_train/main.py does
    return model


def timm_sync(model):
    return timm.layers.convert_sync_batchnorm(model)


def timm_freeze(model):
    timm.utils.model.freeze_batch_norm_2d(model.visual.trunk)
    return model


text = {"vocab_size": 100, "context_length": 8, "width": 32, "heads": 2, "layers": 1}
for name in ("efficientnet_b0", "mobilenetv2_100", "regnety_002"):
    torch.manual_seed(0)
    vision = {"timm_model_name": name, "timm_pool": "avg", "timm_proj": "linear", "image_size": 64}
    model, images, found = CLIP(64, vision, text), torch.randn(16, 3, 64, 64), []
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                norm.momentum = None
        model.train().encode_image(images)
        features, count = model.eval().encode_image(images, normalize=True), activations(model)
        for change in (use_bn_sync, lock_image_freeze_bn_stats, timm_sync, timm_freeze):
            changed = change(copy.deepcopy(model)).eval()
            cosine = (features * changed.encode_image(images, normalize=True)).sum(dim=1).mean().item()
            found.append((activations(changed), cosine))
            copy.deepcopy(model).load_state_dict(changed.state_dict())
    sync, freeze, *own = (f"{number}, {cosine:.2f}" for number, cosine in found)
    told = f"--use-bn-sync: {sync}; --lock-image-freeze-bn-stats: {freeze}; timm's two: {'; '.join(own)}"
    print(f"{name}: {count}; {told}", flush=True)
    assert count > 20 and all(number == 0 and cosine < 0.9 for number, cosine in found[:2])
    assert all(number == count and cosine > 0.999 for number, cosine in found[2:])
EOT
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore "$work/norms.py"
