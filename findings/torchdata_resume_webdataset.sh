#!/usr/bin/env bash
# torchdata's StatefulDataLoader over a seeded WebDataset resumes on other samples.
#
# Versions: torchdata 0.11.0, webdataset 1.0.2, torch 2.13.0. Without a state_dict of its own, a dataset is read again up
# to the saved step. `seed=` of WebDataset orders the shards only; `.shuffle(n)` behind it draws from the clock and the
# process id unless it is given a seed itself. So a run that is stopped after half an epoch and resumed sees about a
# fifth of the epoch's samples never and as many twice; only a line on speed is printed. With `.shuffle(n, seed=7)`
# the resumed half is exact.
#
# Seen 2026-11-28 (400 samples in 4 shards, stopped at 200; the first figure varies):
#   WebDataset(seed=3).shuffle(200): 319 of 400 samples seen, 81 of them twice
#   WebDataset(seed=3).shuffle(200, seed=7): 400 of 400 samples seen
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 torchdata==0.11.0 webdataset==1.0.2
"$work/venv/bin/python" -W ignore - "$work" <<'EOF'
import io
import sys
import tarfile

import webdataset as wds
from torchdata.stateful_dataloader import StatefulDataLoader

work = sys.argv[1]
for shard in range(4):
    with tarfile.open(f"{work}/{shard}.tar", "w") as tar:
        for number in range(shard * 100, shard * 100 + 100):
            info = tarfile.TarInfo(f"{number:05}.txt")
            info.size = len(str(number))
            tar.addfile(info, io.BytesIO(str(number).encode()))


def loader(**seed):
    data = wds.WebDataset(f"{work}/{{0..3}}.tar", shardshuffle=100, seed=3).shuffle(200, **seed).decode()
    return StatefulDataLoader(data.map(lambda sample: int(sample["txt"])), batch_size=10, num_workers=0)


def seen(**seed):
    first, stopped = [], loader(**seed)
    for _, batch in zip(range(20), stopped):
        first += batch.tolist()
    resumed = loader(**seed)
    resumed.load_state_dict(stopped.state_dict())
    rest = [number for batch in resumed for number in batch.tolist()]
    assert len(first) == len(rest) == 200
    return len({*first, *rest})


unseeded, seeded = seen(), seen(seed=7)
print(f"WebDataset(seed=3).shuffle(200): {unseeded} of 400 samples seen, {400 - unseeded} of them twice")
print(f"WebDataset(seed=3).shuffle(200, seed=7): {seeded} of 400 samples seen")
assert unseeded < 380 and seeded == 400
EOF
