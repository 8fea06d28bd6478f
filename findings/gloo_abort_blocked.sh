#!/usr/bin/env bash
# abort() of a gloo process group returns at once, and leaves a thread that is blocked in a collective blocked.
#
# Version: torch 2.13.0 (2.15.0 does the same). A rank waits in an all_reduce for another one, which does not come to it. Another thread
# of the rank calls the process group's abort(): it raises nothing and returns at once, and the all_reduce raises only
# at the group's timeout (here 10 s; 30 minutes by default). shutdown() of the group's backend and
# destroy_process_group() are no different. With nccl, abort() ends collectives that are in progress.
#
# Seen 2026-11-28:
#   abort returned after 0.0 s; the all_reduce raised 10 s after it began, 9 s after the abort
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy torch==2.13.0
"$work/venv/bin/python" - <<'EOF'
import multiprocessing
import threading
import time
from datetime import timedelta


def rank(number, file, seconds):
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(file, 2), rank=number, world_size=2, timeout=timedelta(seconds=10)
    )
    dist.barrier()
    if number == 1:
        time.sleep(15)  # does not come to the all_reduce
        return
    began, group = time.monotonic(), dist.group.WORLD

    def abort():
        time.sleep(1)
        called = time.monotonic()
        group.abort()
        seconds.put(time.monotonic() - called)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        seconds.put(time.monotonic() - began)
    thread.join()


if __name__ == "__main__":
    import tempfile

    context = multiprocessing.get_context("fork")
    seconds = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank, args=(number, f"{folder}/store", seconds)) for number in range(2)]
        for process in ranks:
            process.start()
        abort, raised = seconds.get(), seconds.get()
        for process in ranks:
            process.kill()
    print(f"abort returned after {abort:.1f} s; the all_reduce raised {raised:.0f} s after it began,", end=" ")
    print(f"{raised - 1 - abort:.0f} s after the abort")
    assert abort < 1 and 9 <= raised < 14, (abort, raised)
EOF
