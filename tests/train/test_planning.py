"""What a run plans with: its configuration, and the topology file that it names."""

from dataclasses import replace

import pytest

from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions, Topology
from foreroute.train.experts import NO_LINKS, read_planning
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task
from tests.tiers import grid
from tests.train.small_runs import small_config
from tests.train.test_expert_parallel import TOPOLOGY


def planning_of(**parallel):
    config = small_config(parallel=parallel, rollout={"prompts": 8})
    return read_planning(config.parallel, make_policy(config, make_task(config)).spec)


def test_without_a_file_nothing_is_priced():
    found = planning_of(expert=4, ranks_per_node=2, redundant_slots=3, home_moves="all", slots="shared")
    assert found == (Topology(4, 2, 3, NO_LINKS), PlanOptions(home_moves=None, slots="shared"), None)


def test_a_file_says_ranks_slots_links_and_prices(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(TOPOLOGY.format(links="", weight_bytes=2.0))
    cluster = load_cluster(path)
    found = planning_of(expert=4, topology=str(path), pay_off=False, home_moves=6)
    assert found == (cluster.topology, PlanOptions(home_moves=6, pay_off=False), cluster.costs)
    executed = planning_of(expert=4, topology=str(path), paths="direct", prefetch=3)
    assert executed.costs == replace(cluster.costs, paths="direct", prefetch=3), "prices are of what the run executes"


@grid(
    ("before", "after", "message"),
    [
        ("num_ranks = 4", "num_ranks = 2", r"cluster.toml says num_ranks = 2, the run has 4; describe the ranks"),
        ("num_experts = 16", "num_experts = 32", "says num_experts = 32, the run has 16"),
        ("num_layers = 2", "num_layers = 3", "says num_layers = 3, the run has 2"),
        ("top_k = 2", "top_k = 4", "says top_k = 4, the run has 2"),
        ("hidden = 32", "hiden = 32", "hiden"),
    ],
    quick=2,
)
def test_a_file_of_another_run_is_refused(before, after, message, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(TOPOLOGY.format(links="", weight_bytes=2.0).replace(before, after))
    with pytest.raises(ConfigError, match=message):
        planning_of(expert=4, topology=str(path))
    with pytest.raises(ConfigError, match="missing"):
        planning_of(expert=4, topology=str(tmp_path / "missing.toml"))
