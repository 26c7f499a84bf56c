"""Our own core, which is handed ids alone too: what the others could pass."""

import sys
from contextlib import contextmanager

import torch

from foreroute.conformance.torch_model import padded
from foreroute.core import attach
from tests.conformance.peers.ids_alone import OfTransformers


class Peer(OfTransformers):
    name = "foreroute.core"
    fill = -1

    def enable(self, model):
        model.routed = attach(model.model)

    def arm(self, model, ids):
        self.close(model)
        mask = None if model.batch is None else padded(model.batch)[1]
        rows = torch.stack(ids, 1)
        shape = (len(model.routes.lengths), -1, *rows.shape[1:])
        model.session = model.routed.replay(rows.view(shape), mask if mask is not None and not mask.all() else None)
        model.session.__enter__()

    def close(self, model):
        session, model.session = getattr(model, "session", None), None
        if session is not None:
            session.__exit__(*sys.exc_info())

    @contextmanager
    def recording(self, model):
        with model.routed.record() as recording:
            yield
        [model.recorded_BTLK] = recording.ids()

    def recorded(self, model):
        return model.recorded_BTLK.flatten(0, 1).unbind(1)
