"""Spreading the experts of a Hugging Face model over ranks, through the library's registry of expert functions."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.moe import ExpertsInterface

from foreroute.adapters.hf.expert_adapters import (
    adapters_of,
    draw_adapters,
    hand_over,
    keep_adapters,
    require_adaptable,
)
from foreroute.adapters.hf.sharded_checkpoint import ShardedCheckpoint
from foreroute.core.hooks import is_hooked
from foreroute.ep import ExpertParallelModel
from foreroute.ep.agreement import found_alike
from foreroute.ep.compute import require_grouped_mm
from foreroute.ep.layer import ExpertLayer
from foreroute.ep.shards import keep_experts
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import AttachError, ConfigError, TopologyError
from foreroute.files.container import blake2b_hex, blake2b_int64
from foreroute.layout.rank_rows import block_homes
from foreroute.planner.homes import check_homes

NAME = "foreroute"
"""Name of our function in the registry of transformers."""
STAND_IN = "_foreroute_experts"
"""Where an experts module keeps what runs in the place of its forward."""
LOOKING = "looking at the model"
PLACED = "_foreroute_placed"
"""Where a model keeps what its experts are spread as, for `RoutedTransformer.execute`."""
LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "_is_expert_parallel")
"""What transformers' `use_experts_implementation` puts on an experts module."""
EXPERTS = re.compile(r"(?<!Shared)Experts$")
"""Classes of modules that hold routed experts."""
WEIGHT = re.compile(r"(gate_up_proj|up_proj|down_proj)(_bias)?")
"""Parameters of an experts module that have a row for each expert."""
BYTES_AT_A_TIME = 2**28
"""Bytes of a tensor that are brought to the host for its checksum."""


def distribute(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    home_LE: NDArray[np.integer] | None = None,
    timeout_s: float | None = None,
) -> ExpertParallelModel:
    """Keep on each rank only the experts that live there, and run the model expert-parallel from now on.

    A collective call. All ranks hand in the same whole model with the same weights, which are compared by a checksum.
    Routers, shared experts and everything dense stay as they are, on every rank.

    Args:
        model: of a family whose experts transformers' `use_experts_implementation` decorates, before it is given to an
            optimizer, FSDP, or expert parallelism of transformers' own.
        group: the expert-parallel ranks, on which rows are exchanged; all by default.
        home_LE: integers [L, E], the rank that every expert lives on, E / G on each; in blocks of E / G by default.
        timeout_s: seconds after which a rank that does not answer a transfer or a vote is taken for dead; those of
            `group` by default.

    Raises:
        AttachError: on every rank alike, when torch is older than 2.10, when the model of a rank has no experts that
            can be spread, or when ranks hand in different models.
        TopologyError: on every rank alike, when homes are not E / G experts on each rank.
        TransferError: when a rank does not answer.
    """
    ranks, along = _ranks_of(group)
    consensus = RankConsensus(*along, timeout_s=timeout_s)
    sites = found_alike(
        consensus, AttachError, LOOKING, lambda: _with_weights(model, find_experts(model, ranks.size()))
    )
    homes_LE = found_alike(consensus, TopologyError, LOOKING, lambda: _checked_homes(sites, ranks.size(), home_LE))
    _require_same_models(model, homes_LE, consensus)
    for home_E, (path, module) in zip(homes_LE, sites, strict=True):
        here = np.flatnonzero(home_E == ranks.rank())
        keep_experts(module, here)
        keep_adapters(model, path, here)
    return _placed(model, sites, homes_LE, ranks, consensus, PeerGroup(*along, timeout_s=timeout_s))


def distribute_pretrained(
    folder: str | os.PathLike[str],
    group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
    timeout_s: float | None = None,
) -> ExpertParallelModel:
    """Load a causal language model of which each rank reads only the experts that live there.

    A collective call. No rank holds another's experts at any time, so that models fit whose experts no single device
    could hold. They live in blocks of E / G; `ExpertParallelModel.move_homes` puts them elsewhere.

    Args:
        folder: with config.json and safetensors, as transformers saves them; the same on all ranks.
        group: as in `distribute`.
        dtype: of the weights; as they were saved by default.
        adapt: puts PEFT's adapters on the model that it is given, which has this rank's experts alone, and returns
            PEFT's, as `get_peft_model` does. Ranks are seeded alike; adapters of experts are drawn apart afterwards.
        timeout_s: as in `distribute`.

    Returns:
        The placed model, on the CPU; `placed.model` is what `attach` and `.to(device)` take.

    Raises:
        ConfigError: on every rank alike, when a rank cannot load its part of the folder.
        AttachError, TopologyError, TransferError: as in `distribute`.
    """
    ranks, along = _ranks_of(group)
    consensus = RankConsensus(*along, timeout_s=timeout_s)
    checkpoint = found_alike(consensus, ConfigError, LOOKING, lambda: ShardedCheckpoint.opened(folder))
    found = found_alike(consensus, AttachError, LOOKING, lambda: find_experts(checkpoint.empty, ranks.size()))
    homes_LE = found_alike(consensus, TopologyError, LOOKING, lambda: _checked_homes(found, ranks.size(), None))
    here = np.flatnonzero(homes_LE[0] == ranks.rank())
    paths = [path for path, _ in found]
    own = range(here[0], here[-1] + 1)
    model = found_alike(consensus, ConfigError, LOOKING, lambda: checkpoint.load(paths, own, dtype))
    sites = [(path, model.get_submodule(path)) for path in paths]
    apart = {id(parameter) for _, module in sites for parameter in module.parameters()}
    if adapt is not None:
        model = found_alike(consensus, AttachError, LOOKING, lambda: adapt(model))
        path_of = {module: path for path, module in model.named_modules()}
        sites = [(path_of[module], module) for _, module in sites]
        drawn = found_alike(consensus, AttachError, LOOKING, lambda: _drawn_apart(model, sites, ranks))
        apart |= set(map(id, drawn))
    _require_same_models(model, homes_LE, consensus, apart=apart)
    return _placed(model, sites, homes_LE, ranks, consensus, PeerGroup(*along, timeout_s=timeout_s))


def _drawn_apart(model: nn.Module, sites: list[tuple[str, nn.Module]], ranks: dist.ProcessGroup) -> list[nn.Parameter]:
    """The parameters of adapters that a rank has made of its own experts, drawn anew."""
    for path, _ in sites:
        require_adaptable(model, path, ranks.size())
    draw_adapters(model, [path for path, _ in sites], ranks.rank())
    adapters = [adapter for path, _ in sites for adapter in adapters_of(model, path)]
    return [parameter for each in adapters for _, factor, _ in each.factors for parameter in factor.parameters()]


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]]:
    """The ranks, and what groups beside theirs are made along."""
    ranks = dist.group.WORLD if group is None else group
    assert ranks is not None, "torch.distributed has a default group once it is initialised"
    return ranks, () if group is None else (group,)


def _placed(
    model: nn.Module,
    sites: list[tuple[str, nn.Module]],
    homes_LE: NDArray[np.int16],
    ranks: dist.ProcessGroup,
    consensus: RankConsensus,
    peers: PeerGroup,
) -> ExpertParallelModel:
    """Put layers in the place of experts modules, which have this rank's rows."""
    placed = ExpertParallelModel(model, ranks, consensus, peers)
    ExpertsInterface.register(NAME, _run_stand_in)
    for number, (path, module) in enumerate(sites):
        adapters = adapters_of(model, path)
        hand_over(model, path, homes_LE.shape[1] // ranks.size())
        layer = ExpertLayer(number, path, module, homes_LE[number], ranks, placed.in_force, adapters)
        placed.layers.append(layer)
        module.__dict__[STAND_IN] = layer
        # a configuration of its own: other modules, and other models made from this one, keep theirs
        config: Any = copy.copy(module.config)
        config._experts_implementation_internal = NAME
        module.config = config
    model.__dict__[PLACED] = placed
    return placed


def _run_stand_in(module: nn.Module, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    stand_in = module.__dict__.get(STAND_IN)
    if stand_in is None:
        raise AttachError(
            f"{type(module).__name__} is to run as experts implementation {NAME!r}, but was not distributed; call "
            "foreroute.adapters.hf.distribute(model), which chooses it"
        )
    if is_parametrized(module):
        raise AttachError(
            f"the weights of {stand_in.path} were parametrized after it was distributed, as PEFT adapts experts; call "
            "get_peft_model on the whole model, and distribute what it gives"
        )
    out: Tensor = stand_in(hidden_ND, ids_NK, weights_NK)
    return out


def find_experts(model: nn.Module, num_ranks: int) -> list[tuple[str, nn.Module]]:
    """The experts modules in order of the model, all of which can be spread; it may be on the meta device.

    Raises:
        AttachError: when it has none, or one that cannot.
    """
    require_grouped_mm()
    if any(is_hooked(module) for module in model.modules()):
        raise AttachError("a replay or record session is open on this model; distribute it before")
    named = [(path, module) for path, module in model.named_modules() if EXPERTS.search(type(module).__name__)]
    sites = []
    for path, module in named:
        if all(hasattr(module, name) for name in LAYOUT):
            _require_spreadable(path, module)
            require_adaptable(model, path, num_ranks)
            sites.append((path, module))
        elif any(True for _ in module.parameters()):
            raise AttachError(
                f"{path} is a {type(module).__name__}, whose layout transformers does not declare "
                "(use_experts_implementation); its experts cannot be spread over ranks"
            )
    if not sites:
        raise AttachError(f"{type(model).__name__} has no experts modules that transformers declares the layout of")
    sizes = sorted({int(module.num_experts) for _, module in sites})
    if len(sizes) > 1:
        raise AttachError(f"layers have {sizes} experts; expected the same number in all of them")
    _require_untied(model, sites)
    return sites


def _with_weights(model: nn.Module, sites: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    for name, tensor in _saved(model):
        if isinstance(tensor, DTensor) or tensor.is_meta:
            raise AttachError(
                f"{name} is {'on the meta device' if tensor.is_meta else 'a DTensor'}; distribute the whole model, "
                "with its weights, before anything else shards it, or let distribute_pretrained load a folder"
            )
    return sites


def _require_untied(model: nn.Module, sites: list[tuple[str, nn.Module]]) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for _, module in sites:
        for parameter in module.parameters(recurse=False):
            if len(names[id(parameter)]) > 1:
                raise AttachError(
                    f"{' and '.join(names[id(parameter)])} are one parameter, which would be trained apart in each "
                    "place once experts are spread; give every place a parameter of its own first"
                )


def _require_spreadable(path: str, module: nn.Module) -> None:
    if STAND_IN in module.__dict__:
        raise AttachError(f"{path} is distributed already; load other weights with ExpertParallelModel.load_state_dict")
    if "forward" in module.__dict__:
        raise AttachError(
            f"{path} has a forward of its own, put there by another library (expert parallelism of transformers, "
            "accelerate, a kernel); distribute the model without it"
        )
    if is_parametrized(module):
        raise AttachError(f"{path} has parametrized weights; remove the parametrization first")
    activation = getattr(module, "act_fn", None)
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        raise AttachError(
            f"{path} has a {type(activation).__name__}, an activation that is learnt; its gradients from all ranks and "
            "replicas are not added up"
        )
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if not WEIGHT.fullmatch(name) or len(parameter) != module.num_experts or not parameter.is_floating_point():
            raise AttachError(
                f"{path}.{name} is {parameter.dtype} {list(parameter.shape)}; expected floats [{module.num_experts}, "
                "...] named gate_up_proj, up_proj or down_proj, or _bias of these"
            )


def _checked_homes(
    sites: list[tuple[str, nn.Module]], num_ranks: int, home_LE: NDArray[np.integer] | None
) -> NDArray[np.int16]:
    num_experts = int(sites[0][1].num_experts)  # type: ignore[arg-type]
    if num_experts % num_ranks:
        raise TopologyError(
            f"{num_experts} experts cannot be placed evenly on {num_ranks} ranks; "
            "use a number of expert-parallel ranks that divides the number of experts"
        )
    if home_LE is None:
        return np.tile(block_homes(num_experts, num_ranks).astype(np.int16), (len(sites), 1))
    return check_homes(home_LE, len(sites), num_experts, num_ranks).copy()


def _require_same_models(
    model: nn.Module, home_LE: NDArray[np.int16], consensus: RankConsensus, *, apart: Container[int] = ()
) -> None:
    """Gradients flow, and rows arrive, only where all ranks agree on what is trained and what the weights are.

    `apart` has the ids of parameters whose values are this rank's own.
    """
    what = "comparing the models of all ranks"
    names, hashes = ["the homes of experts"], [blake2b_int64(home_LE)]
    for name, tensor in _saved(model):
        values = "" if id(tensor) in apart else _checksum(tensor)
        facts = (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, values)
        names.append(name)
        hashes.append(blake2b_int64(repr(facts).encode()))
    if len(set(consensus.texts(str(len(names)), what))) > 1:
        raise AttachError(
            "ranks hand in models with different numbers of parameters and buffers; expected the same model"
        )
    mine = torch.tensor([number >> 1 for number in hashes])  # 63 bits, so that its negative is an int64 too
    most, minus_least = consensus.most(torch.stack([mine, -mine]), what)
    for name, differs in zip(names, (most != -minus_least).tolist(), strict=True):
        if differs:
            raise AttachError(
                f"ranks differ in {name}: its shape, dtype, requires_grad or values; hand in the same model, from the "
                "same checkpoint or seed, on all of them"
            )


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once, and the buffers that are saved with them."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _checksum(tensor: Tensor) -> str:
    # the checksum of checksums of parts: one part at a time is on the host
    parts = tensor.detach().reshape(-1).view(torch.uint8).split(BYTES_AT_A_TIME)
    return blake2b_hex(*(blake2b_hex(part.cpu().numpy()).encode() for part in parts))
