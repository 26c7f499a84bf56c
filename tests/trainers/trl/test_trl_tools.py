"""A tool in the loop: every turn's routes reach the experts in their places, and exactly sampled tokens carry loss.

Turns are of an engine that writes down what it routed, of TRL's `generate`, of stand-ins for vLLM in TRL's two modes,
and of a real one: `tools_on_vllm`.
"""

import copy
import importlib.metadata
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.trl.tiny import agent
from foreroute.capture import Generation
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError, CaptureError, ReplayError
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trainers.trl.capture import Turn, join_turns
from tests.tiers import grid
from tests.trainers.given_experts import drawn_anew, native
from tests.trainers.trl.tools_runs import Counter, branching, oracle, sequences_of, trained
from tests.trainers.trl.trl_runs import logged
from tests.trainers.trl.vllm_fakes import COLOCATE, SERVER, colocated, served

ROOT = Path(__file__).parents[3]


class Drawn(EmbeddedEngine):
    """Routes that no model would take: a tenth of the cells of each turn is drawn anew, by what its tokens are.
    `turns` are tokens and routes [T - 1, L, K] of each sequence that was sampled.
    """

    def __init__(self, model):
        super().__init__(model, "float32")
        self.turns = []

    def generate(self, prompts, sampling, generator):
        generation = super().generate(prompts, sampling, generator)
        trace, ids = generation.trace, []
        for s in range(len(generation)):
            tokens, rows = trace.tokens(s).tolist(), trace.select([s]).expert_ids_NLK.astype(np.int64)
            ids.append(drawn_anew(rows, 0.1, np.random.default_rng(tokens)))
            self.turns.append((tokens, ids[-1][:-1]))
        trace = replace(trace, expert_ids_NLK=np.concatenate(ids).astype(trace.expert_ids_NLK.dtype))
        return Generation(trace, generation.prompt_lengths, generation.logprobs_R)

    def routes_of(self, tokens):
        """Rows [R, L, K] of a sequence: of each the first turn that it was an input of."""
        rows = np.zeros((0, 3, 2), np.int64)
        for turn, routes in self.turns:
            if tokens[: len(turn)] == turn[: len(tokens)]:
                rows = np.concatenate([rows, routes[len(rows) :]])
        return rows[: len(tokens)]


@pytest.mark.shows("TRL", "`tools` and `environment_factory`")
@grid("source", ["branches", "generate", "environment"], quick=1, day=2)
def test_gradients_are_those_of_sampled_tokens_under_the_routes_of_their_turns(source, folder):
    model = agent()
    before, engine = copy.deepcopy(model), Drawn(model)
    chosen = {
        "generate": {},
        "environment": {"tools": (), "environment_factory": Counter},
        "branches": {"rollout_func": branching(engine), "tools": ()},
    }[source]
    trainer = trained(folder, model=model, max_completion_length=100, **chosen)
    sequences = list(sequences_of(trainer))
    turns = [np.diff(sampled.astype(int)).clip(0).sum() for _, sampled, _ in sequences]
    own = source != "branches"
    assert max(turns) > 1
    assert min(np.abs([advantage for *_, advantage in sequences])) > 0
    assert any(not sampled[np.flatnonzero(sampled)[0] :].all() for _, sampled, _ in sequences)
    expected = oracle(before, sequences, (lambda tokens: native(before, tokens)[0]) if own else engine.routes_of)
    assert trainer.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(trainer.gradients[name], gradient, rtol=1e-3, atol=2e-5)
    assert logged(trainer, "mismatch/disagreement") == [0.0]
    assert not own or logged(trainer, "mismatch/k3")[0] < 1e-9


FIRST = [[5, 6, 7]]


@pytest.mark.parametrize(
    ("turns", "final", "error", "message"),
    [
        ([FIRST, [[5, 6, 8, 20, 30]]], 5, BatchMismatchError, r"beginning.*none.*1 sequences"),
        ([FIRST, [[5, 6, 7, 20, 30]] * 2], 5, BatchMismatchError, "sequence 1 of a turn"),
        ([FIRST], 5, BatchMismatchError, r"5 tokens.*sequence 0, .*end at 3"),
        ([], 3, ReplayError, "past _generate_single_turn"),
    ],
    ids=["other-tokens", "twice", "missing", "no-turn"],
)
def test_turns_of_other_tokens_are_refused(turns, final, error, message):
    """Each sampled a token."""
    spec, made = RoutingSpec(8, 2, (RoutedLayer(0),)), []
    for turn in turns:
        routes = [np.tile([0, 1], (len(tokens) - 1, 1, 1)) for tokens in turn]
        trace = RoutingTrace.from_sequences(spec, [np.array(tokens, np.int32) for tokens in turn], routes)
        made.append(Turn([len(tokens) - 1 for tokens in turn], trace))
    with pytest.raises(error, match=message):
        join_turns(made, [np.array([5, 6, 7, 20, 30][:final], np.int32)], [2])


@pytest.mark.slow
@pytest.mark.shows("TRL", "vLLM, served and colocated (stand-ins; real vLLM in `make night`)")
@pytest.mark.parametrize(("fake", "settings"), [(colocated, COLOCATE), (served, SERVER)], ids=["colocate", "server"])
def test_routes_of_vllm_are_replayed_turn_by_turn_and_measured(fake, settings, folder, monkeypatch):
    first = {}
    for replay in ("none", "R3"):
        with monkeypatch.context() as patch:
            fake(patch)
            trainer = trained(folder, replay=replay, **settings)
        assert sum(not sampled[20:].all() for _, sampled, _ in sequences_of(trainer)) > 1
        first[replay] = {name: logged(trainer, f"mismatch/{name}")[0] for name in ("k3", "disagreement")}
    assert first["R3"]["disagreement"] == 0
    assert first["none"]["disagreement"] > 0.005
    assert first["R3"]["k3"] < first["none"]["k3"] / 2


@pytest.mark.slow
def test_a_server_that_returns_no_routes_is_refused_with_the_flag_to_start_it_with(folder, monkeypatch):
    served(monkeypatch, returns_routes=False)
    with pytest.raises(CaptureError, match="--enable-return-routed-experts"):
        trained(folder, **SERVER)


OF_TRL = ("trl", "accelerate", "datasets", "pyarrow", "pandas", "dill", "xxhash", "multiprocess", "python-dateutil")


@pytest.mark.exhaustive
def test_turns_of_a_real_vllm_are_replayed_to_its_log_probs(tmp_path, vllm_python):
    """One step in vLLM's Python, which finds TRL and what it stands on here: both have the same torch."""
    layer = tmp_path / "site-packages"  # a name by which dill tells code that is installed
    layer.mkdir()
    for name in OF_TRL:
        for file in importlib.metadata.files(name):
            top = file.parts[0]
            if not top.startswith((".", "_")) or top.startswith("_multiprocess"):
                (layer / top).exists() or (layer / top).symlink_to(Path(file.locate()).parents[len(file.parts) - 2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, layer)))}
    found = {}
    for replay, dtype in (("R3", "float32"), ("none", "bfloat16")):
        command = [vllm_python, "-m", "tests.trainers.trl.tools_on_vllm", tmp_path / replay, replay, dtype]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found[replay] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"k3"')))
    assert max(found["R3"]["turns"]) > 1
    assert found["R3"]["disagreement"] == [0.0]
    assert found["R3"]["k3"][0] < 1e-9
    assert found["none"]["disagreement"][0] > 0.005  # the control
