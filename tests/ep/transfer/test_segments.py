"""The segments that a change of homes moves, carried out on arrays beside what should be there afterwards."""

import itertools

import numpy as np
import pytest

from foreroute.ep.transfer.segments import Extent, LayerExtents, require_complete, segments_for, shard_moves

TENSORS = {"weight": 12, "weight, exp_avg": 12, "bias": 5}


@pytest.mark.parametrize("seed", range(60))
def test_every_part_arrives_once(seed):
    """Any number of ranks of both kinds, state cut anywhere and elsewhere in every row, weights whole everywhere."""
    rng = np.random.default_rng(seed)
    ep, edp, per_rank = (int(rng.integers(1, n)) for n in (5, 4, 5))
    number_GD = rng.permutation(ep * edp).reshape(ep, edp)
    before_E, after_E = (rng.permutation(np.repeat(np.arange(ep), per_rank)) for _ in range(2))
    cuts = [np.sort(rng.integers(0, 13, edp - 1)) for _ in range(per_rank)]
    of_ranks = [[] for _ in range(ep * edp)]
    for ep_rank, d in itertools.product(range(ep), range(edp)):
        of_ranks[number_GD[ep_rank, d]] = LayerExtents([held_by(d, cut) for cut in cuts], frozenset({("step", 2.0)}))
    require_complete(of_ranks, number_GD, "layer")
    held = memory(before_E, number_GD, of_ranks)
    wanted = memory(after_E, number_GD, of_ranks)
    listed = [segments_for(r, shard_moves(before_E, after_E), number_GD, of_ranks) for r in range(ep * edp)]
    for rank, segments_here in enumerate(listed):
        for other in range(rank):
            pair = [
                [s for s in each if {s.source, s.target} == {rank, other}] for each in (segments_here, listed[other])
            ]
            assert pair[0] == pair[1], "two ranks expect different messages of each other"
    arrived = {key: values.copy() for key, values in held.items()}
    for segment in {s for each in listed for s in each}:
        part = slice(segment.start, segment.stop)
        source = held[segment.source, segment.source_row, segment.name][part]
        assert not np.isnan(source).any(), "sent by a rank that does not hold it"
        arrived[segment.target, segment.target_row, segment.name][part] = source
    assert all(np.array_equal(arrived[key], wanted[key], equal_nan=True) for key in wanted)


def held_by(d, cut):
    bounds = [0, *cut.tolist(), 12]
    extents = {name: Extent(0, size, size, "float32") for name, size in TENSORS.items()}
    extents["weight, exp_avg"] = Extent(bounds[d], bounds[d + 1], 12, "float32")
    if bounds[d] == bounds[d + 1]:
        del extents["weight, exp_avg"]
    return extents


def memory(home_E, number_GD, of_ranks):
    """(rank, row, name) -> what lies there, NaN where nothing is held."""
    lies = {}
    for ep_rank, numbers_D in enumerate(number_GD):
        for row, expert in enumerate(np.flatnonzero(home_E == ep_rank)):
            for number, (i, (name, size)) in itertools.product(numbers_D, enumerate(TENSORS.items())):
                values = np.full(size, np.nan)
                if extent := of_ranks[number].rows[row].get(name):
                    values[extent.start : extent.stop] = (1000 * expert + 100 * i + np.arange(size))[
                        extent.start : extent.stop
                    ]
                lies[number, row, name] = values
    return lies
