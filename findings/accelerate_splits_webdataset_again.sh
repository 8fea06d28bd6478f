#!/usr/bin/env bash
# accelerate splits a WebDataset among the ranks once more: with split_by_node, only 1/N of the data is ever trained on.
#
# Versions: accelerate 1.15.0, webdataset 1.0.2, torch 2.13.0. Accelerator.prepare (data_loader.py), and so transformers' Trainer,
# shares out each stream of samples: by default rank 0 reads and sends every rank its part (DataLoaderDispatcher), or each rank
# reads all and keeps its part (dispatch_batches=False: IterableDatasetShard). WebDataset splits too: with several ranks it
# raises an error until it is given a nodesplitter, as wds.split_by_node. Then the shards of the other ranks are read by
# nobody, or each rank drops (N-1)/N of its own. No warning; an epoch of N ranks has 1/N of the samples, and which ones is
# the same every time. Give nodesplitter=None (all ranks the same stream), or leave the loader out of prepare().
#
# Seen 2026-11-29 (800 samples in 8 shards; samples that any rank saw, of 2 and 4 ranks):
#   split_by_node: 400 and 200; split_by_node, dispatch_batches=False: 400 and 200; nodesplitter=None: 800 and 800
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 webdataset==1.0.2 numpy==2.4.1
cat > "$work/epoch.py" <<'EOF'
import io
import multiprocessing
import os
import sys
import tarfile

work = sys.argv[1]


def rank(number, ranks, split, dispatch, numbers):
    os.environ.update(RANK=f"{number}", LOCAL_RANK=f"{number}", WORLD_SIZE=f"{ranks}", LOCAL_WORLD_SIZE=f"{ranks}")
    import torch
    import webdataset as wds
    from accelerate import Accelerator, DataLoaderConfiguration

    store = torch.distributed.FileStore(f"{work}/{ranks}{split}{dispatch}", ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    data = wds.WebDataset(f"{work}/{{0..7}}.tar", shardshuffle=False, nodesplitter=wds.split_by_node if split else None)
    data = data.decode().map(lambda sample: int(sample["txt"]))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=10))
    numbers.put([value for batch in loader for value in batch.tolist()])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def seen(ranks, split, dispatch):
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    started = [context.Process(target=rank, args=(n, ranks, split, dispatch, numbers)) for n in range(ranks)]
    for process in started:
        process.start()
    found = [value for _ in started for value in numbers.get()]
    for process in started:
        process.join()
    assert len(found) == len(set(found))
    return len(found)


if __name__ == "__main__":
    for shard in range(8):
        with tarfile.open(f"{work}/{shard}.tar", "w") as tar:
            for number in range(shard * 100, shard * 100 + 100):
                info = tarfile.TarInfo(f"{number:05}.txt")
                info.size = len(str(number))
                tar.addfile(info, io.BytesIO(str(number).encode()))
    found = {}
    for name, split, dispatch in (("split_by_node", True, None), ("split_by_node, dispatch_batches=False", True, False),
                                  ("nodesplitter=None", False, None)):
        found[name] = [seen(ranks, split, dispatch) for ranks in (2, 4)]
        print(f"{name}: {found[name][0]} and {found[name][1]}", flush=True)
    assert [*found.values()] == [[400, 200], [400, 200], [800, 800]]
EOF
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 \
    "$work/venv/bin/python" -W ignore "$work/epoch.py" "$work" 2> "$work/log" || { tail -20 "$work/log"; exit 1; }
