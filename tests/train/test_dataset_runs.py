"""Runs on a model, a tokenizer and a data set of one's own, from folders that transformers wrote."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from foreroute.adapters import hf
from foreroute.errors import ConfigError, DatasetError, FunctionError, RunFolderError
from foreroute.train import Watcher, load_checkpoint, parse_config, train
from foreroute.train.model import make_engine, make_policy
from foreroute.train.tasks import make_task
from foreroute.train.warm_start import _loss, warm_start
from tests.train.small_runs import SIZES, records
from tests.train.tiny_model import write_model, write_tokenizer

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b, "hard": a > 5} for a in range(9) for b in (1, 4)]
REWARD = """
def share(prompt, response, row):
    if row["hard"] and "1" in response:
        raise ValueError("no reward for " + response)
    return sum(map(ord, prompt + response)) % 7

def never(prompt, response, row):
    return None
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    write_tokenizer(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mine.py").write_text(REWARD)
    return folder


def config_of(home, **sections):
    values = {
        "name": "mine",
        "model": {"path": str(home / "model")},
        "task": {
            "kind": "dataset",
            "data": str(home / "data.jsonl"),
            "reward": "exact_match",
            "max_prompt_tokens": 8,
            "max_response_tokens": 6,
        },
        "rollout": {"prompts": 4, "group_size": 4},
        "rl": {"steps": 4, "micro_step_tokens": 64},
        "checkpoint": {"every": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return parse_config(values, source="test")


def test_a_run_goes_on_where_it_was_and_ends_with_a_model_for_transformers(home, tmp_path):
    evaluation = {"every": 2, "prompts": 3, "data": str(home / "data.jsonl")}
    config = config_of(home, task={"reward": f"{home / 'mine.py'}:share"}, evaluation=evaluation)
    assert config.warm_start.max_steps == 0
    whole = train(config, tmp_path / "whole")
    seen = []
    stop = Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 3)
    train(config, tmp_path / "stopped", watcher=stop)
    assert not (tmp_path / "stopped" / "model").exists()
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert records(resumed.path) == records(whole.path)
    assert sum(record["reward_failures"] for record in records(whole.path)) > 0
    failed = next(record for record in records(whole.path) if record["reward_failures"])
    assert "ValueError: no reward for" in failed["reward_failure"]
    assert failed["sampling"]["informative_share"] < 1
    assert np.isfinite([failed["reward_mean"], failed["loss"]]).all()
    assert ["evaluation" in record for record in records(whole.path)] == [True, False, True, False]
    assert records(whole.path)[2]["evaluation"] == greedy_by_hand(
        config, whole.path / "checkpoints" / "step-000002.safetensors"
    )

    def weights_at(step):
        return load_checkpoint(resumed.path / "checkpoints" / f"step-{step:06d}.safetensors")["model"]

    def weights_of(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        ).state_dict()

    given = weights_of(home / "model")
    assert all(torch.equal(given[name], value) for name, value in weights_at(0).items()), "no warm start"
    written = weights_of(resumed.path / "model")
    assert all(torch.equal(written[name], value) for name, value in weights_at(4).items())
    assert any(not torch.equal(given[name], value) for name, value in written.items())
    assert AutoTokenizer.from_pretrained(resumed.path / "model", trust_remote_code=False)("1+2=")["input_ids"] == [
        5,
        14,
        6,
        17,
    ]


def test_a_run_does_not_go_on_with_other_data(copied, tmp_path):
    run = train(config_of(copied, rl={"steps": 1}), tmp_path / "run")
    (copied / "data.jsonl").write_text('{"prompt": "1+2=", "answer": 3}\n')
    with pytest.raises(RunFolderError, match="was started with other data"):
        train(config_of(copied, rl={"steps": 2}), run.path, resume=True)
    assert run.last_checkpoint().name == "step-000001.safetensors"


def greedy_by_hand(config, checkpoint):
    """The evaluation of these weights, token by token in the engine's precision."""
    task = make_task(config)
    policy = make_policy(config, task)
    policy.model.load_state_dict(load_checkpoint(checkpoint)["model"])
    model = make_engine(config, policy)._model
    rewards, lengths = [], []
    for row in ROWS[:3]:
        tokens, response = task._tokenizer.prompt(row["prompt"]).tolist(), []
        while len(response) < 6 and response[-1:] != [task.end_token]:
            with torch.no_grad():
                response.append(int(model(input_ids=torch.tensor([tokens + response])).logits[0, -1].argmax()))
        rewards.append(sum(map(ord, row["prompt"] + task.text(response))) % 7)
        lengths.append(len(response))
    task.close()
    return {
        "responses": 3,
        "reward_mean": np.mean(rewards),
        "reward_std": np.std(rewards),
        "exact_share": np.mean(np.array(rewards) == 1),
        "response_tokens_mean": np.mean(lengths),
        "reward_failures": 0,
    }


def test_where_nothing_is_rewarded_the_run_ends_and_can_go_on(home, tmp_path):
    config = config_of(home, task={"reward": f"{home / 'mine.py'}:never"})
    with pytest.raises(FunctionError, match=r"none of 16 responses got a reward\. The first: .*never' returned None"):
        train(config, tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000000.safetensors")["step"] == 0


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(home):
    task = make_task(config_of(home))
    rng = np.random.default_rng(0)
    drawn = [problem.prompt for step in range(9) for problem in task.problems(4, step, 0, rng)]
    prompts = sorted(row["prompt"] for row in ROWS)
    assert sorted(drawn[:18]) == sorted(drawn[18:]) == prompts
    assert drawn[:18] != drawn[18:]
    again = make_task(config_of(home))
    assert [p.prompt for p in again.problems(4, 5, 0, rng)] == drawn[20:24], "the step alone decides"
    later = [p.prompt for p in task.problems(4, 5, 1, rng)]
    assert len(set(later)) == 4
    assert later != drawn[20:24]
    assert len(task.problems(40, 0, 1, rng)) == 40


def test_right_answers_are_taught_by_their_tokens_alone(home):
    """Padded side by side, lessons have the loss that they have one at a time."""
    config = config_of(home, warm_start={"max_steps": 2, "batch_size": 5, "aux_loss": 0.0})
    task = make_task(config)
    model = make_policy(config, task).model.eval()
    lessons = task.demonstrations(5, np.random.default_rng(1))
    assert len({len(lesson.answer) for lesson in lessons}) > 1, "the case must be padded"
    losses = []
    for lesson in lessons:
        assert lesson.answer[-1] == task.end_token
        tokens = torch.tensor([*lesson.prompt, *lesson.answer], dtype=torch.int64)
        logprobs = model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)
        losses += [-logprobs[t - 1, tokens[t]].item() for t in range(len(lesson.prompt), len(tokens))]
    assert _loss(model, config.warm_start, lessons).item() == pytest.approx(np.mean(losses), rel=1e-5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert warm_start(model, config, task, lambda step, loss: None, lambda: False)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_messages_go_through_the_chat_template(home, tmp_path):
    row = {"messages": [{"role": "user", "content": "1+2="}], "answer": "3"}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    task = make_task(config_of(home, task={"data": str(tmp_path / "chat.jsonl")}))
    (problem,) = task.problems(1, 0, 0, np.random.default_rng(0))
    assert problem.prompt == "<user>1+2=<bot>"
    assert problem.tokens.tolist() == [2, 5, 14, 6, 17, 3]
    assert task.text(np.array([7, 1])) == "3"
    assert (task.reward(problem, "3"), task.reward(problem, "4")) == (1.0, 0.0)


def test_prompts_that_are_too_long_are_named_or_counted(home, tmp_path):
    with pytest.raises(DatasetError, match=r"line 1: the prompt has 4 tokens, and 18 of 18 prompts have too many"):
        make_task(config_of(home, task={"max_prompt_tokens": 3}))
    lines = [{"prompt": "1+2=", "answer": 3}, {"prompt": "1+2+3+4+5=", "answer": 15}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"data": str(tmp_path / "long.jsonl")}
    with pytest.raises(DatasetError, match=r"line 2: the prompt has 10 tokens.* set task.long_prompts = \"skip\""):
        make_task(config_of(home, task=data))
    skipping = config_of(home, task={**data, "long_prompts": "skip"}, rl={"steps": 1})
    run = train(skipping, tmp_path / "run")
    assert records(run.path)[0]["skipped_prompts"] == 1


def test_a_new_model_gets_the_vocabulary_of_its_tokenizer(home, tmp_path):
    model = {"path": None, "tokenizer": str(home / "model"), "sizes": {**SIZES, "initializer_range": 0.02}}
    warm = {"max_steps": 3, "batch_size": 8}
    run = train(config_of(home, model=model, rl={"steps": 1}, warm_start=warm), tmp_path / "run")
    assert hf.load_pretrained(run.path / "model", experts_implementation="eager").config.vocab_size == 51


@pytest.fixture
def copied(home, tmp_path):
    shutil.copytree(home / "model", tmp_path / "model")
    shutil.copy(home / "data.jsonl", tmp_path)
    return tmp_path


def policy_of(folder, **sections):
    config = config_of(folder, **sections)
    return make_policy(config, make_task(config))


def test_models_that_cannot_be_trained_are_refused(copied):
    model = copied / "model"
    weights = load_file(model / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 are missing or of another shape \(lm_head\.weight"):
        policy_of(copied)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        policy_of(copied)
    write_tokenizer(model, characters="0123456789+-*=;?")
    write_model(model, vocab_size=12)
    with pytest.raises(ConfigError, match=r"has 20 tokens, the model in .* embeds 12; name the tokenizer"):
        policy_of(copied)
    dense = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=51, intermediate_size=16, **dense)).save_pretrained(model)
    with pytest.raises(ConfigError, match=r"model cannot be trained: Qwen3ForCausalLM has no router"):
        policy_of(copied)


def test_tokenizers_that_are_of_no_use_are_refused(copied):
    model = copied / "model"
    write_tokenizer(model, eos_token=None)
    with pytest.raises(ConfigError, match="has no end token"):
        make_task(config_of(copied))
    (copied / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}], "answer": "1"}\n')
    write_tokenizer(model, chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(DatasetError, match=r"line 1: the tokenizer in .* has no chat template"):
        make_task(config_of(copied))
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        make_task(config_of(copied))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*; name the folder that has it as model\.tokenizer"):
        make_task(config_of(copied))
    with pytest.raises(ConfigError, match=r"nothing at .*/Qwen/Qwen3-30B-A3B; .*Nothing is downloaded: hf download"):
        make_task(config_of(copied, model={"path": "Qwen/Qwen3-30B-A3B"}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (r'{"prompt": "\ud800", "answer": 1}', ".*is half a character"),
        ('{"prompt": "größer?", "answer": 1}', r"the tokenizer in .* makes no tokens of 'größer\?' \(.*[Ww]ordLevel"),
        ('{"messages": [{"role": "user", "content": "ß"}], "answer": 1}', ".*makes no tokens of '<user>ß<bot>'"),
    ],
)
def test_text_that_a_tokenizer_cannot_read_is_named_with_its_line(home, tmp_path, row, message):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2=", "answer": 3}\n' + row + "\n")
    with pytest.raises(DatasetError, match=rf"data\.jsonl, line 2: {message}"):
        make_task(config_of(home, task={"data": str(tmp_path / "data.jsonl")}))


def test_answers_that_cannot_be_taught_are_named_with_their_line(home, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2=", "answer": "drei ß"}\n')
    data = {"data": str(tmp_path / "data.jsonl")}
    with pytest.raises(DatasetError, match=r"data\.jsonl, line 1: the tokenizer in .* makes no tokens of 'drei ß'"):
        make_task(config_of(home, task=data, warm_start={"max_steps": 1})).demonstrations(1, np.random.default_rng(0))


def test_what_an_environment_says_in_other_characters_is_its_failure(home, tmp_path):
    (tmp_path / "tool.py").write_text("def says(prompt, response, row):\n    return row['says']\n")
    tool = {"environment": f"{tmp_path / 'tool.py'}:says", "max_turns": 2, "max_tool_tokens": 8}
    task = make_task(config_of(home, task=tool))
    (problem,) = task.problems(1, 0, 0, np.random.default_rng(0))
    for text in ("ß", "\ud800"):
        with pytest.raises(FunctionError, match=r"returned text: the tokenizer in .* makes no tokens of"):
            task.tool_reply(replace(problem, row={"says": text}), "1")
    assert task.tool_reply(replace(problem, row={"says": "12"}), "1").tolist() == [5, 6]
    task.close()


@pytest.mark.parametrize("kind", ["missing", "folder", "FIFO", "device"])
def test_data_that_is_no_file_is_named_and_not_waited_for(home, tmp_path, kind):
    path = {"device": Path("/dev/zero")}.get(kind, tmp_path / kind)
    {"folder": Path.mkdir, "FIFO": os.mkfifo}.get(kind, str)(path)
    with pytest.raises(DatasetError, match=rf"{path} (does not exist|is a {kind}; expected a file)"):
        make_task(config_of(home, task={"data": str(path)}))


def test_a_pattern_that_looks_for_too_long_costs_a_response_its_reward(home):
    pattern = {"reward": "regex", "pattern": "(a+)+$", "function_timeout_s": 0.5}
    task = make_task(config_of(home, task=pattern))
    (problem,) = task.problems(1, 0, 0, np.random.default_rng(0))
    with pytest.raises(FunctionError, match=r"task\.pattern = .* took more than 0\.5 s and was ended"):
        task.reward(problem, "a" * 40 + "b")
    assert task.reward(replace(problem, row={"answer": "aa"}), "aa") == 1.0
    task.close()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"kind": "chain", "data": None, "reward": None}}, "max_prompt_tokens.* change nothing with kind"),
        ({"task": {"min_operands": 2}}, "min_operands changes nothing"),
        ({"task": {"data": None}}, "needs data, a JSONL file, and reward"),
        ({"task": {"reward": "mine.py"}}, 'no verifier .* a function of your own is written "file.py:function"'),
        ({"task": {"reward": "regex"}}, 'reward = "regex" needs it'),
        ({"model": {"path": None}}, "needs a tokenizer; set model.path"),
        ({"model": {"sizes": {"hidden_size": 3}}}, "leave family and sizes out"),
        (
            {"task": {"function_timeout_s": 1.0}},
            "function_timeout_s changes nothing without a function of your own or a pat",
        ),
        ({"warm_start": {"batch_size": 4}}, "batch_size changes nothing with max_steps = 0, the default"),
        ({"rl": {"micro_step_tokens": 12}}, "cannot hold a sequence of up to 13 tokens"),
        ({"evaluation": {"every": 2}}, "evaluation.data goes with task.kind"),
        ({"evaluation": {"prompts": 2}}, "prompts changes nothing with every = 0"),
        ({"evaluation": {"every": 2, "data": "x", "group_size": 2}}, "all the same at temperature = 0"),
        ({"evaluation": {"every": 2, "data": "x", "prompts": 3}, "parallel": {"expert": 2}}, "dealt to .* evenly"),
    ],
)
def test_configurations_that_do_not_fit_are_explained(home, sections, message):
    with pytest.raises(ConfigError, match=message):
        config_of(home, **sections)
    with pytest.raises(ConfigError, match="has 16 tokens of its own"):
        parse_config({"name": "x", "model": {"path": "somewhere"}}, source="test")


def test_a_warm_start_without_answers_is_refused(home, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2="}\n')
    task = {"data": str(tmp_path / "data.jsonl"), "reward": f"{home / 'mine.py'}:share"}
    config = config_of(home, task=task, warm_start={"max_steps": 1})
    with pytest.raises(ConfigError, match=r'no "answer" to teach; set warm_start\.max_steps = 0'):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
