"""What a configuration may say: keys that do not fit together, numbers that would run for ever, topology files."""

import tomllib
from dataclasses import replace

import pytest

from foreroute.adapters import hf
from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions, Topology
from foreroute.train import parse_config
from foreroute.train.experts import NO_LINKS, read_planning
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task
from tests.tiers import grid
from tests.train.small_runs import SIZES, small_config
from tests.train.test_expert_parallel import TOPOLOGY

HUGE = 2**62


@pytest.mark.parametrize(
    "key",
    [
        *("threads", "task.min_operands", "task.max_operands", "task.max_prompt_tokens", "task.max_response_tokens"),
        *("warm_start.max_steps", "warm_start.batch_size", "rollout.prompts", "rollout.group_size", "rollout.top_k"),
        *("rl.steps", "rl.mini_steps", "rl.micro_step_tokens", "rl.warmup_steps", "measure.compare_every"),
        *("measure.save_trace_every", "checkpoint.every", "checkpoint.keep", "parallel.expert"),
        *("parallel.ranks_per_node", "parallel.redundant_slots", "parallel.prefetch", "rollout.server.max_model_len"),
        "parallel.memory_budget",
    ],
)
def test_every_count_is_bounded(key):
    values: dict = {"name": "x"}
    *tables, name = key.split(".")
    inner = values
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[name] = HUGE
    with pytest.raises(ConfigError, match=rf"{key}: .*{HUGE}"):
        parse_config(values, source="here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser = {}", r"optimiser: unknown key; known are name, seed"),
        ('rl = {steps = "ten"}', r"rl\.steps: .*integer.*'ten'"),
        ('rl = {routing = "R4"}', r"rl\.routing: .*'none', 'R2' or 'R3'"),
        ("rollout = {group_size = 1}", r"rollout\.group_size"),
        ("rl = {mini_steps = 25}", "exceeds the 24 sequences"),
        ("task = {min_operands = 9}", "min_operands = 9 exceeds max_operands = 4"),
        ("rl = {clip_low = 1.5}", r"rl\.clip_low"),
        ("rl = {learning_rate = inf}", r"rl\.learning_rate"),
        ("rl = {micro_step_tokens = 8}", "cannot hold a sequence of up to 12 tokens"),
        ("model.sizes = {vocab_size = 7}", "vocab_size comes from the task"),
        ("model.sizes = {hidden_sise = 3}", "hidden_sise"),
        ('model = {family = "qwen9"}', "qwen9"),
        *[
            (f'name = "{name}"', "name: String should")
            for name in ("../up", ".", "..", "a" * 5000, "\u00fc" * 120, "n\\n")
        ],
        *[
            (f'device = "{name}"', "device: Input should be 'auto', 'cpu' or 'cuda'")
            for name in ("gpu", "cuda:1", "CUDA")
        ],
        ("rollout = {prompts = 100000, group_size = 100}", "prompts times group_size is 10000000; expected 999999"),
        ("rl = {clip_high = 1.7e308}", r"rl\.clip_high"),
        ('rl = {method = "cispo"}', "'dapo' or 'gspo'"),
        ("rl.correction = {high = 3.0}", "high changes nothing without a kind"),
        ('rl.correction = {kind = "tis", high = 0.0}', r"rl\.correction\.high"),
        ("rl = {learning_rate = 1e31}", r"rl\.learning_rate"),
        *[(f"rollout = {{temperature = {value}}}", r"rollout\.temperature") for value in (1e-300, 1e30)],
        ("rollout.server = {timeout_s = 1e30}", r"rollout\.server\.timeout_s: .* 604800"),
        ("parallel = {expert = 2, timeout_s = 1e30}", r"parallel\.timeout_s: .* 604800"),
        (
            'warm_start = {checkpoint = "x.pt"}',
            "max_steps, batch_size, stop_at_loss change nothing beside a checkpoint",
        ),
        ("warm_start = {max_steps = 0}", "batch_size, stop_at_loss change nothing with max_steps = 0"),
        ('parallel = {prefetch = 2, plan = {slots = "shared"}}', "prefetch, plan change nothing with expert = 1"),
        *[
            (f"rollout = {{prompts = 8}}\nparallel = {{expert = 4, {parallel}}}", message)
            for parallel, message in (
                ('plan = {packing = "routes"}}\nrl = {routing = "none"', r'packing = "routes" goes by replayed routes'),
                ('memory_budget = 1}\nrl = {routing = "none"', "memory_budget goes by replayed routes"),
                ("plan = {pay_off = true}", r"plan\.pay_off = true goes by prices; name a topology file"),
                ("plan = {traffic = true}", r"plan\.traffic = true goes by prices; name a topology file"),
                ('topology = "a.toml", redundant_slots = 1', "redundant_slots changes nothing beside topology"),
                ('topology = "a.toml", ranks_per_node = 2', "ranks_per_node changes nothing beside topology"),
                ('plan = {home_moves = "some"}', r"parallel\.plan: .*home_moves is 'some'"),
                ("plan = {tolerence = 0}", "tolerence: unknown key; did you mean tolerance"),
                ("plan = 3", "expected a table of the planner's options"),
            )
        ],
        ("rollout.server = {timeout_s = 5.0}", 'server changes nothing with engine = "embedded"'),
        ('rollout = {engine = "vllm", precision = "float32"}', r"needs server\.python"),
        ('rollout = {engine = "sglang"}', r"needs server\.url"),
        ('rollout = {engine = "vllm", server = {url = "http://a"}}', "url and weights_folder go together"),
        *[
            (f'rollout = {{engine = "{engine}", {more}}}', message)
            for engine, more, message in (
                (
                    "sglang",
                    'server = {url = "a", weights_folder = "w", python = "x"}',
                    "python changes nothing beside url",
                ),
                (
                    "vllm",
                    'precision = "float32", server = {url = "http://a", weights_folder = "w"}',
                    r"precision changes nothing with server\.url",
                ),
                ("vllm", 'precision = "fp8", server = {python = "x"}', "vLLM takes float32 or bfloat16"),
            )
        ],
        ('task = {data = "x.jsonl"}', "data, a JSONL file, and reward go together"),
        ("task = {max_prompt_tokens = 8}", "max_prompt_tokens changes nothing without data"),
        ('model = {tokenizer = "folder"}', r"no use for the tokenizer in folder; set task\.data"),
    ],
)
def test_wrong_configurations_are_explained(text, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(config := small_config(**tomllib.loads(text)), make_task(config))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_hidden_layers": HUGE}, "num_hidden_layers is .*; expected 1024 at most"),
        ({"num_experts": HUGE}, "num_experts is .*; expected 65536 at most"),
        ({"hidden_size": HUGE}, "cannot be made with these sizes"),
        ({"vocab_size": 2**40}, r"would take [\d,]+ GB"),
    ],
)
def test_sizes_of_a_new_model_are_bounded(sizes, message):
    with pytest.raises(ConfigError, match=message):
        hf.build_model("qwen3_moe", seed=0, **{**SIZES, "vocab_size": 16, **sizes})


def planning_of(**parallel):
    alone = small_config()
    parallel = small_config(parallel=parallel, rollout={"prompts": 8}).parallel
    return read_planning(parallel, make_policy(alone, make_task(alone)).spec)


def test_without_a_file_nothing_is_priced():
    found = planning_of(expert=4, ranks_per_node=2, redundant_slots=3, plan={"home_moves": "all", "slots": "shared"})
    assert found == (Topology(4, 2, 3, NO_LINKS), PlanOptions(home_moves=None, slots="shared"), None)


def test_a_file_says_ranks_slots_links_and_prices(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(TOPOLOGY.format(links="", weight_bytes=2.0))
    cluster = load_cluster(path)
    found = planning_of(expert=2, topology=str(path), plan={"pay_off": False, "home_moves": 6})
    assert found == (cluster.topology, PlanOptions(home_moves=6, pay_off=False), cluster.costs)
    executed = planning_of(expert=2, topology=str(path), paths="direct", prefetch=3)
    assert executed.costs == replace(cluster.costs, paths="direct", prefetch=3), "prices are of what the run executes"


@grid(
    ("before", "after", "message"),
    [
        ("num_ranks = 2", "num_ranks = 4", r"cluster.toml says num_ranks = 4, the run has 2; describe the ranks"),
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
        planning_of(expert=2, topology=str(path))
    with pytest.raises(ConfigError):
        planning_of(expert=2, topology=str(tmp_path / "missing.toml"))
