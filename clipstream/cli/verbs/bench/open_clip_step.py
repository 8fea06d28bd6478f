"""A training step of open_clip's trainer on the tensors of our batches: `open_clip_train.train.train_one_epoch` itself,
over one batch.

Towers and a batch enter; the loss leaves. open_clip's main is followed in what it sets: AdamW without `fused`, TF32 and
cuDNN's search for algorithms on a GPU, a loss scale with `amp`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from clipstream.data.batch import Batch
from clipstream.errors import SettingsError, errors_as
from clipstream.models.layers import restore_layers
from clipstream.models.towers import Towers
from clipstream.training.optim import AdamW, OptimSettings, parameter_groups

PRECISIONS = {"fp32": "fp32", "bf16": "amp_bf16", "fp16": "amp", "pure_bf16": "pure_bf16"}  # ours -> open_clip's
Prepared = tuple[torch.Tensor, torch.Tensor]  # normalised pixels and ids, as open_clip's loader gives them


class OpenClipStep:
    """A step on open_clip's model of the towers, which is trained in place.

    Args:
        towers: not sharded, in float32; their layers are those of open_clip afterwards.
        precision: of `PRECISIONS`.
        optim: of type adamw.
        name: the model's name, which betas and eps depend on.
        backend: of torch.compile, for the model as one graph (--torchcompile); None for no compilation.

    Raises SettingsError: open_clip's trainer is not installed, or does not train this model with these settings.
    """

    def __init__(
        self, towers: Towers, device: str, precision: str, optim: OptimSettings, name: str, backend: str | None = None
    ) -> None:
        with errors_as(SettingsError, "open_clip's trainer is not installed", ImportError):
            from open_clip.loss import ClipLoss, SigLipLoss
            from open_clip_train.train import train_one_epoch
        if not isinstance(optim, AdamW.Settings):
            raise SettingsError(f"open_clip's trainer has no optimizer {optim.type}")
        if precision not in PRECISIONS:
            raise SettingsError(f"open_clip's trainer has no precision {precision}")
        if towers.stored:
            raise SettingsError("open_clip's trainer reads no feature stores")
        if towers.own_precision:
            raise SettingsError("open_clip's trainer has no separate precision for locked towers")
        self.mean, self.std, self.device = towers.mean.to(device), towers.std.to(device), device
        restore_layers(towers.clip)
        model = towers.clip.to(device)
        model.output_dict = True
        if precision == "pure_bf16":
            model.to(torch.bfloat16)
        cuda = torch.device(device).type == "cuda"
        torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = cuda
        betas, eps = optim.defaults(name)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, optim.wd), lr=0.0, betas=betas, eps=eps)
        # open_clip gives a loss of one process no arguments, and that of SigLIP the rank and the number of ranks.
        self.loss: Any = ClipLoss() if towers.loss_type == "clip" else SigLipLoss(rank=0, world_size=1)
        if backend is not None:
            model = torch.compile(model, backend=backend)
        scaler = torch.amp.GradScaler(device=device) if precision == "fp16" else None
        self._last = torch.zeros(())
        options = argparse.Namespace(  # of a rank that logs nothing: it would wait for the loss
            device=device, precision=PRECISIONS[precision], distill=False, accum_freq=1, skip_scheduler=True,
            grad_clip_norm=optim.grad_clip_norm, horovod=False, local_rank=0, rank=1, log_local=False, world_size=1,
            log_every_n_steps=1000, wandb=False, trackio=False,
        )  # fmt: skip

        def run(batch: Prepared) -> None:
            options.batch_size = len(batch[1])
            data = {"train": SimpleNamespace(dataloader=_Loader(batch), set_epoch=lambda epoch: None)}
            train_one_epoch(model, data, self._keep_sum, 0, self.optimizer, scaler, None, None, options)

        self._run: Callable[[Prepared], None] = run
        logging.getLogger().setLevel(logging.WARNING)  # it logs a line for each batch

    def prepare(self, batch: Batch) -> Prepared:
        """The tensors that open_clip's loader would give for a batch."""
        pixels = batch.images.to(self.device)
        return (pixels.float() / 255 - self.mean) / self.std, batch.ids.to(self.device).long()

    def start(self, batch: Prepared, lr: float) -> Callable[[], float]:
        """Start one step, and return the function that waits for its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._run(batch)
        return partial(float, self._last)

    def _keep_sum(self, *args: Any, **kwargs: Any) -> Any:
        losses = self.loss(*args, **kwargs)
        self._last = sum(losses.values()).detach()
        return losses


class _Loader(list[Any]):
    """One batch in memory, with what open_clip_train reads of a loader."""

    def __init__(self, batch: Prepared) -> None:
        super().__init__([batch])
        self.num_batches, self.num_samples = 1, len(batch[1])
