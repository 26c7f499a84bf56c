"""A training step through Megatron's schedules, and what its dispatchers were given on the way."""

import contextlib

import numpy as np
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer

from tests.adapters.megatron.micro_batches import model_inputs


def forward_step(iterator, model):
    """What a user writes: one micro-batch through one model chunk."""
    batch = next(iterator)
    inputs, weights = model_inputs(batch)
    output = model(**inputs)

    def loss(output):
        total = (output * weights).sum() / weights.numel()
        return total, {"loss": total.detach().item()}

    return output, loss


def step(chunks, batches, forward=forward_step, forward_only=False):
    """Losses of the micro-batches (empty but on the last stage), and the gradients of this rank's parameters."""
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    iterators = [iter(batches) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=batches[0].num_router_rows,
        micro_batch_size=1 if batches[0].packed else len(batches[0].lengths),
        forward_only=forward_only,
    )
    return [each["loss"] for each in losses], gradients(chunks)


def gradients(chunks):
    return {
        f"{i}.{name}": parameter.grad.clone()
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.grad is not None
    }


def moe_layers(chunks):
    return {
        module.layer_number - 1: module
        for chunk in chunks
        for module in chunk.decoder.modules()
        if isinstance(module, MoELayer)
    }


@contextlib.contextmanager
def watching(blocks, note):
    """`note(key, hidden, routing_map, probs)` is told what the dispatchers of these layers are given."""

    def watch(key, dispatcher):
        inner = dispatcher.dispatch_preprocess

        def watched(hidden_states, routing_map, probs):
            note(key, hidden_states.detach(), routing_map.detach(), probs.detach())
            return inner(hidden_states, routing_map, probs)

        dispatcher.dispatch_preprocess = watched

    for key, block in blocks.items():
        watch(key, block.token_dispatcher)
    try:
        yield
    finally:
        for block in blocks.values():
            del block.token_dispatcher.dispatch_preprocess


class Dispatched:
    """What the dispatchers of a model were given, seen where the dispatchers are called."""

    def __init__(self, chunks):
        self.layers = moe_layers(chunks)
        # (hidden states' bytes, map [R, E], weights [R, E], whether it was a recompute), which has the same bytes
        self.calls = {layer: [] for layer in self.layers}

    @contextlib.contextmanager
    def watch(self):
        with watching(self.layers, self._note):
            yield self

    def _note(self, layer, hidden_states, routing_map, probs):
        key = hidden_states.numpy().tobytes()
        seen = {k for k, *_ in self.calls[layer]}
        self.calls[layer].append((key, routing_map.clone().numpy(), probs.clone().numpy(), key in seen))

    def forwards(self, layer):
        """The maps of first forwards, in order of micro-batches."""
        return [call for call in self.calls[layer] if not call[3]]

    def recomputes(self, layer):
        """For every recompute, the number of its micro-batch and the call."""
        order = {key: m for m, (key, *_) in enumerate(self.forwards(layer))}
        return [(order[call[0]], call) for call in self.calls[layer] if call[3]]


def picks(call):
    """Expert ids [R, K] in the order of Megatron's own top-k: by falling weight."""
    _, map_RE, weights_RE, _ = call
    count = map_RE.sum(1)
    assert (count == count[0]).all(), f"rows have {count.min()} to {count.max()} experts"
    ranked = np.where(map_RE, weights_RE, -np.inf)
    return np.argsort(-ranked, axis=1, kind="stable")[:, : count[0]]


def native_routes(chunks, batches, forward=forward_step):
    """Losses, gradients, and per layer and micro-batch the picks [R, K], of a step without replay."""
    with Dispatched(chunks).watch() as seen:
        losses, grads = step(chunks, batches, forward)
    return losses, grads, {layer: [picks(c) for c in seen.forwards(layer)] for layer in seen.layers}, seen
