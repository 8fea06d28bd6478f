"""Micro-batches of the largest size that fits into memory.

**Search.** On the first batch, the number of samples that pass through the towers and back is doubled until memory runs
out, and then the gap is halved. Gradients are zero, and ballast stands for what a real step allocates besides. The
minimum over the ranks is used. The search is repeated when a larger batch arrives and the one before set no limit.

**Running out later.** In the first TRUSTED steps after a search, no rank waits for another until all have finished
their chunks: each runs its chunks alone, then the ranks agree whether all succeeded, and only then are gradients
summed, by a pass of one sample with zero gradients. In later steps, DDP sums during the last backward pass, as it does
without this module; a rank that ran out of memory before that pass adds zeros, and then the ranks agree. If a rank
failed, all take smaller chunks and repeat the batch with the same random numbers. The loss is
collective, and so is the pass that sums: on several ranks, running out of memory in one of them ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from clipstream.data.batch import Batch
from clipstream.errors import SettingsError
from clipstream.losses.tiled import peak_bytes
from clipstream.training.gradcache import GradCache, detached, is_out_of_memory, propagate
from clipstream.training.parallel import sums_gradients
from clipstream.training.precision import same_randomness, set_torch_state, torch_state
from clipstream.utils.logs import logger

if TYPE_CHECKING:
    from clipstream.models.towers import Features

FINENESS = 8  # the size found is at most 1/8 below the largest that fits
TRUSTED = 8  # steps in a row that fitted on all ranks, after which gradients are summed during the backward pass
FIRST = 8  # samples of the first trial: with huge batches, some libraries fail with errors other than out of memory


@dataclass(eq=False)
class AutoMicroBatch(GradCache):
    """GradCache with as many samples per pass as fit."""

    reserved: Callable[[], int] = lambda: 0  # returns the memory that the optimizer has still to allocate, in bytes
    trial_context: Callable[[], AbstractContextManager[Any]] = nullcontext  # of the search's passes
    # global batch size of the last search, whose samples all fit if `size` is None; 0 before the first
    tried_for: int = 0
    fitted: int = 0  # steps since the last search, or since the model changed

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See GradCache; all ranks repeat a step together.

        Raises SettingsError: not even one sample fits.
        """
        if batch.global_size > self.tried_for and self.size is None:
            self._search(batch)
        while True:
            state = torch_state(self.world.device)
            found = self._attempt(batch)
            if found is not None:
                self.fitted += 1
                return found
            self.model.zero_grad(set_to_none=True)
            set_torch_state(state, self.world.device)
            before = self.size or max(self.world.gather_objects(len(batch)))
            self._search(batch, before - max(1, before // FINENESS))
            if self.world.is_main:
                logger.warning(
                    f"out of memory with {before} samples at once; the step is repeated with {self.size or 0}"
                )

    def _attempt(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One try of the step; None on all ranks if one ran out of memory while no rank waited for it."""
        overlapped, summing = self.fitted >= TRUSTED, False

        def last(*args: Any, **options: Any) -> Features:
            nonlocal summing
            features = self._features(*args, **options) if overlapped else self._unsummed(*args, **options)
            summing = sums_gradients(self.model) and overlapped
            return features

        made = self._try(lambda: self.forward(batch, last))
        if any(self.world.any(made is None)):
            del made
            if overlapped:  # a rank's DDP may be set to sum in the next backward pass, whichever it is
                self._sum_zeros(batch)
            return None
        features, backward = made
        found = self._try(lambda: self._loss(features, batch))
        if found is None:
            if self.world.size == 1:
                return None
            raise self._too_late("the loss")
        leaves, share = found
        done = self._try(lambda: (backward(leaves),)) is not None
        if summing and not done:
            raise self._too_late("the backward pass that sums gradients")
        if overlapped and not done:
            self._sum_zeros(batch)
        if any(self.world.any(not done)):
            return None
        if not overlapped:
            self._sum_zeros(batch)
        return share, leaves.logit_scale.detach()

    def _sum_zeros(self, batch: Batch) -> None:
        """Take part in the sum of gradients over the ranks, adding nothing."""
        if self.world.size > 1:
            with same_randomness(self.world.device):
                one = self._features(batch.images[:1], batch.texts[:1], **options_of(batch))
                propagate(one, detached(one))

    def _too_late(self, where: str) -> SettingsError:
        below = f" below {self.size}" if self.size else ""
        return SettingsError(
            f"memory ran out in {where}, in which ranks wait for each other: set --train.micro-batch-size to a "
            f"number{below}, or use a smaller batch"
        )

    def _search(self, batch: Batch, most: int | None = None) -> None:
        """Find `size`, at most `most` samples if given. Collective.

        Raises SettingsError: on all ranks, if on one of them not even one sample fits.
        """
        n = len(batch)
        top = n if most is None else min(n, most)

        def trial(tried: int) -> bool:
            """Passes of the first samples, with zero gradients and the memory that a loss takes."""
            with same_randomness(self.world.device), self.trial_context():
                features = self._unsummed(batch.images[:tried], batch.texts[:tried], **options_of(batch))
                size = peak_bytes(self.loss, n, batch.global_size, features.image.shape[1], self.world)
                of_loss = features.image.new_empty(size, dtype=torch.uint8)
                propagate(features, detached(features))
                del of_loss
            return True

        fits = self._largest(top, min(FIRST, top), trial)
        # A rank that could take all of its samples sets no limit.
        limits = [found for found, count in self.world.gather_objects((fits, n)) if found < count]
        limits += [] if most is None else [most]
        if 0 in limits:
            raise SettingsError(
                "train.micro_batch_size: memory runs out with a single sample: use a smaller model, "
                "--grad-checkpointing, or another --precision"
            )
        first = not self.tried_for
        self.tried_for, self.fitted = batch.global_size, 0
        self.size = min(limits) if limits else None
        if limits and first and self.world.is_main:
            logger.info(f"train.micro_batch_size: {self.size} samples fit at once")

    def _largest(self, top: int, first: int, trial: Callable[[int], bool]) -> int:
        """The largest number up to `top`, to 1 / FINENESS, for which the trial finds memory; 0 if there is none.

        Args:
            first: the first number that is tried.
        """
        fits, fails, tried = 0, top + 1, first
        ballast = self._try(lambda: torch.empty(self.reserved(), dtype=torch.uint8, device=self.world.device))
        while fits < top if fails > top else fails - fits > max(1, fits // FINENESS):
            if self._try(partial(trial, tried)):
                fits = tried
            else:
                fails = tried
            tried = min(2 * fits, top) if fails > top else (fits + fails) // 2
        del ballast
        self.model.zero_grad(set_to_none=True)
        return fits

    def _try(self, function: Callable[[], Any]) -> Any:
        """The function's result; None if memory runs out."""
        try:
            return function()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside of `except`, whose traceback holds the tensors.
        if self.world.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return None


def options_of(batch: Batch) -> dict[str, Any]:
    """Further arguments of the towers for samples of a batch whose texts have no known length."""
    return {"known": batch.known} if batch.known else {}
