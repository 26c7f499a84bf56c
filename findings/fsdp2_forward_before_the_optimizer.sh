#!/usr/bin/env bash
# Guess, written down before as "the model is left as it was": a forward without gradients changes nothing that an
# optimizer sees, so that it makes no difference whether a model is tried out before its optimizer is made.
# Seen in torch 2.13.0: after `fully_shard` of the layers and of the model, such a forward leaves the weights of the root
# gathered, for a backward that does not come. `parameters()` then gives other tensors than those that train. An optimizer
# made now never moves the embedding, the last norm and the head; nothing is raised, and the loss falls. `reshard()` of
# every FSDP module before the optimizer is made mends it, and so does `reshard_after_forward=True` of the root.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
cat > "$tmp/train.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, tokens):
        rows = self.embedding(tokens)
        for layer in self.layers:
            rows = rows + layer(rows).relu()
        return self.head(rows)


def unmoved(tries_out, mended):
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, **({"reshard_after_forward": True} if mended == "reshard_after_forward" else {}))
    tokens = torch.arange(16)[None]
    if tries_out:
        with torch.no_grad():
            model(tokens)
    for module in model.modules():
        if mended == "reshard" and isinstance(module, FSDPModule):
            module.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    whole = lambda: {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}
    before = whole()
    for _ in range(2):
        nn.functional.cross_entropy(model(tokens)[0], tokens[0].roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    after = whole()
    return [name for name in before if torch.equal(before[name], after[name])]


dist.init_process_group("gloo")
seen = {
    "no forward before": unmoved(False, ""),
    "a forward before": unmoved(True, ""),
    "and reshard()": unmoved(True, "reshard"),
    "and reshard_after_forward=True": unmoved(True, "reshard_after_forward"),
}
rank = dist.get_rank()
dist.destroy_process_group()
if not rank:
    print(f"torch {torch.__version__}, parameters that never moved: {seen}")
lost = seen.pop("a forward before")
sys.exit(not (lost == ["embedding.weight", "head.weight", "head.bias"] and not any(seen.values())))
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$tmp/train.py" ||
	{ echo "it behaves otherwise now" >&2; exit 1; }
