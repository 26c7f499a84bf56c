"""What a configuration may say: keys that do not fit together, topology files, and where a run computes."""

import tomllib
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions
from foreroute.trace import RoutedLayer, RoutingSpec
from foreroute.train.experts import read_planning
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task
from foreroute.train.ranks import find_device, num_started
from tests.train.small_runs import small_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser = {}", r"optimiser: unknown.*name, seed"),
        ("task = {min_operands = 9}", "min_operands = 9 exceeds max_operands = 4"),
        ("rl = {micro_step_tokens = 8}", r"cannot hold.*12 tokens"),
        ("model.sizes = {num_hidden_layers = 9999}", "num_hidden_layers is 9999; expected 1024 at most"),
        ("model.sizes = {hidden_size = 4611686018427387904}", r"cannot.*these sizes"),
        *[(f'name = "{name}"', r"name: String") for name in ("../up", "..", "a" * 5000, "n\\n")],
        ("rollout = {prompts = 100000, group_size = 100}", r"group_size is 10000000; expected 999999"),
        ('rl = {routing = "R2", sentinel = "drop"}', r"sentinel.*without routes"),
        ('warm_start = {checkpoint = "x.pt"}', r"max_steps, batch_size, stop_at_loss .*checkpoint"),
        ('parallel = {prefetch = 2, plan = {slots = "shared"}}', r"prefetch, plan .*expert = 1"),
        *[
            (f"rollout = {{prompts = 8}}\nparallel = {{expert = 4, {parallel}}}", message)
            for parallel, message in (
                ('plan = {packing = "routes"}}\nrl = {routing = "none"', r'packing = "routes".*replayed routes'),
                ('memory_budget = 1}\nrl = {routing = "none"', r"memory_budget.*replayed routes"),
                ("ranks_per_node = 3", r"expert = 4 .*ranks_per_node = 3"),
                ("plan = {pay_off = true}", r"plan\.pay_off = true .*topology file"),
                ('topology = "a.toml", redundant_slots = 1', r"redundant_slots.*beside topology"),
            )
        ],
        ('rollout = {engine = "vllm", precision = "float32"}', r"needs server\.python"),
        ('rollout = {engine = "vllm", server = {url = "http://a"}}', r"url.*weights_folder.*together"),
        ('task = {data = "x.jsonl"}', r"data, .*reward.*together"),
    ],
)
def test_wrong_configurations_are_explained(text, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(config := small_config(**tomllib.loads(text)), make_task(config))


SPEC = RoutingSpec(16, 2, (RoutedLayer(0),))
TOPOLOGY = """
topology = {num_ranks = 2, ranks_per_node = 1, redundant_slots = 2}
hardware = {preset = "h100"}
model = {preset = "qwen3-30b-a3b", num_layers = 1, num_experts = 16, top_k = 2}
"""


def test_a_file_says_ranks_slots_links_and_prices_and_that_of_another_run_is_refused(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(TOPOLOGY)
    cluster = load_cluster(path)

    def planning_of(**how):
        parallel = {"expert": 2, "topology": str(path), **how}
        return read_planning(small_config(parallel=parallel, rollout={"prompts": 8}).parallel, SPEC)

    found = planning_of(plan={"pay_off": False, "home_moves": 6})
    assert found == (cluster.topology, PlanOptions(home_moves=6, pay_off=False), cluster.costs)
    executed = planning_of(paths="direct", prefetch=3)
    assert executed.costs == replace(cluster.costs, paths="direct", prefetch=3), "prices are of what the run executes"
    for before, after, message in (
        ("num_ranks = 2", "num_ranks = 4", r"cluster\.toml .*num_ranks = 4, .*2; describe"),
        ("top_k = 2", "top_k = 4", r"says top_k = 4, .*2"),
    ):
        path.write_text(TOPOLOGY.replace(before, after))
        with pytest.raises(ConfigError, match=message):
            planning_of()


@contextmanager
def seen(count, **environment):
    """As if torch saw so many CUDA devices, in a process with these variables."""
    cuda = {"is_available": lambda: count > 0, "device_count": lambda: count}
    with patch.multiple(torch.cuda, **cuda), patch.dict("os.environ", environment):
        yield


def test_auto_takes_a_device_of_its_own_or_the_cpu():
    with seen(0):
        assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with seen(2):
        assert find_device("auto") == find_device("cuda") == torch.device("cuda:0")
        assert find_device("cpu") == torch.device("cpu")
    with seen(2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"):
        assert find_device("auto") == find_device("cuda") == torch.device("cuda:1")
    for rank in "0123":  # all processes of a machine decide alike
        with seen(2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="4"):
            assert find_device("auto") == torch.device("cpu")


def test_a_device_that_is_not_there_and_processes_that_are_no_number_are_refused():
    for count, variables, work in (
        (0, {}, lambda: find_device("cuda")),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, lambda: find_device("cuda")),
        (1, {"LOCAL_RANK": "x"}, lambda: find_device("auto")),
        *((0, {"WORLD_SIZE": said}, num_started) for said in ("0", "-1", "two", "\u0662")),
    ):
        with seen(count, **variables), pytest.raises(ConfigError):
            work()
