#!/usr/bin/env bash
# The state of a Hugging Face stream counts in each pass whose epoch number is the state's: in none, or in all.
#
# Version: datasets 5.2.0. load_state_dict keeps the state, and each new iterator begins at it again if the numbers of
# the epochs are equal (iterable_dataset.py: _starting_state_dict). It does not set the epoch that the state holds,
# and nothing removes the state after its use. So where a training loop does not call set_epoch, each pass after a
# resume begins at the checkpoint: the samples before it are never seen again, and a state saved at the end of a pass
# leaves all later ones empty. Where it does, and the state is loaded by a new process that has not called
# set_epoch(n) with the state's number yet, the state is ignored, without a warning: the pass begins anew, of epoch 0.
# Call set_epoch before each pass, the first one after a resume too.
#
# Seen 2026-11-29 (1,000 samples in 10 shards; each pass after loading: samples, and how many of them were seen before)
#   saved at 900 in a loop without set_epoch: 100 0, 100 0, 100 0; saved at its end: 0 0, 0 0, 0 0
#   saved at 900 in epoch 2, loaded without set_epoch: 1000 900; with set_epoch from 2 on: 100 0, 1000 900, 1000 900
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6
HF_HOME="$work" "$work/venv/bin/python" - 2> "$work/log" <<'EOF' || { cat "$work/log"; exit 1; }
from datasets import Dataset


def stream():
    data = Dataset.from_dict({"number": list(range(1000))}).to_iterable_dataset(num_shards=10)
    return data.shuffle(seed=0, buffer_size=1)


def save(samples, epoch=0):
    data, numbers = stream(), []
    data.set_epoch(epoch)
    for sample in data:
        numbers.append(sample["number"])
        if len(numbers) == samples:
            state = data.state_dict()
    return state, set(numbers[:samples])


def passes(state, seen, epochs):
    data, found = stream(), []
    data.load_state_dict(state)
    for epoch in epochs:
        if epoch is not None:
            data.set_epoch(epoch)
        numbers = {sample["number"] for sample in data}
        found.append((len(numbers), len(numbers & seen)))
    return found


never = passes(*save(900), [None] * 3)
ends = passes(*save(1000), [None] * 3)
late, right = (passes(*save(900, epoch=2), epochs) for epochs in ([None], [2, 3, 4]))
for name, found in {"never": never, "at the end": ends, "not at loading": late, "right": right}.items():
    print(name, found)
assert never == [(100, 0)] * 3 and ends == [(0, 0)] * 3
assert late == [(1000, 900)] and right == [(100, 0), (1000, 900), (1000, 900)]
EOF
