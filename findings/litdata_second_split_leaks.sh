#!/usr/bin/env bash
# litdata's train_test_split of a part that an earlier split gave puts training samples into the test set.
#
# Versions: litdata 0.2.76, torch 2.15.0. A split is a list of chunk files and a list of the range of samples to read
# of each. The second call keeps the ranges in the part's order, but takes the files in the order of index.json
# (utilities/train_test_split.py: subsampled_chunks). The first call shuffled the chunks, as it does by default, so
# the range of the chunk that was cut between the two parts is read from another file, and the cut chunk with a whole
# one's range. Lengths are right, and nothing is raised, although the docstring has an Exception for this case. The
# usual way, first training and the rest, then the rest into validation and test, so leaks up to a chunk of samples
# (64 MB of images are thousands) into the scores, and as many of the rest are read by nobody. Give all shares to one
# call: that is right.
#
# Seen 2026-11-29 (1,000 samples in 10 chunks; 0.85 and 0.15, then 0.15 into halves, of 75 samples each; seeds 0 to 9)
#   one call: 0 training samples in validation or test, 0 samples in no part, with each seed
#   two calls: 50 and 50 with seven of the seeds, 0 and 0 with 1, 6 and 7
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet litdata==0.2.76 torch==2.15.0 numpy==2.4.6
cat > "$work/split.py" <<'EOF'
import sys

from litdata import StreamingDataset, optimize, train_test_split


def sample(number):
    return {"number": number}


def numbers(dataset):
    found = [int(sample["number"]) for sample in dataset]
    assert len(found) == len(dataset) == len(set(found))
    return set(found)


def leaks(train, validation, test):
    train, held_out = numbers(train), numbers(validation) | numbers(test)
    return len(train & held_out), 1000 - len(train | held_out)


if __name__ == "__main__":
    optimize(fn=sample, inputs=list(range(1000)), output_dir=sys.argv[1], num_workers=1, chunk_size=100)
    found, once = [], []
    for seed in range(10):
        dataset = StreamingDataset(sys.argv[1])
        train, rest = train_test_split(dataset, [0.85, 0.15], seed=seed)
        parts = train, *train_test_split(rest, [0.5, 0.5], seed=seed)
        found.append((*map(len, parts), *leaks(*parts)))
        once.append(leaks(*train_test_split(dataset, [0.85, 0.075, 0.075], seed=seed)))
    print("one call: training samples in validation or test, samples in no part:", *once)
    print("two calls: lengths, then the same:", *found)
    assert set(once) == {(0, 0)} and {parts[:3] for parts in found} == {(850, 75, 75)}
    assert sum(parts[3] == parts[4] == 50 for parts in found) >= 5, found
EOF
"$work/venv/bin/python" "$work/split.py" "$work/data"
