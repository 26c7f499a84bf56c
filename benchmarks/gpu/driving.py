"""Runs of a model: its batch, its bits, routes of no relation to it, and what its experts were really given."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.families import Family
from foreroute.adapters.hf import RoutedTransformer
from foreroute.errors import ForerouteError
from foreroute.trace import LayerKind, RoutingTrace

GATE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Of gate weights, relative: weights are rounded to the model's dtype, renormalised in it in some families."""
EXPERT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Of the experts' outputs against float64, relative to the greatest."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a padded batch.

    Attributes:
        inputs: what the model is called with.
        direction_BTV: of every logit in the loss, zero where padded.
    """

    inputs: dict[str, Any]
    direction_BTV: Tensor

    @classmethod
    def of(cls, vocabulary: int, device: torch.device, *, full: bool, seed: int = 0) -> Batch:
        """Sequences of different lengths, padded on the right."""
        lengths = (64, 48, 33, 64) if full else (9, 6)
        rng = np.random.default_rng(seed)
        tokens = np.zeros((len(lengths), max(lengths)), np.int64)
        mask = np.zeros_like(tokens)
        for row, length in enumerate(lengths):
            tokens[row, :length] = rng.integers(1, vocabulary, length)
            mask[row, :length] = 1
        direction = rng.standard_normal((*tokens.shape, vocabulary)) * mask[..., None]
        inputs = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}
        return cls(
            {key: value.to(device) for key, value in inputs.items()} | {"use_cache": False},
            torch.from_numpy(direction).to(device, torch.float32),
        )

    @property
    def tokens(self) -> list[Any]:
        """int64 [T] of each sequence."""
        ids, mask = self.inputs["input_ids"].cpu(), self.inputs["attention_mask"].cpu().bool()
        return [row[kept].numpy() for row, kept in zip(ids, mask, strict=True)]

    @property
    def kept_R(self) -> Tensor:
        """Bool [R] on the host, False where padded."""
        kept_R: Tensor = self.inputs["attention_mask"].cpu().bool().reshape(-1)
        return kept_R


Bits = dict[str, Tensor]
"""`logits`, and the gradient of each parameter by its name."""


def logits_of(model: Any, batch: Batch) -> Tensor:
    """[B, T, V], without gradients."""
    with torch.no_grad():
        logits: Tensor = model(**batch.inputs).logits
    return logits.mul(batch.inputs["attention_mask"][..., None])


def step(model: Any, batch: Batch) -> Bits:
    """Forward and backward; the same random numbers every time."""
    return gradients_of(model, forward(model, batch))


def forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits without padding, and the loss."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    logits = model(**batch.inputs).logits
    loss = (logits.float() * batch.direction_BTV).sum() / batch.direction_BTV[..., 0].numel()
    return (logits * batch.inputs["attention_mask"][..., None]).detach(), loss


def gradients_of(model: Any, done: tuple[Tensor, Tensor]) -> Bits:
    """The bits of a forward, after its backward."""
    logits, loss = done
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits} | {name.replace("_orig_mod.", ""): gradient.clone() for name, gradient in found.items()}


def differing(one: Bits, other: Bits) -> set[str]:
    """What is not the same bit for bit."""
    both = one.keys() & other.keys()
    return (one.keys() ^ other.keys()) | {name for name in both if not torch.equal(one[name], other[name])}


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference over that of the second."""
    one, other = one.double().cpu(), other.double().cpu()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def foreign_routes(routed: RoutedTransformer, batch: Batch, seed: int = 1) -> RoutingTrace:
    """Random routes; a layer that looks its experts up by token keeps its own."""
    rng, spec = np.random.default_rng(seed), routed.spec
    rows = sum(len(each) for each in batch.tokens)
    ids_NLK = np.argsort(rng.random((rows, spec.num_layers, spec.num_experts)), axis=-1)[..., : spec.top_k]
    looked_up = [layer for layer, each in enumerate(spec.layers) if each.kind is LayerKind.HASH]
    if looked_up:
        with routed.record() as recording, torch.no_grad():
            routed.model(**batch.inputs)
        ids_NLK[:, looked_up] = recording.trace().expert_ids_NLK[:, looked_up]
    return with_ids(routed, batch, ids_NLK)


def with_ids(routed: RoutedTransformer, batch: Batch, ids_NLK: Any) -> RoutingTrace:
    """A trace of the batch."""
    ends = np.cumsum([len(each) for each in batch.tokens])[:-1]
    return RoutingTrace.from_sequences(routed.spec, batch.tokens, np.split(ids_NLK, ends))


@dataclass
class Ran:
    """One call of the experts of a layer, and what their router saw before it.

    Attributes:
        experts: the module.
        hidden_RH: what it was given.
        ids_RK: the experts that it was given.
        weights_RK: their gate weights.
        output_RH: what it returned; None where a recomputation stopped before its end.
        logits_RE: of the router, live; None where it does not hand them on.
    """

    experts: nn.Module
    hidden_RH: Tensor
    ids_RK: Tensor
    weights_RK: Tensor
    output_RH: Tensor | None
    logits_RE: Tensor | None


@dataclass
class Watch:
    """What the experts of a model were given, call by call."""

    calls: list[Ran] = field(default_factory=list)
    _logits: Tensor | None = None

    def note_router(self, num_experts: int, _: nn.Module, __: Any, output: Any) -> None:
        """A forward hook of routers."""
        parts = output if isinstance(output, tuple | list) else [output]
        shaped = [part for part in parts if torch.is_tensor(part) and part.shape[-1:] == (num_experts,)]
        self._logits = _as_logits(shaped[0].detach().reshape(-1, num_experts)) if shaped else None

    def begin_experts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward hook of experts, before they run."""
        hidden, ids, weights = [*args, *kwargs.values()][:3]
        self.calls.append(Ran(module, hidden.detach(), ids, weights.detach(), None, self._logits))
        self._logits = None

    def end_experts(self, _: nn.Module, __: Any, output: Tensor) -> None:
        """A forward hook of experts."""
        self.calls[-1].output_RH = output.detach()


def _as_logits(handed_on_RE: Tensor) -> Tensor:
    """Some releases of transformers hand probabilities on under the name of logits."""
    sums_R = handed_on_RE.float().sum(-1)
    is_softmax = bool((handed_on_RE >= 0).all()) and torch.allclose(sums_R, torch.ones_like(sums_R), atol=1e-2)
    return handed_on_RE.float().log() if is_softmax else handed_on_RE


@contextmanager
def watching(routed: RoutedTransformer) -> Iterator[list[Ran]]:
    """Every call of an experts module while the context is open, recomputations included."""
    watch = Watch()
    with ExitStack() as stack:
        for path in routed.router_paths:
            note = partial(watch.note_router, routed.spec.num_experts)
            stack.callback(routed.model.get_submodule(path).register_forward_hook(note).remove)
        for module in routed.model.modules():
            if type(module).__name__.endswith("Experts"):
                stack.callback(module.register_forward_pre_hook(watch.begin_experts, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(watch.end_experts).remove)
        yield watch.calls


def require_obeyed(
    trace: RoutingTrace, calls: list[Ran], batch: Batch, family: Family, precision: torch.dtype | None = None
) -> None:
    """Raise `AssertionError` unless experts ran by the trace, weighed by live logits.

    Of every layer the ids that its experts were given are those of the trace, and their weights are those of the
    family's formula at the trace's ids. What the last layer's experts returned, where they came to it, is compared with
    a copy of them on the host, in float64 and one expert at a time, which is given the trace's ids.

    Args:
        trace: the routes.
        calls: of one forward.
        batch: that it ran on.
        family: of the model.
        precision: in which it was computed, where that is not the dtype of hidden states.
    """
    layers, kept_R = trace.spec.num_layers, batch.kept_R
    assert len(calls) == layers, f"{len(calls)} calls of experts in one forward, expected {layers}"
    for layer, ran in enumerate(calls):
        ids_NK = ids_of(trace, layer)
        wrong = (ran.ids_RK.cpu().long()[kept_R] != ids_NK).any(-1)
        assert not wrong.any(), f"layer {layer}: {int(wrong.sum())} of {len(wrong)} rows had other experts"
        if ran.logits_RE is None:
            continue
        expected = family.gate_weights(ran.logits_RE[kept_R.to(ran.logits_RE.device)], ids_NK)
        if expected is not None:
            seen = ran.weights_RK.cpu().double()[kept_R]
            tolerance = GATE_TOLERANCE[precision or ran.hidden_RH.dtype]
            apart = float(((seen - expected).abs() / (expected + 0.1)).max())
            assert apart < tolerance, f"layer {layer}: gate weights are {apart:.2g} from the formula's"
    if calls[-1].output_RH is not None:
        apart = _from_float64(trace, calls[-1], calls[-1].output_RH, kept_R)
        tolerance = EXPERT_TOLERANCE[precision or calls[-1].hidden_RH.dtype]
        assert apart < tolerance, f"what the last layer's experts returned is {apart:.2g} from float64"


def _from_float64(trace: RoutingTrace, ran: Ran, output_RH: Tensor, kept_R: Tensor) -> float:
    """How far what the experts returned is from what the trace's experts compute of what they were given."""
    host: Any = copy.deepcopy(ran.experts).double().cpu()
    host.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = host(
            ran.hidden_RH.cpu().double()[kept_R],
            ids_of(trace, trace.spec.num_layers - 1),
            ran.weights_RK.cpu().double()[kept_R],
        )
    found = output_RH.cpu().double()[kept_R]
    return float((found - expected).abs().max() / expected.abs().max())


def ids_of(trace: RoutingTrace, layer: int) -> Tensor:
    """int64 [N, K] of one layer."""
    return torch.from_numpy(trace.expert_ids_NLK[:, layer].astype(np.int64))


@contextmanager
def refused(naming: str) -> Iterator[None]:
    """What is inside must be refused by an error of foreroute whose message has these words."""
    try:
        yield
    except ForerouteError as error:
        if naming not in str(error):
            raise AssertionError(f"refused for another reason: {error}") from error
        return
    raise AssertionError(f"nothing was refused; expected an error that says {naming!r}")


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add in a fixed order, where PyTorch has them: a model then repeats its bits on a GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
