#!/usr/bin/env bash
# litdata's batches of one stream each (batching_method="per_stream") ignore the weights: 0.9 and 0.1 become a half each.
#
# Versions: litdata 0.2.76, torch 2.15.0. CombinedStreamingDataset(weights=...) calls them the sampling ratio; with "per_stream" the
# stream of each batch is to be selected randomly. But after each batch another is drawn until it is not the last one again
# (combined.py: _get_dataset_index), so no stream ever gives two batches in a row. Two streams just alternate, whatever their
# weights; of more, each has a share in proportion to w * (1 - w), which pulls all towards equal parts and lets none have more
# than half. A small set is thus seen five times as often as was asked for, and an epoch, which ends with the first stream, is a fifth
# as long. Without weights the ratio is that of the lengths, and it is lost in the same way: a small stream gives every second batch
# until it has ended, early in the epoch, and all the rest is the large one alone. "stratified", the default, keeps the
# weights. Nothing shows it but a count of the batches. Draw the stream of each batch oneself, with one loader for each.
#
# Seen 2026-11-29 (streams of 9,000, 1,000 and 1,000, batches of 10; batches; shares of samples; two batches in a row of one stream)
#   0.9, 0.1: stratified 998; 0.90, 0.10. per_stream 201; 0.50, 0.50; 0. 0.8, 0.1, 0.1: per_stream 348; 0.45, 0.26, 0.29; 0
#   lengths 9,000 and 1,000 without weights: the small one has ended after 100% of the epoch, with per_stream after 20%
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet litdata==0.2.76 torch==2.15.0 numpy==2.4.6
cat > "$work/weights.py" <<'EOF'
import sys

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache

LENGTHS = {"crawl": 9000, "clean": 1000, "own": 1000}


def batches(names, method, weights=None):
    """Gives the streams that the samples of each batch come from."""
    datasets = [StreamingDataset(f"{sys.argv[1]}/{name}", shuffle=True) for name in names]
    data = CombinedStreamingDataset(datasets, weights=weights, batching_method=method, iterate_over_all=not weights)
    for batch in StreamingDataLoader(data, batch_size=10, num_workers=0):
        yield (batch["number"] // 10_000).tolist()


if __name__ == "__main__":
    for stream, (name, length) in enumerate(LENGTHS.items()):
        cache = Cache(f"{sys.argv[1]}/{name}", chunk_size=500)
        for index in range(length):
            cache[index] = {"number": 10_000 * stream + index}
        cache.done()
        cache.merge()
    for names, weights in ((("crawl", "clean"), [0.9, 0.1]), (tuple(LENGTHS), [0.8, 0.1, 0.1]), (("crawl", "clean"), None)):
        for method in ("stratified", "per_stream"):
            streams = list(batches(names, method, weights))
            order = [stream for batch in streams for stream in batch]
            shares = [order.count(stream) / len(order) for stream in range(len(names))]
            repeats = sum(set(one) == set(next) for one, next in zip(streams, streams[1:]) if len(set(one)) == 1)
            end = max(place for place, stream in enumerate(order) if stream) / len(order)
            text = ", ".join(f"{share:.2f}" for share in shares)
            print(f"{weights}, {method} {len(streams)}; {text}; {repeats}; {end:.0%}", flush=True)
            if method == "stratified":
                assert abs(shares[0] - (weights or [0.9])[0]) < 0.02 and end > 0.99
            elif weights:
                assert abs(shares[0] - (0.5 if len(names) == 2 else 0.47)) < 0.05 and repeats == 0
            else:
                assert shares == [0.9, 0.1] and end < 0.25
EOF
"$work/venv/bin/python" "$work/weights.py" "$work/data"
