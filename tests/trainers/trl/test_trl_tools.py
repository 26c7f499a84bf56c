"""A tool in the loop: every turn's routes reach the experts in their places, and exactly sampled tokens carry loss.

Oracles: `tools_runs.oracle`, and what each turn of an engine is written down to have routed.
"""

import copy

import numpy as np
import pytest
import torch

from examples.trl.tiny import agent
from foreroute.capture import Generation, Sampling
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.trace import SAMPLING, RoutingTrace, concatenate
from foreroute.trainers.trl.capture import Turn, join_turns
from tests.trainers.given_experts import drawn_anew, native
from tests.trainers.trl.test_trl_masks import SCORES_ON_SETS
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


LATER = {"generate": pytest.mark.slow, "environment": pytest.mark.exhaustive}


@pytest.mark.shows("TRL", "`tools` and `environment_factory`")
@pytest.mark.parametrize("source", ["branches", *(pytest.param(each, marks=LATER[each]) for each in LATER)])
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
    assert max(turns) > (2 if own else 1), (
        "some have three turns where TRL generates, and two where `rollout_func` does"
    )
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


@SCORES_ON_SETS
@pytest.mark.slow
def test_sampling_masks_of_all_turns_are_scored_on(folder):
    k3 = {}
    for replay in ("R3", "none"):
        trainer = trained(folder, replay=replay, top_p=0.8)
        (k3[replay],) = logged(trainer, "mismatch/k3")
    assert k3["R3"] < 1e-9
    assert k3["none"] > 1e-2  # the control
    assert SAMPLING not in trainer.routing.rollout.trace.streams


@pytest.mark.slow
def test_r2_and_evaluation_need_nothing_of_a_turn(folder):
    trainer = trained(folder, replay="R2", num_iterations=2, max_steps=2, eval_strategy="steps", eval_steps=2)
    assert len(logged(trainer, "eval_loss")) == 1
    assert logged(trainer, "mismatch/native_disagreement")


def turn_of(spec, number, prompts, responses):
    """A turn whose rows hold its number, as the first expert, and their position."""
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    others = [e for e in range(8) if e != number]
    rows = [np.array([[[number, others[p % 7]]] * 3 for p in range(len(t))]) for t in sequences]
    valid = [np.arange(len(t)) < len(t) - 1 for t in sequences]
    versions = [np.zeros(len(t), np.int64) for t in sequences]
    trace = RoutingTrace.from_rows(spec, sequences, rows, valid=valid, weight_versions=versions)
    return Turn([len(p) for p in prompts], trace, [np.full(len(r), -1.0 - number, np.float32) for r in responses])


@pytest.fixture(scope="module")
def spec():
    return EmbeddedEngine(agent()).generate([np.array([5, 6], np.int32)], Sampling(1, 1), torch.Generator()).trace.spec


def test_rows_log_probs_and_cuts_of_turns_by_hand(spec):
    """Two sequences alike in their first turn, of which the second goes on; one that is cut; one that ends at once."""
    one = turn_of(spec, 0, [[5, 6], [5, 6], [5], [5]], [[7], [7], [8, 9], [1]])
    two = turn_of(spec, 1, [[5, 6, 7, 20, 21], [5, 8, 9, 22]], [[30, 31], [32, 33, 34]])
    final = [[5, 6, 7], [5, 6, 7, 20, 21, 30, 31], [5, 8, 9, 22, 32], [5, 1]]
    trace, logprobs = join_turns([one, two], [np.array(t, np.int32) for t in final], [2, 2, 1, 1])
    of_turn = trace.expert_ids_NLK[:, 0, 0].tolist()
    valid = trace.valid_N.tolist()
    assert [int(t) if v else None for t, v in zip(of_turn, valid, strict=True)] == [
        *(0, 0, None),
        *(0, 0, 1, 1, 1, 1, None),
        *(0, 0, 1, 1, 1),
        *(0, None),
    ]
    nan = np.nan
    expected = [[-1], [-1, nan, nan, -2, -2], [-1, -1, nan, -2], [-1]]
    for found, own in zip(logprobs, expected, strict=True):
        np.testing.assert_array_equal(found, np.array(own, np.float32))


@pytest.mark.parametrize(
    ("second", "final", "error", "message"),
    [
        ([[5, 6, 8, 20, 30]], [5, 6, 7, 20, 30], BatchMismatchError, "the beginning of none of the 1 sequences"),
        ([], [5, 6, 7, 20, 30], BatchMismatchError, "trains on 5 tokens of sequence 0, and .* end at 3"),
        (None, [5, 6, 7], ReplayError, "past _generate_single_turn"),
    ],
    ids=["other-tokens", "missing", "no-turn"],
)
def test_turns_of_other_tokens_are_refused(second, final, error, message, spec):
    turns = [] if second is None else [turn_of(spec, 0, [[5, 6]], [[7]])]
    if second:
        turns.append(turn_of(spec, 1, [tokens[:-1] for tokens in second], [tokens[-1:] for tokens in second]))
    with pytest.raises(error, match=message):
        join_turns(turns, [np.array(final, np.int32)], [2])
