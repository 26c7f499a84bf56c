"""Two ranks of verl's FSDP engine: each replays its own sequences, and metrics and weights are those of both."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from tests.trainers.verl.verl_book import Book, followed, watched


def test_each_rank_replays_its_own_sequences_and_metrics_are_of_all(folder):
    with tempfile.TemporaryDirectory() as shared:
        mp.spawn(_rank, (folder, shared), nprocs=2)
        found = [torch.load(Path(shared) / f"{rank}.pt", weights_only=False) for rank in range(2)]
    book = Book(folder, count=8)
    exact, rounding = book.exact()
    for rank, results in enumerate(found):
        assert results["counts"]
        assert all(no == 0 for _, no in results["counts"])
        for logprobs, wanted in zip(results["log_probs"], exact[4 * rank : 4 * rank + 4], strict=True):
            assert float((logprobs - wanted).abs().max()) < 8 * rounding
    assert found[0]["metrics"] == found[1]["metrics"]
    log_r = book.log_ratios()
    assert found[0]["metrics"]["mismatch/k3"] == [pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-3)]
    assert found[0]["metrics"]["mismatch/disagreement"] == [0.0]
    for one, other in zip(found[0]["weights"], found[1]["weights"], strict=True):
        assert torch.equal(one, other)


def _rank(rank, folder, shared):
    from examples.verl import verl_on_cpu  # noqa: F401  before verl
    from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict, update

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{shared}/store", 2), rank=rank, world_size=2)
    book = Book(folder, count=8)
    batch = {name: values[4 * rank : 4 * rank + 4] for name, values in book.batch().items()}
    engine = make(folder, "R3")
    old_log_probs(engine, tensordict(batch))  # the first is held against the model's own routes
    log_probs, _ = old_log_probs(engine, tensordict(batch))
    engine.routing.comparison.metrics.__init__()  # so that sums are of one pass
    old_log_probs(engine, tensordict(batch))
    with watched(engine.module) as forwards:
        output = update(engine, tensordict(batch))
    metrics = {name: value for name, value in output["metrics"].items() if name.startswith("mismatch")}
    counts = [followed(forward, book)[:2] for forward in forwards]
    weights = [parameter.full_tensor().detach() for parameter in engine.module.parameters()]
    torch.save(
        {"log_probs": log_probs, "metrics": metrics, "counts": counts, "weights": weights}, Path(shared) / f"{rank}.pt"
    )
    dist.destroy_process_group()
