"""Forecasts of memory against a replay of every block of a made-up program, budgets, and refused input."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.memory import SIZES, WORKS, BatchSizes, StepMemory, describe_section, section_sizes
from foreroute.errors import CountsError, ForecastError
from foreroute.plan import Topology, known_rows
from foreroute.plan.hosts import Hosts
from tests.plan.random_plans import LINKS, random_counts, random_plan

LAYERS, RANKS, MICRO_STEPS, EXPERT = 4, 2, 3, 1000
PARTS = [("begin", None), *(("forward", n) for n in range(LAYERS)), ("head", None)]
PARTS += [*(("backward", n) for n in reversed(range(LAYERS))), ("end", None)]


def case(seed, slots=2):
    rng = np.random.default_rng(seed)
    counts = random_counts(seed, (MICRO_STEPS, LAYERS, RANKS, 8))
    plan = random_plan(counts, Topology(RANKS, RANKS, slots, LINKS), seed=seed, sharing="layer")
    sizes = BatchSizes(*rng.integers(1, 50, (3, MICRO_STEPS, RANKS)))
    return plan, known_rows(counts, plan), sizes


def program(seed, *, blocks=6):
    """For each section and work: allocations in order, each with its bytes by size, and where it is given back."""
    rng, made = np.random.default_rng(seed), {}
    for part, layer in PARTS:
        for work in WORKS if layer is not None else WORKS[:1]:
            bytes_IX = rng.integers(0, 9, (blocks, len(SIZES))) * (rng.random((blocks, len(SIZES))) < 0.5)
            made[part, layer, work] = bytes_IX, rng.integers(0, blocks + 2, blocks)
    return made


def seen(block_bytes_I, freed_I):
    """Bytes behind each allocation of a section, and at its end: blocks above the last are kept."""
    blocks = np.arange(len(freed_I))
    alive = [[a <= i and not (a < freed_I[a] <= i) for a in blocks] for i in blocks]
    end = [not (a < freed_I[a] <= len(blocks)) for a in blocks]
    return np.array([*alive, end]) @ block_bytes_I


def memory_of(made):
    rng, sections = np.random.default_rng(0), []
    for part, layer in PARTS:
        logs = {}
        for work in WORKS if layer is not None else WORKS[:1]:
            bytes_IX, freed_I = made[part, layer, work]
            small = np.column_stack([np.ones(12), rng.integers(0, 20, (12, len(SIZES) - 1))])
            logs[work] = [(sizes_X, seen(bytes_IX @ sizes_X, freed_I)) for sizes_X in small]
        sections.append(describe_section(layer, part, logs))
    return StepMemory(EXPERT, 1, sections)


@pytest.mark.parametrize("seed", range(3))
def test_a_forecast_is_the_peak_of_all_blocks_one_after_the_other(seed):
    made, (plan, known, sizes) = program(seed), case(seed)
    found = memory_of(made).forecast(known, sizes, plan, resident=77)
    for m, g in np.ndindex(MICRO_STEPS, RANKS):
        # of two slots a layer, from its first replica on, and of the next one that has some, which is fetched ahead
        cells = [(n, layer) for n, layer in np.argwhere(plan.num_replicas_ML > 0) if n > m]
        layers = {layer for n, layer in np.argwhere(plan.num_replicas_ML > 0) if n <= m}
        slots = 2 * EXPERT * len(layers | {layer for n, layer in cells[:1] if n <= m + 2})
        alive, peak, where = 77 + slots, 0, None
        for part, layer in PARTS:
            sizes_MGX, _ = section_sizes(known, sizes, layer)
            rows = sizes_MGX[m, g, SIZES.index("home_rows")] + sizes_MGX[m, g, SIZES.index("replica_rows")]
            assert rows == known.reserved_MLG[m, slice(None) if layer is None else layer, g].sum()
            work = "home"
            if layer is not None and known.replicas_MLG[m, layer].any():
                work = "here" if known.replicas_MLG[m, layer, g] else "elsewhere"
            bytes_IX, freed_I = made[part, layer, work]
            after = seen(bytes_IX @ sizes_MGX[m, g], freed_I)
            if alive + after.max() > peak:
                peak, where = alive + after.max(), (part, -1 if layer is None else layer)
            alive += after[-1]
        assert found.bytes_MG[m, g] == pytest.approx(peak, abs=2)
        assert (found.part_MG[m, g], found.layer_MG[m, g]) == where
        # what leaves the slots out is seen to miss
        assert found.bytes_MG[m, g] - memory_of(made).forecast(known, sizes, resident=77).bytes_MG[m, g] == slots


@pytest.mark.parametrize(("prefetch", "sets"), [(0, [0, 1, 1]), (1, [1, 1, 1])])
def test_slots_are_there_from_the_first_fetch_on(prefetch, sets):
    plan, _, sizes = case(0)
    cells = [
        plan.cell(*place) if place == (1, 2) else plan.cell(*place).only(slice(0)) for place in np.ndindex(3, LAYERS)
    ]
    plan = replace(plan, hosts=Hosts.of_cells(plan.home_LE, cells))
    known, memory = known_rows(random_counts(0, (MICRO_STEPS, LAYERS, RANKS, 8)), plan), memory_of(program(0))
    memory = replace(memory, prefetch=prefetch)
    slots = memory.forecast(known, sizes, plan).bytes_MG - memory.forecast(known, sizes).bytes_MG
    assert (slots == 2 * EXPERT * np.array(sets)[:, None]).all()
    # an update finds the slots that the recompute on the same weights has filled
    full, _, _ = case(0)
    assert full.num_replicas_ML.any(axis=0).all()
    kept = memory.forecast(known, sizes, plan, kept=full).bytes_MG - memory.forecast(known, sizes).bytes_MG
    assert (kept == 2 * EXPERT * LAYERS).all()


def test_a_budget_names_rank_micro_step_and_layer():
    plan, known, sizes = case(0)
    found = memory_of(program(0)).forecast(known, sizes, plan)
    most = int(found.bytes_MG.max())
    found.require(most)
    m, g = np.unravel_index(found.bytes_MG.argmax(), found.bytes_MG.shape)
    layer = found.layer_MG[m, g]
    words = rf"rank {g} .*{most:,} bytes.*micro-step {m}, .*{found.part_MG[m, g]}"
    with pytest.raises(ForecastError, match=words + (f".*routed layer {layer}" if layer >= 0 else "")):
        found.require(most - 1)
    with pytest.raises(CountsError, match="memory_budget is"):
        found.require(1.5)


def test_sizes_rows_and_memory_of_something_else_are_refused():
    plan, known, sizes = case(2)
    memory = memory_of(program(2))
    for wrong in (sizes.tokens[:1], sizes.tokens * 1.0, -sizes.tokens):
        with pytest.raises(CountsError, match="tokens are"):
            memory.forecast(known, sizes._replace(tokens=wrong), plan)
    for resident in ([1, 2, 3], 1.5, -1):
        with pytest.raises(CountsError, match="resident is"):
            memory.forecast(known, sizes, plan, resident=resident)
    fewer = StepMemory(EXPERT, 1, [section for section in memory.sections if section.layer != 3])
    with pytest.raises(ForecastError, match=r"4 layers.* of 3"):
        fewer.forecast(known, sizes, plan)
    at_home = [section._replace(by_work={"home": section.by_work["home"]}) for section in memory.sections]
    with pytest.raises(ForecastError, match="measured without"):
        StepMemory(EXPERT, 1, at_home).forecast(known, sizes, plan)
    sizes = [np.array([1.0, n, *[0] * 7]) for n in range(1, 6)]
    for bytes_of in (lambda n: [1e6 * n * n, 0], lambda n: [5.0] * int(2 + n % 2)):
        with pytest.raises(ForecastError, match=r"forward.* layer 3 .*grouped_mm"):
            describe_section(3, "forward", {"home": [(one, np.array(bytes_of(one[1]))) for one in sizes]})
