"""The good Hugging Face adapter, with places to break it: trace, session, router output, recording."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from foreroute.adapters import hf
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


class Adapter(HuggingFaceUnderTest):
    """Works, until a subclass overrides something."""

    family = "qwen3_moe"
    scores_on_sets = True
    checks = None  # all
    compiles = False  # a second or two each time

    def __init_subclass__(cls, fails=None):
        if fails is not None:
            assert fails not in BROKEN, "one would hide the other"
            BROKEN[fails] = cls

    def __init__(self):
        super().__init__(self.family, SIZES[self.family])
        self.name = type(self).__name__

    def build(self, case):
        if case.compiled and not self.compiles:
            raise Unsupported("compiles nothing")
        return Model(super().build(case).model, self, case)

    def attach(self, model):
        return Handle(self, super().attach(model), model)

    def rows(self, trace):
        """The trace that is replayed instead."""
        return trace

    def score(self, logits, targets, masks):
        """Log-probs of tokens that have been given sets."""
        return masked_logprobs_of_logits(logits, targets, masks)

    @contextmanager
    def session(self, handle, trace, **options):
        with handle.routed.replay(trace, **options):
            yield

    def output(self, handle, layer, router, args, output):
        """What a router returns while replaying: logits, weights, ids."""
        return output

    def recorded(self, handle, trace):
        return trace

    def forward(self, model, batch, grad):
        return HuggingFaceModel.forward(model, batch, grad=grad)

    def backward(self, model, step):
        step.right()


def broken(check, **methods):
    """An adapter whose method is another."""
    family = "deepseek_v3" if check in OF_GROUPS else "qwen3_moe"
    return type(f"Broken {check}", (Adapter,), {"family": family, **methods}, fails=check)


class Model(HuggingFaceModel):
    """Its log-probs are those on the sets of the trace that is replayed, if it has any."""

    def __init__(self, model, adapter, case):
        super().__init__(model)
        self.adapter, self.case = adapter, case
        self.batch, self.trace, self.injected = None, None, None
        self.attached, self.forwards, self.backwards = False, 0, 0

    def forward(self, batch, *, grad=True):
        self.batch = batch
        self.forwards += 1
        return Step(self, self.adapter.forward(self, batch, grad))

    def next_logprobs(self, input_ids, mask, given):
        if self.trace is None or SAMPLING not in self.trace.streams:
            return super().next_logprobs(input_ids, mask, given)
        logits = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        size = len(input_ids), input_ids.shape[1]
        rows = np.arange(self.trace.num_rows).reshape(size)[:, :-1].reshape(-1)  # batches with sets have no padding
        masks = self.trace.streams[SAMPLING].take(rows)
        return self.adapter.score(logits.flatten(0, 1), input_ids[:, 1:].reshape(-1), masks).view(size[0], -1)

    def inject(self, fault):
        self.injected = fault
        super().inject(fault)


class Step:
    def __init__(self, model, good):
        self.model, self.batch, self.trace = model, model.batch, model.trace
        self.seen, self.right = good.seen, good.backward

    def backward(self):
        self.model.backwards += 1
        self.model.adapter.backward(self.model, self)

    def under(self, trace):
        """Adds the gradients that a recomputation under other routes (None: its own) gives."""
        other = HuggingFaceUnderTest.build(self.model.adapter, Case(top_k=self.model.case.top_k))
        with ExitStack() as stack:
            if trace is not None:
                rebound = replace(trace, token_ids_N=np.concatenate(self.batch.sequences))
                stack.enter_context(hf.attach(other.model).replay(rebound))
            other.forward(self.batch).backward()
        theirs = dict(other.model.named_parameters())
        for name, parameter in self.model.model.named_parameters():
            added = theirs[name].grad
            parameter.grad = added if parameter.grad is None else parameter.grad + added


class Handle:
    def __init__(self, adapter, routed, model):
        self.adapter, self.routed, self.model, self.spec = adapter, routed, model, routed.spec
        self.replayed, self.open = False, None
        model.attached = True
        for layer, path in enumerate(router_paths(routed)):
            routed.model.get_submodule(path).register_forward_hook(lambda r, a, o, at=layer: self.hook(at, r, a, o))

    def hook(self, layer, router, args, output):
        recomputing = self.replayed and torch._C._current_graph_task_id() != -1
        replaying = self.model.trace is not None or recomputing
        # a block in the place of a router returns no routes to break
        return self.adapter.output(self, layer, router, args, output) if replaying and type(output) is tuple else output

    @contextmanager
    def record(self, **options):
        with self.routed.record(**options) as recording:
            yield SimpleNamespace(trace=lambda: self.adapter.recorded(self, recording.trace()))

    @contextmanager
    def replay(self, trace, **options):
        # what is handed on in the place of a selection would be told: the kit is to see it by itself
        with patch.object(OutputCheck, "follow"), self.adapter.session(self, self.adapter.rows(trace), **options):
            self.model.trace, self.replayed = trace, True
            try:
                yield
            finally:
                self.model.trace = None


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
