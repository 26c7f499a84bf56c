"""The copies that a change of homes asks for, carried out on arrays beside what should be there afterwards."""

import itertools

import numpy as np
import pytest

from foreroute.adapters.megatron.homes.copies import Extent, LayerParts, copies_for, require_complete
from foreroute.ep.transfer.moves import shard_moves
from foreroute.errors import TransferError

TENSORS = {"weight": 12, "weight, exp_avg": 12, "bias": 5}


def check_copies():
    for seed in range(60):
        check_every_part_arrives_once(np.random.default_rng(seed))


def check_every_part_arrives_once(rng):
    """Any number of places and copies, state cut anywhere and elsewhere in every slot, weights whole everywhere."""
    places, copies, per_place = (int(rng.integers(1, n)) for n in (5, 4, 5))
    number_GD = rng.permutation(places * copies).reshape(places, copies)
    before_E, after_E = (rng.permutation(np.repeat(np.arange(places), per_place)) for _ in range(2))
    cuts = [np.sort(rng.integers(0, 13, copies - 1)) for _ in range(per_place)]
    of_ranks = [[] for _ in range(places * copies)]
    for place, d in itertools.product(range(places), range(copies)):
        of_ranks[number_GD[place, d]] = LayerParts([slot_of(d, cut) for cut in cuts], frozenset({("step", 2.0)}))
    require_complete(of_ranks, number_GD, "layer")
    held = memory(before_E, number_GD, of_ranks)
    wanted = memory(after_E, number_GD, of_ranks)
    listed = [copies_for(r, shard_moves(before_E, after_E), number_GD, of_ranks) for r in range(places * copies)]
    for rank, copies_here in enumerate(listed):
        for other in range(rank):
            pair = [[c for c in each if {c.source, c.target} == {rank, other}] for each in (copies_here, listed[other])]
            assert pair[0] == pair[1], "two ranks expect different messages of each other"
    arrived = {key: values.copy() for key, values in held.items()}
    for copy in {c for each in listed for c in each}:
        part = slice(copy.start, copy.stop)
        source = held[copy.source, copy.source_slot, copy.name][part]
        assert not np.isnan(source).any(), "sent by a rank that does not hold it"
        arrived[copy.target, copy.target_slot, copy.name][part] = source
    assert all(np.array_equal(arrived[key], wanted[key], equal_nan=True) for key in wanted)


def slot_of(d, cut):
    bounds = [0, *cut.tolist(), 12]
    slot = {name: Extent(0, size, size, "float32") for name, size in TENSORS.items()}
    slot["weight, exp_avg"] = Extent(bounds[d], bounds[d + 1], 12, "float32")
    if bounds[d] == bounds[d + 1]:
        del slot["weight, exp_avg"]
    return slot


def memory(home_E, number_GD, of_ranks):
    """(rank, slot, name) -> what lies there, NaN where nothing is held."""
    lies = {}
    for place, numbers_D in enumerate(number_GD):
        for slot, expert in enumerate(np.flatnonzero(home_E == place)):
            for number, (i, (name, size)) in itertools.product(numbers_D, enumerate(TENSORS.items())):
                values = np.full(size, np.nan)
                if extent := of_ranks[number].slots[slot].get(name):
                    values[extent.start : extent.stop] = (1000 * expert + 100 * i + np.arange(size))[
                        extent.start : extent.stop
                    ]
                lies[number, slot, name] = values
    return lies


def check_gaps_are_refused():
    whole, half = Extent(0, 8, 8, "float32"), Extent(0, 4, 8, "float32")
    places = np.array([[0], [1]])
    for slots, message in (
        (({"m": whole}, {"m": half}), "m is all of 8 elements of float32 for slot 0 of place 0 and a part of 8"),
        (({"m": whole}, {}), "and not kept for slot 0 of place 1"),
        (({"m": whole}, {"m": Extent(0, 8, 8, "bfloat16")}), "all of 8 elements of bfloat16 for slot 0 of place 1"),
    ):
        with pytest.raises(TransferError, match=message):
            require_complete([LayerParts([slot], frozenset()) for slot in slots], places, "layer")
