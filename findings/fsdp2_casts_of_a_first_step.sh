#!/usr/bin/env bash
# Guess, as a probe of steps under autocast had it: two steps on equal weights and equal batches have equal gradients.
# Seen in torch 2.13.0: under FSDP2 and autocast, the gradients of two micro-batches whose forwards both come before
# their backwards are wrong in the first step, by most of their size, and right from the second on; nothing is said.
# With autocast(cache_enabled=False), or one micro-batch, the first step is right too.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --quiet torch==2.13.0 numpy
cat > "$tmp/steps.py" <<'PYTHON'
import copy
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def off(alone, cached):
    """How far gradients of three steps on equal weights are from those of a model that is not sharded."""
    model = copy.deepcopy(alone)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def gradients(of):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            losses = [of(batch).float().square().mean() for batch in batches]
        for loss in losses:
            loss.backward()
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in of.parameters()]
        of.zero_grad()
        return found

    right = gradients(alone)
    return [
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients(model), right, strict=True))
        for _ in range(3)
    ]


print("torch", torch.__version__)
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(file.name, 1))
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU()) for _ in range(3)))
    batches = [torch.randn(5, 16) for _ in range(2)]
    cached, uncached = off(alone, True), off(alone, False)
    dist.destroy_process_group()
print("off by, of their largest, in three steps:", cached, "and without the cache of casts:", uncached)
assert cached[0] > 0.1 and max(cached[1:] + uncached) < 0.01
print("the first step has other gradients")
PYTHON
"$tmp/venv/bin/python" "$tmp/steps.py"
