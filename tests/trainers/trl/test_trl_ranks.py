"""Two data-parallel processes: metrics are those of both. That each replays its own: test_trl_sharded.py."""

from contextlib import closing, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from examples.trl.tiny import policy
from foreroute.adapters import hf
from foreroute.errors import AttachError, BatchMismatchError, CaptureError
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trainers.trl.capture_vllm import VLLMSource
from tests.trainers.trl.routes_book import Book, differing_cells, log_ratios
from tests.trainers.trl.trl_runs import as_torchrun_does, make, two_processes

pytestmark = pytest.mark.slow


def train(rank, folder):
    """What a process logs and saw, and how vLLM's answer to the main process is dealt out."""
    as_torchrun_does(rank)
    model = policy()
    book = Book(model, seed=rank)
    trainer = make(f"{folder}/none", model=model, rollout_func=book, max_steps=1, replay="none")
    trainer.train()
    results = {"shares": deal_out(rank), "logs": trainer.state.log_history[0]}
    results |= {"log_r": log_ratios(book), "cells": differing_cells(book)}
    results["measured"] = []
    for what in ("routes", "model"):  # that the second process cannot measure
        model = policy()
        book = Book(model, seed=rank, change=lambda routes, what=what: None if rank and what == "routes" else routes)
        fails = patch.object(hf, "attach", side_effect=AttachError("no router"))
        with fails if rank and what == "model" else nullcontext():
            trainer = make(f"{folder}/{what}", model=model, rollout_func=book, max_steps=1, replay="none")
        trainer.train()
        results["measured"] += [name for name in trainer.state.log_history[0] if name.startswith("mismatch/")]
    return results


def deal_out(rank):
    accelerator = SimpleNamespace(num_processes=2, is_main_process=rank == 0)
    client = SimpleNamespace(_post=lambda url, json: json)
    source = VLLMSource(SimpleNamespace(mode="server", vllm_client=client), accelerator, None)
    spec = RoutingSpec(4, 2, (RoutedLayer(0),))
    tokens = [[s, s + 1] for s in range(4)]
    trace = RoutingTrace.from_sequences(spec, tokens, [[[[s % 4, (s + 1) % 4]]] for s in range(4)])
    share = source._scatter(trace if rank == 0 else None, 2)
    wrong = source._scatter(trace if rank == 0 else None, 3)
    failed = source._scatter(CaptureError("no routes") if rank == 0 else None, 2)
    return share.token_ids_N, type(wrong), str(failed)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with closing(two_processes()) as workers:
        return workers.run(train, str(tmp_path_factory.mktemp("ranks")))


def test_metrics_are_those_of_the_tokens_of_both(results):
    log_r = np.concatenate([rank["log_r"] for rank in results]).astype(np.float64)
    cells = np.concatenate([rank["cells"] for rank in results])
    logs = results[0]["logs"]
    assert logs["mismatch/k3"] == results[1]["logs"]["mismatch/k3"]
    assert logs["mismatch/k3"] == pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-4)
    assert logs["mismatch/disagreement"] == pytest.approx(np.mean(cells) / 3, rel=1e-9)
    alone = results[0]["log_r"].astype(np.float64)
    assert logs["mismatch/k3"] != pytest.approx(np.mean(np.exp(alone) - 1 - alone), rel=1e-2)  # the control


def test_where_one_process_cannot_measure_none_does(results):
    """The first rollout is checked by a forward, in which processes that share a model would wait for each other.

    A process that could not attach asks the others too.
    """
    assert [rank["measured"] for rank in results] == [[], []]


def test_what_the_main_process_was_answered_is_dealt_out_in_blocks(results):
    for rank, result in enumerate(results):
        tokens, wrong, failed = result["shares"]
        assert tokens.tolist() == [2 * rank, 2 * rank + 1, 2 * rank + 1, 2 * rank + 2]
        assert wrong is BatchMismatchError
        assert failed == "no routes"
