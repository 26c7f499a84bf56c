"""The split of the transfers of a cell between paths, against all splits that there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.ep.transfer import Moves
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.moves import batch_seconds, choose_host_V
from foreroute.errors import ConfigError
from foreroute.plan import Links, Topology

MB = 10**6
rates = st.sampled_from([1e9, 3e9, 8e9])


def moves_of(pairs):
    source_V, target_V = np.array(pairs, np.int64).reshape(-1, 2).T
    rows_V = np.arange(len(source_V))
    return Moves(rows_V, source_V, rows_V, target_V, rows_V)


def topology(node=4e9, cluster=1e9, host=2e9, latency=1e-6, ranks=4, per_node=4):
    return Topology(ranks, per_node, 8, Links(node, cluster, host, latency, latency))


def seconds_by_hand(pairs, host_V, topology):
    """Bytes over bandwidth of the busiest lane, written down a second time."""
    lanes, links = {}, topology.links
    for (source, target), on_host in zip(pairs, host_V, strict=True):
        same = source // topology.ranks_per_node == target // topology.ranks_per_node
        rate = links.node_bytes_per_s if same else links.cluster_bytes_per_s
        if on_host:
            lanes.setdefault(("host", target), []).append(MB / links.host_bytes_per_s)
        else:
            for lane in (("out", same, source), ("in", same, target)):
                lanes.setdefault(lane, [links.node_latency_s]).append(MB / rate)
    return max((sum(lane) for lane in lanes.values()), default=0.0)


@given(st.lists(st.tuples(st.integers(1, 3), st.just(0)), min_size=1, max_size=8), rates, rates)
@settings(max_examples=80, deadline=None)
def test_a_batch_to_one_rank_is_split_as_well_as_can_be(pairs, node, host):
    links, moves = topology(node=node, host=host), moves_of(pairs)
    chosen = choose_host_V(moves, MB, links, "auto")
    best = min(seconds_by_hand(pairs, split, links) for split in itertools.product([0, 1], repeat=len(pairs)))
    assert batch_seconds(moves, chosen, MB, links) == pytest.approx(best)


crowds = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda p: p[0] != p[1]), max_size=9)


@given(crowds, rates, rates, rates)
@settings(max_examples=80, deadline=None)
def test_any_batch_ends_no_later_than_by_one_path_alone(pairs, node, cluster, host):
    links, moves = topology(node, cluster, host, ranks=6, per_node=3), moves_of(pairs)
    chosen = choose_host_V(moves, MB, links, "auto")
    reached = [source // 3 == target // 3 for source, target in pairs]
    assert not any(chosen[v] and not reached[v] for v in range(len(pairs)))
    took = batch_seconds(moves, chosen, MB, links)
    assert took == pytest.approx(seconds_by_hand(pairs, chosen, links))
    assert (
        took <= min(seconds_by_hand(pairs, [False] * len(pairs), links), seconds_by_hand(pairs, reached, links)) + 1e-12
    )
    assert choose_host_V(moves, MB, links, "host").tolist() == reached
    assert not choose_host_V(moves, MB, links, "direct").any()


def test_a_batch_is_really_split():
    chosen = choose_host_V(moves_of([(1, 0)] * 6), MB, topology(node=4e9, host=2e9), "auto")
    assert chosen.sum() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": "both"}, "paths is 'both'"),
        ({"slots": "rank"}, "slots is 'rank'"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"deadline_s": 600}, "expected 0 to less than timeout_s"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TransferOptions(**options)
