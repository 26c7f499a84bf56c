"""Routing replay as it is often written: a patched class, a queue per layer, globals."""

from collections import defaultdict, deque
from contextlib import contextmanager

import torch

from foreroute.conformance.huggingface import HuggingFaceUnderTest
from foreroute.testing.models import FAMILIES, GROUPED
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

REPLAYING = False
QUEUES = defaultdict(deque)
RECORDED = defaultdict(list)


def patch_router_class(router_class, layer_of):
    original = router_class.forward

    def forward(self, hidden_states):
        logits, weights, ids = original(self, hidden_states)
        layer = layer_of(self)
        if REPLAYING and QUEUES[layer]:
            ids = QUEUES[layer].popleft()
            weights = torch.softmax(logits, dim=-1).gather(-1, ids)
            weights = weights / weights.sum(dim=-1, keepdim=True)
        RECORDED[layer].append(ids)
        return logits, weights.to(logits.dtype), ids

    router_class.forward = forward
    return lambda: setattr(router_class, "forward", original)


def set_routes(trace, width, checkpointing):
    """Pads with zeros and queues one entry per forward, and one more per recomputation."""
    ids = torch.zeros(len(trace), width, trace.spec.num_layers, trace.spec.top_k, dtype=torch.long)
    for s in range(len(trace)):
        rows = trace.expert_ids_NLK[trace.offsets[s] : trace.offsets[s + 1]].astype("int64")
        ids[s, : len(rows)] = torch.from_numpy(rows)
    for layer in range(trace.spec.num_layers):
        for _ in range(2 if checkpointing else 1):
            QUEUES[layer].append(ids[:, :, layer].reshape(-1, trace.spec.top_k))


class Handle:
    def __init__(self, model, spec, checkpointing):
        self.model, self.spec, self.checkpointing = model, spec, checkpointing

    @contextmanager
    def replay(self, trace, weight_version=None):
        global REPLAYING
        REPLAYING = True
        self.model.before_forward = lambda batch: set_routes(trace, batch.width, self.checkpointing)
        yield
        # left on: the update's backward may still recompute

    @contextmanager
    def record(self, weight_version=-1):
        RECORDED.clear()
        yield self

    def trace(self):
        batch = self.model.batch
        ids = torch.stack([torch.cat(RECORDED[layer]) for layer in sorted(RECORDED)], dim=1).numpy()
        rows = [ids[s * batch.width : s * batch.width + len(t)] for s, t in enumerate(batch.sequences)]
        return RoutingTrace.from_sequences(self.spec, batch.sequences, rows)


class Naive:
    """The adapter of the above, for the kit."""

    gradient_tolerance, picks_in_order, scores_on_sets = 0.0, True, False

    def __init__(self, family):
        self.good = HuggingFaceUnderTest(family, {**FAMILIES, **GROUPED}[family])
        self.name, self.vocabulary, self.groups = f"naive hooks on {family}", self.good.vocabulary, self.good.groups
        self.unpatch = {}

    def build(self, case):
        return Model(self.good.build(case), case)

    def indexers(self):
        return None

    def ingest(self, *arguments):
        return self.good.ingest(*arguments)

    def attach(self, model):
        routers = [m for m in model.good.model.modules() if type(m).__name__.endswith(("Router", "Gate"))]
        for layer, router in enumerate(routers):
            router.layer = layer
        if type(routers[0]) not in self.unpatch:
            self.unpatch[type(routers[0])] = patch_router_class(type(routers[0]), lambda r: getattr(r, "layer", 0))
        config = model.good.model.config
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        first = max(config.num_hidden_layers - len(routers), 0)
        layers = tuple(RoutedLayer(first + i) for i in range(len(routers)))
        return Handle(model, RoutingSpec(experts, config.num_experts_per_tok, layers), model.case.checkpointing)

    def close(self):
        global REPLAYING
        REPLAYING = False
        QUEUES.clear()
        for undo in self.unpatch.values():
            undo()


class Model:
    def __init__(self, good, case):
        self.good, self.case, self.before_forward, self.batch = good, case, None, None

    def __getattr__(self, name):
        return getattr(self.good, name)

    def forward(self, batch, *, grad=True):
        self.batch = batch
        if self.before_forward:
            self.before_forward(batch)
            self.before_forward = None
        return self.good.forward(batch, grad=grad)
