#!/usr/bin/env bash
# mosaicml-streaming's `stratified` batches give a small stream other weights, and the epoch ends with one stream.
#
# Versions: mosaicml-streaming 0.13.0, torch 2.15.0. Each global batch has the same whole number of samples of each
# stream, its proportion times the batch, rounded (batching/stratified.py: batch_portion). An epoch has as many
# batches as the stream that ends first allows (min_batch_parts), and the rest of all others is dropped. So a clean
# set of 1% beside a crawl has 1 of 64 samples, 1.6 times its weight, and after 100 of 157 batches it has ended and
# the epoch too: 36% of the crawl are not read, always the same ones without `shuffle`. At a batch of 128 the small
# set loses 23% instead. The lengths of the data set and the loader, from which schedules are made, stay those of the
# whole. A warning is logged only if the last part of a stream is not full, and says nothing of how much is dropped.
# Choose global batches at which all products are whole numbers, or `random`.
#
# Seen 2026-11-29 (streams of 9,900 and 100 samples; batch size: batches told by the loader, given, samples of both)
#   random, 64: 157, 157, 9900 100; stratified, 64: 157, 100, 6300 100; 128: 79, 77, 9779 77; 100: 100, 100, 9900 100
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 mosaicml-streaming==0.13.0
"$work/venv/bin/python" -W ignore - "$work" <<'EOF'
import sys

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

folders = [f"{sys.argv[1]}/{name}" for name in ("crawl", "clean")]
for folder, samples in zip(folders, (9900, 100)):
    with MDSWriter(out=folder, columns={"number": "int"}) as writer:
        for number in range(samples):
            writer.write({"number": number + (folder == folders[1]) * 10_000})

found = {}
for method, size in (("random", 64), ("stratified", 64), ("stratified", 128), ("stratified", 100)):
    streams = [Stream(local=folder) for folder in folders]
    data = StreamingDataset(streams=streams, batch_size=size, batching_method=method)
    loader = StreamingDataLoader(data, batch_size=size, num_workers=0)
    batches = [batch["number"] for batch in loader]
    total = sum(map(len, batches))
    clean = sum(int((batch >= 10_000).sum()) for batch in batches)
    assert len(data) == 10_000
    found[method, size] = len(loader), len(batches), total - clean, clean
    print(method, size, *found[method, size], flush=True)
assert list(found.values()) == [(157, 157, 9900, 100), (157, 100, 6300, 100), (79, 77, 9779, 77), (100, 100, 9900, 100)]
EOF
