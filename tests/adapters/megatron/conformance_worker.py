"""The conformance kit on small Megatron models: on the adapter, and on the bare primitive driven as it usually is."""

from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.conformance import Groups, Unsupported, run_conformance
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.model_chunks import VOCABULARY
from tests.adapters.megatron.presented import MegatronUnderTest


def report_of(routing, recompute):
    """(text, outcomes and reasons by check) of the adapter, with this recomputation where the kit asks for any."""
    settings, groups = on.ROUTINGS[routing], None
    if "moe_router_num_groups" in settings:
        groups = Groups(settings["moe_router_num_groups"], settings["moe_router_group_topk"])
    build = builder(settings, recompute)
    return _plain(run_conformance(MegatronUnderTest(routing, build, vocabulary=VOCABULARY, groups=groups)))


def bare_report():
    return _plain(run_conformance(Bare()))


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


class Bare(MegatronUnderTest):
    """`RouterReplay`: the global list, which holds the routers of the model whose session was opened last."""

    def __init__(self):
        super().__init__("bare", builder({}, "uniform"), vocabulary=VOCABULARY)
        self.name = "megatron.core RouterReplay, driven by hand"

    def build(self, case):
        registered = RouterReplay.global_router_replay_instances
        before = list(registered)
        registered.clear()
        model = Forward(super().build(case), case)
        model.routers = list(registered)
        registered[:] = before
        return model

    def attach(self, model):
        config = model.good.model.config
        layers = tuple(RoutedLayer(i) for i, routed in enumerate(config.moe_layer_freq) if routed)
        return Handle(model, RoutingSpec(config.num_moe_experts, config.moe_router_topk, layers))


class Forward:
    """A model whose next forward can be prepared for."""

    def __init__(self, good, case):
        self.good, self.case, self.trace, self.batch = good, case, None, None

    def __getattr__(self, name):
        return getattr(self.good, name)

    def forward(self, batch, *, grad=True):
        self.batch = batch
        if self.trace is None:
            return self.good.forward(batch, grad=grad)
        RouterReplay.set_replay_data(rows_of(self.trace, batch))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        step = self.good.forward(batch, grad=grad)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return step


class Handle:
    def __init__(self, model, spec):
        self.model, self.spec = model, spec

    @contextmanager
    def replay(self, trace, weight_version=None):
        RouterReplay.global_router_replay_instances[:] = self.model.routers
        self.model.trace = trace
        yield
        self.model.trace = None
        if not self.model.case.checkpointing:
            RouterReplay.clear_global_router_replay_action()
            RouterReplay.clear_global_indices()

    @contextmanager
    def record(self, weight_version=-1):
        RouterReplay.global_router_replay_instances[:] = self.model.routers
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        self.version = weight_version
        yield self
        RouterReplay.clear_global_router_replay_action()

    def trace(self):
        batch = self.model.batch
        layers = [ids.view(batch.width, -1, self.spec.top_k) for ids in RouterReplay.get_recorded_data()]
        ids_BTLK = torch.stack(layers, 2).transpose(0, 1).numpy()
        rows = [ids_TLK[: len(tokens)] for ids_TLK, tokens in zip(ids_BTLK, batch.sequences, strict=True)]
        return RoutingTrace.from_sequences(self.spec, batch.sequences, rows, weight_version=self.version)


def rows_of(trace, batch):
    """int64 [T · B, K] per router, sequence first; the first experts where there is no route.

    Zeros, with which engines fill up, crash the dispatcher of newer versions.
    """
    first = torch.arange(trace.spec.top_k)
    ids = first.repeat(batch.width, len(trace), trace.spec.num_layers, 1)
    for s in range(len(trace)):
        rows = trace.expert_ids_NLK[trace.offsets[s] : trace.offsets[s + 1]].astype("int64")
        rows[~trace.valid_N[trace.offsets[s] : trace.offsets[s + 1]]] = first.numpy()
        start = batch.width - len(rows) if batch.padding == "left" else 0
        ids[start : start + len(rows), s] = torch.from_numpy(rows)
    return [ids[:, :, layer].reshape(-1, trace.spec.top_k) for layer in range(trace.spec.num_layers)]


def _plain(report):
    return report.text(), {r.check.id: (str(r.outcome), r.reason) for r in report.results}
