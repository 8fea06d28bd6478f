"""Forward and backward passes of a batch: features, the loss on them, and its gradients down to the weights.

**Exactness.** A loss gives each rank its share of the global loss, and one backward pass on every rank gives gradients
whose sum over the ranks is that of the whole batch. DDP averages, so the share is multiplied by the number of ranks.

**Micro-batches** follow GradCache (arXiv:2101.06983). Chunks of the batch pass through the towers without a graph; the
loss is computed once on all features and gives their gradients; then each chunk passes through the towers again, with
the same random numbers, to propagate its features' gradients to the weights. The cost is one more forward pass and
memory for the features, n x 2D. The last `kept` chunks keep their graph from the first pass, so that k chunks cost
(k - kept) / k of a forward pass; as there is memory for so many, all chunks pass in groups of `kept`. A tower that does
not change runs in the first pass alone. Gradients are summed in the order of the backward passes: the kept chunks, then
the others. If the true lengths of texts are known, the chunks are made of the samples sorted by them. Ranks may have
different numbers of chunks: gradients are summed over the ranks once, in the last backward pass of each. Scale and bias
take part in it only, so that they are counted once.

`AutoMicroBatch` has micro-batches of the largest size that fits into memory.

**Search.** On the first batch, the number of samples that pass through the towers and back is doubled until memory runs
out, and then the gap is halved. Gradients are zero, and ballast stands for what a real step allocates besides. The
minimum over the ranks is used. The search is repeated when a larger batch arrives and the one before set no limit.

**Running out later.** All ranks take smaller chunks and repeat the batch with the same random numbers. In the first
TRUSTED steps after a search, each runs its chunks alone, and once all have succeeded, gradients are summed by a pass of
one sample with zero gradients. Later, DDP sums during the last backward pass; a rank that failed before it adds zeros.
The loss and the pass that sums are collective: on several ranks, running out of memory in one of them ends the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from clipstream.data.batch import Batch, Lengths, flat_lengths
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses.tiled import peak_bytes
from clipstream.models.precision import autocast
from clipstream.models.settings import Precision
from clipstream.training.parallel import is_sharded, no_sync, sums_gradients
from clipstream.training.state import same_randomness, set_torch_state, torch_state
from clipstream.utils.logs import logger
from clipstream.utils.timing import BACKWARD, COMMUNICATION, FORWARD, LOSS, begin_when_backward_ends, time_part

if TYPE_CHECKING:
    from clipstream.losses.contrastive import ContrastiveLoss
    from clipstream.models.towers import Features

# In errors of CUDA and torch's allocators; of cuBLAS and cuDNN, whose handles take memory at their first use; and of
# cuDNN 9 (CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED).
NO_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED",
)  # fmt: skip
FINENESS = 8  # the size found is at most 1/8 below the largest that fits
TRUSTED = 8  # steps in a row that fitted on all ranks, after which gradients are summed during the backward pass
FIRST = 8  # samples of the first trial: with huge batches, some libraries fail with errors other than out of memory
Forward = Callable[..., Any]  # images, texts and options of the model -> features


@dataclass(eq=False)
class GradCache:
    """Callable that adds the gradients of the global batch to the parameters."""

    towers: Any  # the model, not wrapped; `zeros`, `has_batch_norm` and `unchanging` are read
    model: nn.Module  # the same, wrapped in DDP or sharded
    loss: ContrastiveLoss  # returns this rank's share of the global loss
    world: World  # this rank among the others
    precision: Precision  # of the forward pass
    scaled: Callable[[torch.Tensor], torch.Tensor]  # applied to a share before its backward pass (GradScaler.scale)
    size: int | None = None  # samples per forward pass on this rank; None for all
    # chunks that pass together, of which the last ones keep their graph; with 0, none keeps it. One chunk at least is
    # computed again, as its backward pass sums over the ranks
    kept: int = 1

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the loss, and exp(logit_scale) as it was used. Raises SettingsError: memory runs out."""
        try:
            features, backward = self.forward(batch, self._features)
            leaves, share = self._loss(features, batch)
            backward(leaves)
            return share, leaves.logit_scale.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            size = "a smaller --train.micro-batch-size" if is_sharded(self.model) else "--train.micro-batch-size auto"
            advice = "a smaller batch" if self.towers.has_batch_norm else size
            raise SettingsError(
                f"memory ran out with {min(len(batch), self.size or len(batch))} samples at once: use {advice}, "
                f"--grad-checkpointing or another --precision ({str(error).splitlines()[0]})"
            ) from error

    def warm_up(self) -> None:
        """Forward and backward pass of two samples of zeros; its gradients are zero or nan, and have to be dropped."""
        features = self._features(*self.towers.zeros(2, self.world.device))
        propagate(features, detach(features))

    def forward(self, batch: Batch, last: Forward) -> tuple[Features, Callable[[Features], None]]:
        """The features of all samples, and the function that propagates gradients of their leaves to the weights. The
        forward pass of the last chunk, `last`, decides whether gradients are summed over the ranks.
        """
        n, device = len(batch), self.world.device
        count = -(-n // (self.size or n))
        if self.size is not None and is_sharded(self.model):
            count = max(self.world.gather_objects(count))  # every pass is collective
        if count == 1:
            features = last(batch.images, batch.texts, **MicroBatch(slice(None), n, batch.lengths).options(batch.known))
            return features, partial(propagate, features)
        # Of 5 chunks of which 2 keep their graph, cut makes passes of 1, 2 and 2: the last is `kept`, others run twice.
        joined = min(self.kept, count - 1)
        chunks, places = cut(batch, count, max(joined, 1))
        kept = chunks.pop() if joined else None
        states, parts, graph = [], [], []
        for chunk in chunks:
            states.append(torch_state(device))
            with torch.no_grad():
                options = chunk.options(batch.known)
                found = self._features(*chunk.images_texts(batch), module=self.towers, **options)
            parts.append((found, chunk.size))
        if kept is not None:
            graph.append(self._features_without_sync(*kept.images_texts(batch), **kept.options(batch.known)))
            parts.append((detach(graph[0]), kept.size))
        images, texts = (torch.cat(rows) for rows in zip(*((p.image[:n], p.text[:n]) for p, n in parts), strict=True))
        if places is not None:
            images, texts = images.index_select(0, places), texts.index_select(0, places)

        def backward(leaves: Features) -> None:
            after, known = torch_state(device), self.towers.unchanging().union(batch.known)
            if kept is not None:
                with no_sync(self.model):
                    propagate(graph.pop(), kept.leaves(leaves), scalars=False)
            for chunk, state in zip(chunks, states, strict=True):
                set_torch_state(state, device)
                rows, is_last = chunk.leaves(leaves), chunk is chunks[-1]
                forward = last if is_last else self._features_without_sync
                features = forward(*chunk.images_texts(batch, rows, known), **chunk.options(known))
                with nullcontext() if is_last else no_sync(self.model):
                    propagate(features, rows, scalars=is_last)
            set_torch_state(after, device)

        return parts[0][0]._replace(image=images, text=texts), backward

    def _features_without_sync(self, images: torch.Tensor, texts: torch.Tensor, **options: Any) -> Features:
        """Features whose backward pass does not sum gradients over the ranks."""
        with no_sync(self.model):
            return self._features(images, texts, **options)

    def _features(
        self, images: torch.Tensor, texts: torch.Tensor, *, module: nn.Module | None = None, **options: Any
    ) -> Features:
        if is_sharded(module or self.model) and "lengths" in options:
            options["lengths"] = array("i", options["lengths"])  # FSDP2 would look at each number of a tuple
        with autocast(self.world.device, self.precision), time_part(FORWARD):
            features: Features = (module or self.model)(images, texts, **options)
        if sums_gradients(self.model):
            first = next((output for output in features if output is not None and output.requires_grad), None)
            if first is not None:
                begin_when_backward_ends(COMMUNICATION, first)
        return features

    def _loss(self, features: Features, batch: Batch) -> tuple[Features, torch.Tensor]:
        """The features as leaves with gradients of the global loss (times the number of ranks), and the share."""
        leaves = detach(features)
        for leaf in leaves:
            if leaf is not None:
                leaf.requires_grad_()
        with time_part(LOSS):
            share = self.loss(leaves, batch, self.world)
            self.scaled(share * self.world.size).backward()  # type: ignore[no-untyped-call]
        return leaves, share.detach()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of CUDA, of its libraries or of the CPU says that memory ran out."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def detach(features: Features) -> Features:
    """The features without their graph."""
    return type(features)._make(None if one is None else one.detach() for one in features)


def propagate(features: Features, leaves: Features, *, scalars: bool = True) -> None:
    """Backward pass of the towers from the gradients of `leaves`; zeros if the loss did not use a feature. With
    `scalars`, scale and bias of the logits take part.
    """
    count = len(features) if scalars else 2
    outputs, gradients = [], []
    for output, leaf in zip(features[:count], leaves[:count], strict=True):
        if output is not None and leaf is not None and output.requires_grad:
            outputs.append(output)
            gradients.append(torch.zeros_like(output) if leaf.grad is None else leaf.grad.to(output.dtype))
    if outputs:
        with time_part(BACKWARD):
            torch.autograd.backward(outputs, gradients)


@dataclass(frozen=True)
class MicroBatch:
    """Samples of a batch that pass through the towers together."""

    rows: Any  # slice, or int64 tensor on the batch's device; of an empty chunk a single sample
    size: int  # samples; 0 on a rank that has fewer samples than there are chunks, as the other ranks wait for its pass
    lengths: Lengths | None  # true lengths of the texts

    def images_texts(
        self, batch: Batch, leaves: Features | None = None, known: Collection[str] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of the towers; of those in `known`, the features in `leaves`."""
        image = leaves.image if leaves is not None and "image" in known else batch.images[self.rows]
        text = leaves.text if leaves is not None and "text" in known else batch.texts[self.rows]
        return image, text

    def options(self, known: Collection[str] = ()) -> dict[str, Any]:
        options: dict[str, Any] = {} if self.lengths is None else {"lengths": flat_lengths(self.lengths)}
        return {**options, "known": known} if known else options

    def leaves(self, leaves: Features) -> Features:
        """The chunk's rows of the leaves with their gradients; of an empty one, a row without gradient."""
        image, text = (leaf.detach()[self.rows] for leaf in (leaves.image, leaves.text))
        for part, leaf in ((image, leaves.image), (text, leaves.text)):
            part.grad = None if leaf.grad is None or not self.size else leaf.grad[self.rows]
        return leaves._replace(image=image, text=text)


def cut(batch: Batch, count: int, together: int = 1) -> tuple[list[MicroBatch], torch.Tensor | None]:
    """Chunks of equal size, as a small last one would cost a whole pass; with n < count, some are empty.

    If the texts' lengths are known, samples are sorted by them, and the place of each sample among the chunks comes
    with the chunks. So many of the `count` chunks are joined `together`; the first of the joined ones may have fewer.
    """
    n = len(batch)
    firsts = [0, *range(count % together or together, count, together)]
    bounds = list(pairwise([*(n * number // count for number in firsts), n]))
    if batch.lengths is None:
        parts = [slice(start, stop) if stop > start else slice(0, 1) for start, stop in bounds]
        return [MicroBatch(rows, stop - start, None) for rows, (start, stop) in zip(parts, bounds, strict=True)], None
    lengths: Any = batch.lengths
    device = batch.texts.device
    order = sorted(range(n), key=lengths.__getitem__)
    chunks = []
    for start, stop in bounds:
        own = order[start:stop] or order[:1]
        rows = torch.tensor(own).to(device, non_blocking=True)
        chunks.append(MicroBatch(rows, stop - start, tuple(lengths[row] for row in own)))
    places = torch.empty(n, dtype=torch.long)
    places[order] = torch.arange(n)
    return chunks, places.to(device, non_blocking=True)


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
                text = f"out of memory with {before} samples at once; the step is repeated with {self.size or 0}"
                logger.warning(text)

    def _attempt(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One try of the step; None on all ranks if one ran out of memory while no rank waited for it."""
        # At first, passes sum no gradients over ranks, so that any may fail, and a pass of zeros sums them at the end.
        # Once steps have fitted, DDP sums during the last backward pass (`overlapped`), where no rank may fail alone.
        overlapped, summing = self.fitted >= TRUSTED, False

        def last(*args: Any, **options: Any) -> Features:
            nonlocal summing
            features = self._features(*args, **options) if overlapped else self._features_without_sync(*args, **options)
            summing = sums_gradients(self.model) and overlapped
            return features

        made = self._try(lambda: self.forward(batch, last))
        if any(self.world.any(made is None)):
            del made
            if overlapped:  # a rank's DDP may be set to sum in the next backward pass, whichever it is
                self._sum_zeros(batch)
            return None
        features, backward = made
        # The loss exchanges features: a rank that fails here leaves the others waiting.
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
                propagate(one, detach(one))

    def _too_late(self, where: str) -> SettingsError:
        below = f" below {self.size}" if self.size else ""
        advice = f"set --train.micro-batch-size to a number{below}, or use a smaller batch"
        return SettingsError(f"memory ran out in {where}, in which ranks wait for each other: {advice}")

    def _search(self, batch: Batch, most: int | None = None) -> None:
        """Find `size`, at most `most` samples if given. Collective.

        Raises SettingsError: on all ranks, if on one of them not even one sample fits.
        """
        n = len(batch)
        top = n if most is None else min(n, most)

        def trial(tried: int) -> bool:
            """Passes of the first samples, with zero gradients and the memory that a loss takes."""
            with same_randomness(self.world.device), self.trial_context():
                features = self._features_without_sync(batch.images[:tried], batch.texts[:tried], **options_of(batch))
                size = peak_bytes(self.loss, n, batch.global_size, features.text.shape[1], self.world)
                of_loss = features.image.new_empty(size, dtype=torch.uint8)
                propagate(features, detach(features))
                del of_loss
            return True

        fits = self._largest(top, min(FIRST, top), trial)
        # A rank that could take all of its samples sets no limit.
        limits = [found for found, count in self.world.gather_objects((fits, n)) if found < count]
        limits += [] if most is None else [most]
        if 0 in limits:
            advice = "use a smaller model, --grad-checkpointing, or another --precision"
            raise SettingsError(f"train.micro_batch_size: memory runs out with a single sample: {advice}")
        first = not self.tried_for
        self.tried_for, self.fitted = batch.global_size, 0
        self.size = min(limits) if limits else None
        if limits and first and self.world.is_main:
            logger.info(f"train.micro_batch_size: {self.size} samples fit at once")

    def _largest(self, top: int, first: int, trial: Callable[[int], bool]) -> int:
        """The largest number up to `top`, to 1 / FINENESS, for which the trial finds memory, beginning at `first`; 0 if
        there is none.
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
