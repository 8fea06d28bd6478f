#!/usr/bin/env bash
# torchmetrics' macro accuracy counts classes without images as 0 at top 1, and leaves them out at top 5.
#
# Versions: torchmetrics 1.9.0, torch 2.15.0. "macro", which MulticlassAccuracy has by default, shall be the mean of the classes'
# accuracies. Zero-shot sets often hold images of a part of the classes: a subset, one rank's part, the first batches. At
# top_k=1 a class without images counts as 0 as soon as one image is taken for it (utilities/compute.py:
# _adjust_weights_safe_divide: tp + fp + fn == 0), at top_k > 1 it does not (tp + fn == 0). So top 1 falls to near the share of
# classes that are present, the more images the lower, while top 5 is the mean per-class recall, and the two cannot be
# compared with each other or with published figures. scikit-learn's balanced_accuracy_score leaves the absent classes
# out. Nothing is said. Take average=None, and the mean over the classes that have images.
#
# Seen 2026-11-29 (100 classes, images of 50 of them; torchmetrics' macro, mean over the 50 classes)
#   top 1: 0.252, 0.504, scikit-learn 0.504; the first 20 images: 0.167, 0.271; top 5: 0.795, 0.795
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchmetrics==1.9.0 scikit-learn==1.9.1
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'EOT' \
    || { tail -20 "$work/log"; exit 1; }
import torch
from sklearn.metrics import balanced_accuracy_score
from torchmetrics.classification import MulticlassAccuracy

torch.manual_seed(0)
labels = torch.randint(0, 50, (2000,))
logits = torch.randn(2000, 100)
logits[torch.arange(2000), labels] += 2.5


def both(k, count=2000):
    """torchmetrics' macro accuracy, and the mean over classes that have images, by hand."""
    right = (logits.topk(k).indices == labels[:, None]).any(dim=1).float()[:count]
    true = torch.stack([right[labels[:count] == label].mean() for label in labels[:count].unique()]).mean().item()
    return MulticlassAccuracy(num_classes=100, top_k=k)(logits[:count], labels[:count]).item(), true


first, few, fifth = both(1), both(1, 20), both(5)
balanced = balanced_accuracy_score(labels.numpy(), logits.argmax(dim=1).numpy())
print("top 1: {:.3f}, {:.3f}, scikit-learn {:.3f}; the first 20 images: {:.3f}, {:.3f}; top 5: {:.3f}, {:.3f}".format(
    *first, balanced, *few, *fifth))
assert abs(balanced - first[1]) < 1e-5 and abs(fifth[0] - fifth[1]) < 1e-5
assert abs(first[0] / first[1] - 0.5) < 0.01 and few[0] < few[1] - 0.05
EOT
