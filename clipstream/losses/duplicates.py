"""A warning for batches in which many samples occur more than once, and so count as negatives of themselves."""

from __future__ import annotations

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.losses.settings import LossSettings
from clipstream.utils.logs import logger

ENOUGH = 0.7  # share of distinct samples in a batch: a data set of 2 batches gives 0.79, of 1 batch 0.63


def warn_of_duplicates(settings: LossSettings, batch: Batch, world: World) -> None:
    """Print a warning if the loss takes duplicates as negatives and the batch has many. Collective."""
    if getattr(settings, "duplicates", "") != "negatives":
        return
    pictures = [None] * len(batch) if batch.pictures is None else batch.pictures.tolist()
    named = {key for key in zip(batch.keys, pictures, strict=True) if key[0]}
    keys = set().union(*world.gather_objects(named))
    if world.is_main and len(keys) < ENOUGH * batch.global_size:
        logger.warning(
            f"the first batch of {batch.global_size:,} samples holds only {len(keys):,} different "
            "ones, as the data set has few, and the loss takes the copies of a sample as its negatives: give "
            "a smaller --data.global-batch-size, or --loss.duplicates mask --loss.duplicates-by pictures"
        )
