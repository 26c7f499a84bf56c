"""What cannot be replayed exactly is refused when the model is attached, with the router and the reason."""

from functools import partial
from unittest import mock

import torch
from megatron.core.transformer.moe import router as routers
from megatron.core.transformer.moe.router import TopKRouter

from foreroute.adapters import megatron
from foreroute.errors import AttachError
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.one_rank import MegatronSubject, model
from tests.replay.session_subject import batch_of, refuses

SETTINGS = [
    ({"moe_router_fusion": True}, "moe_router_fusion"),
    ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing"),
    ({"moe_router_force_biased": 1.0}, r"moe_router_force_biased=1\.0.*logits"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, r"'sinkhorn'.*top-k"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local'"),
    ({"enable_cuda_graph": True}, r"captures.*CUDA graphs"),
    ({"moe_expert_capacity_factor": 1.5}, r"drops.*picks"),
    ({"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity"),
    ({"moe_expert_rank_capacity_factor": 1.5}, "moe_expert_rank_capacity_factor=1.5 drops tokens"),
    ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
    ({"mlp_chunks_for_training": 2}, r"mlp_chunks_for_training.*several times"),
]


def refused(given, said):
    refuses(AttachError, said, lambda: megatron.attach(given))


@on_ranks(1)
def test_settings_that_bypass_or_change_the_selection():
    built = model()
    for settings, said in SETTINGS:
        with mock.patch.multiple(built.config, create=True, **settings):
            for module in built.modules():
                if isinstance(module, TopKRouter):
                    module.routing_type = built.config.moe_router_load_balancing_type
            refuses(AttachError, f"decoder.layers.0.mlp.router .*{said}", partial(megatron.attach, built))


class Hashing(TopKRouter):
    def routing(self, logits, padding_mask=None):
        return super().routing(logits.flip(-1), padding_mask)


@on_ranks(1)
def test_routers_that_select_in_a_way_of_their_own():
    built = model()
    router = built.decoder.layers[2].mlp.router
    router.__class__ = Hashing
    refused(built, r"layers\.2\.mlp\.router \(Hashing\).*routing")
    router.__class__ = TopKRouter
    router.routing = lambda logits, padding_mask=None: TopKRouter.routing(router, logits, padding_mask)
    refused(built, r"replaced.*instance")
    del router.routing
    megatron.attach(built)
    del router.router_replay  # as before 0.16
    refused(built, "install megatron-core 0.16.1 or newer")


@on_ranks(1)
def test_the_self_check_sees_a_selection_that_is_not_obeyed_and_weights_that_are_masked():
    """What no setting says: a function under the router that ignores replay, or masks the scores it gathers from."""
    honest = routers.topk_routing_with_score_function

    def ignores(logits, topk, router_replay=None, **kwargs):
        return honest(logits, topk, **kwargs)

    def pretends(logits, topk, router_replay=None, **kwargs):
        honest(logits, topk, router_replay=router_replay, **kwargs)
        return honest(logits, topk, **kwargs)

    def masks(logits, topk, router_replay=None, **kwargs):
        probs, routing_map = honest(logits, topk, router_replay=router_replay, **kwargs)
        return probs * honest(logits, topk, **kwargs)[1], routing_map

    for stand_in, said in ((ignores, "bypasses replay"), (pretends, "did not"), (masks, "weight zero")):
        with mock.patch.object(routers, "topk_routing_with_score_function", stand_in):
            refused(model(), said)
    megatron.attach(model())


@on_ranks(1)
def test_models_without_routers_or_with_several_decoders():
    built = model()
    for given, said in (
        (model(moe_layer_freq=[0, 0, 0, 0]), r"no MoE.*layer"),
        (torch.nn.Linear(2, 2), r"no decoder"),
        ([], r"no model.*attach"),
        (torch.nn.ModuleDict({"language": built, "draft": model()}), r"2 decoders \(language, draft\)"),
        ([built, built], "passed twice"),
        ([built, model()], r"each once"),
    ):
        refused(given, said)


@on_ranks(1)
def test_attaching_runs_no_hooks():
    """Those of DDP gather parameters, and overwrite them with a buffer that no step has filled yet."""
    on, ran = MegatronSubject(model()), []
    for module in on.model.modules():
        module.register_forward_pre_hook(lambda module, args: ran.append(module))
    megatron.attach(on.model)
    assert not ran
    on.run(batch_of())
    assert ran, "the check must be able to see a hook"
