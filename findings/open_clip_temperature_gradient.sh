#!/usr/bin/env bash
# open_clip multiplies the gradient of the temperature by --accum-freq, and divides those of the towers by the number of ranks.
#
# Versions: open_clip_torch 3.3.0, torch 2.15.0. --accum-freq k computes the loss of all k micro-batches k times, each time with the
# gradient of one micro-batch's features (open_clip_train/train.py); logit_scale, and SigLIP's logit_bias, get their full
# gradient every time. Without --local-loss and --gather-with-grad, the default, each of N ranks has the loss of all pairs and
# the gradient of its own features alone, of which DDP takes the mean: 1/N for the towers, 1 for logit_scale. The README calls
# the two ways one-to-one the same. So one global batch, laid out on other ranks and micro-batches, has another ratio of these
# gradients, k * N of the true one; the loss is the same to the last figure. AdamW hides a constant factor, but
# --grad-clip-norm sees the norm of all: it cuts nothing where it should (1/N), or cuts the towers for the temperature's k.
# Divide logit_scale.grad and logit_bias.grad by k before clipping, and use both flags.
#
# Seen 2026-11-29 (the same 64 pairs; gradients of towers, logit_scale, logit_bias as factors of one process without accumulation)
#   CLIP: k 4: 1.00, 4.00; 4 ranks: 0.25, 1.00; 4 ranks, both flags: 1.00, 1.00; 4 ranks, k 4: 0.25, 4.00
#   SigLIP: k 4: 1.00, 4.00, 4.00; 4 ranks: 1.00, 1.00, 1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchvision==0.29.2 timm==1.0.31 open_clip_torch==3.3.0
cat > "$work/step.py" <<'EOT'
import multiprocessing
import sys
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
from open_clip.factory import create_loss
from open_clip.model import CLIP
from open_clip_train.train import train_one_epoch


def rank(number, ranks, k, flags, siglip, folder, answers):
    """Puts the gradients of one step of open_clip's own loop: of the towers as one vector, logit_scale, logit_bias."""
    torch.manual_seed(0)
    vision, text = {"image_size": 32, "patch_size": 16, "head_width": 16}, {"vocab_size": 100, "context_length": 8, "heads": 2}
    tower, bias = {"width": 32, "layers": 2}, {"init_logit_bias": -10.0} if siglip else {}
    model = plain = CLIP(32, {**vision, **tower}, {**text, **tower}, **bias, output_dict=True)
    images, texts = torch.randn(64, 3, 32, 32), torch.randint(1, 99, (64, 8))
    pairs = 64 // ranks // k
    starts = range(number * pairs * k, (number + 1) * pairs * k, pairs)
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=number, world_size=ranks)
        model = torch.nn.parallel.DistributedDataParallel(model)
    args = SimpleNamespace(
        device="cpu", precision="fp32", distill=False, accum_freq=k, skip_scheduler=True, horovod=False, grad_clip_norm=None,
        rank=number, world_size=ranks, log_every_n_steps=1, batch_size=pairs, wandb=False, siglip=siglip, model="",
        local_loss=flags, gather_with_grad=flags, loss_dist_impl=None, distributed=ranks > 1)
    loader = type("Loader", (list,), {"num_batches": k, "num_samples": 64})(
        (images[start : start + pairs], texts[start : start + pairs]) for start in starts)
    data = {"train": SimpleNamespace(set_epoch=lambda _: None, dataloader=loader)}
    train_one_epoch(model, data, create_loss(args), 0, torch.optim.SGD(model.parameters(), lr=0.0), None, None, None, args)
    scalars = [value.grad.item() for name, value in plain.named_parameters() if name.startswith("logit_")]
    towers = [value.grad.flatten() for name, value in plain.named_parameters() if not name.startswith("logit_")]
    if number == 0:
        answers.put((torch.cat(towers).tolist(), scalars))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def gradients(ranks, k, flags, siglip):
    context = multiprocessing.get_context("fork")
    answers, folder = context.SimpleQueue(), tempfile.mkdtemp(dir=sys.argv[1])
    started = [context.Process(target=rank, args=(n, ranks, k, flags, siglip, folder, answers)) for n in range(ranks)]
    for process in started:
        process.start()
    towers, scalars = answers.get()
    for process in started:
        process.join()
    return torch.tensor(towers), scalars


def factors(*layout):
    (true, true_scalars), (towers, scalars) = gradients(1, 1, False, layout[-1]), gradients(*layout)
    factor = (towers @ true / (true @ true)).item()
    assert (towers - factor * true).norm() < 1e-3 * true.norm()
    return [factor, *(one / other for one, other in zip(scalars, true_scalars))]


layouts = {"k 4": (1, 4, False), "4 ranks": (4, 1, False), "4 ranks, both flags": (4, 1, True), "4 ranks, k 4": (4, 4, False)}
expected = [[1, 4], [0.25, 1], [1, 1], [0.25, 4], [1, 4, 4], [1, 1, 1]]
found = [factors(*layout, False) for layout in layouts.values()] + [factors(*layouts[n], True) for n in ("k 4", "4 ranks")]
told = [", ".join(f"{factor:.2f}" for factor in one) for one in found]
print("CLIP: " + "; ".join(f"{name}: {one}" for name, one in zip(layouts, told)))
print("SigLIP: " + "; ".join(f"{name}: {one}" for name, one in zip(("k 4", "4 ranks"), told[4:])))
assert all(abs(a - b) < 0.01 for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))
EOT
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 \
    "$work/venv/bin/python" -W ignore "$work/step.py" "$work" 2> "$work/log" || { tail -20 "$work/log"; exit 1; }
