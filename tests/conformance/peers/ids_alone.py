"""What the adapters share: a replay that is handed ids for each layer, and neither tokens nor weights."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch

from foreroute import ForerouteError, RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.conformance import AdapterUnderTest, Batch, Unsupported
from foreroute.conformance.huggingface import HuggingFaceUnderTest
from foreroute.conformance.torch_model import padded
from foreroute.errors import ReplayError
from foreroute.testing.models import FAMILIES


class IdsAlone(AdapterUnderTest):
    """A peer. Subclasses build its model and drive its replay:

    - `model(case)`: a new one with a probe, which the peer has not touched; `spec(model)`: its experts, picks, layers.
    - `enable(model)`: switch the replay on; `arm(model, ids)`: hand ids over for the next forward, a list of int64
      [rows, K], one for each layer; `close(model)`: what the project does when the replay ends, also by an exception.
    - `recording(model)`: a context that records forwards; `recorded(model)`: integers [rows, K], one for each layer.
    """

    fill = None  # what a row without a route holds, as the peer's own code has it; None where it has no word for that
    sequence_first = False  # rows are token after token, and of each token sequence after sequence

    def build(self, case):
        if case.selective:
            batch = Batch((np.arange(1, 5, dtype=np.int32),))
            try:
                self.model(case).forward(batch).backward()
            except RuntimeError as error:
                said = f"its model does not train under such a checkpoint without replay either: {error}"
                raise Unsupported(said) from error
        return Driven(self, case)

    def attach(self, model):
        with as_refusals():
            self.enable(model)
        return Attached(self, model)

    def ingest(self, spec, token_ids, expert_ids):
        """The ids as they are: the peer is asked about them, and not a trace of ours."""
        lengths = np.array([len(tokens) for tokens in token_ids])
        offsets = np.append(0, lengths.cumsum())
        ids = np.concatenate(expert_ids)
        return SimpleNamespace(lengths=lengths, offsets=offsets, expert_ids_NLK=ids, valid_N=np.ones(len(ids), bool))

    def after_forward(self, model, grad):
        """What the project does behind a forward under replay or recording."""

    def backward(self, model, step):
        step.backward()


class OfTransformers(IdsAlone):
    """On a model of transformers, whose layers are all routed."""

    def __init__(self, family="qwen3_moe"):
        self.of_transformers = HuggingFaceUnderTest(family, FAMILIES[family])
        self.vocabulary, self.group_limit = self.of_transformers.vocabulary, self.of_transformers.group_limit

    def model(self, case):
        return self.of_transformers.build(case)

    def spec(self, model):
        config = model.model.config
        layers = tuple(RoutedLayer(i) for i in range(config.num_hidden_layers))
        return RoutingSpec(config.num_experts, config.num_experts_per_tok, layers)


class Driven:
    """A model of the kit whose forwards are prepared for while a session is open."""

    def __init__(self, peer, case):
        self.peer, self.case, self.inner = peer, case, peer.model(case)
        self.routes = self.batch = None
        self.is_armed = self.records = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, batch, *, grad=True):
        self.batch, replays = batch, self.routes is not None
        with as_refusals():
            if (replays and not self.is_armed) or batch.padding != "none":
                self.arm(batch.padding, batch.width)
            self.is_armed = False
            step = self.inner.forward(batch, grad=grad)
            if replays or self.records:
                self.peer.after_forward(self, grad)
        return SimpleNamespace(seen=step.seen, backward=lambda: self.peer.backward(self, step))

    def arm(self, padding, width):
        if self.routes is not None:
            ids_BTLK = laid_out(self.routes, padding, width, self.peer.spec(self).num_experts, self.peer.fill)
            rows_RLK = (ids_BTLK.transpose(0, 1) if self.peer.sequence_first else ids_BTLK).flatten(0, 1)
            self.peer.arm(self, [layer.contiguous() for layer in rows_RLK.unbind(1)])


class Attached:
    """The session of the kit over a replay that has none, or one of its own."""

    def __init__(self, peer, model):
        self.peer, self.model, self.spec, self.version = peer, model, peer.spec(model), None

    @contextmanager
    def replay(self, trace, *, weight_version=None):
        model, lengths = self.model, trace.lengths
        model.routes = trace
        try:
            if (lengths == lengths[0]).all():  # else the layout is known with the batch
                with as_refusals():
                    model.arm("none", int(lengths[0]))
                model.is_armed = True
            yield
        finally:
            model.routes, model.is_armed = None, False
            with as_refusals():
                self.peer.close(model)

    @contextmanager
    def record(self, *, weight_version=-1):
        if self.model.routes is not None:
            raise Unsupported("it records or replays, one at a time")
        self.version = weight_version
        self.model.records = True
        try:
            with self.peer.recording(self.model):
                yield self
        finally:
            self.model.records = False

    def trace(self):
        batch = self.model.batch
        _, real_BT = padded(batch)
        layers = torch.stack([torch.as_tensor(layer) for layer in self.peer.recorded(self.model)], 1).cpu()
        shape = (batch.width, -1) if self.peer.sequence_first else (-1, batch.width)
        ids_BTLK = layers.view(*shape, *layers.shape[1:])
        ids_BTLK = ids_BTLK.transpose(0, 1) if self.peer.sequence_first else ids_BTLK
        rows = [ids_TLK[real_T].numpy() for ids_TLK, real_T in zip(ids_BTLK, real_BT, strict=True)]
        return RoutingTrace.from_sequences(self.spec, batch.sequences, rows, weight_version=self.version)


def laid_out(routes, padding, width, num_experts, fill):
    """int64 [B, T, L, K], and what fills rows that have no route."""
    layers, top_k = routes.expert_ids_NLK.shape[1:]
    rows = torch.arange(len(routes.lengths) * width).view(-1, width, 1, 1)
    ids = ((rows * top_k + torch.arange(top_k)) % num_experts).repeat(1, 1, layers, 1)
    if fill is not None:
        ids.fill_(fill)
    for s, (start, length) in enumerate(zip(routes.offsets.tolist(), routes.lengths.tolist(), strict=False)):
        first = width - length if padding == "left" else 0
        valid = torch.from_numpy(routes.valid_N[start : start + length].copy())
        given = torch.from_numpy(routes.expert_ids_NLK[start : start + length].astype(np.int64))
        ids[s, first : first + length][valid] = given[valid]
    return ids


@contextmanager
def as_refusals():
    """Errors of a peer as one of ours, which the kit takes for a refusal; those that it injects stay what they are."""
    try:
        yield
    except (ForerouteError, Unsupported, ArithmeticError):
        raise
    except Exception as error:
        raise ReplayError(f"{type(error).__name__}: {error}") from error
