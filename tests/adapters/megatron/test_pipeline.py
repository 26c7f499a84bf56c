"""The pipeline of examples/pipeline: exported weights, the same losses on other ranks, and a canary that sees."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters.megatron.forked_ranks import ROOT, checks_of, run
from tests.processes import environment, torchrun

FAKE = ROOT / "tests" / "engines" / "vllm" / "fake"
CLOSE = 1e-9

test_names = checks_of("pipeline_checks")


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (4, 2)])
def test_exported_weights_are_the_trainers_bit_for_bit(tmp_path, ranks, stages):
    run("pipeline_checks.exports", str(tmp_path / "checkpoint"), stages, ranks=ranks)


def test_four_ranks_and_one_have_the_same_losses_on_the_same_rollouts(tmp_path):
    """Rollouts of an engine that is fed what four ranks export after every step."""
    steps = 20 if "FOREROUTE_MEGATRON_GRID" in os.environ else 2
    four, one = tmp_path / "four", tmp_path / "one"
    for ended in run("pipeline_checks.trains", str(four), None, 2, steps, ranks=4, timeout=600):
        assert ended == (0, "")
    assert run("pipeline_checks.trains", str(one), str(four / "rollouts"), 1, steps, timeout=600) == [(0, "")]
    of_four, of_one = metrics(four), metrics(one)
    assert len(of_four) == len(of_one) == steps
    for step, (a, b) in enumerate(zip(of_four, of_one, strict=True)):
        for name in ("loss_0", "loss_1"):
            assert abs(a[name] - b[name]) <= CLOSE, (step, name, a, b)
        assert a["disagreement"] == b["disagreement"] == 0, step
        assert a["k3"] < 1e-9, step
        assert a["canary_nats"] < 1e-4, step
        assert a["canary_experts"] == 1, step
        assert a["executed"] == a["planned"], step
    assert max(abs(a["loss_1"]) for a in of_four) > 1e-3, "losses that are zero are the same anywhere"
    assert sum(a["moved_bytes"] for a in of_four) > 0
    assert sum(a["slowest_rank_at_homes"] for a in of_four) > sum(a["executed"] for a in of_four)
    first, *trained = (
        load_file(f / "model.safetensors") for f in (four / "initial", four / "trained", one / "trained")
    )
    for name, weight in first.items():
        assert torch.allclose(trained[0][name], trained[1][name], rtol=0, atol=CLOSE), name
        assert not torch.equal(trained[0][name], weight.double()), f"{name} was not trained"


def test_the_canary_ends_a_run_whose_engine_lacks_one_experts_weights(tmp_path):
    ended = run("pipeline_checks.trains", str(tmp_path / "run"), None, 1, 3, "LosingEngine", ranks=2, timeout=600)
    assert [code for code, _ in ended] == [1, 1]
    assert re.fullmatch(
        r"the run ends: EngineError: engine and trainer are \S+ nats apart at a token of the canary, after the sync of "
        r"version 1; (.|\n)*",
        ended[0][1],
    ), ended[0][1]
    assert ended[1][1] == ""


def test_a_sync_that_fails_half_way_ends_all_ranks(tmp_path):
    first, *others = run("pipeline_checks.trains", str(tmp_path / "run"), None, 2, 1, "FullDisk", ranks=4)
    assert first == (1, "the run ends: EngineError: no space left\n")
    assert others == [(1, "")] * 3


def test_a_dead_engine_ends_all_ranks_with_one_message(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{FAKE}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (code, said), other = run("pipeline_checks.with_a_dead_engine", str(tmp_path / "run"), str(python), ranks=2)
    assert said.startswith("the run ends: EngineError: the engine worker died (signal SIGABRT) when asked to generate")
    assert (code, other) == (1, (1, ""))


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_a_real_vllm_samples_for_four_ranks(tmp_path):
    named = os.environ.get("FOREROUTE_VLLM_PYTHON")
    python = Path(named or ".venv-vllm/bin/python").absolute()
    if not named and not python.exists():
        pytest.skip("there is no vLLM environment: run `make vllm-env`, or set FOREROUTE_VLLM_PYTHON")
    arguments = (tmp_path / "run", "--vllm-python", python, "--pipeline", "2", "--steps", "3")
    done = torchrun(4, "-m", "examples.pipeline.train", *arguments, timeout=300, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    for step in metrics(tmp_path / "run"):
        assert step["disagreement"] == 0
        assert step["k3"] < 1e-9
        assert step["canary_nats"] < 1e-4
        assert step["executed"] == step["planned"]
    assert len(metrics(tmp_path / "run")) == 3


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
