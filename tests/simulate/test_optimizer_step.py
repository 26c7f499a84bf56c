"""What surrounds the stages, by hand on 64 H100 of the 30B model."""

import numpy as np
import pytest

from foreroute.simulate import parse_config
from foreroute.simulate.optimizer_step import move_seconds, optimizer_seconds, reduction_seconds

EXPERT = 3 * 2048 * 768
DENSE = 48 * 2 * 2048 * 128 * 36 + 151_936 * 2048
DENSE_S = DENSE * (4 + 2) * (7 / 8 / 340e9 + 7 / 8 / 8 / 45e9)


def described(ranks, gpus=64):
    config = parse_config({"cluster": {"gpus": gpus, "expert_parallel": ranks}}, source="the test")
    cluster = config.described()
    return config.cluster, cluster.topology, cluster.costs


def test_gradients_are_reduced_in_the_node_first():
    found = reduction_seconds(*described(16))
    # four ranks on as many nodes have the same 8 experts of a layer
    experts_s = 48 * 8 * EXPERT * (4 + 2) * 3 / 4 / 45e9
    assert found == pytest.approx(DENSE_S + experts_s)


def test_one_group_reduces_no_experts_and_one_gpu_nothing():
    assert reduction_seconds(*described(64)) == pytest.approx(DENSE_S)
    assert reduction_seconds(*described(1, gpus=1)) == 0


def test_groups_smaller_than_a_node_reduce_experts_inside_it():
    """EP 4: two of the 16 replicas in each node."""
    experts = 48 * 32 * EXPERT * (4 + 2)
    experts_s = experts * (1 / 2 / 340e9 + 7 / 8 / 2 / 45e9)
    assert reduction_seconds(*described(4)) == pytest.approx(DENSE_S + experts_s)


def test_the_optimizer_reads_and_writes_its_share():
    parameters = DENSE / 64 + 48 * 8 * EXPERT / 4
    assert optimizer_seconds(*described(16)) == pytest.approx(parameters * 30 / 2.7e12)


def test_homes_move_with_their_state_over_the_busiest_link():
    _, topology, costs = described(16)
    before_LE = np.array([[0, 0, 5], [2, 2, 2]])
    home_LE = np.array([[0, 3, 3], [2, 2, 8]])  # two into rank 3 of the node, one to the other node
    size = EXPERT * 14
    near_s, far_s = 2 * size / 340e9, size / 45e9
    assert move_seconds(before_LE, home_LE, 12.0, topology, costs) == pytest.approx(12 * max(near_s, far_s))
    assert move_seconds(before_LE[:1], home_LE[:1], 1.0, topology, costs) == pytest.approx(near_s)
    assert move_seconds(home_LE, home_LE, 1.0, topology, costs) == 0
