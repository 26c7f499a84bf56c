"""Numbers that would run for ever, or end a run without a word, are refused when they are read."""

import pytest

from foreroute.adapters import hf
from foreroute.errors import ConfigError
from foreroute.train import parse_config
from tests.train.small_runs import SIZES

HUGE = 2**62


@pytest.mark.parametrize(
    "key",
    [
        *("threads", "task.min_operands", "task.max_operands", "task.max_prompt_tokens", "task.max_response_tokens"),
        *("warm_start.max_steps", "warm_start.batch_size", "rollout.prompts", "rollout.group_size", "rollout.top_k"),
        *("rl.steps", "rl.mini_steps", "rl.micro_step_tokens", "rl.warmup_steps", "measure.compare_every"),
        *("measure.save_trace_every", "checkpoint.every", "checkpoint.keep", "parallel.expert"),
        *("parallel.ranks_per_node", "parallel.redundant_slots", "parallel.prefetch", "rollout.server.max_model_len"),
    ],
)
def test_every_count_is_bounded(key):
    values: dict = {"name": "x"}
    *tables, name = key.split(".")
    inner = values
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[name] = HUGE
    with pytest.raises(ConfigError, match=rf"{key}: Input should be less than or equal to \d+ \(got {HUGE}\)"):
        parse_config(values, source="here")


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
