#!/usr/bin/env bash
# grain's WindowShuffleMapDataset leaves samples out of an epoch and repeats others, unless windows divide the data set.
#
# Version: grain 0.2.18. Each window of indices is permuted within window_size, the last one too, if it is shorter (shuffle.py:
# _shuffled_index, max_index=window_size - 1). The indices that lie past the end wrap around to the beginning, as all do in a
# MapDataset, so that samples of the first window take the places of the last ones. The length stays right, and the docstring has a
# guarantee that nothing is repeated in a window. A shuffle of 1,000 in windows of 128, the example of MapDataset.pipe, leaves out 14
# samples; a window as large as memory allows, larger than the data set or than a rank's part, leaves out a third of it. Which
# ones depends on the seed alone, so that each epoch leaves out the same ones if the data set is made anew for each (and
# validation counts some samples twice). WindowShuffleIterDataset permutes what is there. Shuffle there, or globally, or in windows that
# divide the length (after the shards of ranks are taken), or repeat() first, after which only the end of the run is concerned.
#
# Seen 2026-11-29 (1,000 samples; distinct ones of an epoch)
#   windows of 100: 1000; 128: 986; 1000: 1000; 2000: 746; 10000: 655; 10000 of an iterator: 1000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6
"$work/venv/bin/python" - <<'EOF'
import grain
from grain.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset

data, found = grain.MapDataset.range(1000), {}
for size in (100, 128, 1000, 2000, 10_000):
    epoch = list(WindowShuffleMapDataset(data, window_size=size, seed=0))
    found[size] = len(set(epoch))
    print(size, len(epoch), found[size])
    assert len(epoch) == 1000
iterated = list(WindowShuffleIterDataset(data.to_iter_dataset(), window_size=10_000, seed=0))
print("iterator", len(iterated), len(set(iterated)))
assert found[100] == found[1000] == len(set(iterated)) == 1000
assert 970 < found[128] < 1000 and found[2000] < 800 and found[10_000] < 700
EOF
