"""Gate weights recorded and replayed: exactly, as constants, row by row."""

import numpy as np
import torch

from foreroute.errors import TraceContentError
from tests.replay.session_subject import batch_of, entering, foreign, recorded, refuses, same, step
from tests.traces import weighted

BATCH = batch_of(12, 12)
RAGGED = batch_of(12, 7)


def prepared(framework, gate=None, recompute="none", batch=BATCH):
    """A model, the routes and weights that it gives its tokens, and the log-probabilities that come of them."""
    on = framework.built(gate, recompute)
    with on.routed.record(gate_weights=True) as recording, torch.no_grad():
        native = on.run(batch)
    return on, recording.trace(), native


def forced(on, trace, batch=BATCH, **options):
    """The log-probabilities under a trace and its weights, and those that experts were given [N, L, K]."""
    with on.given() as given, torch.no_grad(), on.routed.replay(trace, gate_weights=True, **options):
        seen = on.run(batch)
    weights_NLE = np.stack([each.weights_BTE[batch.real_BT.numpy()] for each in given], axis=1)
    return seen, np.take_along_axis(weights_NLE, trace.expert_ids_NLK.astype(int), -1)


def check_own_weights_change_no_bit(framework):
    for gate in framework.gates:
        on, trace, native = prepared(framework, gate)
        assert (trace.gate_weights_NLK > 0).all(), gate
        assert torch.equal(forced(on, trace)[0], native), gate
        # a router's own weights may be rounded otherwise in another order of sequences; those of a trace are constants
        swapped = trace.select([1, 0])
        _, given_NLK = forced(on, swapped, BATCH.select(1, 0))
        assert np.array_equal(given_NLK, swapped.gate_weights_NLK), gate


def check_other_weights_are_obeyed_and_no_gradient_reaches_a_router(framework):
    for gate in framework.gates:
        on, trace, native = prepared(framework, gate)
        other = weighted(trace, trace.gate_weights_NLK / 2)
        with on.routed.record(gate_weights=True) as recording:
            changed, given_NLK = forced(on, other)
        assert np.array_equal(recording.trace().gate_weights_NLK, other.gate_weights_NLK), gate
        assert np.array_equal(given_NLK, other.gate_weights_NLK), gate
        assert not torch.allclose(changed, native, atol=1e-4), gate
        step(on, other, BATCH, gate_weights=True)
        of_routers = {p for router in on.routers for p in router.parameters()}
        assert not any(p.grad is not None and p.grad.any() for p in of_routers), gate
        assert any(p.grad is not None and p.grad.any() for p in on.model.parameters()), gate
        step(on, trace, BATCH)
        assert all(router.weight.grad.any() for router in on.routers), "live weights have one"


def check_recomputed_layers_have_the_same_weights(framework):
    steps = []
    for recompute in framework.recomputations:
        on, trace, _ = prepared(framework, recompute=recompute)
        steps.append(step(on, weighted(trace, trace.gate_weights_NLK[::-1].copy()), BATCH, gate_weights=True))
    for loss, gradients in steps[1:]:
        assert torch.equal(loss, steps[0][0])
        assert same(gradients, steps[0][1])


def check_padding_and_rows_without_a_route_keep_their_own_weights(framework):
    on, _, native = prepared(framework, batch=RAGGED)
    with on.routed.record(gate_weights=True) as recording, torch.no_grad():
        on.run(RAGGED)
    rollout = recording.rollout(RAGGED.ids_BT, RAGGED.real_BT.long())
    assert np.flatnonzero(~rollout.valid_N).tolist() == [11, 18]
    seen, _ = forced(on, rollout, RAGGED, padding="native")
    assert torch.equal(seen[RAGGED.real_BT[:, 1:]], native[RAGGED.real_BT[:, 1:]])
    _, given_NLK = forced(on, rollout, RAGGED, padding="spread")
    assert np.array_equal(given_NLK[rollout.valid_N], rollout.gate_weights_NLK[rollout.valid_N])
    with on.given() as given, torch.no_grad(), on.routed.replay(rollout, gate_weights=True, padding="spread"):
        on.run(RAGGED)
    assert all(((each.weights_BTE > 0) == each.map_BTE).all() for each in given), "padding has live weights"


def check_a_trace_without_weights_is_refused(framework):
    on = framework.built()
    for bare in (
        foreign(on.routed.spec, BATCH),
        recorded(on, BATCH, gate_weights=True).without_streams("gate_weights"),
    ):
        refuses(TraceContentError, "no gate weights", entering(on.routed.replay, bare, gate_weights=True))
