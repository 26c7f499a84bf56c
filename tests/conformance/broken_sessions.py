"""Adapters whose sessions are broken in one way each."""

from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import numpy as np
import torch

from foreroute import concatenate
from foreroute.adapters import hf
from foreroute.conformance import Fault
from foreroute.errors import ReplayError
from tests.conformance.breaking import Adapter, broken, filled, with_ids


def narrowest(ids):
    """In the width of the data, and not of the model."""
    return ids.astype(np.uint8) if ids.max() < 256 else ids


OF_BACKWARDS = {
    "backward-outside-session": lambda model, step: model.trace is None and step.trace is not None,
    "selective-checkpoint": lambda model, step: model.case.selective,
    "compiled-layers": lambda model, step: model.case.compiled,
}
"""By check, when backward recomputes natively."""
OF_RECORDINGS = {
    "recording-faithful": lambda handle, trace: with_ids(trace, np.roll(trace.expert_ids_NLK, 1, axis=0)),
    "recorded-once": lambda handle, trace: concatenate([trace, trace]) if handle.model.backwards else trace,
    "int-width": lambda handle, trace: replace(trace, expert_ids_NLK=narrowest(trace.expert_ids_NLK)),
}
"""By check, what is recorded instead."""

for check, is_native in OF_BACKWARDS.items():
    broken(
        check,
        compiles=check == "compiled-layers",
        backward=lambda self, model, step, is_native=is_native: (
            step.under(None) if is_native(model, step) else step.right()
        ),
    )
for check, change in OF_RECORDINGS.items():
    broken(check, recorded=lambda self, handle, trace, change=change: change(handle, trace))


class ForwardsQueueRows(Adapter, fails="forward-only-residue"):
    """Every forward queues its rows for a recomputation, also those that have none."""

    def forward(self, model, batch, grad):
        if not grad and model.trace is not None:
            model.residue = model.trace
        return super().forward(model, batch, grad)

    def backward(self, model, step):
        left = model.__dict__.pop("residue", None)
        step.under(left) if left is not None else step.right()


class ReplaysInEveryModel(Adapter, fails="reference-untouched"):
    def __init__(self):
        super().__init__()
        self.last = []

    def build(self, case):
        self.last = [*self.last[-1:], super().build(case)]
        return self.last[-1]

    @contextmanager
    def session(self, handle, trace, **options):
        others = [m for m in self.last if not m.attached and m.case == handle.model.case]
        with super().session(handle, trace, **options), ExitStack() as stack:
            for other in others:
                stack.enter_context(suppress(ReplayError))
                stack.enter_context(hf.attach(other.model).replay(trace))
            yield


class LeftOn(Adapter, fails="model-restored"):
    @contextmanager
    def session(self, handle, trace, **options):
        if handle.open is not None:
            handle.open.__exit__(None, None, None)
            handle.open = None
        before = handle.model.forwards
        session = super().session(handle, trace, **options)
        session.__enter__()
        try:
            yield
        except BaseException:
            with suppress(ReplayError):
                session.__exit__(None, None, None)
            raise
        if handle.model.forwards == before:
            session.__exit__(None, None, None)
        handle.open = session


class NoFinally(Adapter, fails="exception-safety"):
    @contextmanager
    def session(self, handle, trace, **options):
        session = super().session(handle, trace, **options)
        session.__enter__()
        handle.open = session  # kept alive, as an attribute of a model would be
        yield
        session.__exit__(None, None, None)


class SkipsFusedRouters(Adapter, fails="fused-bypass"):
    @contextmanager
    def session(self, handle, trace, **options):
        is_fused = handle.model.injected is Fault.FUSED_ROUTER
        with nullcontext() if is_fused else super().session(handle, trace, **options):
            yield


class FindsTheOrphans(Adapter, fails="orphan-routers"):
    def attach(self, model):
        if model.injected is not Fault.ORPHAN_ROUTERS:
            return super().attach(model)
        handle = super().attach(self.build(model.case))
        handle.orphan = True
        return handle

    @contextmanager
    def session(self, handle, trace, **options):
        refusals = suppress(ReplayError) if hasattr(handle, "orphan") else nullcontext()
        with refusals, super().session(handle, trace, **options):
            yield


class HeadIsLayerZero(Adapter, fails="mtp-alias"):
    def attach(self, model):
        if model.injected is not Fault.MTP_HEAD:
            return super().attach(model)
        trunk = model.model.model
        head = trunk.__dict__["mtp"] = trunk._modules.pop("mtp")  # runs, and is not found
        handle = super().attach(model)
        trunk._modules["mtp"] = trunk.__dict__.pop("mtp")
        head["layers"][0]["mlp"].gate.register_forward_hook(lambda r, a, o: self.alias(handle, o))
        return handle

    def alias(self, handle, output):
        logits, weights, _ = output
        trace = handle.model.trace
        layer0 = torch.from_numpy(filled(trace, ~trace.valid_N).expert_ids_NLK[:, 0].astype(np.int64))
        return logits, weights, layer0


SPOILED = {
    "duplicates-refused": lambda spec, ids: (np.diff(np.sort(ids, -1), axis=-1) == 0).any(),
    "range-refused": lambda spec, ids: ids.max() >= spec.num_experts,
}
"""By check, the ids from outside that fill a trace without a look."""


def believing(is_spoiled):
    def ingest(self, spec, token_ids, expert_ids):
        ids = np.concatenate(expert_ids)
        if not is_spoiled(spec, ids):
            return Adapter.ingest(self, spec, token_ids, expert_ids)
        fine = [np.broadcast_to(np.arange(spec.top_k), np.shape(r)) for r in expert_ids]
        return with_ids(Adapter.ingest(self, spec, token_ids, fine), ids)

    return ingest


for check, is_spoiled in SPOILED.items():
    broken(check, ingest=believing(is_spoiled))


class TakesStaleRoutes(Adapter, fails="stale-refused"):
    @contextmanager
    def session(self, handle, trace, weight_version=None):
        with super().session(handle, trace):
            yield
