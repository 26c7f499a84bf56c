"""Which rows a plan counts, on one rank and over all."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.errors import CountsError
from foreroute.trace import RoutedLayer, RoutingSpec
from tests.ep.training import Case, policy

SPEC = RoutingSpec(4, 2, (RoutedLayer(0), RoutedLayer(1)))


def test_replayed_rows_are_planned_and_last_tokens_only_sent():
    routes = [np.array([[[0, 1], [2, 3]], [[0, 3], [2, 0]]]), np.array([[[1, 2], [3, 0]]])]
    tokens = [np.array([7, 8, 9]), np.array([5])]  # the last token of the first sequence has no route
    trace = fr.RoutingTrace.from_sequences(SPEC, tokens, routes)
    rows = BatchRows.replayed(trace, [[7, 8, 9], [0, 0, 5]], [[1, 1, 1], [0, 0, 1]])
    assert rows.planned_N.tolist() == [True, True, False, False, False, True]
    assert rows.sent_N.tolist() == [True, True, True, False, False, True]
    assert rows.routed_LE.tolist() == [[2, 2, 1, 1], [2, 0, 2, 2]]
    assert not rows.all_planned


def test_a_batch_without_last_tokens_is_all_planned():
    trace = fr.RoutingTrace.from_sequences(SPEC, [np.array([7, 8])], [np.array([[[0, 1], [2, 3]]])])
    assert BatchRows.replayed(trace, [[7]]).all_planned
    assert not BatchRows.replayed(trace, [[7, 8]]).all_planned
    assert BatchRows().all_planned
    assert BatchRows(sent_N=np.array([True, False])).all_planned


@pytest.mark.parametrize("sent", [[True, False], [True]])
def test_what_is_planned_must_be_sent(sent):
    with pytest.raises(CountsError, match="with everything that is planned sent"):
        BatchRows(planned_N=np.array([True, True]), sent_N=np.array(sent))


def test_a_rank_without_sequences_brings_padding_alone():
    trace = fr.RoutingTrace.from_sequences(SPEC, [np.array([7, 8])], [np.array([[[0, 1], [2, 3]]])])
    rows = BatchRows.replayed(trace.select([]), [[0, 0]], [[0, 0]])
    assert rows.sent_N.tolist() == [False, False]
    assert rows.routed_LE.tolist() == [[0] * 4] * 2
    assert rows.all_planned


COUNTS_MLGE = np.arange(2 * 3 * 2 * 8).reshape(2, 3, 2, 8)
"""Of two micro-steps, the three layers of the policy, two ranks and its eight experts."""


def gathered(rank):
    placed = hf.distribute(policy(Case(ranks=2, plan=0)), timeout_s=20)
    return placed.gather_counts([counts_LGE[:, rank] for counts_LGE in COUNTS_MLGE])


def test_every_rank_gets_the_counts_of_all(workers):
    for found_MLGE in workers(2).run(gathered):
        np.testing.assert_array_equal(found_MLGE, COUNTS_MLGE)
