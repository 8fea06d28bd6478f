#!/usr/bin/env bash
# albumentations in DataLoader workers: all workers draw the same augmentations, and each epoch repeats those of the first.
#
# Versions: albumentations 2.0.8 (its last release), torch 2.13.0. A Compose owns a numpy generator, made when it is built
# (core/composition.py); nothing seeds it anew in a worker, and the global generators that DataLoader seeds there are not read. Each
# worker starts with a copy of one state, and so does the next epoch, whose workers are copies of the same parent. With w
# workers, an epoch of n images has n/w different crops, each w times, the same ones in every epoch; the loss only tells
# later, as overfitting. persistent_workers=True ends the repetition of epochs, not that among workers. random.seed,
# np.random.seed and torch.manual_seed do not make a run repeatable either. Call set_random_seed in worker_init_fn, with
# torch.initial_seed(), which differs between workers and epochs.
#
# Seen 2026-11-29 (crops of 64 places in one image, 4 workers, 2 epochs, that are different ones; 128 were drawn)
#   Compose([RandomCrop]): 16; persistent_workers: 32; with worker_init_fn: 128; first draws after the same global seeds: different
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 opencv-python-headless==5.0.0.93 albumentations==2.0.8
NO_ALBUMENTATIONS_UPDATE=1 CUDA_VISIBLE_DEVICES='' \
    "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'EOF' || { tail -20 "$work/log"; exit 1; }
import random

import albumentations as A
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

IMAGE = np.stack([*np.mgrid[:256, :256], np.zeros((256, 256))], axis=-1).astype("uint8")  # each pixel has its row and column


class Crops(Dataset):
    """The place of a random crop out of 193 x 193 places."""

    def __init__(self):
        self.transform = A.Compose([A.RandomCrop(64, 64)])

    def __len__(self):
        return 64

    def __getitem__(self, _):
        return self.transform(image=IMAGE)["image"][0, 0, :2].tolist()


def seed_worker(_):
    get_worker_info().dataset.transform.set_random_seed(torch.initial_seed() % 2**32)


def different(**options):
    loader = DataLoader(Crops(), batch_size=None, num_workers=4, **options)
    places = [tuple(place) for _ in range(2) for place in loader]
    assert len(places) == 128
    return len(set(places))


def first():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    return [Crops()[n] for n in range(4)]


torch.manual_seed(0)
plain, persistent, seeded = different(), different(persistent_workers=True), different(worker_init_fn=seed_worker)
same = "the same" if first() == first() else "different"
print(f"Compose([RandomCrop]): {plain}; persistent_workers: {persistent}; with worker_init_fn: {seeded};", end=" ")
print(f"first draws after the same global seeds: {same}")
assert plain == 16 and persistent == 32 and seeded > 120 and same == "different"
EOF
