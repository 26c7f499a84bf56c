"""Attaching: find the routers of the forwarded decoder, name their layers, and prove replay on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.discover import (
    ChunkRouter,
    find_other_routers,
    find_sites,
    find_trunks,
    require_replayable,
)
from foreroute.adapters.megatron.forward_args import Share
from foreroute.adapters.megatron.hooks import ChunkHooks, TopKRouterHook, require_idle
from foreroute.adapters.megatron.routed_megatron import RoutedMegatron
from foreroute.core.attaching import require_attachable
from foreroute.core.passes import Rows
from foreroute.core.untouched import untouched
from foreroute.ep.transfer.peers import gather_objects
from foreroute.errors import AttachError, ForerouteError, ReplayError
from foreroute.trace import RoutedLayer, RoutingSpec

ROWS = 8
"""Random hidden states that a router is checked on."""


def attach(model: nn.Module | Sequence[nn.Module]) -> RoutedMegatron:
    """Make the routing of a Megatron-Core model recordable and replayable.

    Every pipeline rank must call it, since ranks tell each other which layers they route. Each router runs four times
    on 8 random rows, to prove that replaying its own routes changes no bit and that other routes are obeyed. The model
    is left as it was.

    Args:
        model: a GPTModel of megatron-core 0.16.1 or newer, wrapped or not, or the list of its virtual pipeline chunks.

    Raises:
        AttachError: when there are no routers, a setting bypasses or changes the selection, or a router does not pass
            the self-check, on this pipeline rank or another. The message says which router and why.
        ReplayError: when Megatron's own router replay is active.
    """
    trunks = find_trunks(model)
    of_chunks = [find_sites(trunk) for trunk in trunks]
    chunks: list[ChunkHooks] = []
    # of each router its layer, experts, top-k and expert-parallel ranks, then other routers' names; or why not
    here: Any = []
    problem = None
    try:
        chunks = _proven(trunks, of_chunks)
        facts = [
            (s.layer, s.module.num_experts, s.module.topk, s.block.ep_group.size()) for of in of_chunks for s in of
        ]
        here = facts, [name for trunk in trunks for name in find_other_routers(trunk)]
    except ForerouteError as error:
        problem, here = error, str(error)
    # a stage that gave up silently would leave the others waiting for it
    stages = gather_objects(here, trunks[0].pg_collection.pp, "attaching")
    if problem is not None:
        raise problem
    for rank, stage in enumerate(stages):
        if isinstance(stage, str):
            raise AttachError(f"pipeline rank {rank} cannot be attached: {stage}")
    facts = sorted(router for routers, _ in stages for router in routers)
    native_routers = tuple(name for _, names in stages for name in names)
    spec = _spec_of(trunks[0], [layer for layer, *_ in facts], sorted({(e, k) for _, e, k, _ in facts}))
    return RoutedMegatron(chunks, spec, max(ep_size for *_, ep_size in facts), native_routers)


def _proven(trunks: Sequence[Any], of_chunks: Sequence[Sequence[ChunkRouter]]) -> list[ChunkHooks]:
    """Make the hooks of chunks, and try on each router that it can be replayed."""
    for trunk in trunks:
        require_attachable(trunk)
    sites = [site for each in of_chunks for site in each]
    require_replayable(sites)
    for site in sites:
        require_idle(site)
    share = Share.of(trunks[0], [site.module for site in sites])
    numbered = enumerate(zip(trunks, of_chunks, strict=True))
    chunks = [ChunkHooks(number, trunk, of_chunk, share) for number, (trunk, of_chunk) in numbered]
    for chunk in chunks:
        if chunk.routers:
            self_check(chunk)
    return chunks


def _spec_of(trunk: Any, layers: list[RoutedLayer], shapes: list[tuple[int, int]]) -> RoutingSpec:
    if not layers:
        raise AttachError(f"{type(trunk).__name__} has no MoE layer; attach a Mixture-of-Experts model")
    if len(set(layers)) != len(layers) or layers[-1].index >= trunk.config.num_layers:
        raise AttachError(
            f"the routers number their layers {[layer.index + 1 for layer in layers]} in a model of "
            f"{trunk.config.num_layers}; expected each once. Pass every virtual chunk of this rank, and no chunk of "
            "another"
        )
    if len(shapes) > 1:
        raise AttachError(f"the routers differ in (experts, top-k): {shapes}; on Megatron-Core they must be alike")
    return RoutingSpec(*shapes[0], tuple(layers), model=type(trunk).__name__)


def self_check(hooks: ChunkHooks) -> None:
    """Run the routers of a chunk as they are, watched, on their native routes, and on other routes."""
    with untouched(hooks.trunk):
        torch.manual_seed(0)
        given = [_rows_for(router.site.module) for router in hooks.routers]
        native = [_output_of(*each) for each in zip(hooks.routers, given, strict=True)]
        watched, native_LRK = _run_in_pass(hooks, given, None)
        replayed, _ = _run_in_pass(hooks, given, Rows(native_LRK))
        # routers are alike on Megatron: see `_spec_of`
        other_LRK = (native_LRK.long() + 1) % hooks.routers[0].num_experts
        # which needs no choice of the routers
        other, _ = _run_in_pass(hooks, given, Rows(other_LRK, is_complete=True))
    for layer, router in enumerate(hooks.routers):
        for what, results in (("watching it", watched), ("replaying its own routes", replayed)):
            if not all(map(torch.equal, native[layer], results[layer])):
                raise AttachError(
                    f"self-check failed: {what} changed what router {router.path} hands on; something replaced a part "
                    "of it"
                )
        (probs_RE, map_RE), ids_RK = other[layer], other_LRK[layer, :, : router.top_k]
        wanted_RE = torch.zeros_like(map_RE, dtype=torch.bool).scatter(1, ids_RK, True)
        if not torch.equal(map_RE.bool(), wanted_RE):
            raise AttachError(
                f"self-check failed: router {router.path} was told to pick other experts and did not; a fused or "
                "replaced selection bypasses replay"
            )
        if bool((probs_RE[wanted_RE] == 0).any()) or not bool(probs_RE.isfinite().all()):
            raise AttachError(
                f"self-check failed: router {router.path} gave weight zero, or none that is finite, to an expert that "
                "it was told to pick, as if its scores had been masked first"
            )


def _run_in_pass(
    hooks: ChunkHooks, given: list[Tensor], rows: Rows | None
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Give what routers return in a pass, and what they picked natively [L, R, K]."""
    current = hooks.open_pass(rows, ROWS, given[0].device)
    with hooks.routers_running(current):
        return [_output_of(*each) for each in zip(hooks.routers, given, strict=True)], current.native_LRK


def _output_of(router: TopKRouterHook, hidden: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # input jitter draws numbers
    try:
        # its hooks are not for rows of ours: those of DDP would begin to gather parameters
        probs_RE, map_RE = router.site.module.forward(hidden)
    except ReplayError as error:
        raise AttachError(f"self-check failed: {error}") from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise AttachError(
            f"self-check failed: router {router.path} does not run by itself ({type(error).__name__}: {error}); attach "
            "when its weights are in place, and before FSDP shards them"
        ) from error
    return probs_RE, map_RE


def _rows_for(router: Any) -> Tensor:
    """Draw rows for which logits are of the order of one: the softmax of a confident router may underflow to zero."""
    hidden = torch.randn(ROWS, 1, router.config.hidden_size).to(router.weight)
    largest: float = router.weight.detach().float().norm(dim=-1).max().item()
    return hidden / max(1.0, largest)
