#!/usr/bin/env bash
# A validation part that is cut off a shuffled grain data set is trained on from the second epoch on.
#
# Version: grain 0.2.18 (so since 0.2.13). A MapDataset has an element for each index, past its length, too: these are those of later
# epochs. shuffle() gives each epoch an order of its own, from its seed and the number of the epoch (shuffle.py: per_epoch_seed). A
# slice takes positions, and hands the number of the epoch on to its parent (slice.py: parent_epoch * self._parent_length). So the
# first 900 of 1,000 shuffled positions are 900 other samples in each epoch. In the first epoch the two parts are apart, so that
# a check of overlap passes; repeat(), or any index past the end, then trains on the validation part: nine tenths of it in the
# second epoch, all of it by the third, while part of the training set is left out of each epoch. Lengths are right, and nothing is
# raised. A small subset, as ds.shuffle(seed)[:100] for a test of overfitting or a curve over sizes of data, grows in the same way.
# (That the shards ds[rank::ranks] change in each epoch is as wanted.) Cut first, and shuffle the parts: for a random cut, permute
# the indices of the source. repeat(reseed_each_epoch=False) keeps the parts apart, but has one order for all epochs.
#
# Seen 2026-11-29 (900 of 1,000 train, 100 validate; samples of each epoch that are of the validation part, and of any epoch so far)
#   shuffled, then cut: 0, 95, 89; 0, 95, 100. Not reseeded: 0, 0, 0. Cut, then shuffled: 0, 0, 0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
"$work/venv/bin/python" - <<'EOF'
import grain
import numpy as np

shuffled = grain.MapDataset.range(1000).shuffle(seed=1)
permuted = grain.MapDataset.source(np.random.default_rng(1).permutation(1000).tolist())
cuts = {
    "shuffled, then cut": (shuffled[:900].repeat(3), shuffled[900:]),
    "not reseeded": (shuffled[:900].repeat(3, reseed_each_epoch=False), shuffled[900:]),
    "cut, then shuffled": (permuted[:900].shuffle(seed=1).repeat(3), permuted[900:]),
}
found = {}
for name, (train, validation) in cuts.items():
    held, order = set(validation), list(train)
    epochs = [set(order[start : start + 900]) for start in (0, 900, 1800)]
    assert len(held) == 100 and len(train) == 2700 and all(len(epoch) == 900 for epoch in epochs)
    each = [len(epoch & held) for epoch in epochs]
    so_far = [len(set(order[: 900 * passes]) & held) for passes in (1, 2, 3)]
    found[name] = each, so_far
    print(name, each, so_far)
assert found["not reseeded"] == found["cut, then shuffled"] == ([0, 0, 0], [0, 0, 0])
each, so_far = found["shuffled, then cut"]
assert each[0] == 0 and min(each[1:]) > 80 and so_far[2] >= 99
EOF
