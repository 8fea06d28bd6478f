#!/usr/bin/env bash
# Lightning's EMAWeightAveraging never averages with two optimizers and an even update_every_n_steps, and then undoes the training.
#
# Versions: lightning 2.6.6, torch 2.15.0. The callback (callbacks/weight_averaging.py) updates after a batch if trainer.global_step
# less one is divisible by update_every_n_steps. global_step counts the steps of all optimizers: with two, as Muon for the
# matrices beside AdamW for the rest, it is even after every batch, and one less is odd: no even number divides it. The
# average stays the copy of the first weights that setup() made. Validation is done with the average, and at the end it is
# copied into the model, so that fit() gives back the weights it was given, in every bit; a checkpoint's state_dict has
# them too. Nothing is raised or logged, and the training loss falls as it should. With an odd number the average is updated
# every so many batches, and a single optimizer is not concerned. Use update_every_n_steps=1, with the decay's root, or
# override should_update. Before update_starting_at_step, too, the first weights are validated.
#
# Seen 2026-11-29 (200 batches; update_every_n_steps, updates of the average, last training loss, validation loss, weights
#   as at first)
#   AdamW: 1, 200, 0.66, 0.80, False; 2, 100, 0.66, 0.87, False; 5, 40, 0.66, 1.18, False; 10, 20, 0.66, 1.93, False
#   Muon and AdamW: 1, 200, 0.17, 0.15, False; 2, 0, 0.17, 9.85, True; 5, 40, 0.17, 0.18, False; 10, 0, 0.17, 9.85, True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 lightning==2.6.6
cat > "$work/towers.py" <<'EOT'
import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Towers(LightningModule):
    def __init__(self, two):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.two = False, two
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(2.6593))

    def configure_optimizers(self):
        if not self.two:
            return [torch.optim.AdamW(self.parameters(), lr=1e-3)]
        matrices = [parameter for parameter in self.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in self.parameters() if parameter.ndim != 2]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]

    def loss(self, batch):
        images, texts = (normalize(tower(part), dim=1) for tower, part in zip(self.towers, batch))
        logits, labels = self.logit_scale.exp() * images @ texts.T, torch.arange(len(images))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    def training_step(self, batch, number):
        loss = self.loss(batch)
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers() if self.two else [self.optimizers()]:
            optimizer.step()
        self.trained = loss.item()

    def validation_step(self, batch, number):
        self.validated = self.loss(batch).item()


random = torch.Generator().manual_seed(1)
images = torch.randn(128 * 50, 16, generator=random)
data = TensorDataset(images, images @ torch.randn(16, 16, generator=random))
loaders = DataLoader(data, batch_size=128), DataLoader(torch.utils.data.Subset(data, range(128)), batch_size=128)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
for two in (False, True):
    for every in (1, 2, 5, 10):
        average, model = EMAWeightAveraging(decay=0.9, update_every_n_steps=every), Towers(two)
        trainer = Trainer(accelerator="cpu", max_epochs=4, callbacks=[average], num_sanity_val_steps=0, **quiet)
        trainer.fit(model, *loaders)
        updates, fresh = int(average._average_model.n_averaged), Towers(two)
        same = all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters()))
        name = "Muon and AdamW" if two else "AdamW"
        print(f"{name}: {every}, {updates}, {model.trained:.2f}, {model.validated:.2f}, {same}", flush=True)
        nothing = two and every % 2 == 0
        assert updates == (0 if nothing else 200 // every) and same == nothing and model.trained < 2, (updates, same)
        assert (model.validated > 3) == nothing
EOT
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore "$work/towers.py"
