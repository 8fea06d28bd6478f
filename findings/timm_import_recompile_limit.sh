#!/usr/bin/env bash
# `import timm.optim` lifts torch.compile's limit of recompilations from 8 to 1,000,000 for the whole process.
#
# Versions: timm 1.0.31, torch 2.15.0. timm/optim/kron.py, which timm.optim imports for any optimizer, sets
# torch._dynamo.config.cache_size_limit (the old name of recompile_limit) at import, whether Kron is used or not. torch's own
# limit ends the recompilations of a function that depends on a changing number, as an integer attribute of a module that
# counts steps or kept patches: after 8 it warns, and the function runs uncompiled. After the import it goes on compiling, up to
# accumulated_recompile_limit (256), seconds to minutes each on a real model, and says nothing until then: a run that is slow
# for hours instead of one that warns in its first minute. `import timm` alone, and open_clip, leave the limit as it is, so
# the choice of the optimizer changes what compile does to the model. Set recompile_limit = 8 after the imports.
#
# Seen 2026-11-29: compilations of one module whose integer attribute has 40 values, one after the other
#   torch alone: limit 8, 8 compilations; timm: limit 8, 8 compilations; timm.optim: limit 1000000, 40 compilations
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 timm==1.0.31 numpy==2.4.1
cat > "$work/count.py" <<'EOF'
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
import torch._dynamo

compiled = 0


def backend(graph, inputs):
    global compiled
    compiled += 1
    return graph.forward


class Counts(torch.nn.Module):
    count = 0

    def forward(self, x):
        return x * self.count


module, x = Counts(), torch.ones(3)
step = torch.compile(module, backend=backend)
for number in range(40):
    module.count = number
    assert torch.equal(step(x), x * number)
print(f"limit {torch._dynamo.config.recompile_limit}, {compiled} compilations")
EOF
cd "$work"
for name in "" timm timm.optim; do
  found=$(CUDA_VISIBLE_DEVICES='' venv/bin/python -W ignore count.py $name 2> log) || { tail -20 log; exit 1; }
  echo "${name:-torch alone}: $found"
  [ "$found" = "limit $([ "$name" = timm.optim ] && echo 1000000, 40 || echo 8, 8) compilations" ]
done
