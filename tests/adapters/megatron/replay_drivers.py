"""Two ways of feeding routes to a training loop: Megatron's bare primitive as it is usually driven, and foreroute."""

import dataclasses

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from foreroute.adapters import megatron
from tests.adapters.megatron.grid_checks import carrying
from tests.adapters.megatron.micro_batches import PAD_ROW, expected_rows
from tests.adapters.megatron.training_step import forward_step


class Bare:
    """`RouterReplay` driven as its peers drive it: the global list, set before each forward, popped by recomputes."""

    def __init__(self, chunks, layers):
        self.layers = layers

    def give(self, batches, traces):
        """One int64 tensor [R, K] per router of this process, in the order in which routers were made."""
        return [
            dataclasses.replace(batch, routes=[self._rows(batch, trace, layer) for layer in self.layers])
            for batch, trace in zip(batches, traces, strict=True)
        ]

    def forward(self, iterator, model):
        batch = next(iterator)
        if batch.routes is None:
            RouterReplay.clear_global_router_replay_action()
            return forward_step(iter([batch]), model)
        RouterReplay.set_replay_data(batch.routes)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        result = forward_step(iter([batch]), model)
        # the backward of this micro-batch may recompute
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return result

    def done(self):
        """What a loop does after a step without recomputation, or before a native pass."""
        RouterReplay.clear_global_router_replay_action()

    def _rows(self, batch, trace, layer):
        rows_R = self._order(batch)
        assert (rows_R != PAD_ROW).all(), "these cases have no padding"
        return torch.from_numpy(trace.expert_ids_NLK[rows_R, layer].astype("int64"))

    def _order(self, batch):
        return expected_rows(batch)


class BareInOneAction(Bare):
    """As `Bare`, but routers stay in REPLAY_FORWARD, as when the action is toggled on other objects than they hold."""

    def forward(self, iterator, model):
        result = super().forward(iterator, model)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        return result


class BareBatchFirst(Bare):
    """As `Bare`, but the rows of a padded batch are flattened in the order in which an engine returns them."""

    def _order(self, batch):
        return batch.rows.reshape(-1).numpy()


class Foreroute:
    """The adapter."""

    def __init__(self, chunks, layers):
        self._routed = megatron.attach(chunks)
        self.forward = self._routed.replaying(forward_step)

    def give(self, batches, traces):
        return carrying(batches, traces)

    def done(self):
        pass
