#!/usr/bin/env bash
# take(n) for validation and skip(n) for training of a Hugging Face stream overlap once workers or ranks share the shards.
#
# Versions: datasets 5.2.0, torch 2.13.0. In one process take(150) is samples 0 to 149, and skip(150) all others. Where shards are
# split (DataLoader workers, or split_dataset_by_node if the number of shards divides by that of ranks), the n is split too
# (iterable_dataset.py: SkipExamplesIterable, split_when_sharding): each worker leaves out the first n/k samples of its own
# shards. The two parts fit each other only if both are read with one number of workers and ranks. Validation on rank 0 or
# with fewer workers than training, the usual case, then scores samples that were trained on; the counts (150, 250) stay
# right. With a number of ranks that does not divide the shards there is no overlap, so that a small test shows nothing. Hold
# out whole shards.
#
# Seen 2026-11-29 (400 samples in 4 shards): samples of take(150), read in one process, that skip(150) trains on
#   workers 0: 0; workers 2: 25; workers 4: 74 of 150; ranks 3: 0; ranks 4: 74 of 150
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.1 datasets==5.2.0
HF_HOME="$work/home" HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES='' \
    "$work/venv/bin/python" -W ignore - "$work" 2> "$work/log" <<'EOF' || { tail -20 "$work/log"; exit 1; }
import io
import sys
import tarfile

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

work = sys.argv[1]
for shard in range(4):
    with tarfile.open(f"{work}/{shard}.tar", "w") as tar:
        for number in range(shard * 100, shard * 100 + 100):
            info = tarfile.TarInfo(f"{number:05}.txt")
            info.size = len(str(number))
            tar.addfile(info, io.BytesIO(str(number).encode()))
data = datasets.load_dataset("webdataset", data_files={"train": f"{work}/*.tar"}, split="train", streaming=True)


def keys(part, workers=0):
    loader = DataLoader(part.with_format("torch"), batch_size=10, num_workers=workers)
    return [int(key) for batch in loader for key in batch["__key__"]]


validation = keys(data.take(150))
assert sorted(validation) == [*range(150)]
found = {}
for workers in (0, 2, 4):
    trained = keys(data.skip(150), workers)
    found[f"workers {workers}"] = len(set(trained) & set(validation))
    assert len(trained) == len(set(trained)) == 250
for ranks in (3, 4):
    trained = [key for rank in range(ranks) for key in keys(split_dataset_by_node(data.skip(150), rank, ranks))]
    found[f"ranks {ranks}"] = len(set(trained) & set(validation))
    assert len(trained) == len(set(trained)) == 250
print("; ".join(f"{name}: {count}" for name, count in found.items()))
assert [*found.values()] == [0, 25, 74, 0, 74]
EOF
