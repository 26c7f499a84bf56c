"""Megatron-Core's `RouterReplay`: one object in each router, all of them in one list of the process."""

from contextlib import contextmanager

from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from foreroute import RoutedLayer, RoutingSpec
from tests.adapters.megatron.presented import MegatronUnderTest
from tests.conformance.peers.ids_alone import IdsAlone


class Peer(IdsAlone):
    """With full recomputation; its list is emptied when no backward is to come."""

    name = "megatron-core"
    picks_in_order = False
    sequence_first = True

    def __init__(self, build_model, vocabulary):
        self.of_megatron, self.vocabulary = MegatronUnderTest("", build_model, vocabulary=vocabulary), vocabulary

    def model(self, case):
        before = list(RouterReplay.global_router_replay_instances)
        model = self.of_megatron.build(case)
        for router in routers(model):
            router.router_replay = None  # as without moe_enable_routing_replay
        RouterReplay.global_router_replay_instances[:] = before
        return model

    def enable(self, model):
        RouterReplay.clear_global_router_replay_instances()
        for router in routers(model):
            router.router_replay = RouterReplay()
        model.pending = 0

    def spec(self, model):
        config = model.model.config
        layers = tuple(RoutedLayer(i) for i, routed in enumerate(config.moe_layer_freq) if routed)
        return RoutingSpec(config.num_moe_experts, config.moe_router_topk, layers)

    def arm(self, model, ids):
        RouterReplay.set_replay_data(ids)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def after_forward(self, model, grad):
        if model.records:
            return
        model.pending += grad and model.case.checkpointing
        if model.pending:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        else:
            clean_up()

    def backward(self, model, step):
        step.backward()
        if getattr(model, "pending", 0):
            model.pending -= 1
            self.close(model)

    def close(self, model):
        if not model.pending:
            clean_up()

    @contextmanager
    def recording(self, model):
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        yield
        model.recorded = RouterReplay.get_recorded_data()
        clean_up()

    def recorded(self, model):
        return model.recorded


def routers(model):
    return [part.router for part in model.model.modules() if hasattr(part, "token_dispatcher")]


def clean_up():
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
