#!/usr/bin/env bash
# with_epoch() begins each epoch at the head of a new shard, so that resampled training sees the ends of shards seldom or never.
#
# Versions: webdataset 1.0.2 and 0.2.86 (the one that open_clip pins). DataPipeline.__iter__ (pipeline.py) cuts a new iterator
# after the given number of samples; the shard that was open at the cut is dropped, and so is the shuffle buffer. The last
# shard of each epoch and worker is read in part, always from its head. So samples are not drawn evenly: with an epoch of two and
# a half shards the second halves are seen two thirds as often; an epoch of less than a shard a worker, as many workers and
# frequent checkpoints give, never reaches what comes later, however long the run. open_clip's --dataset-resampled is built
# so, with samples per epoch / ranks / workers as the length.
#
# Seen 2026-11-29 (8 shards of 1,000 samples, 40,000 draws, shuffle(200); draws from the quarters of shards, which vary):
#   both versions, epochs of 2,500: 11768, 11141, 9158, 7933; 8000 of 8000 samples seen
#   both versions, epochs of 400: 21601, 16262, 2137, 0; 4661 of 8000 samples seen
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 1.0.2 0.2.86; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install --quiet "webdataset==$version" numpy==2.4.1
  "$work/$version/bin/python" -W ignore - "$work" "$version" <<'EOF'
import io
import sys
import tarfile
from collections import Counter

import webdataset as wds

work, version = sys.argv[1:]
for shard in range(8):
    with tarfile.open(f"{work}/{shard}.tar", "w") as tar:
        for number in range(shard * 1000, shard * 1000 + 1000):
            info = tarfile.TarInfo(f"{number:05}.txt")
            info.size = len(str(number))
            tar.addfile(info, io.BytesIO(str(number).encode()))


def draws(epoch, total=40_000):
    data = wds.WebDataset(f"{work}/{{0..7}}.tar", resampled=True, shardshuffle=False).shuffle(200)
    data, counts = data.map(lambda sample: int(sample["txt"])).with_epoch(epoch), Counter()
    for _ in range(total // epoch):
        counts.update(data)
    assert counts.total() == total
    return len(counts), [sum(n for key, n in counts.items() if key % 1000 // 250 == part) for part in range(4)]


for epoch in (2500, 400):
    seen, quarters = draws(epoch)
    print(f"{version}, epochs of {epoch}: {', '.join(map(str, quarters))}; {seen} of 8000 samples seen")
    assert quarters[0] > 1.2 * quarters[3] and (epoch == 2500 or quarters[3] == 0 and seen < 5600)
EOF
done
