"""twinkle's replay on models of transformers: blocks by name in one registry, driven as by `TransformersModel`."""

import sys
from contextlib import contextmanager

import torch
from twinkle.model.transformers.moe import router_replay
from twinkle.model.transformers.moe.router_replay import RouterReplayAction

from foreroute import RoutedLayer, RoutingSpec
from tests.conformance.peers.ids_alone import OfTransformers


class Peer(OfTransformers):
    name = "twinkle"
    fill = 0  # as its processor pads

    def enable(self, model):
        router_replay.Platform.get_local_device = staticmethod(lambda: "cpu")  # it knows GPUs and NPUs
        router_replay.apply_router_replay_patch(model.model)

    def spec(self, model):
        routers = [weight for name, weight in model.model.named_parameters() if name in model.router_weights]
        first = model.model.config.num_hidden_layers - len(routers)
        layers = tuple(RoutedLayer(first + i) for i in range(len(routers)))
        return RoutingSpec(len(routers[0]), model.model.config.num_experts_per_tok, layers)

    def arm(self, model, ids):
        model.is_replayed = False
        router_replay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        routes_BTLK = torch.stack(ids, 1)[None]
        router_replay.set_router_replay_data(routes_BTLK, model.model)

    def after_forward(self, model, grad):
        if model.records:
            model.recorded_BTLK = router_replay.get_router_replay_data(model.model)
        model.is_replayed = grad and not model.records
        if not model.is_replayed:  # `forward_backward` cleans up behind its backward
            self.clean_up()

    def backward(self, model, step):
        if getattr(model, "is_replayed", False):
            router_replay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        try:
            step.backward()
        finally:
            self.clean_up()

    def close(self, model):
        # behind a forward that is replayed, `backward` cleans up, which may come after the session
        if sys.exc_info()[0] or not getattr(model, "is_replayed", False):
            self.clean_up()

    def clean_up(self):
        router_replay.clear_global_router_replay_action()
        router_replay.clear_global_indices()

    @contextmanager
    def recording(self, model):
        router_replay.set_global_router_replay_action(RouterReplayAction.RECORD)
        try:
            yield
        finally:
            self.clean_up()

    def recorded(self, model):
        return model.recorded_BTLK[0].unbind(1)
