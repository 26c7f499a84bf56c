"""Topology files: presets, overrides, and refusal of what is not understood."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from foreroute.costs.cluster_file import cluster_toml, load_cluster, parse_cluster, write_rates
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.errors import ConfigError, TopologyError

USUAL = {
    "topology": {"num_ranks": 64, "redundant_slots": 2},
    "hardware": {"preset": "h100"},
    "model": {"preset": "qwen3-30b-a3b"},
}


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_cluster_can_be_written_down_and_read_again(hardware):
    given = {
        "topology": {"num_ranks": 16, "redundant_slots": 2, "ranks_per_node": 4},
        "hardware": {"preset": hardware},
        "model": {"preset": "glm-4.5", "weight_bytes": 0.5},
        "links": {"host_bytes_per_s": 1.1e17, "node_latency_s": 1e-7},
        "costs": {"dispatcher": "copies", "paths": "direct", "trial_s_per_count": 1e-4},
    }
    cluster = parse_cluster(given, source="x")
    assert parse_cluster(tomllib.loads(cluster_toml(cluster)), source="x") == cluster


@pytest.mark.parametrize(
    ("links", "left"),
    [({"node_bytes_per_s": 22e9}, "cluster_bytes_per_s"), ({"cluster_bytes_per_s": 400e9}, "node_bytes_per_s")],
)
def test_a_link_of_a_preset_does_not_outrun_that_of_a_file_in_silence(links, left):
    parse_cluster({**USUAL, "topology": {"num_ranks": 8, "redundant_slots": 2}, "links": links}, source="one node")
    with pytest.raises(ConfigError, match=rf"nearer.*node\. Set {left} too"):
        parse_cluster({**USUAL, "links": links}, source="x")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *(({"hardware": {"preset": name}, "topology": {"num_ranks": 144}}, None) for name in HARDWARE),
        ({"hardware": {"gemm_flops_per_s": 6e11}}, r"gemm_flops_per_s is 6e\+11, and GPUs reach 1e\+12"),
        ({"hardware": {"memory_bytes_per_s": 2.7e13}}, "memory_bytes_per_s"),
        ({"hardware": {"gemm_flops_per_s": 6e9, "memory_bytes_per_s": 3e9, "tile_rows": 1}}, None),
        ({"links": {"node_bytes_per_s": 45e9, "cluster_bytes_per_s": 90e9}}, "nearer than ranks of the same"),
        ({"links": {"cluster_bytes_per_s": 5e7}}, "cluster_bytes_per_s is 5e.07, and GPUs reach 1e.08"),
        ({"links": {"node_latency_s": 0.005}}, "node_latency_s is 0.005, and GPUs reach 1e-06 to 0.001 s"),
        ({"links": {"node_latency_s": 15e-9}}, "node_latency_s is 1.5e-08, and GPUs"),
        ({"hardware": {"attention_flops_per_s": 250e6}}, r"attention_flops_per_s is 2.5e\+08, and GPUs reach"),
        ({"topology": {"redundant_slots": 126}}, None),
        ({"topology": {"redundant_slots": 127}}, "redundant_slots is 127; a rank has a use for 126 at most"),
        ({"model": {"attention_width": 128}}, "attention_width is 128, and hidden 2048; expected num_attention_heads"),
        ({"model": {"dense_parameters": 50 * 2048**2}}, None),
        ({"model": {"intermediate": 3584}}, None),
        ({"model": {"intermediate": 11264}}, "intermediate is 11,264, which makes 44 times hidden for top_k 8; exp"),
        ({"model": {"dense_parameters": 1_500_000_000}}, "1,500,000,000, 358 times the square of hidden"),
    ],
)
def test_what_is_odd_is_told_once(changes, told):
    """Rates that no GPU reaches, slots of no use, a whole model for a layer; no preset, and no process on a CPU."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            parse_cluster(
                {name: USUAL.get(name, {}) | changes.get(name, {}) for name in (*USUAL, *changes)}, source="x"
            )
    assert [bool(re.search(told or "", str(each.message))) for each in found] == [True] * bool(told)


def test_one_node_needs_no_link_to_others():
    links = {"node_bytes_per_s": 2e10, "host_bytes_per_s": 2e10, "node_latency_s": 2e-5}
    hardware = dict.fromkeys(("gemm_flops_per_s", "attention_flops_per_s"), 2e14) | {"memory_bytes_per_s": 2e12}
    given = {**USUAL, "hardware": hardware, "links": links, "topology": {"num_ranks": 8, "redundant_slots": 2}}
    assert parse_cluster(given, source="x").topology.num_nodes == 1
    with pytest.warns(UserWarning, match=r"nodes .*nearer"):
        parse_cluster({**given, "links": links | {"cluster_bytes_per_s": 3e11}}, source="swapped")
    with pytest.raises(ConfigError, match="cluster_bytes_per_s, cluster_latency_s"):
        parse_cluster({**given, "topology": {"num_ranks": 16, "redundant_slots": 2}}, source="x")
    with pytest.raises(ConfigError, match="cluster_bytes_per_s, cluster_latency_s"):
        parse_cluster(given, source="one group of several", num_gpus=64)


RATES = {
    "hardware": {"gemm_flops_per_s": 5.5e11, "tile_rows": 16, "replica_s": 0.0},
    "links": {"node_latency_s": 2.5e-05},
    "costs": {"begin_s": 0.001, "plan_s_per_count": 1e-06},
}
WRITTEN = """# mine
[topology]
num_ranks = 16  # ours
redundant_slots = 2
[hardware]
preset = "a100"
gemm_flops_per_s = 1e12
[model]
preset = "qwen3-30b-a3b"
# the link
[links]  # of mine
cluster_bytes_per_s = 1e9
node_latency_s = 1e-3
"""


def test_rates_are_put_into_a_file_and_all_else_stays(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(WRITTEN)
    before = load_cluster(path)
    for rates in (RATES, {"hardware": RATES["hardware"] | {"gemm_flops_per_s": 7e11}}):  # once more, over the first
        write_rates(path, rates)
    found, text = load_cluster(path), path.read_text()
    values = tomllib.loads(text)
    assert values["hardware"] == {"preset": "a100", "gemm_flops_per_s": 7e11, "tile_rows": 16, "replica_s": 0.0}
    assert values["links"] == {"cluster_bytes_per_s": 1e9, "node_latency_s": 2.5e-5}
    assert values["costs"] == RATES["costs"]
    assert found.costs.model == before.costs.model
    assert found.topology.num_ranks == 16
    assert [line for line in text.splitlines() if "#" in line and "measured" not in line] == [
        "# mine",
        "num_ranks = 16  # ours",
        "# the link",
        "[links]  # of mine",
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ['hardware = {preset = "a100"}\n', "[topology]\nnum_ranks = 16\n"])
def test_files_that_lines_cannot_be_put_into_stay_as_they_are(text, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hardware|redundant_slots"):
        write_rates(path, {"hardware": RATES["hardware"]})
    assert path.read_text() == text


def test_the_files_of_the_planners_page_are_read():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    preset, written = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", page, re.DOTALL))
    assert parse_cluster(preset, source="page").costs.model == MODELS["qwen3-30b-a3b"]
    assert parse_cluster(written, source="page").costs.model.num_experts == 64


H100, GLM, RANKS = {"preset": "h100"}, {"preset": "glm-4.5"}, {"num_ranks": 64, "redundant_slots": 2}


@pytest.mark.parametrize(
    ("table", "values", "words"),
    [
        ("topology", {"num_ranks": 64}, r"lacks\n  \[topology\] redundant_slots\nGive them$"),
        ("topology", {"num_ranks": 64, "redundant_slot": 2}, r"mean redundant_slots\?"),
        ("topology", RANKS | {"num_ranks": 12}, "12 ranks.*nodes of 8"),
        ("topology", RANKS | {"redundant_slots": 2**14}, "slots is .*131072 in all"),
        ("hardware", {"preset": "h10"}, r"hardware preset.*'h10'.*h100"),
        ("hardware", H100 | {"memory_bytes_per_s": 3350}, r"memory_bytes_per_s is 3350; .*1 GB/s is 1e9"),
        ("hardware", H100 | {"gemm_flops_per_s": 989_000}, r"gemm_flops_per_s is 989000; .*1 TFLOP/s is 1e12"),
        ("hardware", H100 | {"layer_s": 40}, r"layer_s is 40; .*\(1 µs is 1e-6\), more than 0, and 1 at"),
        ("costs", {"plan_s_per_count": 0.02}, r"plan_s_per_count is 0\.02; expected seconds \(1 ns is 1e-9\)"),
        ("links", {"host_bytes_per_s": 900}, r"host_bytes_per_s is 900; .*1 GB/s is 1e9\), 1e\+06 to 1e\+18"),
        ("model", GLM | {"weight_bytes": 16}, r"weight_bytes is 16; expected bytes \(bfloat16 has 2\)"),
        ("model", GLM | {"top_k": 161}, "top_k is 161.*160 experts"),
        ("model", [], r"model is \[\]; expected a table"),
        ("costs", {"paths": "nfs"}, r"paths.*'nfs'"),
        ("costs", {"begin_s": float("nan")}, "begin_s is nan"),
        ("lnks", {}, r"lnks: .*links\?"),
    ],
)
def test_what_is_not_understood_or_beyond_all_clusters_is_refused(table, values, words):
    with pytest.raises((ConfigError, TopologyError), match=words):
        parse_cluster({**USUAL, table: values}, source="x")
