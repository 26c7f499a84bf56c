"""The conformance kit on small Megatron models: on the adapter, and on the bare primitive."""

from foreroute.conformance import GroupLimit, Unsupported, run_conformance
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.model_chunks import VOCABULARY
from tests.adapters.megatron.presented import MegatronUnderTest
from tests.conformance.peers.megatron import Peer
from tests.conformance.peers.scores import scores_of


def report():
    """(text, outcomes and reasons by check) of the adapter."""
    routing = "sigmoid with bias, of groups, scaled"
    settings = on.GATES[routing]
    limit = GroupLimit(settings["moe_router_num_groups"], settings["moe_router_group_topk"])
    given = MegatronUnderTest(routing, builder(settings, "block"), vocabulary=VOCABULARY, group_limit=limit)
    found = run_conformance(given)
    return found.text(), {r.check.id: (str(r.outcome), r.reason) for r in found.results}


def scores():
    """What the kit says of `RouterReplay`, with full recomputation."""
    return scores_of(Peer(builder(on.GATES["softmax before"], "uniform"), VOCABULARY))


def builder(settings, recompute):
    def build(case):
        if case.selective or case.compiled:
            raise Unsupported("Megatron-Core recomputes by checkpoints of its own, and compiles no layer")
        sizes = {"moe_router_topk": case.top_k, "num_moe_experts": case.num_experts}
        chosen = settings | {name: size for name, size in sizes.items() if size is not None}
        return on.model(recompute if case.checkpointing else "none", layers=3, moe_layer_freq=[0, 1, 1], **chosen)

    return build
