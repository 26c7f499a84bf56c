"""A training step through Megatron's schedules, and what its dispatchers were given on the way."""

import contextlib
from functools import partial

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer

from tests.adapters.megatron.micro_batches import model_inputs


def forward_step(iterator, model):
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

    def watched(key, inner, hidden_states, routing_map, probs):
        note(key, hidden_states.detach(), routing_map.detach(), probs.detach())
        return inner(hidden_states, routing_map, probs)

    for key, block in blocks.items():
        dispatcher = block.token_dispatcher
        dispatcher.dispatch_preprocess = partial(watched, key, dispatcher.dispatch_preprocess)
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
