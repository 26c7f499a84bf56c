"""The good Hugging Face adapter, with places to break it: trace, session, router output, recording."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from foreroute.conformance import Case, Unsupported
from foreroute.conformance.huggingface import HuggingFaceModel, HuggingFaceUnderTest
from foreroute.core.output_check import OutputCheck
from foreroute.replay import masked_logprobs_of_logits
from foreroute.testing.models import FAMILIES, GROUPED
from foreroute.trace import SAMPLING
from tests.attended import SIZES as SPARSE
from tests.replay.session_subject import router_paths

SIZES = {**FAMILIES, **GROUPED, "deepseek_v32": SPARSE}
BROKEN = {}
"""By the check that must fail, and no other, an adapter that is broken in one way."""
OF_GROUPS = {"layer-axis", "gate-rule"}
"""Checks that a family with a dense layer and a sigmoid is asked of."""


class Adapter:
    """Works, until a subclass overrides something."""

    family = "qwen3_moe"
    picks_in_order = True
    scores_on_sets = True
    checks = None  # all
    compiles = False  # a second or two each time

    def __init_subclass__(cls, fails=None):
        if fails is not None:
            assert fails not in BROKEN, "one would hide the other"
            BROKEN[fails] = cls

    def __init__(self):
        self.good = HuggingFaceUnderTest(self.family, SIZES[self.family])
        self.name = type(self).__name__
        self.vocabulary, self.groups, self.gradient_tolerance = self.good.vocabulary, self.good.groups, 0.0

    def build(self, case):
        if case.compiled and not self.compiles:
            raise Unsupported("compiles nothing")
        return Model(self, Scoring(self, self.good.build(case).model), case)

    def attach(self, model):
        return Handle(self, self.good.attach(model.good), model)

    def indexers(self):
        return self.good.indexers()

    def ingest(self, *arguments):
        return self.good.ingest(*arguments)

    def rows(self, trace):
        """The trace that is replayed instead."""
        return trace

    def score(self, logits, targets, masks):
        """Log-probs of tokens that have been given sets."""
        return masked_logprobs_of_logits(logits, targets, masks)

    @contextmanager
    def session(self, handle, trace, **options):
        with handle.good.replay(trace, **options):
            yield

    def output(self, handle, layer, router, args, output):
        """What a router returns while replaying: logits, weights, ids."""
        return output

    def recorded(self, handle, trace):
        return trace

    def forward(self, model, batch, grad):
        return model.good.forward(batch, grad=grad)

    def backward(self, model, step):
        step.right()


def broken(check, **methods):
    """An adapter whose method is another."""
    family = "deepseek_v3" if check in OF_GROUPS else "qwen3_moe"
    return type(f"Broken {check}", (Adapter,), {"family": family, **methods}, fails=check)


class Model:
    def __init__(self, adapter, good, case):
        self.adapter, self.good, self.case = adapter, good, case
        self.batch, self.session_trace, self.injected = None, None, None
        self.attached, self.forwards, self.backwards = False, 0, 0

    def __getattr__(self, name):
        return getattr(self.good, name)

    def forward(self, batch, *, grad=True):
        self.batch = batch
        self.forwards += 1
        return Step(self, batch, self.adapter.forward(self, batch, grad))

    def inject(self, fault):
        self.injected = fault
        self.good.inject(fault)


class Scoring(HuggingFaceModel):
    """Its log-probs are those on the sets of the trace that is replayed, if it has any."""

    def __init__(self, adapter, model):
        super().__init__(model)
        self.adapter, self.trace = adapter, None

    def next_logprobs(self, input_ids, mask, given):
        if self.trace is None or SAMPLING not in self.trace.streams:
            return super().next_logprobs(input_ids, mask, given)
        logits = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        size = len(input_ids), input_ids.shape[1]
        rows = np.arange(self.trace.num_rows).reshape(size)[:, :-1].reshape(-1)  # batches with sets have no padding
        masks = self.trace.streams[SAMPLING].take(rows)
        return self.adapter.score(logits.flatten(0, 1), input_ids[:, 1:].reshape(-1), masks).view(size[0], -1)


class Step:
    def __init__(self, model, batch, good):
        self.model, self.batch, self.good, self.trace = model, batch, good, model.session_trace

    @property
    def seen(self):
        return self.good.seen

    def backward(self):
        self.model.backwards += 1
        self.model.adapter.backward(self.model, self)

    def right(self):
        self.good.backward()

    def under(self, trace):
        """Adds the gradients that a recomputation under other routes (None: its own) gives."""
        other = self.model.adapter.good.build(Case(top_k=self.model.case.top_k))
        with ExitStack() as stack:
            if trace is not None:
                rebound = replace(trace, token_ids_N=np.concatenate(self.batch.sequences))
                stack.enter_context(self.model.adapter.good.attach(other).replay(rebound))
            other.forward(self.batch).backward()
        mine, theirs = dict(self.model.good.model.named_parameters()), dict(other.model.named_parameters())
        for name, parameter in mine.items():
            added = theirs[name].grad
            parameter.grad = added if parameter.grad is None else parameter.grad + added


class Handle:
    def __init__(self, adapter, good, model):
        self.adapter, self.good, self.model = adapter, good, model
        self.replayed, self.open = False, None
        self.spec = good.spec
        model.attached = True
        for layer, path in enumerate(router_paths(good)):
            good.model.get_submodule(path).register_forward_hook(lambda r, a, o, at=layer: self.hook(at, r, a, o))

    def hook(self, layer, router, args, output):
        recomputing = self.replayed and torch._C._current_graph_task_id() != -1
        replaying = self.model.session_trace is not None or recomputing
        # a block in the place of a router returns no routes to break
        return self.adapter.output(self, layer, router, args, output) if replaying and type(output) is tuple else output

    @contextmanager
    def record(self, **options):
        with self.good.record(**options) as recording:
            yield SimpleNamespace(trace=lambda: self.adapter.recorded(self, recording.trace()))

    @contextmanager
    def replay(self, trace, **options):
        # what is handed on in the place of a selection would be told: the kit is to see it by itself
        with patch.object(OutputCheck, "follow"), self.adapter.session(self, self.adapter.rows(trace), **options):
            self.model.session_trace, self.replayed = trace, True
            self.model.good.trace = trace
            try:
                yield
            finally:
                self.model.session_trace = self.model.good.trace = None


def with_ids(trace, ids):
    """Without any check, as a careless adapter would."""
    return replace(trace, expert_ids_NLK=np.where(trace.valid_N[:, None, None], ids, 0).astype(trace.spec.id_dtype))


def other_ids(trace):
    return (trace.expert_ids_NLK.astype(np.int64) + 1) % trace.spec.num_experts


def filled(trace, rows):
    """Absent rows made routes of the first K experts."""
    ids = trace.expert_ids_NLK.copy()
    ids[rows] = np.arange(trace.spec.top_k)
    return replace(trace, expert_ids_NLK=ids, valid_N=trace.valid_N | rows)


def native(router, args):
    """What the router does without the adapter, which overrides the forward of the instance."""
    return type(router).forward(router, *args)
