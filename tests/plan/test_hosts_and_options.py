"""Hosts in pieces are the hosts of the whole; options that cannot be."""

import numpy as np
import pytest

from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions
from foreroute.plan.hosts import Hosts
from tests.plan.random_plans import small_case


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sizes", [(5,), (3, 2), (1, 3, 1)])
def test_layers_side_by_side_are_the_hosts_of_all(sizes):
    plan, _ = small_case(4, layers=5)
    parts, begin = [], 0
    for size in sizes:
        layers = range(begin, begin + size)
        cells = [plan.cell(m, layer) for m in range(3) for layer in layers]
        parts.append(Hosts.of_cells(plan.home_LE[layers], cells))
        begin += size
    assert same(Hosts.side_by_side(parts), plan.hosts)


def test_micro_steps_are_written_one_behind_the_other():
    hosts = small_case(4)[0].hosts
    room = Hosts.with_room(hosts.home_LE, 3, 4, most=8)
    for begin, end in ((0, 1), (1, 3)):
        room.write(begin, hosts.part(begin, end))
    assert same(room.part(0, 3), hosts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tolerance": -0.01}, "tolerance is -0.01; expected a share of the mean load, from 0 to below 1"),
        ({"tolerance": 1}, "tolerance is 1; expected a share"),
        ({"tolerance": float("nan")}, "tolerance is nan; expected a share"),
        ({"home_moves": -1}, "home_moves is -1; expected a whole number from 0 to"),
        ({"home_moves": 1.5}, "home_moves is 1.5; expected a whole number from 0 to"),
        ({"threads": 0}, "threads is 0; expected a whole number from 1 to"),
        ({"threads": True}, "threads is True; expected a whole number from 1 to"),
        ({"slots": "both"}, "slots is 'both'; expected 'layer' or 'shared'"),
        ({"packing": "tokens"}, "packing is 'tokens'; expected 'length' or 'routes'"),
        ({"packing": [1]}, r"packing is \[1\]; expected 'length'"),
        ({"traffic": True, "replicas": False}, "traffic is on with replicas=False"),
    ],
)
def test_impossible_options_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**wrong)
