#!/usr/bin/env bash
# Guess, as a test of runs resumed on other numbers of ranks had it: `set_gradient_divide_factor(f)` of FSDP2 divides
# gradients by f, whatever their dtype and however many ranks the mesh has.
# Seen in torch 2.13.0: on a mesh of one rank those of float32 and bfloat16 are divided by f, of float64 and float16 by
# f * f. transformers 5.24 sets the factor on experts under expert parallelism. With as many expert-parallel as
# data-parallel ranks each expert has a mesh of one rank, and its gradients in these dtypes are the mean over ranks,
# divided by their number once more; those of dense parameters are the mean.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 numpy==2.4.6
cat > "$tmp/divides.py" <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

print("torch", torch.__version__)
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(file.name, 1))
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        layer = fully_shard(torch.nn.Linear(1, 1, bias=False, dtype=dtype))
        layer.set_gradient_divide_factor(4.0)
        layer(torch.ones(1, 1, dtype=dtype)).sum().backward()
        found[str(dtype)] = layer.weight.grad.full_tensor().item()
    dist.destroy_process_group()
print("a gradient of 1, to be divided by 4:", found)
assert found == {"torch.float32": 0.25, "torch.bfloat16": 0.25, "torch.float64": 0.0625, "torch.float16": 0.0625}
print("divided twice in float64 and float16")
PYTHON
"$tmp/venv/bin/python" "$tmp/divides.py"
