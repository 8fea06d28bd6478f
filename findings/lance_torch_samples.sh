#!/usr/bin/env bash
# LanceDataset(samples=n) of pylance gives as little as half of n rows, or simply the first n of the data set.
#
# Versions: pylance 14.0.2, torch 2.15.0. With samples=n the torch data set calls maybe_sample(), which is to sample n records. Up to
# max_takes (2,048) of them are drawn at random. Above that the data set is cut into chunks of total // 2048 rows, and n // 2048
# neighbouring rows are taken from each (sampler.py: _efficient_sample). Both are rounded down: of 100,000 rows, any n from 2,084
# to 4,095 gives 2,084, one of each chunk. With fewer than 4,096 rows in all a chunk is one row, so that the
# "sample" is the first n rows, whatever the seed: of a data set in the order of its classes or sources the last ones are never
# seen. The last row a chunk offers is never drawn either (randint excludes it), so that of 6,000 rows, in chunks of two, it is
# always the even ones. Nothing is logged, the data set has no length to compare with, and each iteration draws anew. Count what
# comes, or draw indices oneself, sort them, and use take().
#
# Seen 2026-11-29 (rows, asked for: rows given; different ones of two seeds; the last one)
#   100000, 2000: 2000; 3957; 99961. 100000, 4000: 2084; 4120; 99991. 3000, 2500: 2500; 2500; 2499. 6000, 3000: 3000; 3000; 5998
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 pyarrow==26.0.1 pylance==14.0.2
"$work/venv/bin/python" - "$work" <<'EOF'
import sys

import lance
import numpy as np
import pyarrow as pa
from lance.torch.data import LanceDataset

found = {}
for total, asked in ((100_000, 2000), (100_000, 4000), (3000, 2500), (6000, 3000)):
    path = f"{sys.argv[1]}/{total}-{asked}.lance"
    lance.write_dataset(pa.table({"row": range(total)}), path)
    draws = []
    for seed in (0, 1):
        np.random.seed(seed)
        draws.append(np.concatenate([batch.numpy() for batch in LanceDataset(path, 1000, samples=asked)]))
    assert len(draws[0]) == len(draws[1]) and len(np.unique(draws[0])) == len(draws[0])
    found[total, asked] = draws
    print(f"{total}, {asked}: {len(draws[0])}; {len(np.unique(draws))}; {draws[0].max()}", flush=True)
assert len(found[100_000, 2000][0]) == 2000 and len(np.unique(found[100_000, 2000])) > 3900
assert len(found[100_000, 4000][0]) == 2084
assert all((draw == np.arange(2500)).all() for draw in found[3000, 2500])
assert all((draw == np.arange(0, 6000, 2)).all() for draw in found[6000, 3000])
EOF
