#!/usr/bin/env bash
# A column `label` in the data makes the gradients of CLIP and SigLIP k times as large under gradient accumulation of k.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0. CLIPModel.forward has **kwargs, so Trainer takes it for a model
# that divides its loss by num_items_in_batch (trainer.py: model_accepts_loss_kwargs). It counts items only if a batch has
# `labels`, as default_data_collator renames a column `label` (class folders have one). Then it neither divides the loss by
# the number of micro-batches, nor does the contrastive loss use the count, nor is anything said about the unused labels.
# So the logged loss and the gradients grow with gradient_accumulation_steps (with the number of processes, too, by the same
# code), and clipping at max_grad_norm=1 hides it. Remove the column, or set trainer.loss_is_scaled_for_ga = False.
#
# Seen 2026-11-29 (the same micro-batch four times, so that accumulation must not change the figures): loss, norm of gradients
#   CLIPModel: 2.45, 37.1; accumulated 2.45, 37.1; with a column `label` 2.45, 37.1; accumulated 9.82, 148.3
#   SiglipModel: 5.42, 7.0; accumulated 5.42, 7.0; with a column `label` 5.42, 7.0; accumulated 21.70, 28.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.1 torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$work"
CUDA_VISIBLE_DEVICES='' HF_HUB_OFFLINE=1 venv/bin/python -W ignore - 2> log <<'EOF' || { tail -20 log; exit 1; }
import torch
from transformers import (CLIPConfig, CLIPModel, PrinterCallback, SiglipConfig, SiglipModel, Trainer, TrainingArguments,
                          default_data_collator)

tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
vision = {**tower, "image_size": 32, "patch_size": 16}
text = {**tower, "vocab_size": 100, "max_position_embeddings": 16, "bos_token_id": 98, "eos_token_id": 99}
configs = {CLIPModel: CLIPConfig(text_config=text, vision_config=vision, projection_dim=24),
           SiglipModel: SiglipConfig(text_config=text, vision_config=vision)}
random = torch.Generator().manual_seed(0)
pairs = [{"pixel_values": torch.randn(3, 32, 32, generator=random),
          "input_ids": torch.randint(0, 98, (8,), generator=random)} for _ in range(8)]


class Loss(Trainer):
    """Asks the model for its loss, which is of the pairs of one micro-batch."""

    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, {**inputs, "return_loss": True}, **options)

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def first_step(kind, k, label):
    torch.manual_seed(0)
    data = [pair | ({"label": 3} if label else {}) for pair in pairs] * k
    trainer = Loss(kind(configs[kind]), TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=k, max_steps=1, logging_steps=1,
        max_grad_norm=1e9, learning_rate=0.0, report_to=[], save_strategy="no", disable_tqdm=True), train_dataset=data,
        data_collator=default_data_collator)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]


for kind in configs:
    found = [first_step(kind, k, label) for label in (False, True) for k in (1, 4)]
    told = [f"{loss:.2f}, {norm:.1f}" for loss, norm in found]
    print(f"{kind.__name__}: {told[0]}; accumulated {told[1]}; with a column `label` {told[2]}; accumulated {told[3]}")
    times = [norm / found[0][1] for _, norm in found]
    assert all(abs(one - other) < 0.01 for one, other in zip(times, (1, 1, 1, 4))), times
EOF
