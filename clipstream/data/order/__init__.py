"""Which sample comes when: pure arithmetic on the seed, the settings and the number of shards or samples.

A position (lane, source, group, window) enters; the shards to open and the samples of a window leave. `rng` has the
hashes and permutations; `lanes` cuts the global batch into lanes, chooses the source of each sample, and has the
position as checkpoints keep it; `windows` orders the samples of one source, and makes epochs exact.
"""

from __future__ import annotations

MIN_LANES, MAX_LANES = 192, 3072


def default_lanes(batch: int) -> int:
    """The default number of lanes for global batches of `batch` samples; it depends on nothing else.

    192·2^k, about 3 lanes for 16 samples of a large batch: large batches come with many ranks and workers, which divide
    192·2^k evenly. Each lane has one shard open then. The number of pairs of samples from one shard in a batch,
    relative to independent draws, is about 1 + S (1/L - 1/B) for S shards, L lanes and batches of B: 4.3 at 1,000
    shards and 512 samples, 2.1 at 4,096.
    """
    lanes = MIN_LANES
    while lanes < MAX_LANES and 32 * lanes <= 3 * batch:
        lanes *= 2
    return min(lanes, batch)
