"""Owns micro-batches of the size that fits: it is searched on the first batch, and a step without memory is repeated.

**The search** doubles the samples that go through the towers and back with gradients of zero, beside ballast in place
of what a step holds more, and then halves the gap. The least of all ranks counts. It is made again where a larger batch
comes and the one before set no limit.

**Running out later.** Nothing that goes through the towers waits for other ranks meanwhile: each goes through its
chunks alone, the ranks say whether they could, and only then are gradients summed, by a pass of one sample with
gradients of zero. Where one could not, all take smaller chunks and go through the batch again, with the same random
numbers. The loss does wait: on several ranks, running out of memory in it ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from clipstream.batch import Batch
from clipstream.errors import SettingsError
from clipstream.training.passes import Passes, carry, detached, is_out_of_memory
from clipstream.training.precision import same_randomness, set_torch_state, torch_state

MicroBatch = int | Literal["auto"] | None
FINENESS = 8  # what is found is at most this part of it below the largest that fits
FIRST = 8  # samples of the first trial: some libraries fail otherwise than for want of memory where a batch is huge


class FittingPasses(Passes):
    """Passes with as many samples at once as fit.

    Args:
        unmade: bytes that the optimiser will take and has not taken yet.
        more: as Passes.

    Attributes:
        size: samples at once; None where all of `tried_for` fit.
        tried_for: samples of the global batch that the search was made on; 0 for none.
    """

    def __init__(self, *args: Any, unmade: Callable[[], int] = lambda: 0, **more: Any) -> None:
        super().__init__(*args, micro_batch_size=None, **more)
        self.tried_for = 0
        self.unmade = unmade

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See Passes; on all ranks alike.

        Raises:
            SettingsError: not even one sample fits.
        """
        if self.size is None and batch.global_size > self.tried_for:
            self._search(batch)
        while True:
            state = torch_state(self.world.device)
            found = self._alone(batch)
            if found is not None:
                return found
            self.model.zero_grad(set_to_none=True)
            set_torch_state(state, self.world.device)
            before = self.size or max(self.world.gather_objects(len(batch)))
            self._search(batch, before - max(1, before // FINENESS))
            self._say(f"warning: out of memory with {before} samples at once; the step is repeated with {self.size}")

    def _alone(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The passes of a step, with no rank in want of memory while others wait; None where one ran out."""
        count = self._chunks_of(batch)
        whole = count == 1

        def forward() -> Any:
            return self._unsummed(batch.pixels, batch.ids) if whole else self._without_graph(batch, count)

        made = self._try(forward)
        if not all(self.world.gather_objects(made is not None)):
            return None
        features = made if whole else made[2]
        found = self._try(lambda: self._loss(features, batch))
        if found is None:
            if self.world.size == 1:
                return None
            raise SettingsError(
                "memory ran out in the loss, in which ranks wait for each other: give --train.micro-batch-size a "
                "number, so that more is left for it, or take a smaller batch"
            )
        leaves, share = found

        def backward() -> bool:
            if whole:
                carry(features, leaves)
            else:
                self._with_graph(batch, made[0], made[1], leaves, self._unsummed)
            return True

        if not all(self.world.gather_objects(self._try(backward) is not None)):
            return None
        if self.world.size > 1:
            assert batch.pixels is not None
            with same_randomness(self.world.device):
                one = self._features(self.model, batch.pixels[:1], batch.ids[:1])
                carry(one, detached(one))
        return share, leaves.logit_scale.detach()

    def _search(self, batch: Batch, most: int | None = None) -> None:
        """Find the size, at most `most` samples where that is given. Collective.

        Raises:
            SettingsError: on all ranks, where on one not even one sample goes through.
        """
        n = len(batch)
        top = n if most is None else min(n, most)
        fits, fails = 0, top + 1
        tried = min(FIRST, top)
        ballast = self._try(lambda: torch.empty(self.unmade(), dtype=torch.uint8, device=self.world.device))
        while fits < top if fails > top else fails - fits > max(1, fits // FINENESS):
            if self._try(lambda size=tried: self._trial(batch, size)) is not None:  # type: ignore[misc]
                fits = tried
            else:
                fails = tried
            tried = min(2 * fits, top) if fails > top else (fits + fails) // 2
        del ballast
        self.model.zero_grad(set_to_none=True)
        # A rank that could take all of its samples sets no limit.
        limits = [found for found, count in self.world.gather_objects((fits, n)) if found < count]
        limits += [] if most is None else [most]
        if 0 in limits:
            raise SettingsError(
                "train.micro_batch_size: memory runs out with a single sample; take a smaller model, "
                "--grad-checkpointing, or another --precision"
            )
        first = not self.tried_for
        self.tried_for = batch.global_size
        self.size = min(limits) if limits else None
        if limits and first:
            self._say(f"train.micro_batch_size: {self.size} samples fit at once")

    def _trial(self, batch: Batch, size: int) -> bool:
        """The first samples through the towers and back, with gradients of zero and the room that a loss takes."""
        assert batch.pixels is not None, "a batch of precomputed features has no pixels to cut"
        with same_randomness(self.world.device):
            features = self._unsummed(batch.pixels[:size], batch.ids[:size])
            # Features and gradients of the whole batch, and as much under way between ranks.
            room = features.image.new_empty((6, len(batch), features.image.shape[1]))
            carry(features, detached(features))
            del room
        return True

    def _try(self, function: Callable[[], Any]) -> Any:
        """What it gives; None where memory runs out."""
        try:
            return function()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside of `except`, whose traceback holds the tensors.
        if self.world.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return None

    def _say(self, text: str) -> None:
        if self.world.is_main:
            print(text, file=sys.stderr, flush=True)
