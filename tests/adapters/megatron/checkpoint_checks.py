"""Checkpoints that Megatron does not make itself, inside of its own or around them, and of what is frozen."""

import contextlib

import torch
from torch.utils.checkpoint import checkpoint

from tests.adapters.megatron import one_rank as on


def check_checkpoints_by_hand_find_their_routes():
    """Around a layer or the whole chunk, when the session is closed and another batch has been replayed."""
    built, routed, ids, trace = on.prepared()
    expected = on.alone(built, routed, ids, trace)
    for reentrant in (True, False):
        with checkpointed(built, reentrant):
            assert on.same(on.alone(built, routed, ids, trace), expected)
        whole = lambda weight, run=built: on.forward(run, ids) + 0 * weight.sum()  # noqa: E731
        with routed.replay(trace):
            loss = checkpoint(whole, built.embedding.word_embeddings.weight, use_reentrant=reentrant)
        on.replayed(built, routed, on.foreign(routed.spec, ids, seed=4), ids)
        loss.backward()
        assert on.same(on.gradients(built), expected)
        built.zero_grad(set_to_none=True)


def check_a_checkpoint_inside_of_a_checkpoint_keeps_its_routes():
    """The inner one is made anew when the outer one recomputes, and recomputes itself when the session is closed."""
    built, routed, ids, trace = on.prepared("selective")
    expected = on.alone(built, routed, ids, trace)
    with checkpointed(built, reentrant=True), on.maps_given(routed) as maps:
        assert on.same(on.alone(built, routed, ids, trace), expected)
    on.assert_followed(maps, trace, calls=3)


def check_a_non_reentrant_checkpoint_inside_of_megatrons_keeps_its_routes():
    built, routed, ids, trace = on.prepared("uniform")
    expected = on.alone(built, routed, ids, trace)
    with checkpointed(built, reentrant=False):
        assert on.same(on.alone(built, routed, ids, trace), expected)


def check_a_frozen_model_is_replayed_with_gradients_on_or_off():
    """A reference model has nothing to recompute, whatever its configuration says."""
    built, routed, ids, trace = on.prepared("uniform")
    expected = on.replayed(built, routed, trace, ids)
    built.requires_grad_(False)
    assert torch.equal(on.replayed(built, routed, trace, ids), expected)
    built.output_layer.requires_grad_(True)
    assert torch.equal(on.replayed(built, routed, trace, ids), expected)


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
