"""Attaching: find the routers, learn from a small forward what they select, and prove replay on this very model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreroute.adapters.hf.discover import PROBE_TOKENS, RouterSite, find_routers, hidden, layer_of, probe, spec_of
from foreroute.adapters.hf.indexers import FoundIndexers, find_indexers
from foreroute.adapters.hf.model import RoutedTransformer, TransformerHooks
from foreroute.core.overrides import is_hooked, overridden
from foreroute.core.recompute import prove
from foreroute.errors import AttachError, TraceContentError
from foreroute.trace import INDEXER, DecisionStream, RoutingTrace

PLAIN = (bool, int, float, str, Tensor, type(None))


def attach(model: nn.Module) -> RoutedTransformer:
    """Make the routing of a Hugging Face MoE model recordable and replayable.

    Runs four forwards of 8 tokens in eval mode: one to see what each router selects, and three to prove that replaying
    a model's own routes changes no bit and that replaying other routes is obeyed. Four more of three units prove the
    same of indexers, where it has them. The model is left as it was.

    Args:
        model: a transformers model with routers (5.14 or newer), on any device, in any dtype. Of an encoder-decoder,
            one stack; of a speech model, the part that takes text.

    Raises:
        AttachError: when the model has no routers, is known not to be replayable, has routers of different shapes, or
            does not pass the self-check. The message says which router and why.
        ReplayError: when this release of torch keeps what activation checkpoints run again in an unknown place.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach was given an object of the class {type(model).__name__}; expected a model of transformers, which "
            "is a torch.nn.Module"
        )
    if any(is_hooked(module) for module in model.modules()):
        raise AttachError("a session is open on this model; attach it before or after, or use the one that it has")
    prove()
    candidates = find_routers(model)
    _refuse_two_stacks(model, candidates)
    with _untouched(model):
        seen = probe(model, candidates)
        spec = spec_of(model, seen)
        finals = [len(selections) - 1 for selections in seen.seen]
        indexers = find_indexers(model, seen.trunk, layer_of)
        hooks = TransformerHooks(model, seen.trunk, seen.sites, finals, spec, indexers)
        routed = RoutedTransformer(model, spec, seen.sites, hooks)
        self_check(routed, seen.sites)
        if indexers is not None:
            check_indexers(routed, indexers)
    return routed


def _refuse_two_stacks(model: nn.Module, candidates: list[RouterSite]) -> None:
    stacks = {part for site in candidates for part in site.path.split(".") if part in ("encoder", "decoder")}
    if len(stacks) > 1:
        raise AttachError(
            f"{type(model).__name__} routes in an encoder and in a decoder, which are given different tokens; one "
            "trace has one sequence of tokens. Attach each stack on its own: attach(model.get_encoder())"
        )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, nothing compiled; random state, flags, buffers and attributes of all modules kept."""
    before = [(module, _attributes(module), _buffers(module)) for module in model.modules()]
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(range(torch.cuda.device_count())),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, attributes, buffers in before:
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, (buffer, values) in buffers.items():
                if module._buffers.get(name) is not buffer or not torch.equal(buffer, values):
                    module._buffers[name] = buffer
                    buffer.copy_(values)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of the instance: counters, caches, flags."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, PLAIN)}


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Buffers of the module itself, with copies of their values."""
    return {name: (buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None}


def self_check(routed: RoutedTransformer, sites: list[RouterSite]) -> None:
    """Run the model three times: as it is, on its own routes, and on other routes.

    Replay must be invisible on a model's own routes and obeyed on others. The check looks at what the routers hand on
    and at what the experts are handed, not at what we put in. It sees a selection that is not obeyed, a gate weight
    taken from scores that were zeroed outside the router's own choice, and experts that are fed by a router which was
    not found.

    Raises:
        AttachError: when replay changes what it should not, or does not change what it should.
    """
    own = _check_own_routes(routed)
    other = _other_routes(own, sites)
    if other is not None:
        _check_other_routes(routed, sites, other)


def _check_own_routes(routed: RoutedTransformer) -> RoutingTrace:
    with routed.record() as recording:
        native = hidden(routed.model)
    try:
        own = recording.trace()
    except TraceContentError as error:
        raise AttachError(f"the routers do not make K different picks of E experts: {error}") from error
    with routed.replay(own), routed.record() as recording:
        replayed = hidden(routed.model)
    same_routes = recording.trace().equals(own)
    # an output that differs from itself (noise, atomics on a GPU) cannot be compared bit by bit; routes still can
    if not same_routes or not (torch.equal(native, replayed) or not torch.equal(native, hidden(routed.model))):
        raise AttachError(
            f"self-check failed: replaying the model's own routes changed its output by up to "
            f"{(native - replayed).abs().max().item():.3g}; this family needs an adapter of its own"
        )
    return own


def check_indexers(routed: RoutedTransformer, indexers: FoundIndexers) -> None:
    """Run the model four times on three units, each indexer choosing one: as it is, on its own choices, and on others.

    Raises:
        AttachError: when its own choices change its output, or others are not obeyed or change nothing.
    """
    num_tokens = max(PROBE_TOKENS, 3 * indexers.spec.unit)
    with indexers.choosing_one():
        with routed.record(indexers=True) as recording:
            native = hidden(routed.model, num_tokens)
        own = recording.trace()
        with routed.replay(own), routed.record(indexers=True) as recording:
            replayed = hidden(routed.model, num_tokens)
        is_stable = torch.equal(native, hidden(routed.model, num_tokens))
        if not recording.trace().equals(own) or (is_stable and not torch.equal(native, replayed)):
            raise AttachError(
                "self-check failed: replaying the indexers' own choices changed the output by up to "
                f"{(native - replayed).abs().max().item():.3g}; this family needs an adapter of its own"
            )
        stream, spec = own.streams[INDEXER], indexers.spec
        visible_N = np.repeat(spec.num_visible(np.arange(num_tokens)), stream.counts_ND.sum(axis=1))
        ids = (stream.ids // spec.heads + 1) % visible_N * spec.heads + stream.ids % spec.heads
        others = DecisionStream.from_sets(
            stream.num_choices, stream.valid_N, stream.counts_ND, ids, layers=stream.layers
        )
        other = own.with_stream(INDEXER, others)
        with routed.replay(other), routed.record(indexers=True) as recording:
            moved = hidden(routed.model, num_tokens)
    if not recording.trace().equals(other) or torch.equal(native, moved):
        raise AttachError(
            f"self-check failed: indexers such as {indexers.hooks[0].path} ({type(indexers.modules[0]).__name__}) were "
            "told to choose other keys, and were not obeyed; this family needs an adapter of its own"
        )


def _other_routes(trace: RoutingTrace, sites: list[RouterSite]) -> RoutingTrace | None:
    """Each id moved to the next real expert; None where all experts are always picked."""
    spec = trace.spec
    if spec.top_k == spec.num_experts:
        return None
    ids = trace.expert_ids_NLK.astype(np.int64)
    for layer, site in enumerate(sites):
        if not site.rule.is_lookup:
            ids[:, layer] = (ids[:, layer] + 1) % (spec.num_experts - site.rule.num_skip_classes)
    return RoutingTrace.from_sequences(spec, [trace.tokens(0)], [ids])


def _check_other_routes(routed: RoutedTransformer, sites: list[RouterSite], other: RoutingTrace) -> None:
    handed_on: dict[str, Any] = {}

    def note(path: str, selecting: Any, *args: Any, **kwargs: Any) -> Any:
        handed_on[path] = selecting(*args, **kwargs)
        return handed_on[path]

    with ExitStack() as stack:
        stack.enter_context(routed.replay(other))
        for site in sites:
            stack.enter_context(overridden(*site.selecting, partial(note, site.path)))
        experts = stack.enter_context(_ids_given_to_experts(routed.model))
        hidden(routed.model)
    forced_LNK = torch.from_numpy(other.expert_ids_NLK.astype(np.int64)).transpose(0, 1)
    for site, forced_NK in zip(sites, forced_LNK, strict=True):
        name = f"router {site.path} ({type(site.module).__name__})"
        output = handed_on[site.path]
        if not _obeyed(site, output, forced_NK, other.spec.num_experts):
            raise AttachError(
                f"self-check failed: {name} was told to pick other experts and its selection was not obeyed; this "
                "family needs an adapter of its own"
            )
        if not _all_weighted(output, forced_NK, other.spec.num_experts):
            raise AttachError(
                f"self-check failed: {name} gave weight zero, or none that is finite, to an expert that it was told to "
                "pick, as if its scores had been masked first; this family needs an adapter of its own"
            )
    for path, ids_NK in experts:
        if not any(torch.equal(ids_NK, forced_NK) for forced_NK in forced_LNK):
            raise AttachError(
                f"self-check failed: {path} was handed expert ids that are not those of any router found; something "
                "between routers and experts changes them, or a router has an unknown class name"
            )


def _obeyed(site: RouterSite, output: Any, forced_NK: Tensor, num_experts: int) -> bool:
    """Whether what a router hands on says the forced ids: as ids, as one-hot rows, or as gates over all experts."""
    if site.rule.read_back is not None:
        return torch.equal(site.rule.read_back(output).cpu(), forced_NK.sort(dim=-1).values)
    wanted_NE = torch.zeros(len(forced_NK), num_experts, dtype=torch.bool).scatter(-1, forced_NK, True)
    for part in _tensors(output):
        if not part.is_floating_point() and part.numel() == forced_NK.numel():
            if torch.equal(part.reshape(forced_NK.shape).long(), forced_NK):
                return True
        elif part.numel() == wanted_NE.numel() and torch.equal(part.reshape(wanted_NE.shape) != 0, wanted_NE):
            return True
    return False


def _all_weighted(output: Any, forced_NK: Tensor, num_experts: int) -> bool:
    """Whether no gate weight, where the router hands on one per pick, is zero or infinite."""
    if forced_NK.shape[-1] == num_experts:
        return True
    weights = [part for part in _tensors(output) if part.is_floating_point() and part.numel() == forced_NK.numel()]
    return all(bool(((part != 0) & part.isfinite()).all()) for part in weights)


def _tensors(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple | list) else [output]
    return [part.detach().cpu() for part in parts if isinstance(part, Tensor)]


@contextmanager
def _ids_given_to_experts(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """(path, int64 [R, K]) for every call of an experts module that takes ids."""
    given: list[tuple[str, Tensor]] = []

    def note(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.extend(
            (path, value.detach().cpu().long())
            for value in [*args, *kwargs.values()]
            if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.ndim == 2
        )

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if type(module).__name__.endswith("Experts"):
                stack.callback(module.register_forward_pre_hook(partial(note, path), with_kwargs=True).remove)
        yield given
