#!/usr/bin/env bash
# webdataset 1.0 shuffles the shards once: every epoch reads them in the same order, with and without a seed.
#
# Versions: webdataset 1.0.2 and 0.2.86 (the one that open_clip pins), torch 2.15.0. Since 1.0 WebDataset(shardshuffle=N) draws a seed
# when it is made, unless given one (compat.py: self.seed), and filters.shuffle makes a new Random(seed) for each epoch
# (filters.py: _shuffle). 0.2 drew from the clock, so that orders differed. What remains of shuffling is the buffer behind it,
# which mixes neighbouring shards; given a seed, as for a run that can be repeated, it repeats as well, and all epochs are
# equal sample for sample. detshuffle=True counts epochs, in the copy of the data set that iterates: DataLoader workers are
# made anew for each epoch and begin at 0 again, so the order repeats unless persistent_workers=True. A check with
# num_workers=0 shows nothing of that. Use detshuffle=True with persistent workers, or resampled=True.
#
# Seen 2026-11-29: different orders of 12 shards in 4 epochs, with 0 workers, 2 workers, 2 persistent workers
#   1.0.2: shardshuffle=100: 1, 1, 1; shardshuffle=100, .shuffle(20, seed=7): 1, 1, 1 of samples; detshuffle=True: 4, 1, 4
#   0.2.86: shardshuffle=100: 4, 4, 4
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 braceexpand==0.1.7 pyyaml==6.0.4
for version in 1.0.2 0.2.86; do
  "$work/venv/bin/pip" install --quiet --no-deps --target "$work/$version" "webdataset==$version"
done
cat > "$work/epochs.py" <<'EOT'
import io
import sys
import tarfile

import torch
import webdataset as wds

work, version = sys.argv[1:]
for shard in range(12):
    with tarfile.open(f"{work}/{shard:02}.tar", "w") as tar:
        for number in range(5):
            name = f"{shard:02}{number:03}"
            info = tarfile.TarInfo(f"{name}.txt")
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))


def orders(samples=None, **options):
    """How many of 4 epochs differ in the order of shards, or of samples, for the three ways to read."""
    counts = []
    for loading in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        data = wds.WebDataset(f"{work}/{{00..11}}.tar", **options)
        data = (data.shuffle(20, **samples) if samples else data).decode().map(lambda sample: sample["txt"])
        loader = torch.utils.data.DataLoader(data, batch_size=None, **loading)
        epochs = [[name if samples else name[:2] for name in loader] for _ in range(4)]
        assert all(len(epoch) == 60 for epoch in epochs)
        counts.append(len({tuple(dict.fromkeys(epoch)) for epoch in epochs}))
    return counts


found = {"shardshuffle=100": orders(shardshuffle=100)}
if version == "1.0.2":
    found["shardshuffle=100, .shuffle(20, seed=7)"] = orders({"seed": 7}, shardshuffle=100)
    found["detshuffle=True"] = orders(shardshuffle=100, detshuffle=True)
print(f"{version}: " + "; ".join(f"{name}: {', '.join(map(str, counts))}" for name, counts in found.items()))
assert [*found.values()] == ([[1, 1, 1], [1, 1, 1], [4, 1, 4]] if version == "1.0.2" else [[4, 4, 4]])
EOT
cd "$work"
for version in 1.0.2 0.2.86; do
  OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' PYTHONPATH="$work/$version" \
      venv/bin/python -W ignore epochs.py "$work" $version 2> log || { tail -20 log; exit 1; }
done
