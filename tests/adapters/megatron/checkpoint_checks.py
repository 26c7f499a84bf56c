"""Checkpoints that Megatron does not make itself, inside of its own or around them, and of what is frozen."""

import contextlib

import torch
from torch.utils.checkpoint import checkpoint

from foreroute.errors import ReplayError
from tests.adapters.megatron import one_rank as on


def check_checkpoints_by_hand_are_replayed_or_refused():
    """Around a layer, torch's reentrant checkpoint is found in the graph; others are refused before they go wrong."""
    built, routed, ids, trace = on.prepared()
    expected = on.alone(built, routed, ids, trace)
    with checkpointed(built, reentrant=True):
        assert on.same(on.alone(built, routed, ids, trace), expected)
    with checkpointed(built, reentrant=False):
        on.refuses(ReplayError, "non-reentrant", lambda: on.replayed(built, routed, trace, ids))
    with routed.replay(trace):
        embedded = built.embedding.word_embeddings.weight
        whole = lambda weight: on.forward(built, ids) + 0 * weight.sum()  # noqa: E731
        on.refuses(ReplayError, "inside a checkpoint", lambda: checkpoint(whole, embedded, use_reentrant=True))
        on.forward(built, ids)


def check_a_checkpoint_inside_of_a_checkpoint_keeps_its_routes():
    """The inner one is made anew when the outer one recomputes, and recomputes itself when the session is closed."""
    built, routed, ids, trace = on.prepared("selective")
    expected = on.alone(built, routed, ids, trace)
    with checkpointed(built, reentrant=True), on.maps_given(routed) as maps:
        assert on.same(on.alone(built, routed, ids, trace), expected)
    on.assert_followed(maps, trace, calls=3)


def check_a_non_reentrant_checkpoint_inside_of_megatrons_is_refused():
    built, routed = on.attached("uniform")
    ids = on.tokens()
    with checkpointed(built, reentrant=False):
        loss = on.replayed(built, routed, on.foreign(routed.spec, ids), ids)
        on.refuses(ReplayError, "non-reentrant", loss.backward)


def check_a_frozen_model_is_replayed_with_gradients_on_or_off():
    """A reference model has nothing to recompute, whatever its configuration says."""
    built, routed, ids, trace = on.prepared("uniform")
    expected = on.replayed(built, routed, trace, ids)
    built.requires_grad_(False)
    assert torch.equal(on.replayed(built, routed, trace, ids), expected)
    built.output_layer.requires_grad_(True)
    assert torch.equal(on.replayed(built, routed, trace, ids), expected)


def check_layers_that_no_gradient_reaches_are_told_of():
    """Megatron itself trains none of them then, and says nothing."""
    built, routed = on.attached("uniform")
    built.embedding.requires_grad_(False)
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
    on.refuses(ReplayError, "what comes before it is frozen", lambda: on.replayed(built, routed, trace, ids))


@contextlib.contextmanager
def checkpointed(built, reentrant):
    """Each layer inside of a checkpoint of torch."""

    def around(inner):
        def forward(hidden_states, **kwargs):
            run = lambda hidden: inner(hidden_states=hidden, **kwargs)  # noqa: E731
            return checkpoint(run, hidden_states, use_reentrant=reentrant)

        return forward

    for layer in built.decoder.layers:
        layer.forward = around(layer.forward)
    try:
        yield
    finally:
        for layer in built.decoder.layers:
            del layer.forward
