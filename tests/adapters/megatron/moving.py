"""Training with experts that move between steps, beside the same training without: what is equal, and what is seen."""

import itertools
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from batches import make_batches
from cpu_optimizers import Trained
from foreroute import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.adapters import megatron
from foreroute.adapters.megatron.homes import move
from foreroute.adapters.megatron.homes.carry import Carriage
from foreroute.balance import Links, Topology, plan
from foreroute.trace import digest
from grid import Cell
from model_chunks import EXPERTS, TOP_K, build, initialize
from replayed import carrying
from routes import made_up
from steps import forward_step, moe_layers, step

STEPS = 3
LINKS = Links(4e9, 1e9, 2e9, 1e-5, 5e-5)


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
    inner = move.held_in
    breaks = {
        "state stays": mock.patch.object(move, "held_in", lambda slot, state: inner(slot, {})),
        "weights stay": mock.patch.object(Carriage, "put_in_place", lambda self: None),
        "tokens go where experts were": mock.patch.object(move, "set_home", lambda *args: None),
    }
    fixed = train(cell, kind, True, moves=())
    for name, broken in breaks.items():
        with broken:
            different = differing(fixed, train(cell, kind, True, moves=(1,)))
        assert "losses" in different, f"{name}: only {different} differ"


def train(cell, kind, replays, moves):
    """Losses, recorded routes, experts in logical order with their state, everything dense, and bytes received."""
    initialize(cell)
    chunks = build(cell)
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
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return put_together(itertools.chain.from_iterable(everywhere))


def parameters_of(experts, slot):
    if hasattr(experts, "local_experts"):
        return dict(experts.local_experts[slot].named_parameters())
    return {n.removesuffix(str(slot)): p for n, p in experts.named_parameters() if n.endswith(f"weight{slot}")}


def put_together(parts):
    whole = {}
    for key, first, numel, tensor in parts:
        flat = tensor.reshape(-1)
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


def check_loads_are_those_of_the_plan(cell):
    """Measured where experts take their tokens in: per rank, layer and micro-batch what the plan says, and evener."""
    initialize(cell)
    chunks = build(cell)
    routed = megatron.attach(chunks)
    trained = Trained(chunks, "adamw")
    batches = make_batches(cell)
    traces = [skewed(batch, cell, seed) for seed, batch in enumerate(batches)]
    step_plan, counts_MLGE = planned(routed, traces)
    assert (step_plan.home_LE != routed.home_LE).any()
    before_ML = measured(trained, carrying(batches, traces), routed)
    routed.move_homes(step_plan, trained.optimizer)
    after_ML = measured(trained, carrying(batches, traces), routed)
    place = parallel_state.get_expert_model_parallel_rank()
    for m, of_layers in enumerate(counts_MLGE):
        for layer, counts_GE in enumerate(of_layers):
            wanted_G = step_plan.cell(m, layer).loads_G(counts_GE)
            assert after_ML[m][layer] == wanted_G[place], (m, layer, after_ML, wanted_G)
            block_G = counts_GE.sum(0).reshape(cell.ep, -1).sum(1)
            assert before_ML[m][layer] == block_G[place], (m, layer, before_ML, block_G)
    slowest = [most(loads_ML).sum() for loads_ML in (before_ML, after_ML)]
    assert slowest[1] < 0.8 * slowest[0], slowest


def skewed(batch, cell, seed):
    """Routes that like experts of the first rank."""
    rng = np.random.default_rng((seed, dist.get_rank()))
    chances_E = np.where(np.arange(EXPERTS) < EXPERTS // cell.ep, 4.0, 1.0)
    layers = tuple(map(RoutedLayer, cell.routed_layers))
    routes = [
        np.argsort(rng.random((n, len(layers), EXPERTS)) ** (1 / chances_E), axis=-1)[..., -TOP_K:]
        for n in batch.lengths
    ]
    return RoutingTrace.from_sequences(RoutingSpec(EXPERTS, TOP_K, layers), [t.numpy() for t in batch.tokens], routes)


def planned(routed, traces):
    """A plan of homes alone, from the counts of all ranks."""
    mine_MLE = np.stack(
        [[np.bincount(trace.expert_ids_NLK[:, i].ravel(), minlength=EXPERTS) for i in range(2)] for trace in traces]
    )
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine_MLE)
    counts_MLGE = np.stack(everywhere, axis=2)
    topology = Topology(len(everywhere), len(everywhere), redundant_slots=0, links=LINKS)
    return plan(counts_MLGE, topology, home_LE=routed.home_LE), counts_MLGE


def measured(trained, batches, routed):
    """Tokens that the experts of this rank were given, by micro-batch and layer."""
    trained.zero_grad()
    seen = []
    blocks = moe_layers([chunk.module for chunk in trained.chunks]).values()
    handles = [
        block.experts.register_forward_pre_hook(lambda module, args: seen.append(int(args[1].sum())))
        for block in blocks
    ]
    step(trained.chunks, batches, routed.replaying(forward_step))
    trained.zero_grad()
    for handle in handles:
        handle.remove()
    return np.array(seen).reshape(len(batches), len(blocks))


def most(loads_ML):
    """Over ranks."""
    slowest = torch.from_numpy(loads_ML.copy())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.numpy()
