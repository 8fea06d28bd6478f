#!/usr/bin/env bash
# pylance's torch samplers shuffle each epoch alike, set_epoch() or not, and reset Python's random numbers with it.
#
# Versions: pylance 14.0.2, torch 2.15.0. ShardedFragmentSampler and ShardedBatchSampler take randomize, seed and set_epoch() as
# torch's DistributedSampler does. The first one always, and the second without a filter, call random.seed(self._seed) and shuffle
# (sampler.py: iter_fragments, _sample_all); the epoch that was set is not read, so all epochs have one order. Only the order of
# fragments or batches is shuffled: a batch holds the same rows, and a contrastive loss the same negatives, in every epoch. What
# is seeded is the generator of the module `random`, in the process that iterates: augmentations that draw from it, as timm's crops
# and AutoAugment, begin anew with each epoch, alike in all ranks and workers, so that epochs are equal to the pixel. With a filter
# ShardedBatchSampler reads the epoch. A sampler that is given does not know of DataLoader workers, unlike the data set's own
# sharding (torch/dist.py: get_global_rank): each worker gives all rows of the rank. Shuffle indices oneself and read them by
# take(), as SafeLanceDataset does with torch's own samplers.
#
# Seen 2026-11-29 (1,000 rows, 3 epochs: different orders, different sequences of random.random() during an epoch)
#   ShardedFragmentSampler: 1, 1; ShardedBatchSampler: 1, 1; with a filter: 3, 3. Two workers: 2,000 rows in an epoch, each twice
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 pyarrow==26.0.1 pylance==14.0.2
cat > "$work/epochs.py" <<'EOF'
import random
import sys

import lance
import pyarrow as pa
from lance.sampler import ShardedBatchSampler, ShardedFragmentSampler
from lance.torch.data import LanceDataset
from torch.utils.data import DataLoader


def epochs(sampler, condition=None, workers=0):
    """Gives the batches of three epochs, and the random numbers that are drawn at each."""
    context = "spawn" if workers else None
    data = LanceDataset(sys.argv[1], 50, sampler=sampler, filter=condition)
    loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=context)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches, draws = zip(*((tuple(batch.tolist()), random.random()) for batch in loader))
        yield batches, draws


if __name__ == "__main__":
    lance.write_dataset(pa.table({"row": range(1000)}), sys.argv[1], max_rows_per_file=100)
    for kind in (ShardedFragmentSampler, ShardedBatchSampler):
        batches, draws = zip(*epochs(kind(0, 1, randomize=True)))
        print(f"{kind.__name__}: {len(set(batches))}, {len(set(draws))}", flush=True)
        assert len(set(batches)) == len(set(draws)) == 1 and sum(map(len, batches[0])) == 1000
        assert list(sum(batches[0], ())) != list(range(1000))
    batches, draws = zip(*epochs(ShardedBatchSampler(0, 1, randomize=True), "row >= 0"))
    print(f"with a filter: {len(set(batches))}, {len(set(draws))}", flush=True)
    assert len(set(batches)) == len(set(draws)) == 3
    batches, draws = zip(*epochs(ShardedBatchSampler(0, 1, randomize=True), workers=2))
    print(f"two workers: {sum(map(len, batches[0]))} rows", flush=True)
    assert sum(map(len, batches[0])) == 2000 and len(set(sum(batches[0], ()))) == 1000
EOF
"$work/venv/bin/python" "$work/epochs.py" "$work/data.lance"
