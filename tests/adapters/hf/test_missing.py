"""Rows without a route, under each policy: what is executed, row by row, and what counts, token by token."""

import numpy as np
import pytest
import torch

import foreroute as fr
from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.testing.models import FAMILIES, tiny
from tests.adapters.hf.model_runs import (
    batch_of,
    enable_checkpointing,
    experts_log,
    gradients,
    log_probs,
    loss_of,
    random_routes,
    sequences_of,
)
from tests.roundings import TERMS, require_rounded, roundings

BATCH = batch_of(9, 6, 4)
MISSING = {"none": [[], [], []], "gap": [[2, 3], [], [0]], "tail": [[7, 8], [4, 5], []], "all": [range(9), [], []]}


def without(trace, missing):
    """The trace, and for each sequence the rows it lacks; the last row of each is always absent, as engines give it."""
    sequences = []
    for s, lacking in enumerate(missing):
        tokens = trace.tokens(s)
        routes = np.split(trace.expert_ids_NLK, trace.offsets[1:-1])[s]
        part = None
        for p, token in enumerate(tokens):
            absent = p in lacking or p == len(tokens) - 1
            row = (
                fr.RoutingTrace.unrouted(trace.spec, [[token]])
                if absent
                else fr.RoutingTrace.from_sequences(trace.spec, [[token]], [routes[p : p + 1]])
            )
            part = row if part is None else part.continued_by(row)
        sequences.append(part)
    return fr.concatenate(sequences)


def expected_mask(missing):
    """By hand: a token counts while no row before it is missing."""
    mask = torch.zeros_like(BATCH["attention_mask"], dtype=torch.bool)
    for s, lacking in enumerate(missing):
        length = int(BATCH["attention_mask"][s].sum())
        for t in range(length):
            mask[s, t] = not any(row < t for row in lacking)
    return mask


@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("policy", ["native", "drop"])
@pytest.mark.parametrize("telemetry", [False, True])
def test_missing_rows_are_routed_by_the_model_and_others_as_given(missing, policy, telemetry):
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    trace = without(random_routes(routed.spec, BATCH), missing)
    routers = [model.get_submodule(path) for path in routed.router_paths]
    own = []
    handles = [r.register_forward_hook(lambda r, a, out: own.append(out[0].topk(2).indices)) for r in routers]
    kept = BATCH["attention_mask"].bool().reshape(-1)
    with experts_log(model) as log, routed.replay(trace, missing=policy, telemetry=telemetry) as session:
        log_probs(model, BATCH)
        mask = session.loss_mask_BT
    for handle in handles:
        handle.remove()
    for layer, (_, ids) in enumerate(log):
        expected = own[layer][kept].numpy()
        expected[trace.valid_N] = trace.expert_ids_NLK[trace.valid_N, layer]
        assert np.array_equal(ids[kept].numpy(), expected)
    assert torch.equal(mask, expected_mask(missing) if policy == "drop" else BATCH["attention_mask"].bool())


@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_a_counted_token_has_the_log_probability_of_the_full_trace(missing):
    """What `drop` keeps is right up to the rounding of other groups of rows per expert; what it drops is not."""
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    full = random_routes(routed.spec, BATCH)
    with torch.no_grad():
        with routed.replay(full):
            expected = log_probs(model, BATCH)
        with routed.replay(without(full, missing), missing="drop") as session:
            seen = log_probs(model, BATCH)
            counted = session.loss_mask_BT[:, 1:][BATCH["attention_mask"][:, 1:].bool()]
    require_rounded(seen[counted], expected[counted])
    seen_otherwise = 100 * roundings(TERMS) * expected.abs().max()
    assert ((seen[~counted] - expected[~counted]).abs() > seen_otherwise).all()


def test_by_default_missing_rows_are_refused():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    full = random_routes(routed.spec, BATCH)
    for name, message in [
        ("gap", "sequence 0 has no route at position 2, and 9 later tokens"),
        ("tail", "sequence 0 has no route at position 7, and 2 later tokens"),
        ("all", "sequence 0 has no route at position 0, and 8 later tokens"),
    ]:
        with pytest.raises(BatchMismatchError, match=message), routed.replay(without(full, MISSING[name])):
            model(**BATCH)
    with routed.replay(without(full, MISSING["none"])) as session:
        model(**BATCH)
    assert torch.equal(session.loss_mask_BT, BATCH["attention_mask"].bool())


def test_a_row_that_the_batch_leaves_out_is_not_missing():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    batch = {name: value[:1] for name, value in BATCH.items()}
    trace = without(random_routes(routed.spec, BATCH), MISSING["tail"]).select([0])
    with routed.replay(trace):
        model(**{name: value[:, :-1] for name, value in batch.items()})


def test_dropping_without_reading_the_mask_is_no_silent_no_op():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with (
        pytest.raises(ReplayError, match="nobody read the loss mask"),
        routed.replay(without(trace, MISSING["gap"]), missing="drop"),
    ):
        model(**BATCH)
    with routed.replay(without(trace, MISSING["none"]), missing="drop"):
        model(**BATCH)
    with routed.replay(trace) as session:
        with pytest.raises(ReplayError, match="before the first forward"):
            _ = session.loss_mask_BT
        model(**BATCH)


@pytest.mark.parametrize("policy", ["native", "drop"])
def test_with_one_pick_per_token_expert_0_is_an_expert(policy):
    sizes = {**FAMILIES["qwen3_moe"], "num_experts_per_tok": 1}
    model = hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", **sizes)
    routed = hf.attach(model)
    zeros = [np.zeros((len(tokens), 3, 1), np.int64) for tokens in sequences_of(BATCH)]
    trace = without(fr.RoutingTrace.from_sequences(routed.spec, sequences_of(BATCH), zeros), MISSING["gap"])
    with routed.replay(trace, missing=policy) as session, routed.record() as recording, torch.no_grad():
        model(**BATCH)
        assert session.loss_mask_BT.any()
    executed = recording.trace().expert_ids_NLK
    assert (executed[trace.valid_N] == 0).all()
    assert (executed[~trace.valid_N] != 0).any()


@pytest.mark.parametrize("telemetry", [False, True])
def test_whoever_writes_to_the_loss_mask_changes_no_recomputation(telemetry):
    grads = []
    for writes in (False, True):
        model = tiny("qwen3_moe")
        enable_checkpointing(model, use_reentrant=True)
        routed = hf.attach(model)
        with routed.replay(random_routes(routed.spec, BATCH), telemetry=telemetry) as session:
            loss = loss_of(model, BATCH)
            if writes:
                session.loss_mask_BT[:, :5] = False
            loss.backward()
        grads.append(gradients(model))
    assert all(torch.equal(grads[0][name], gradient) for name, gradient in grads[1].items())
