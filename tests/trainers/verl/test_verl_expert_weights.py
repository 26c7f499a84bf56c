"""Rollouts whose engine lacked weights: which are refused, against k3 summed up token by token."""

import math
import re

import numpy as np
import pytest

from foreroute.errors import EngineError
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trainers.verl.comparison import K3_LIMIT, MIN_TOKENS, ExpertWeightsCheck

SPEC = RoutingSpec(num_experts=8, top_k=2, layers=(RoutedLayer(1), RoutedLayer(3)))
LAYER, EXPERT = 1, 5


def rollout(log_ratio, *, seed=0, count=60):
    """Sequences with routes, and log-probs of both sides, which differ by so much for tokens of one expert."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 5, count), rng.integers(1, 9, count)
    rows = [
        np.argsort(rng.random((p + r - 1, 2, 8)), axis=-1)[..., :2] for p, r in zip(prompts, responses, strict=True)
    ]
    trace = RoutingTrace.from_sequences(SPEC, [np.arange(len(r) + 1, dtype=np.int32) for r in rows], rows)
    sampled = [rng.normal(-2, 1, n).astype(np.float32) for n in responses]
    trained = [logprobs.copy() for logprobs in sampled]
    for ours, routes, prompt in zip(trained, rows, prompts, strict=True):
        for t in range(len(ours)):
            if EXPERT in routes[prompt - 1 + t, LAYER]:
                ours[t] += log_ratio
    return trace, sampled, trained, [np.ones(n, bool) for n in responses]


def judged(*parts, reduce=lambda sums: sums):
    check = ExpertWeightsCheck(SPEC)
    for part in parts:
        check.add(*part)
    check.judge(reduce)


def test_an_expert_whose_tokens_are_far_apart_is_named():
    trace, sampled, trained, counted = rollout(0.6)
    k3 = math.exp(0.6) - 1 - 0.6
    tokens = sum(map(len, sampled))
    of_expert = sum(int((ours != theirs).sum()) for ours, theirs in zip(trained, sampled, strict=True))
    assert tokens > of_expert > MIN_TOKENS
    assert k3 * of_expert / tokens < K3_LIMIT < k3  # the mean over all tokens would not have shown it
    said = f"are {k3 * of_expert / tokens:.3g} nats (k3) from the trainer's on the same experts, and {k3:.3g} for those"
    with pytest.raises(EngineError, match=re.escape(f"{said} of expert {EXPERT} in {SPEC.layers[LAYER]};")):
        judged((trace, sampled, trained, counted))


def test_tokens_that_are_not_known_or_not_counted_are_left_out():
    trace, sampled, trained, counted = rollout(0.6)
    off = [ours != theirs for ours, theirs in zip(trained, sampled, strict=True)]
    judged((trace, sampled, trained, [~one for one in off]))
    judged((trace, [np.where(one, np.nan, s) for one, s in zip(off, sampled, strict=True)], trained, counted))


def test_few_tokens_of_an_expert_prove_nothing_and_all_tokens_together_do():
    trace, sampled, trained, counted = rollout(0.6, count=8)
    assert max(np.bincount(trace.expert_ids_NLK[:, LAYER].ravel())) < MIN_TOKENS
    judged((trace, sampled, trained, counted))
    with pytest.raises(EngineError, match="Weights did not arrive"):
        judged((trace, sampled, [logprobs + 0.6 for logprobs in sampled], counted))


def test_a_few_tokens_far_apart_end_no_run():
    trace, sampled, trained, counted = rollout(0.0)
    for ours in trained[:: len(trained) // 5]:
        ours[0] += 8.0  # a k3 of 2,972 nats
    judged((trace, sampled, trained, counted))


def test_sums_are_of_all_micro_batches_and_processes_and_start_anew():
    parts = [rollout(0.6, seed=seed, count=16) for seed in range(4)]
    for part in parts:
        judged(part)  # too few
    with pytest.raises(EngineError, match=f"expert {EXPERT} in "):
        judged(*parts)
    with pytest.raises(EngineError, match=f"expert {EXPERT} in "):
        judged(parts[0], reduce=lambda sums: 4 * sums)
    check = ExpertWeightsCheck(SPEC)
    for part in parts:
        check.add(*part)
        check.judge(lambda sums: sums)


def test_what_two_precisions_differ_by_is_let_through():
    trace, sampled, _, counted = rollout(0.0)
    rng = np.random.default_rng(1)
    judged((trace, sampled, [s + rng.normal(0, 0.1, len(s)).astype(np.float32) for s in sampled], counted))
    ExpertWeightsCheck(SPEC).judge(lambda sums: sums)  # no token at all, as without log-probs of the rollout
