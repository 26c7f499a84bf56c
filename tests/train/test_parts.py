"""The parts of the trainer, by hand and by brute force."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.adapters.hf.response_logprobs import response_log_probs, response_logits
from foreroute.layout.packing import padded_batches
from foreroute.train.chain import VOCABULARY, ChainTask, draw_chain, encode, right_share
from foreroute.train.config import RLConfig, TaskConfig
from foreroute.train.loop import _in_order, make_schedule
from foreroute.train.policy import Alone
from tests.train.small_runs import small_config, trainer_of


def test_answers_are_right_and_verified():
    rng = np.random.default_rng(0)
    for problem in [draw_chain(rng, operands) for operands in (2, 3, 6) for _ in range(20)]:
        text = problem.prompt.removesuffix("=")
        result, expected = int(text[0]), text[0]
        for operator, digit in zip(text[1::2], text[2::2], strict=True):
            result = eval(f"({result}) {operator} {digit}") % 10
            expected += str(result)
        assert problem.row["answer"] == expected + ";"
        assert "".join(VOCABULARY[token] for token in problem.tokens) == problem.prompt
        assert ChainTask(TaskConfig()).rewards([problem], [encode(problem.row["answer"])]).tolist() == [1]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("3749;", 1), ("374", 3 / 5), ("", 0), ("9749;", 0), ("3;", 1 / 5), ("37 9;", 2 / 5), ("3749;;", 1)],
)
def test_reward_is_the_right_prefix(response, expected):
    assert (
        right_share("3749;", response) == right_share(encode("3749;"), encode(response.replace(" ", "_"))) == expected
    )


def test_log_probs_and_entropy_match_one_sequence_at_a_time():
    config = small_config(rollout={"temperature": 0.8})
    trainer = trainer_of(config)
    generation = trainer.roll_out().generation
    assert len(set(generation.trace.lengths.tolist())) > 1, "the case must be padded"
    model = trainer.policy.model.eval()
    with torch.no_grad():
        logprobs, entropy = response_log_probs(model, generation, 0.8, entropy=True)
        seen = []
        watch = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[:-1]))
        assert torch.equal(response_log_probs(model, generation, 0.8)[0], logprobs)
        watch.remove()
        assert seen == [(1, len(generation.logprobs_R))], "logits are those of response tokens alone"
        ((_, logits),) = response_logits(model, generation)
        few_at_once = list(response_logits(model, generation, whole=True, rows_at_once=7))
        assert [len(part) for _, part in few_at_once[:-1]] == [7] * (len(logits) // 7)
        torch.testing.assert_close(torch.cat([part for _, part in few_at_once]), logits, rtol=0, atol=1e-5)
        expected, expected_entropy = [], []
        for s in range(len(generation)):
            tokens = generation.trace.tokens(s)
            logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0] / 0.8
            for t in range(int(generation.prompt_lengths[s]), len(tokens)):
                row = logits[t - 1].double().log_softmax(-1)
                expected.append(row[tokens[t]].item())
                expected_entropy.append(-(row.exp() * row).sum().item())
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(entropy.numpy(), expected_entropy, atol=2e-5)


def test_little_of_a_micro_step_is_padding():
    lengths = np.random.default_rng(0).integers(8, 200, 64)
    experience = SimpleNamespace(
        generation=SimpleNamespace(trace=SimpleNamespace(lengths=lengths)), informative_S=np.arange(64) % 4 > 0
    )
    recompute, mini_batches = make_schedule(
        experience, RLConfig(mini_steps=2, micro_step_tokens=1600), Alone(), seed=(0, 0)
    )
    for each, members in zip([recompute, *mini_batches], (64, 24, 24), strict=True):
        taken = np.concatenate(each.micro_steps)
        assert len(set(taken.tolist())) == len(taken) == members
        slots = [len(part) * int(lengths[part].max() - 1) for part in each.micro_steps]
        assert max(slots) <= 1600
        assert sum(slots) < 1.3 * (lengths[taken] - 1).sum()
    # a control: in the order that they came in, a third of what is computed is padding
    as_they_came = padded_batches(lengths - 1, 1600)
    assert sum(len(part) * int(lengths[part].max() - 1) for part in as_they_came) > 1.5 * (lengths - 1).sum()
    values, order = [lengths[part].repeat(lengths[part]) for part in recompute.micro_steps], recompute.micro_steps
    assert np.array_equal(_in_order(values, np.concatenate(order), lengths), lengths.repeat(lengths))
