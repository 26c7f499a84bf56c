"""Responses of several turns: what was sampled is trained on, what tools said is not. Against a loss by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.capture import Generation
from foreroute.doctor.examine import _response_logprobs
from foreroute.errors import ConfigError, FunctionError
from foreroute.train import parse_config
from foreroute.train.passes import PolicyExecution, inputs, make_schedule, response_logprobs
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import roll_out
from foreroute.train.update import update
from tests.train.expert_parallel_steps import parallel_steps, steps_alone
from tests.train.small_runs import trainer_of
from tests.train.test_expert_parallel import same_numbers
from tests.train.tiny_model import SPECIAL, write_model, write_tokenizer

CHARACTERS = "0123456789+="
TEMPERATURE = 0.9
FUNCTIONS = """
def tool(prompt, response, row):
    if len(response) % 5 == 4:
        return None
    return "=" + str(len(prompt) % 10) + "+"

def broken(prompt, response, row):
    return "=" * 30 if "1" in response else 1 / 0 if "2" in response else None

def reward(prompt, response, row):
    return sum(map(ord, prompt + response)) % 5
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model that ends a turn with one token of sixteen."""
    folder = tmp_path_factory.mktemp("turns")
    write_model(folder / "model", vocab_size=len(SPECIAL) + len(CHARACTERS))
    write_tokenizer(folder / "model", characters=CHARACTERS)
    rows = [{"prompt": f"{a}+{b}="[: 3 + a % 2]} for a in range(8) for b in (1, 4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(FUNCTIONS)
    return folder


def config_of(home, *, environment="tool", **sections):
    values = {
        "name": "turns",
        "model": {"path": str(home / "model"), "experts_implementation": "eager"},
        "task": {
            "kind": "dataset",
            "data": str(home / "data.jsonl"),
            "reward": f"{home / 'mine.py'}:reward",
            "environment": f"{home / 'mine.py'}:{environment}",
            "max_turns": 3,
            "max_tool_tokens": 4,
            "max_prompt_tokens": 8,
            "max_response_tokens": 14,
        },
        "rollout": {"prompts": 8, "group_size": 4, "temperature": TEMPERATURE},
        "rl": {"micro_step_tokens": 96, "warmup_steps": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return parse_config(values, source="test")


class Listening:
    """An engine, and all that it was asked and answered."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    def generate(self, prompts, sampling, generator):
        answer = self.engine.generate(prompts, sampling, generator)
        self.calls.append(answer)
        return answer


@pytest.fixture(scope="module")
def rolled_out(home):
    """A trainer in float64, its rollout, and what the engine did for it."""
    trainer = trainer_of(config_of(home))
    trainer.policy.model.double()
    trainer.engine.load_weights(trainer.policy.model.state_dict(), 0)
    engine = Listening(trainer.engine)
    experience = roll_out(engine, trainer.task, trainer.config, 0, Ranks())
    yield trainer, experience, engine.calls
    trainer.task.close()


def masks_by_the_engine(generation, calls):
    """For each sequence, which of its tokens the engine brought, and their log-probs."""
    masks = []
    for s in range(len(generation)):
        tokens, known = generation.trace.tokens(s).tolist(), {}
        for call in calls:
            ends = np.cumsum(call.response_lengths)
            for c in range(len(call)):
                given = call.trace.tokens(c).tolist()
                if tokens[: len(given)] == given:
                    start = int(call.prompt_lengths[c])
                    logprobs = call.logprobs_R[ends[c] - len(given) + start : ends[c]]
                    known |= dict(zip(range(start, len(given)), logprobs, strict=True))
        masks.append(known)
    return masks


def test_what_was_sampled_is_what_the_engine_brought(rolled_out):
    _, experience, calls = rolled_out
    generation = experience.generation
    assert len(calls) == 3
    known = masks_by_the_engine(generation, calls)
    turns = []
    for s, of_tokens in enumerate(known):
        start, end = generation.trace.offsets[s : s + 2]
        assert np.flatnonzero(generation.sampled_N[start:end]).tolist() == sorted(of_tokens)
        turns.append(1 + int((np.diff(sorted(of_tokens)) > 1).sum()))
        before, last = generation.last_turn(s)
        assert [*before, *last] == generation.trace.tokens(s)[generation.prompt_lengths[s] :].tolist()
        assert (turns[-1] > 1) == (len(before) > 0)
    assert {1, 2, 3} == set(turns)
    assert generation.logprobs_R.tolist() == [of_tokens[t] for of_tokens in known for t in sorted(of_tokens)]
    assert generation.response_lengths.tolist() == [len(of_tokens) for of_tokens in known]
    last_rows = generation.trace.offsets[1:] - 1
    assert np.flatnonzero(~generation.trace.valid_N).tolist() == last_rows.tolist(), "what tools said is routed"
    first = calls[0].trace
    for s in range(len(generation)):
        rows = slice(int(first.offsets[s]), int(first.offsets[s + 1]) - 1)
        kept = slice(int(generation.trace.offsets[s]), int(generation.trace.offsets[s]) + rows.stop - rows.start)
        assert np.array_equal(generation.trace.expert_ids_NLK[kept], first.expert_ids_NLK[rows])
    assert experience.max_response_tokens == 42


def test_rewards_see_the_last_turn_and_all_before_it(rolled_out):
    _, experience, calls = rolled_out
    generation, names = experience.generation, [*SPECIAL, *CHARACTERS]
    for s, known in enumerate(masks_by_the_engine(generation, calls)):
        tokens, sampled = generation.trace.tokens(s), sorted(known)
        start = max(t for t in sampled if t - 1 not in known)
        before = "".join(names[token] for token in tokens[:start])
        last = "".join(names[token] for token in tokens[start:] if token >= len(SPECIAL))
        assert experience.rewards_S[s] == sum(map(ord, before + last)) % 5


def loss_by_hand(trainer, experience, masks, old):
    """Clipped ratios of the sampled tokens, one sequence at a time; with gradients."""
    generation, total, count = experience.generation, 0.0, 0
    for s in np.flatnonzero(experience.informative_S):
        tokens = torch.from_numpy(generation.trace.tokens(s).astype(np.int64))
        with trainer.policy.replay(inputs(generation.select([s]).trace), weight_version=0):
            logits = trainer.policy.model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        advantage = float(np.float32(experience.advantages_S[s]))
        for t in masks[s]:
            ratio = (logprobs[t - 1, tokens[t]] - old[s][t]).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            count += 1
    return total / count


def updated(trainer, experience, old_R):
    """Loss and gradients of the trainer's update, without a step."""
    gradients, model = {}, trainer.policy.model
    execution = PolicyExecution(trainer.policy)

    def kept(max_norm):
        gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return 1.0

    execution.finish_gradients = kept
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    mini_steps = make_schedule(experience, trainer.config.rl, Ranks(), seed=(0, 0)).update
    result = update(
        trainer.policy,
        execution,
        idle,
        experience,
        mini_steps,
        old_R,
        experience.generation.trace,
        trainer.config.rl,
        weight_version=0,
        temperature=TEMPERATURE,
    )
    return result.loss, gradients


def test_log_probs_loss_and_gradients_are_those_of_a_masked_loss(rolled_out):
    trainer, experience, calls = rolled_out
    model, generation = trainer.policy.model, experience.generation
    masks = [sorted(known) for known in masks_by_the_engine(generation, calls)]
    schedule = make_schedule(experience, trainer.config.rl, Ranks(), seed=(0, 0))
    recomputed = trainer._recompute(experience, schedule, "replayed").logprobs_R
    old_R = recomputed + np.random.default_rng(0).normal(0, 0.2, len(recomputed))
    ends = np.cumsum([len(mask) for mask in masks])
    old = [dict(zip(mask, old_R[end - len(mask) : end], strict=True)) for mask, end in zip(masks, ends, strict=True)]
    by_hand = loss_by_hand(trainer, experience, masks, old)
    model.zero_grad()
    by_hand.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss, gradients = updated(trainer, experience, old_R)
    assert loss == pytest.approx(by_hand.item(), rel=1e-9)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-7, atol=1e-12)
    for s, mask in enumerate(masks):
        tokens = torch.from_numpy(generation.trace.tokens(s).astype(np.int64))
        with torch.no_grad(), trainer.policy.replay(inputs(generation.select([s]).trace), weight_version=0):
            logprobs = (model(input_ids=tokens[None, :-1]).logits[0] / TEMPERATURE).log_softmax(-1)
        truth = [logprobs[t - 1, tokens[t]].item() for t in mask]
        np.testing.assert_allclose(recomputed[ends[s] - len(mask) : ends[s]], truth, rtol=1e-9)
    # a control: without the mask, what tools said is learned too
    blurred, old_blurred_R = without_mask(generation, old_R)
    other_loss, other = updated(trainer, replace(experience, generation=blurred), old_blurred_R)
    assert abs(other_loss - loss) > 1e-3 * abs(loss)
    largest = max((other[name] - expected[name]).abs().max() / expected[name].abs().max() for name in expected)
    assert largest > 1e-2


def without_mask(generation, old_R):
    """As if all behind the prompts had been sampled, with probability 1 where it was not."""
    positions = np.concatenate([np.arange(n) for n in generation.trace.lengths])
    response_N = positions >= np.repeat(generation.prompt_lengths, generation.trace.lengths)
    engine_N, old_N = np.zeros(len(response_N), np.float32), np.zeros(len(response_N))
    engine_N[generation.sampled_N], old_N[generation.sampled_N] = generation.logprobs_R, old_R
    return Generation(generation.trace, generation.prompt_lengths, engine_N[response_N]), old_N[response_N]


@pytest.mark.parametrize("routing", ["R2", "R3", "R3+weights"])
def test_every_routing_trains_on_several_turns(home, routing):
    trainer = trainer_of(config_of(home, rl={"routing": routing}))
    experience, record = trainer.run_step()
    trainer.task.close()
    generation = experience.generation
    sampled = int(generation.sampled_N.sum())
    assert sampled < (generation.trace.lengths - generation.prompt_lengths).sum()
    for side in record["mismatch"].values():
        assert side["response_tokens"] == sampled
        assert side["routed_rows"] == generation.trace.num_rows - len(generation)
    assert record["mismatch"]["replayed"]["differing_share"] == 0
    assert record["grad_norm"] > 0
    assert record["response_tokens_mean"] == pytest.approx(sampled / len(generation))


def test_two_ranks_learn_what_one_process_learns(home, workers):
    config = config_of(home, parallel={"expert": 2, "tolerance": 0.0, "timeout_s": 30.0})
    steps, *_ = workers(2).run(parallel_steps, config, 1)
    assert any(len(g.last_turn(s)[0]) for g in steps.generations for s in range(len(g)))
    # what was sampled is complete: nobody is asked to go on
    alone = config.model_copy(update={"task": config.task.model_copy(update={"max_turns": 1})})
    truth = steps_alone(alone, steps.generations)
    assert truth.records[0]["grad_norm"] > 0
    same_numbers(steps.records[0], truth.records[0])
    same_numbers(steps.state, truth.state)


def test_an_environment_that_fails_leaves_its_response_without_reward(home):
    trainer = trainer_of(config_of(home, environment="broken", rl={"steps": 1}))
    experience, record = trainer.run_step()
    assert 0 < record["reward_failures"] < 32
    assert record["reward_failures"] == np.isnan(experience.rewards_S).sum()
    assert "task.environment" in record["reward_failure"]
    groups = np.isnan(experience.rewards_S).reshape(-1, 4).any(axis=1)
    assert not experience.informative_S[np.repeat(groups, 4)].any()
    with pytest.raises(FunctionError, match=r"returned text of 30 tokens; expected 1 to task\.max_tool_tokens = 4"):
        trainer.task.tool_reply(trainer.task.problems(1, 0, 0, np.random.default_rng(0))[0], "1")
    trainer.task.close()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"max_turns": 1}, "an environment and max_turns of 2 or more go together"),
        ({"environment": "mine"}, 'is no function; write "file.py:function"'),
        ({"environment": None, "max_turns": 1}, "max_tool_tokens changes nothing without an environment"),
    ],
)
def test_settings_of_turns_that_do_not_fit_are_explained(home, task, message):
    with pytest.raises(ConfigError, match=message):
        config_of(home, task=task)


def test_the_doctor_compares_what_was_sampled(rolled_out):
    trainer, experience, _ = rolled_out
    model, generation = trainer.policy.model, experience.generation
    with torch.no_grad():
        parts = _response_logprobs(model, generation, TEMPERATURE)
        logprobs_R, _ = response_logprobs(model, generation, TEMPERATURE)
    assert [len(part) for part in parts] == generation.response_lengths.tolist()
    np.testing.assert_allclose(np.concatenate(parts), logprobs_R.numpy(), atol=2e-5)
