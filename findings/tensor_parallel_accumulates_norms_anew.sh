#!/usr/bin/env bash
# Guess, written down before as a test against one process: under tensor parallelism of transformers, two backward passes
# over the same batch leave twice the gradient of one, in every parameter, as on one process.
# Seen in transformers 5.24.0 with torch 2.13.0: norms of query and key heads, whose partial gradients are summed over the
# ranks after each backward pass, have their accumulated gradient summed again. On two ranks two passes leave 3 times the
# gradient of one, three leave 7 times, and nothing is raised. All others have 2 and 3 times. So whoever accumulates
# micro-batches trains these norms by other gradients.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
"${PYTHON:-python3.11}" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$tmp/accumulate.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

folder, PASSES = sys.argv[1], 3
dist.init_process_group("gloo")
rank, tokens = dist.get_rank(), torch.arange(1, 19).view(2, 9)
sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
if not rank:
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.3)
    Qwen3ForCausalLM(config).save_pretrained(folder)
dist.barrier()


def gradients(**how):
    """Of one, two and three passes over the same batch, by name."""
    model, found = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, **how), []
    for _ in range(PASSES):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters()}
        found.append({name: getattr(g, "full_tensor", lambda g=g: g)().clone() for name, g in grads.items()})
    return found


def times(found, alone):
    """How many times the gradient of one pass on one process each has, by the last part of its name."""
    kinds = {}
    for name, gradient in alone[0].items():
        kind = "norms of heads" if name.endswith(("q_norm.weight", "k_norm.weight")) else "all others"
        kinds.setdefault(kind, set()).add(tuple(round(float(each[name].norm() / gradient.norm()), 6) for each in found))
    return kinds


alone = gradients()
seen = times(gradients(distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")), alone)
on_one = times(alone, alone)
dist.destroy_process_group()
if not rank:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; times the gradient of one pass, after 1, 2")
    print(f"and 3 passes: on one process {on_one}, on two ranks {seen}")
right = {(1.0, 2.0, 3.0)}
sys.exit(not (on_one == {"all others": right, "norms of heads": right} == {**seen, "norms of heads": right} and seen["norms of heads"] == {(1.0, 3.0, 7.0)}))
PYTHON
OMP_NUM_THREADS=1 "$tmp/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$tmp/accumulate.py" "$tmp/model" ||
	{ echo "it behaves otherwise now" >&2; exit 1; }
