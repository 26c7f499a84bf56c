"""Training with experts that move between steps, beside the same training without: what is equal, and what is seen."""

import itertools
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from foreroute.adapters import megatron
from foreroute.adapters.megatron.expert_placement import placement
from foreroute.ep.transfer.segments import LayerTransfer
from foreroute.trace import digest
from tests.adapters.megatron.cpu_optimizers import Trained
from tests.adapters.megatron.grid import Cell, with_settings
from tests.adapters.megatron.grid_checks import carrying
from tests.adapters.megatron.micro_batches import made_up, make_batches
from tests.adapters.megatron.model_chunks import build, initialize
from tests.adapters.megatron.training_step import forward_step, moe_layers, step

STEPS = 3


def check_cases(cases):
    """(cell, optimizer, whether routes are replayed) each."""
    for cell, kind, replays in cases:
        try:
            check_moves_change_nothing(cell, kind, replays)
        except Exception as error:
            raise AssertionError(f"[{cell}], {kind}, {'replayed' if replays else 'live'}: {error}") from error


def check_moves_change_nothing(cell, kind, replays):
    fixed = train(cell, kind, replays, moves=())
    moved = train(cell, kind, replays, moves=range(STEPS))
    assert fixed["received"] == 0
    assert total(moved["received"]) > 0
    different = differing(fixed, moved)
    assert not different, f"{different} differ"


def check_the_comparison_sees():
    """State that stays behind, weights that do, and tokens that are sent where experts were."""
    cell, kind = Cell(ep=2, layers=2, packed=True), "adamw"
    inner = placement.held_tensors
    breaks = {
        "state stays": mock.patch.object(placement, "held_tensors", lambda slot, state: inner(slot, {})),
        "weights stay": mock.patch.object(LayerTransfer, "commit"),
        "tokens go where experts were": mock.patch.object(placement, "set_home"),
    }
    fixed = train(cell, kind, True, moves=())
    for name, broken in breaks.items():
        with broken:
            different = differing(fixed, train(cell, kind, True, moves=(1,)))
        assert "losses" in different, f"{name}: only {different} differ"


def check_sums_are_all_that_differs(settings, cell):
    """A token's experts are added up in the order of slots, which two summands cannot tell and four can.

    In float64, with an optimizer that does not divide by gradients, what is left are a few units of 2e-16.
    """
    cell = with_settings({"moe_router_dtype": "fp64", "params_dtype": torch.float64, **settings}, **cell)
    fixed, moved = (train(cell, "momentum", False, moves) for moves in ((), range(STEPS)))
    assert fixed["traces"] == moved["traces"]
    furthest = max(float((fixed["experts"][key] - moved["experts"][key]).abs().max()) for key in fixed["experts"])
    assert 0 < furthest < 1e-13, furthest
    assert np.allclose(fixed["losses"], moved["losses"], rtol=1e-13, atol=0)


def train(cell, kind, replays, moves):
    """Losses, recorded routes, experts in logical order with their state, everything dense, and bytes received."""
    initialize(cell)
    chunks = [chunk.to(chunk.config.params_dtype) for chunk in build(cell)]
    routed = megatron.attach(chunks)
    trained = Trained(chunks, kind)
    # padding that is spread goes evenly to places, so that it goes elsewhere when homes move
    forward = routed.replaying(forward_step, padding="native") if replays else forward_step
    rng = np.random.default_rng(0)
    found = {"losses": [], "traces": [], "received": 0}
    for number in range(STEPS):
        trained.zero_grad()
        home_LE = rng.permuted(routed.block_home_LE, axis=1)
        if number in moves:
            found["received"] += routed.move_homes(home_LE, trained.optimizer)
            assert np.array_equal(routed.home_LE, home_LE)
        batches = make_batches(cell, seed=number)
        if replays:
            traces = [made_up(b, cell.routed_layers, seed, complete=True) for seed, b in enumerate(batches)]
            batches = carrying(batches, traces)
        with routed.record() as recording:
            found["losses"].append(step(trained.chunks, batches, forward)[0])
        found["traces"].append(digest(recording.trace()))
        trained.step()
    found["experts"] = whole_experts(routed, trained)
    found["dense"] = {
        f"{i}.{name}": tensor.detach().clone()
        for i, chunk in enumerate(trained.chunks)
        for name, tensor in itertools.chain(chunk.named_parameters(), chunk.named_buffers())
        if "experts." not in name
    }
    return found


def whole_experts(routed, trained):
    """(decoder layer, expert, tensor-parallel rank, name) -> what all ranks have of it, put together."""
    place, part = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    mine = []
    for layer, block in moe_layers([chunk.module for chunk in trained.chunks]).items():
        row = [named.index for named in routed.spec.layers].index(layer)
        for slot, expert in enumerate(np.flatnonzero(routed.home_LE[row] == place).tolist()):
            for name, parameter in parameters_of(block.experts, slot).items():
                key = (layer, expert, part, name)
                mine.append(((*key, "weight"), 0, parameter.numel(), parameter.detach()))
                mine += [((*key, what), *where, t.detach()) for what, *where, t in trained.kept(parameter)]
    return put_together(mine)


def parameters_of(experts, slot):
    if hasattr(experts, "local_experts"):
        return dict(experts.local_experts[slot].named_parameters())
    return {n.removesuffix(str(slot)): p for n, p in experts.named_parameters() if n.endswith(f"weight{slot}")}


def put_together(mine):
    """Key -> the whole tensor, flat, of (key, first element, elements of the whole, tensor) of all ranks."""
    everywhere = [None] * dist.get_world_size()
    # as bytes: tensors are pickled by way of files, one each
    as_bytes = [(*of, t.dtype, t.reshape(-1).contiguous().view(torch.uint8).numpy()) for *of, t in mine]
    dist.all_gather_object(everywhere, as_bytes)
    whole = {}
    for key, first, numel, dtype, held in itertools.chain.from_iterable(everywhere):
        flat = torch.from_numpy(held).view(dtype)
        values = whole.setdefault(key, torch.full((numel,), torch.nan, dtype=flat.dtype))
        before = values[first : first + len(flat)]
        assert bool((before.isnan() | (before == flat)).all()), f"copies of {key} differ"
        values[first : first + len(flat)] = flat
    gaps = [key for key, values in whole.items() if values.isnan().any()]
    assert not gaps, f"nobody has all of {gaps[0]}"
    return whole


def differing(one, other):
    """What of two runs is not equal, bit for bit, on this rank."""
    seen = [name for name in ("losses", "traces") if one[name] != other[name]]
    for name in ("experts", "dense"):
        assert one[name].keys() == other[name].keys()
        seen += [(name, key) for key in one[name] if not torch.equal(one[name][key], other[name][key])][:1]
    return seen


def total(number):
    tensor = torch.tensor(number)
    dist.all_reduce(tensor)
    return int(tensor)
