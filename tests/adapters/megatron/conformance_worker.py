"""The conformance kit on small Megatron models: on the adapter, and on the bare primitive."""

from foreroute.conformance import Groups, Unsupported, run_conformance
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.model_chunks import VOCABULARY
from tests.adapters.megatron.presented import MegatronUnderTest
from tests.conformance.peers.megatron import Peer
from tests.conformance.peers.scores import scores_of


def report_of(routing, recompute):
    """(text, outcomes and reasons by check) of the adapter, with this recomputation where the kit asks for any."""
    settings, groups = on.ROUTINGS[routing], None
    if "moe_router_num_groups" in settings:
        groups = Groups(settings["moe_router_num_groups"], settings["moe_router_group_topk"])
    build = builder(settings, recompute)
    return _plain(run_conformance(MegatronUnderTest(routing, build, vocabulary=VOCABULARY, groups=groups)))


def scores():
    """What the kit says of `RouterReplay`, with full recomputation."""
    return scores_of(Peer(builder(on.ROUTINGS["softmax before"], "uniform"), VOCABULARY))


def builder(settings, recompute):
    def build(case):
        if case.selective or case.compiled:
            raise Unsupported("Megatron-Core recomputes by checkpoints of its own, and compiles no layer")
        chosen = dict(settings)
        if case.top_k is not None:
            chosen["moe_router_topk"] = case.top_k
        if case.num_experts is not None:
            chosen["num_moe_experts"] = case.num_experts
        if case.top_k == 1 and not settings:
            raise Unsupported("Megatron refuses softmax over a single pick; it wants moe_router_pre_softmax then")
        return on.model(recompute if case.checkpointing else "none", **chosen)

    return build


def _plain(report):
    return report.text(), {r.check.id: (str(r.outcome), r.reason) for r in report.results}
