"""What cannot be replayed exactly is refused when the model is attached, with the router and the reason."""

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from foreroute.adapters import megatron
from foreroute.errors import AttachError
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import on_ranks

SETTINGS = [
    ({"moe_router_fusion": True}, "moe_router_fusion"),
    ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing"),
    ({"moe_router_force_biased": 1.0}, "moe_router_force_biased=1.0 replaces the router's logits"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "'sinkhorn' does not select by top-k"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local'"),
    ({"cuda_graph_impl": "transformer_engine"}, "repeat one batch's routes"),
    ({"enable_cuda_graph": True}, "captures routers in CUDA graphs"),
    ({"external_cuda_graph": True}, "captures routers in CUDA graphs"),
    ({"moe_expert_capacity_factor": 1.5}, "drops or adds picks after the selection"),
    ({"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity"),
    ({"moe_expert_rank_capacity_factor": 1.5}, "moe_expert_rank_capacity_factor=1.5 drops tokens"),
    ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
    ({"mlp_chunks_for_training": 2}, "mlp_chunks_for_training has a router run several times"),
]


@on_ranks(1)
def test_settings_that_bypass_or_change_the_selection():
    for settings, said in SETTINGS:
        built = on.model()
        for name, value in settings.items():
            setattr(built.config, name, value)
        for module in built.modules():
            if isinstance(module, TopKRouter):
                module.routing_type = built.config.moe_router_load_balancing_type
        on.refuses(AttachError, said, lambda built=built: megatron.attach(built))
        on.refuses(AttachError, "decoder.layers.1.mlp.router", lambda built=built: megatron.attach(built))


@on_ranks(1)
def test_routers_that_select_in_a_way_of_their_own():
    class Hashing(TopKRouter):
        def routing(self, logits, padding_mask=None):
            return super().routing(logits.flip(-1), padding_mask)

    built = on.model()
    router = built.decoder.layers[2].mlp.router
    router.__class__ = Hashing
    on.refuses(
        AttachError,
        "layers.2.mlp.router (Hashing) cannot be replayed: it has a routing of its own",
        lambda: megatron.attach(built),
    )
    router.__class__ = TopKRouter
    router.routing = lambda logits, padding_mask=None: TopKRouter.routing(router, logits, padding_mask)
    on.refuses(AttachError, "was replaced on the instance", lambda: megatron.attach(built))
    del router.routing
    megatron.attach(built)
    del router.router_replay  # as before 0.16
    on.refuses(AttachError, "install megatron-core 0.16.1 or newer", lambda: megatron.attach(built))


@on_ranks(1)
def test_the_self_check_sees_a_selection_that_is_not_obeyed_and_weights_that_are_masked():
    """What no setting says: a function under the router that ignores replay, or masks the scores it gathers from."""
    from megatron.core.transformer.moe import router as routers

    honest = routers.topk_routing_with_score_function

    def ignores(logits, topk, router_replay=None, **kwargs):
        return honest(logits, topk, **kwargs)

    def pretends(logits, topk, router_replay=None, **kwargs):
        honest(logits, topk, router_replay=router_replay, **kwargs)
        return honest(logits, topk, **kwargs)

    def masks(logits, topk, router_replay=None, **kwargs):
        probs, routing_map = honest(logits, topk, router_replay=router_replay, **kwargs)
        return probs * honest(logits, topk, **kwargs)[1], routing_map

    try:
        for stand_in, said in ((ignores, "bypasses replay"), (pretends, "did not"), (masks, "weight zero")):
            routers.topk_routing_with_score_function = stand_in
            on.refuses(AttachError, said, lambda: megatron.attach(on.model()))
    finally:
        routers.topk_routing_with_score_function = honest
    megatron.attach(on.model())


@on_ranks(1)
def test_models_without_routers_or_with_several_decoders():
    on.refuses(AttachError, "has no MoE layer", lambda: megatron.attach(on.model(moe_layer_freq=[0, 0, 0])))
    on.refuses(AttachError, "has no decoder", lambda: megatron.attach(torch.nn.Linear(2, 2)))
    on.refuses(AttachError, "no model to attach", lambda: megatron.attach([]))
    both = torch.nn.ModuleDict({"language_model": on.model(), "draft": on.model()})
    on.refuses(AttachError, "2 decoders (language_model, draft)", lambda: megatron.attach(both))
    built = on.model()
    on.refuses(AttachError, "passed twice", lambda: megatron.attach([built, built]))
    on.refuses(AttachError, "expected each once", lambda: megatron.attach([built, on.model()]))


@on_ranks(1)
def test_a_router_that_does_not_run_by_itself():
    """As one that FSDP has sharded. Attached before that, it is the same module."""
    mesh = init_device_mesh("cpu", (1,))
    built, routed = on.attached()
    for part in (built, on.model()):
        for sharded in (*part.decoder.layers, part):
            fully_shard(sharded, mesh=mesh)
    on.refuses(AttachError, "before FSDP shards them", lambda: megatron.attach(part))
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
    with on.maps_given(routed) as maps, routed.replay(trace):
        on.forward(built, ids).backward()
    on.assert_followed(maps, trace)


@on_ranks(1)
def test_confident_routers_are_no_masked_ones():
    """Their softmax underflows on rows of any size, in half precision first."""
    for dtype, confidence in ((torch.float16, 10), (torch.float32, 200)):
        built = on.model(moe_router_dtype=None)
        for site in megatron.attach(built).chunks[0].sites:
            site.module.weight.data = (site.module.weight.data * confidence).to(dtype)
        megatron.attach(built)


@on_ranks(1)
def test_attaching_runs_no_hooks():
    """Those of DDP gather parameters, and overwrite them with a buffer that no step has filled yet."""
    built, ran = on.model(), []
    for module in built.modules():
        module.register_forward_pre_hook(lambda module, args: ran.append(module))
    megatron.attach(built)
    assert not ran
    on.forward(built, on.tokens())
    assert ran, "the check must be able to see a hook"
