"""The pipeline of examples/pipeline: an engine that has the exported weights, and a canary that sees."""

import json
import re

import pytest

from tests.adapters.megatron.forked_ranks import run

pytestmark = pytest.mark.slow


def test_the_engine_has_the_weights_and_experts_compute_what_was_planned(tmp_path):
    """Rollouts are those of an engine that is fed what four ranks export after every step."""
    ended = run("pipeline_checks.trains", str(tmp_path), (2,), 2, ranks=4, timeout=600)
    assert ended == [(0, "")] * 4
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(found) == 2
    for step in found:
        assert step["disagreement"] == 0, step
        assert step["k3"] < 1e-9, step
        assert step["canary_nats"] < 1e-4, step
        assert step["canary_experts"] == 1, step
        assert step["executed"] == step["planned"], step
    assert max(abs(step["loss_1"]) for step in found) > 1e-3, "losses that are zero are the same anywhere"


def test_the_canary_ends_a_run_whose_engine_lacks_one_experts_weights(tmp_path):
    ended = run("pipeline_checks.trains", str(tmp_path), (), 3, "LosingEngine", ranks=2, timeout=600)
    assert [code for code, _ in ended] == [1, 1]
    assert re.fullmatch(
        r"the run ends: EngineError: engine and trainer are \S+ nats apart at a token of the canary, after the sync of "
        r"version 1; (.|\n)*",
        ended[0][1],
    ), ended[0][1]
    assert ended[1][1] == ""
