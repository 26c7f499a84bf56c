"""Attaching: find the routers, learn from a small forward what they select, and prove replay on this very model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foreroute.adapters.hf.routed_transformer import RoutedTransformer, TransformerHooks
from foreroute.core.attaching import attach_by, require_attachable
from foreroute.core.find import ATTENTION
from foreroute.core.hooks import SelectingRouter
from foreroute.core.probe import PROBE_TOKENS, Probe
from foreroute.core.untouched import plain_tensors
from foreroute.errors import AttachError
from foreroute.trace import INDEXER, DecisionStream, LayerKind, RoutedLayer, RoutingSpec

if TYPE_CHECKING:
    from foreroute.adapters.hf.expert_parallel import SpreadExperts
    from foreroute.adapters.hf.indexers import FoundIndexers

WANTED_FORM = "needs a form in foreroute/adapters/hf/indexers.py (see CONTRIBUTING, Adding a Hugging Face family)"


def attach(model: nn.Module) -> RoutedTransformer:
    """Make the routing of a Hugging Face MoE model recordable and replayable.

    Runs four forwards of 8 tokens in eval mode: one to see what each router selects, and three to prove that replaying
    a model's own routes changes no bit and that replaying other routes is obeyed; and two of one token along the
    key-value cache, as rollouts and beams do. Four more of three units prove the same of indexers, where it has them.
    The model is left as it was. Routers that a quantizing loader packed are warned of by name.

    Args:
        model: a transformers model with routers, on any device, in any dtype; for a speech model, the part that
            takes text.

    Raises:
        AttachError: when the model has no routers, is known not to be replayable, as an encoder-decoder is, or does not
            pass the self-check. The message says which router and why.
        ReplayError: when this release of torch keeps what activation checkpoints run again in an unknown place.
    """
    require_attachable(model)
    # imported when transformers has found our implementation: no experts are spread by it where it was never loaded
    spreading = sys.modules.get("foreroute.adapters.hf.expert_parallel")
    if spreading is not None:
        from foreroute.adapters.hf.expert_lora import require_adapters_spread

        require_adapters_spread(model)  # the first forward would fail

    def make_hooks(model: nn.Module, trunk: nn.Module, routers: list[SelectingRouter]) -> TransformerHooks:
        return TransformerHooks(model, trunk, routers, spec_of(model, routers), find_indexers(model, trunk))

    def finish(hooks: TransformerHooks) -> RoutedTransformer:
        spread: SpreadExperts | None = None
        if spreading is not None:
            spread = spreading.find_spread_experts(model, [router.path for router in hooks.routers])
        routed = RoutedTransformer(hooks, spread)
        if hooks.found_indexers is not None:
            check_indexers(routed, hooks.found_indexers)
        return routed

    routed = attach_by(model, make_hooks, finish)
    routed._check_rollout = partial(warn_of_padding, model)
    if about := about_packed(routed.routers):
        warnings.warn(about, stacklevel=2)
    return routed


def spec_of(model: nn.Module, routers: list[SelectingRouter]) -> RoutingSpec:
    """Give the routing facts that a forward showed. Raises `AttachError` when routers share a layer."""
    sizes = [(router.num_experts, router.top_k) for router in routers]
    layers = [layer_of(router.path, is_lookup=router.rule.is_lookup) for router in routers]
    if len(set(layers)) != len(layers):
        twice = [router.path for router, layer in zip(routers, layers, strict=True) if layers.count(layer) > 1]
        raise AttachError(
            f"{type(model).__name__} routes more than once in one decoder layer ({', '.join(twice[:2])}); a trace "
            "names each layer once"
        )
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return RoutingSpec.of_sizes(layers, sizes, model=str(name))


def layer_of(path: str, *, is_lookup: bool = False) -> RoutedLayer:
    """Name the layer of a router or indexer; one in an attention block counts as a layer of its own."""
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if not numbers:
        raise AttachError(f"{path} is in no numbered layer; expected a path such as model.layers.3.mlp.gate")
    kind = LayerKind.ATTENTION if ATTENTION.search(path) else LayerKind.DECODER
    return RoutedLayer(numbers[0], LayerKind.HASH if is_lookup else kind)


def find_indexers(model: nn.Module, trunk: nn.Module) -> FoundIndexers | None:
    """Find the indexers of sparse attention in a trunk; None where none, or not all alike, are known."""
    inside = set(trunk.modules())
    sites = [
        (path, module, layer_of(path))
        for path, module in model.named_modules()
        if module in inside and type(module).__name__.endswith("Indexer")
    ]
    if not sites:
        return None
    from foreroute.adapters.hf.indexers import FORMS, FoundIndexers

    forms = {FORMS.get(type(module).__name__) for _, module, _ in sites}
    form = forms.pop() if len(forms) == 1 else None
    if form is None or len({form.spec_of(module, ()) for _, module, _ in sites}) > 1:
        return None
    return FoundIndexers(sites)


def check_indexers(routed: RoutedTransformer, indexers: FoundIndexers) -> None:
    """Run the model four times, each indexer choosing one of three units: as it is, on its own choices, on others."""
    num_tokens = max(PROBE_TOKENS, 3 * indexers.spec.unit)
    hidden = Probe.of(routed.model, num_tokens=num_tokens).hidden
    with indexers.choosing_one():
        with routed.record(indexers=True) as recording:
            native = hidden()
        own = recording.trace()
        with routed.replay(own), routed.record(indexers=True) as recording:
            replayed = hidden()
        is_stable = torch.equal(native, hidden())
        if not recording.trace().equals(own) or (is_stable and not torch.equal(native, replayed)):
            raise AttachError(
                "self-check failed: replaying the indexers' own choices changed the output by up to "
                f"{(native - replayed).abs().max().item():.3g}; their class {WANTED_FORM}"
            )
        stream, spec = own.streams[INDEXER], indexers.spec
        visible_N = np.repeat(spec.num_visible(np.arange(num_tokens)), stream.counts_ND.sum(axis=1))
        ids = (stream.ids // spec.heads + 1) % visible_N * spec.heads + stream.ids % spec.heads
        others = DecisionStream.from_sets(
            stream.num_choices, stream.valid_N, stream.counts_ND, ids, layers=stream.layers
        )
        other = own.with_stream(INDEXER, others)
        with routed.replay(other), routed.record(indexers=True) as recording:
            moved = hidden()
    if not recording.trace().equals(other) or torch.equal(native, moved):
        raise AttachError(
            f"self-check failed: indexers such as {indexers.hooks[0].path} ({type(indexers.modules[0]).__name__}) were "
            f"told to choose other keys, and were not obeyed; their class {WANTED_FORM}"
        )


def about_packed(routers: Sequence[SelectingRouter]) -> str:
    """Say what packed weights of routers do, and how to leave them whole; nothing where no router has one."""
    # loaders that pack every `nn.Linear` pack the one inside the router too, in families whose router has one (Gemma 4,
    # HunYuan, AFMoE, JetMoE and others); a packed weight shows by how it is stored
    packed = [
        (".".join(filter(None, (router.path, inner))), stored)
        for router in routers
        if not router.rule.is_lookup  # whose table is integers
        for inner, module in router.module.named_modules()
        if (stored := _packed_as(module)) is not None
    ]
    if not packed:
        return ""
    names = sorted({_within_layer(path) for path, _ in packed})
    first, stored = packed[0]
    return (
        f"weights of routers were packed when the model was loaded ({stored} in {first}, {len(packed)} in all): such a "
        "router chooses other experts than a whole one, in 4 bits for about a third of the tokens, and engines have it "
        f"whole; leave {', '.join(names)} out of quantization, by llm_int8_skip_modules = {['lm_head', *names]} of "
        "bitsandbytes, modules_to_not_convert of other configurations of transformers, or filter_fn of torchao's "
        "quantize_"
    )


def _packed_as(module: nn.Module) -> str | None:
    """Name how the weight of a module itself is stored, where that is not as floats of two bytes or more."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.ndim < 2:  # counts, biases and scales
            continue
        for stored in plain_tensors(tensor.detach()):
            is_whole = stored.is_floating_point() and stored.itemsize > 1
            if not is_whole and stored.dtype != torch.bool:
                return str(stored.dtype).removeprefix("torch.")
    return None


def _within_layer(path: str) -> str:
    """Give the end of a path, behind the number of its layer."""
    parts = path.split(".")
    number = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[number + 1 :])


def warn_of_padding(model: nn.Module, tokens: Sequence[NDArray[np.int64]]) -> None:
    """Warn where sequences of a rollout go on behind their end, as the configurations of the model tell."""
    configs = [getattr(model, name, None) for name in ("generation_config", "config")]
    ends = {end for config in configs for end in _ids(getattr(config, "eos_token_id", None))}
    paddings = [pad for config in configs for pad in _ids(getattr(config, "pad_token_id", None))]
    # without padding of their own, `generate` goes on with the end token, of which the first is no padding
    known = set(paddings[:1]) or ends
    if any(len(each) > 1 and each[-1] == each[-2] and int(each[-1]) in known for each in tokens):
        warnings.warn(
            f"sequences of the rollout end in several tokens {' or '.join(map(str, sorted(known)))}, the padding of "
            "this model, which are kept as tokens with routes; give an attention_mask that is 0 there",
            stacklevel=3,
        )


def _ids(given: object) -> list[int]:
    """Give the tokens that a configuration names: none, one or a list."""
    ids = given if isinstance(given, list | tuple) else [given]
    return [each for each in ids if isinstance(each, int)]
