#!/usr/bin/env bash
# torch.manual_seed() on a machine without accelerators formats the caller's stack, once for each kind of accelerator.
#
# Version: torch 2.13.0 (CPU; 2.15.0 does the same). It seeds the CPU's generator, and queues a seed for CUDA, XPU and
# MTIA in case they are initialized later, each with traceback.format_stack() for a later error message. So a call costs
# more the deeper the stack is, and the lines of the sources are read. Seeding before each step or sample, as for
# randomness that can be resumed, costs hundreds of times torch.default_generator.manual_seed(), which draws the same
# numbers on the CPU.
#
# Seen 2026-11-28:
#   3 stacks formatted by one call
#   the same numbers: True; times as long as default_generator.manual_seed: more than 20
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy torch==2.13.0
cat > "$work/seed.py" <<'EOF'
import time
import traceback

import torch

whole, stacks = traceback.format_stack, []


def counting(*args, **options):
    stacks.append(whole(*args, **options))
    return stacks[-1]


def deep(function, levels=50):
    return function() if levels == 0 else deep(function, levels - 1)


def seconds(function):
    def run():
        began = time.perf_counter()
        for _ in range(200):
            function()
        return time.perf_counter() - began

    return min(deep(run) for _ in range(5))


traceback.format_stack = counting
deep(lambda: torch.manual_seed(5))
traceback.format_stack = whole
print(f"{len(stacks)} stacks formatted by one call")
one = torch.rand(3)
torch.default_generator.manual_seed(5)
same = torch.equal(one, torch.rand(3))
ratio = seconds(lambda: torch.manual_seed(5)) / seconds(lambda: torch.default_generator.manual_seed(5))
print(f"the same numbers: {same}; times as long as default_generator.manual_seed: {'more than 20' if ratio > 20 else ratio}")
assert same and len(stacks) == 3 and ratio > 20, (same, len(stacks), ratio)
EOF
"$work/venv/bin/python" "$work/seed.py"
