#!/usr/bin/env bash
# torch's distributed checkpoint gives every rank a mixture of the ranks' states: one rank's position, another one's generator.
#
# Version: torch 2.15.0. dcp.save keeps one value a key. DTensors are put together; any other value, a plain tensor, number, string or
# object, counts as a copy of the same thing, and one rank's is written, chosen for equal bytes a rank, not rank 0's
# (planner_helpers, _dedup_save_plans). So the state of a loader, of a random generator or of a queue of negatives, different in
# each rank, comes back equal in all ranks, its keys from different ones. Nothing is compared, and nothing raised, on saving or
# loading. After a resume all ranks read one rank's shards again and draw the same augmentations: N copies of one stream, by
# a loss that goes on smoothly, and the samples of the other ranks are not seen again until the next epoch. Give the keys of
# such states the rank, as f"loader{rank}"; these come back exactly.
#
# Seen 2026-11-29 (2 ranks; position in the data, shard, queue, and whose state of torch's generator)
#   saved by rank 0: 1000, shards-0.tar, [0.0, 0.0], 0; by rank 1: 1001, shards-1.tar, [1.0, 1.0], 1
#   loaded, one key: 1001, shards-0.tar, [1.0, 1.0], 0 in both; a key a rank: as saved
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0
cat > "$work/resume.py" <<'EOT'
import multiprocessing
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def rank(number, folder, answers):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=number, world_size=2)
    generators = [torch.Generator().manual_seed(seed).get_state() for seed in range(2)]
    loader = {"position": 1000 + number, "shard": f"shards-{number}.tar", "queue": torch.full((2,), float(number)),
              "generator": generators[number]}
    found = []
    for key in ("loader", f"loader{number}"):
        dcp.save({"step": 5, key: loader}, checkpoint_id=f"{folder}/{key[:6]}{len(key)}")
        empty = {"position": 0, "shard": "", "queue": torch.zeros(2), "generator": torch.zeros_like(generators[0])}
        state = {"step": 0, key: empty}
        dcp.load(state, checkpoint_id=f"{folder}/{key[:6]}{len(key)}")
        loaded = state[key]
        whose = [seed for seed in range(2) if torch.equal(loaded["generator"], generators[seed])]
        assert state["step"] == 5 and len(whose) == 1
        found.append((loaded["position"], loaded["shard"], loaded["queue"].tolist(), whose[0]))
    answers.put((number, found))
    dist.barrier()
    dist.destroy_process_group()


context = multiprocessing.get_context("fork")
answers = context.SimpleQueue()
ranks = [context.Process(target=rank, args=(number, sys.argv[1], answers)) for number in range(2)]
for process in ranks:
    process.start()
(_, first), (_, second) = sorted(answers.get() for _ in ranks)
for process in ranks:
    process.join()
for name, one, other in zip(("one key", "a key a rank"), first, second):
    print(f"{name}: rank 0: {one}; rank 1: {other}")
assert first[0] == second[0] and first[0][0] in (1000, 1001)
assert first[1] == (1000, "shards-0.tar", [0.0, 0.0], 0) and second[1] == (1001, "shards-1.tar", [1.0, 1.0], 1)
EOT
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 \
    "$work/venv/bin/python" -W ignore "$work/resume.py" "$work" 2> "$work/log" || { tail -20 "$work/log"; exit 1; }
