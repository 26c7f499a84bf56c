"""Run by the Python that has verl: log-probs of sequences on their routes, through its FSDP engine.

python -m tests.trainers.verl.verl_log_probs_worker CHECKPOINT IN.npz OUT.npz
"""

import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist

from examples.verl import verl_on_cpu  # noqa: F401  before verl
from tests.trainers.verl.verl_batches import padded
from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict


def main(checkpoint, given, wanted):
    arrays = np.load(given)
    count = len(arrays.files) // 3
    tokens, routes = [[arrays[f"{kind}{s}"] for s in range(count)] for kind in ("tokens", "routes")]
    pairs = [(t[: int(arrays[f"prompt{s}"])], t[int(arrays[f"prompt{s}"]) :]) for s, t in enumerate(tokens)]
    by_tokens = {tuple(t.tolist()): r for t, r in zip(tokens, routes, strict=True)}
    batch = padded(pairs, lambda t: by_tokens[tuple(np.asarray(t).tolist())], widths=(40, 40))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        torch.set_num_threads(1)
        found, _ = old_log_probs(make(checkpoint, "R3"), tensordict(batch, max_token_len_per_gpu=100))
        dist.destroy_process_group()
    np.savez(wanted, *[row.numpy() for row in found])


main(*sys.argv[1:])
