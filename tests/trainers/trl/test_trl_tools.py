"""A tool in the loop: every turn's routes reach the experts in their places, and exactly sampled tokens carry loss.

Oracles: `tools_runs.oracle`, and what each turn of an engine is written down to have routed.
"""

import copy

import numpy as np
import pytest
import torch

from examples.trl.tiny import agent
from foreroute.capture import Generation
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace, concatenate
from foreroute.trainers.trl.capture import Turn, join_turns
from tests.tiers import grid
from tests.trainers.given_experts import drawn_anew, native
from tests.trainers.trl.tools_runs import Counter, branching, oracle, sequences_of, trained
from tests.trainers.trl.trl_runs import logged


class Drawn(EmbeddedEngine):
    """Routes that no model would take: a tenth of the cells of each turn is drawn anew, by what its tokens are.

    Attributes:
        turns: tokens and routes int64 [T - 1, L, K] of each sequence that was sampled, in order.
    """

    def __init__(self, model):
        super().__init__(model, "float32")
        self.turns = []

    def generate(self, prompts, sampling, generator):
        generation = super().generate(prompts, sampling, generator)
        traces = [self._drawn(generation.trace.select([s])) for s in range(len(generation))]
        return Generation(concatenate(traces), generation.prompt_lengths, generation.logprobs_R)

    def _drawn(self, trace):
        tokens, rows = trace.tokens(0).tolist(), trace.expert_ids_NLK.astype(np.int64)
        rows = drawn_anew(rows, 0.1, np.random.default_rng(tokens))
        self.turns.append((tokens, rows[:-1]))
        versions = [trace.weight_versions_N]
        return RoutingTrace.from_rows(trace.spec, [tokens], [rows], valid=[trace.valid_N], weight_versions=versions)

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
    own = source in ("generate", "environment")
    assert max(turns) > 1
    assert min(np.abs([advantage for *_, advantage in sequences])) > 0
    assert any(not sampled[np.flatnonzero(sampled)[0] :].all() for _, sampled, _ in sequences)
    routes_of = (
        (lambda tokens: native(before, tokens)[0][:-1])
        if own
        else lambda tokens: engine.routes_of(tokens)[: len(tokens) - 1]
    )
    expected = oracle(before, sequences, routes_of)
    assert trainer.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(trainer.gradients[name], gradient, rtol=1e-3, atol=2e-5)
    assert logged(trainer, "mismatch/disagreement") == [0.0]
    assert not own or logged(trainer, "mismatch/k3")[0] < 1e-9


def turn_of(prompts, responses):
    sequences = [np.array(prompt + response, np.int32) for prompt, response in zip(prompts, responses, strict=True)]
    routes = [np.tile([0, 1], (len(tokens) - 1, 1, 1)) for tokens in sequences]
    spec = RoutingSpec(8, 2, (RoutedLayer(0),))
    return Turn([len(prompt) for prompt in prompts], RoutingTrace.from_sequences(spec, sequences, routes))


@pytest.mark.parametrize(
    ("second", "final", "error", "message"),
    [
        ([[5, 6, 8, 20, 30]], [5, 6, 7, 20, 30], BatchMismatchError, "the beginning of none of the 1 sequences"),
        ([[5, 6, 7, 20, 30]] * 2, [5, 6, 7, 20, 30], BatchMismatchError, "sequence 1 of a turn"),
        ([], [5, 6, 7, 20, 30], BatchMismatchError, "trains on 5 tokens of sequence 0, and .* end at 3"),
        (None, [5, 6, 7], ReplayError, "past _generate_single_turn"),
    ],
    ids=["other-tokens", "twice", "missing", "no-turn"],
)
def test_turns_of_other_tokens_are_refused(second, final, error, message):
    turns = [] if second is None else [turn_of([[5, 6]], [[7]])]
    if second:
        turns.append(turn_of([tokens[:-1] for tokens in second], [tokens[-1:] for tokens in second]))
    with pytest.raises(error, match=message):
        join_turns(turns, [np.array(final, np.int32)], [2])
