#!/usr/bin/env bash
# Prodigy and D-Adaptation under FSDP2 or ZeRO give each rank a step size of its own, without a warning.
#
# Versions: prodigyopt 1.1.2, dadaptation 3.2, torch 2.13.0. They estimate one step size d from sums over all parameters. The sums
# of ranks are added only for parameters with `_fsdp_flattened`, which FSDP1 sets (prodigy.py, dadapt_adam.py: step).
# fully_shard (FSDP2) has DTensors instead: .item() of their sums is the rank's part. ZeroRedundancyOptimizer gives a rank
# some of the parameters. Each rank then moves its part of one matrix, or its layers, at another rate, the checkpoint has one
# rank's d, and another number of ranks is another training. fsdp_in_use=True forces the addition, on a GPU only (.cuda()).
#
# Seen 2026-11-29 (d of rank 0 and rank 1 after 60 steps of one small model):
#   Prodigy: DDP 0.01362, 0.01362; FSDP2 0.01237, 0.01541; ZeRO 0.01828, 0.01281
#   DAdaptAdam: DDP 0.1192, 0.1192; FSDP2 0.1184, 0.1202; ZeRO 0.1228, 0.1173
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.1 torch==2.13.0 prodigyopt==1.1.2 dadaptation==3.2
cat > "$work/train.py" <<'EOF'
import multiprocessing
import sys


def rank(number, folder, answers):
    import torch
    import torch.distributed as dist
    from dadaptation import DAdaptAdam
    from prodigyopt import Prodigy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=number, world_size=2)
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 16, generator=random), torch.randn(64, 16, generator=random)
    found = {}
    for kind in (Prodigy, DAdaptAdam):
        for way in ("DDP", "FSDP2", "ZeRO"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
            if way == "FSDP2":
                fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            else:
                model = DistributedDataParallel(model)
            if way == "ZeRO":
                optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=1.0)
            else:
                optimizer = kind(model.parameters(), lr=1.0)
            for _ in range(60):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
            inner = optimizer.optim if way == "ZeRO" else optimizer
            found[kind.__name__, way] = float(inner.param_groups[0]["d"])
    answers.put((number, found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(number, sys.argv[1], answers)) for number in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join()
    for kind in ("Prodigy", "DAdaptAdam"):
        pairs = {way: (found[0][kind, way], found[1][kind, way]) for way in ("DDP", "FSDP2", "ZeRO")}
        print(f"{kind}: " + "; ".join(f"{way} {one:.4g}, {other:.4g}" for way, (one, other) in pairs.items()))
        assert pairs["DDP"][0] == pairs["DDP"][1]
        assert all(abs(one / other - 1) > 0.01 for one, other in (pairs["FSDP2"], pairs["ZeRO"])), pairs
EOF
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 \
    "$work/venv/bin/python" -W ignore "$work/train.py" "$work" 2> "$work/log" || { tail -20 "$work/log"; exit 1; }
