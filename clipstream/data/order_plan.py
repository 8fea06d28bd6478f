"""From settings to the order of a run's samples: the order of each source, the mix of sources, and the fingerprint.

The fingerprint is all that makes two runs' global batches the same. It is kept in checkpoints (`DataState.fingerprint`)
and compared when a run resumes; no shard is read for it. For the order, shards are read only to count samples that no
index has. Imports no torch, so that errors in the order are reported before torch is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np

from clipstream.data.decode.images import MAX_ASPECT
from clipstream.data.decode.key_lists import TABLES
from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.groups import GroupedOrder, NeighbourOrder, look_up
from clipstream.data.order.lanes import DataState, Fingerprint, LaneSlots, Mix, SourceMix, lanes_of_rank
from clipstream.data.order.rng import hash_of
from clipstream.data.order.windows import EpochPlan, IndexedOrder, Order, SourceOrder, SystematicDraws, group_size_for
from clipstream.data.settings import MAX_AUTO_WORKERS, DataSettings
from clipstream.data.sources import Source
from clipstream.data.sources.indexes import count_samples
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.storage.shard_url import ShardURL, redact, stable_name, whole_file
from clipstream.text import counted, lines
from clipstream.utils.logs import logger
from clipstream.utils.processes import cores

ORDER_VERSION = 2  # of the algorithm; another number is another order
MIXED_ORDER_VERSION = 3  # the same, of several sources and of the mode `epoch`
TOKENIZER = "tokenizer"
OF_ORDER = (  # settings of the data that the order depends on
    "global_batch_size", "batch_schedule", "lanes", "sampling.mode", "sampling.shards", "sampling.replacement",
    "sampling.remainder", "shuffle.window", "shuffle.shards",
)  # fmt: skip
ON_CPU = 2  # workers of a rank whose model is on the CPU
# Texts that tokenizers treat differently: case, digits, marks, other scripts, spaces, long words, long texts.
PROBES = (
    "a photo of a cat",
    "A Photo, of THE Cat's 12,345 whiskers!",
    "Zürich – naïve café № 7 ½",
    "照片上的猫 кошка на фото 🐈",
    "  two  spaces\tand a tab\n",
    "https://example.com/a_b-c.jpg &amp; <b>bold</b>",
    "antidisestablishmentarianism " * 40,
    "",
)


@dataclass(frozen=True)
class OrderPlan:
    mix: Mix  # of the sources
    sources: Sequence[Order]  # the order of each source, in the order of names
    epochs: EpochPlan | None = None  # in the mode `indexed`

    def remainder(self, step: int) -> dict[str, dict[str, int]]:
        """By source, the remainder of the exact epoch that ends with batch number `step`; {} if none does."""
        if self.epochs is None or (step + 1) % self.epochs.steps:
            return {}
        return dict(zip(self.epochs.names, self.epochs.remainders(), strict=True))


def order_plan(settings: DataSettings, sources: Sequence[Source], seed: int) -> OrderPlan:
    """The order that the settings choose.

    Args:
        settings: with `lanes` resolved.
        sources: in the order of names; `groups.look_up` was called for those of the mode `indexed`.

    Raises SettingsError: as `epoch_plan`, or an index has other numbers of samples than the shards.
    """
    lanes, shuffle, sampling = settings.lanes, settings.shuffle, settings.sampling
    assert isinstance(lanes, int), "resolve the settings first"
    split = sampling.shards == "split"
    if sampling.mode == "indexed":
        epochs = epoch_plan(settings, sources, seed, lanes)
        for source in sources:
            counts = source.counts or []
            looked = [known for known in (source.labels, source.probabilities) if known is not None]
            wrong = source.neighbours is not None and len(source.neighbours) != sum(counts)
            if wrong or any([len(one) for one in known] != counts for known in looked):
                raise SettingsError(f"{source.context.key}: its index is not of these shards: make it again")
            if source.labels is not None:
                return OrderPlan(epochs, [GroupedOrder(epochs, source.labels, settings.groups.samples)], epochs)
            if source.neighbours is not None:
                return OrderPlan(epochs, [NeighbourOrder(epochs, counts, source.neighbours)], epochs)
        exact = [
            IndexedOrder(
                epochs, i, source.counts or [], split=split, window=shuffle.window, draws=_draws(source),
                open_shards=shuffle.open_shards or group_size_for(lanes, len(source.names)),
            )
            for i, source in enumerate(sources)
        ]  # fmt: skip
        return OrderPlan(epochs, exact, epochs)
    orders = [source_order(settings, seed, i, len(source.names), source.factors) for i, source in enumerate(sources)]
    weights = tuple(settings.sources[name].weight for name in sorted(settings.sources))
    return OrderPlan(SourceMix(seed, weights, lanes, tuple(settings.batches)), orders)


def _draws(source: Source) -> SystematicDraws | None:
    return None if source.probabilities is None else SystematicDraws(np.concatenate(source.probabilities))


def source_order(
    settings: DataSettings, seed: int, source: int, shards: int, factors: tuple[float, ...] | None = None
) -> SourceOrder:
    """The order of source number `source` with so many shards, in the modes `resampled` and `epoch`.

    Args:
        settings: with `lanes` resolved.
    """
    sampling, shuffle = settings.sampling, settings.shuffle
    assert isinstance(settings.lanes, int), "resolve the settings first"
    return SourceOrder(
        seed, source, shards, settings.lanes, sampling.mode, shuffle.open_shards, shuffle.window,
        sampling.shards == "split", sampling.replacement, factors,
    )  # fmt: skip


def epoch_plan(settings: DataSettings, sources: Sequence[Source], seed: int = 0, lanes: int = 1) -> EpochPlan:
    """The epochs of the mode `indexed`; sets `counts` and `probabilities` of the sources, where they are None.

    Args:
        sources: in the order of names.
        seed, lanes: the length of an epoch does not depend on them.

    Raises SettingsError: samples cannot be counted, or there are too few for a batch.
    """
    names, samples = sorted(settings.sources), []
    for source in sources:
        counts = count_samples(source)
        if source.settings.probability is not None and source.probabilities is None:
            look_up(source, settings)
        draws = _draws(source)
        samples.append(sum(counts) if draws is None else draws.size)
    weights, batch = tuple(settings.sources[name].weight for name in names), settings.global_batch_size
    return EpochPlan(seed, tuple(names), tuple(samples), weights, batch, lanes, settings.sampling.remainder)


def fingerprint_of(settings: DataSettings, seed: int, tokenizer: Tokenizer, sources: Sequence[Source]) -> Fingerprint:
    """All that fixes the global batches, by the setting's name, as JSON values. The shards' folder does not matter.

    Args:
        settings: with `lanes` resolved.
        seed: of the run.
        tokenizer: identified by its ids of a few texts, wherever its files are.
        sources: in the order of names; in the mode `indexed` with the counts of their samples, and as for `order_plan`.
    """
    mode = settings.sampling.mode
    mixed = mode == "epoch" or (mode == "resampled" and len(settings.sources) > 1)
    order: Fingerprint = {
        "run.seed": seed,
        **{f"data.{key}": attrgetter(key)(settings) for key in OF_ORDER},
        TOKENIZER: tokenizer_identity(tokenizer),
        "the version of the order": MIXED_ORDER_VERSION if mixed else ORDER_VERSION,
    }
    for name, source in zip(sorted(settings.sources), sources, strict=True):
        held = "" if source.counts is None else f", with {sum(source.counts):,} samples {digest_of(source.counts)}"
        named = digest_of(stable_names(source.names))
        order[f"data.sources.{name}.shards"] = f"{len(source.names)}, named {named}{held}"
        order[f"data.sources.{name}.weight"] = settings.sources[name].weight
        if source.factors is not None:
            order[f"data.sources.{name}.upsampling_factors"] = settings.sources[name].upsampling_factors
        if source.labels is not None:
            digest = hash_of(np.concatenate(source.labels).tobytes())
            order["data.groups"] = f"{settings.groups.samples} samples by {settings.groups.by}, {digest:016x}"
        if source.neighbours is not None:
            order["data.hard_negatives"] = f"{source.neighbours.shape}, {hash_of(source.neighbours.tobytes()):016x}"
        if (where := settings.sources[name].probability) is not None:
            order[f"data.sources.{name}.probability"] = probability_identity(where, source)
    found: Fingerprint = json.loads(json.dumps(order))
    return found


def probability_identity(where: str, source: Source) -> str:
    """A source's probabilities by their values, or by its field or file in a mode that does not know all of them."""
    if source.probabilities is not None:
        return f"{hash_of(np.concatenate(source.probabilities).tobytes()):016x}"
    return f"{hash_of(Path(where).read_bytes()):016x}" if where.endswith(TABLES) else where


def differences(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """Setting -> 'old value -> new value' of all that differs."""
    return {
        key: f"{before.get(key, 'none')} -> {now.get(key, 'none')}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    }


def stable_names(urls: list[str]) -> list[str]:
    """Names of shards that stay the same when they are copied elsewhere or a signature in their URL is renewed."""
    names = [stable_name(url) for url in urls]
    unique = len(set(map(whole_file, names))) == len(set(map(whole_file, urls)))
    return names if unique else [redact(url) for url in urls]


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """A tokenizer by its ids, as files are moved and classes renamed."""
    ids = []
    for text in PROBES:
        try:
            ids.append(tokenizer.encode([text]).tolist())
        except Exception as error:  # a user's own may refuse a text that never occurs in its captions
            ids.append(type(error).__name__)
    return f"{tokenizer.vocab_size} tokens, {tokenizer.context_length} a text, of kind {digest_of(ids)}"


def views_of(settings: DataSettings, views: int, seed: int) -> dict[str, object]:
    """How `views` augmented views of each image are made, as JSON values; 0 for the pixels of evaluation."""
    if not views:
        return {"views": 0}
    if settings.decoder == "gpu":
        raise SettingsError("data.decoder gpu: not supported for stored features of augmented images: use fast")
    rest = json.loads(settings.augment.model_dump_json(exclude={"enabled"}))
    # Feature stores compare this record, in this order: `max_aspect` was a setting when the first ones were made.
    augment = {key: rest.pop(key) for key in ("scale", "ratio")} | {"max_aspect": float(MAX_ASPECT)} | rest
    return {"views": views, "seed": seed, "augment": augment, "decoder": settings.decoder}


def digest_of(value: object) -> str:
    """16 hexadecimal digits for a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def resume_at(
    start: DataState, fingerprint: Fingerprint, lanes: int, approximate: bool | Literal["stage"], world: World
) -> DataState:
    """The position to resume from; with another order, restarted under a new salt, so that it shows other samples."""
    if not start.fingerprint:  # a new run, or a checkpoint of open_clip: it has a step, and no position in the data
        return replace(start, fingerprint=fingerprint, lanes_total=lanes, restarted_at=start.step)
    changed = differences(start.fingerprint, fingerprint)
    if not changed:
        return start
    listed = [f"  {key}: {values}" for key, values in changed.items()]
    restart = bool(changed.keys() - {TOKENIZER})
    goes_on = "the data start anew, in a different order" if restart else "the data continue at their position"
    if not approximate:
        advice = (
            f"restore them, or set --resume-approximate: the run then continues at step {start.step}, and {goes_on}"
        )
        said = "--resume: the checkpoint's data order is not that of these settings:"
        raise SettingsError(lines(said, *listed, advice))
    if world.is_main and approximate != "stage":
        logger.warning(lines(f"--resume-approximate: from step {start.step} on, {goes_on}:", *listed))
    if restart:
        start = replace(start, lanes={}, salt=start.salt + 1, restarted_at=start.step)
    return replace(start, fingerprint=fingerprint, lanes_total=lanes)


def slots_of_rank(settings: DataSettings, world: World) -> LaneSlots:
    """The slots of this rank's lanes. Raises SettingsError: there are none in some batch."""
    lanes = settings.lanes
    assert isinstance(lanes, int), "resolve the settings first"
    slots = LaneSlots(lanes_of_rank(world.rank, world.size, lanes), lanes, settings.batch_size)
    for step, size in settings.batches:
        if slots.count(step) == 0:
            raise SettingsError(
                f"rank {world.rank} of {world.size} has no sample of a global batch of {size} with {lanes} lanes: use "
                "fewer ranks, or a larger --data.global-batch-size, --data.batch-schedule or --data.lanes"
            )
    return slots


def remote_shards_in_use(settings: DataSettings, sources: Mapping[str, Source], world: World) -> int:
    """Number of remote shards that the lanes of a node have open at once, at most."""
    lanes_of_node = -(-int(settings.lanes) * world.local_size // world.size)
    held = 0
    for source in sources.values():
        if remote := len({file for file in map(whole_file, source.names) if ShardURL(file).is_remote}):
            most = source_order(settings, 0, 0, len(source.names)).max_open(lanes_of_node)
            held += remote if settings.groups.by or settings.hard_negatives else min(remote, most)
    return held


def resolve_workers(settings: DataSettings, world: World) -> tuple[int, str]:
    """Workers of this rank, at most one for each lane; and why it is not the given number, '' if it is.

    Args:
        settings: with `lanes` resolved.
    """
    most = int(settings.lanes) // world.size
    if settings.workers == "auto":
        of = ", which train as well" if world.device == "cpu" else f" for {counted(world.local_size, 'rank')}"
        return min(auto_workers(world), most), f"{counted(cores(), 'core')}{of}"
    if settings.workers <= most:
        return settings.workers, ""
    why = f"{settings.lanes} lanes for {settings.workers} workers on each of {world.size} ranks "
    return most, f"{why}(more with --data.lanes, which changes the order of samples)"


def auto_workers(world: World) -> int:
    """Workers of a rank by the cores of its node alone.

    A GPU's rank gets a worker for each of its cores but one, which the training process needs; on a CPU, where the
    model takes the cores itself, two. Workers that wait for a slow disk may be worth more than that: `clipstream bench`
    measures several numbers.
    """
    share = max(1, cores() // world.local_size)
    return min(ON_CPU, share) if world.device == "cpu" else min(max(1, share - 1), MAX_AUTO_WORKERS)
