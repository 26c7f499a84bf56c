"""Runs on a model, a tokenizer, prompts and a reward of one's own, from folders that transformers wrote."""

import json
import shutil
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel

from foreroute.errors import ConfigError, DatasetError, FunctionError, RunFolderError
from foreroute.train import parse_config, train
from foreroute.train.folder import load_checkpoint
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task
from foreroute.train.run import Watcher
from tests.train.small_runs import SIZES, merged, records, small_config
from tests.train.tiny_model import write_model

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b, "hard": a > 5} for a in range(9) for b in (1, 4)]
REWARD = """
calls = []

def by_characters(prompts, responses, rows):
    calls.append((prompts, responses, rows))
    return [sum(map(ord, prompt + response)) % 7 for prompt, response in zip(prompts, responses)]

def right(prompts, responses, rows):
    return [float(response == str(row["answer"])) for response, row in zip(responses, rows)]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mine.py").write_text(REWARD)
    return folder


def config_of(home, reward="by_characters", **sections):
    values = {
        "name": "mine",
        "model": {"path": str(home / "model")},
        "task": {
            "data": str(home / "data.jsonl"),
            "reward": f"{home / 'mine.py'}:{reward}",
            "max_prompt_tokens": 8,
            "max_response_tokens": 6,
        },
        "rollout": {"prompts": 4, "group_size": 4},
        "rl": {"steps": 4, "micro_step_tokens": 64},
        "checkpoint": {"every": 2, "keep": 9},
    }
    return parse_config(merged(values, sections), source="test")


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_and_ends_with_a_model_for_transformers(home, tmp_path):
    config, seen = config_of(home, rl={"steps": 2}), []
    stop = Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 1)
    train(config, tmp_path / "stopped", watcher=stop)
    assert not (tmp_path / "stopped" / "model").exists()
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert any(record["grad_norm"] > 0 for record in records(resumed.path))

    def weights_at(step):
        return load_checkpoint(resumed.path / "checkpoints" / f"step-{step:06d}.safetensors")["model"]

    def weights_of(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        ).state_dict()

    given = weights_of(home / "model")
    assert all(torch.equal(given[name], value) for name, value in weights_at(0).items()), "no warm start"
    written = weights_of(resumed.path / "model")
    assert all(torch.equal(written[name], value) for name, value in weights_at(2).items())
    assert any(not torch.equal(given[name], value) for name, value in written.items())
    tokenizer = AutoTokenizer.from_pretrained(resumed.path / "model", trust_remote_code=False)
    assert tokenizer("1+2=")["input_ids"] == [5, 14, 6, 17]


def test_a_run_does_not_go_on_with_other_data(home, tmp_path):
    copied = shutil.copytree(home, tmp_path / "home")
    run = train(config_of(copied, rl={"steps": 1}), tmp_path / "run")
    (copied / "data.jsonl").write_text('{"prompt": "1+2=", "answer": 3}\n')
    with pytest.raises(RunFolderError):
        train(config_of(copied, rl={"steps": 2}), run.path, resume=True)
    assert run.last_checkpoint().name == "step-000001.safetensors"


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(home):
    task, rng = make_task(config_of(home)), np.random.default_rng(0)
    drawn = [problem.prompt for step in range(9) for problem in task.problems(4, step, rng)]
    prompts = sorted(row["prompt"] for row in ROWS)
    assert sorted(drawn[:18]) == sorted(drawn[18:]) == prompts
    assert drawn[:18] != drawn[18:]
    again = make_task(config_of(home))
    assert [p.prompt for p in again.problems(4, 5, rng)] == drawn[20:24], "the step alone decides"


def test_messages_go_through_the_chat_template(home, tmp_path):
    row = {"prompt": None, "messages": [{"role": "user", "content": "1+2="}], "answer": "3"}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    task = make_task(config_of(home, reward="right", task={"data": str(tmp_path / "chat.jsonl")}))
    (problem,) = task.problems(1, 0, np.random.default_rng(0))
    assert problem.prompt == "<user>1+2=<bot>"
    assert problem.tokens.tolist() == [2, 5, 14, 6, 17, 3]
    assert task.rewards([problem] * 2, [np.array([7, 1]), np.array([8, 1])]).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("rows[0]['no such row']", r"mine\.py:mine'.*KeyError: 'no"),
        ("[1.0]", r"1 rewards for 2.*one each"),
        ("[float('nan')] * len(responses)", r"returned nan.*finite"),
        ("1.0", r"TypeError: 'float'"),
    ],
)
def test_a_reward_that_does_not_say_is_named(home, tmp_path, returned, message):
    (tmp_path / "mine.py").write_text(f"def mine(prompts, responses, rows):\n    return {returned}\n")
    task = make_task(config_of(home, task={"reward": f"{tmp_path / 'mine.py'}:mine"}))
    with pytest.raises(FunctionError, match=message):
        task.rewards(task.problems(2, 0, np.random.default_rng(0)), [np.array([4, 1])] * 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", r"not JSON"),
        ("[1]", r"\[1\].*no object"),
        ('{"answer": 1}', r"expected one.*messages"),
        ('{"prompt": "1+2=", "messages": []}', "messages: .*1"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"messages.0.content: .*string.*3"),
        ('{"prompt": "größer?"}', r"no tokens.*'größer\?' \(.*[Ww]ordLevel"),
    ],
)
def test_a_wrong_line_is_named(home, tmp_path, row, message):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2="}\n' + row + "\n")
    with pytest.raises(DatasetError, match=rf"data\.jsonl, line 2:? (.|\n)*{message}"):
        make_task(config_of(home, task={"data": str(tmp_path / "data.jsonl")}))


@pytest.mark.slow
def test_models_that_cannot_be_trained_are_refused(home, tmp_path):
    folder = shutil.copytree(home, tmp_path / "home")
    dense = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    write_model(folder / "model", vocab_size=12)
    for named in ("embeds 12", r"cannot be.*trained"):
        with pytest.raises(ConfigError, match=named):
            make_policy(config_of(folder), make_task(config_of(folder)))
        Qwen3ForCausalLM(Qwen3Config(vocab_size=51, intermediate_size=16, **dense)).save_pretrained(folder / "model")
    checkpointed = {"model": {"gradient_checkpointing": True}}
    with (
        patch.object(Qwen3MoePreTrainedModel, "supports_gradient_checkpointing", False),
        pytest.raises(ConfigError, match=r"^qwen3_moe .*checkpointing"),
    ):
        make_policy(small_config(**checkpointed), make_task(small_config()))
