"""What a step really does: whose routes the update runs on, by hooks on the experts; what it starts from and counts."""

import numpy as np
import pytest
import torch

from foreroute.adapters.hf.response_logprobs import response_log_probs, response_logits
from foreroute.train.policy import ScheduledPass
from tests.train.small_runs import small_config, trainer_of
from tests.trainers.given_experts import differing, watched

pytestmark = pytest.mark.usefixtures("rewards_that_differ")


def seen_step(**rl):
    """Run one step; returns the trainer, its rollout, its record, and what went into and on in the update."""
    trainer = trainer_of(small_config(rollout={"prompts": 8, "precision": "fp8"}, rl=rl))
    trainer.run_step()  # a second step has weights that differ from the engine's in more than precision
    seen, passes, recompute, update = {}, [], trainer.recompute, trainer.update

    def watched_update(experience, mini_batches, old_logprobs_R, routes, **options):
        with watched(trainer.policy.model) as seen["forwards"]:
            result = update(experience, mini_batches, old_logprobs_R, routes, **options)
        seen["old"], seen["lr"] = old_logprobs_R, trainer.optimizer.param_groups[0]["lr"]
        return result

    trainer.recompute = lambda *a: passes.append(recompute(*a)) or passes[-1]
    trainer.update = watched_update
    experience, record = trainer.run_step()
    return trainer, experience, record, passes, seen


def routes_of(trace):
    """By the tokens of each sequence but the last, which has no route and no part in an update."""
    ends = zip(trace.offsets, trace.offsets[1:], strict=False)
    return {tuple(trace.token_ids_N[i : j - 1].tolist()): trace.expert_ids_NLK[i : j - 1] for i, j in ends}


@pytest.mark.parametrize("routing", ["R3", "R2"])
def test_the_update_runs_on_the_routes_it_should(routing):
    trainer, experience, record, passes, seen = seen_step(routing=routing, mini_steps=3, learning_rate=0.05)
    assert 0 < record.clip_share < 1
    native = passes[0 if routing == "R2" else 1].executed
    (rows, from_rollout), (_, from_native) = (
        differing(seen["forwards"], routes_of(trace)) for trace in (experience.generation.trace, native)
    )
    assert rows > 100
    assert (from_rollout == 0, from_native == 0) == (routing == "R3", routing == "R2")
    assert seen["lr"] == pytest.approx(trainer.config.rl.learning_rate * 2 / 3), "the second of three that warm up"
    # and it starts from the recomputed log-probs
    assert np.array_equal(seen["old"], passes[0].logprobs_R)
    assert not np.array_equal(seen["old"], experience.generation.logprobs_R)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.policy.model.state_dict().items()}


def test_metrics_of_a_step_are_those_of_its_tokens():
    tis = {"correction": {"method": "tis", "high": 1.005}, "routing": "none"}
    config, whole = small_config(rl=tis, rollout={"precision": "fp8"}), ScheduledPass("recompute", 0, [np.arange(24)])
    experience, record = trainer_of(config).run_step()
    recomputed = trainer_of(config).recompute(experience.generation, whole, "native")
    ratio = np.exp(recomputed.logprobs_R.astype(np.float64) - experience.generation.logprobs_R)
    seen = record.importance
    assert seen.ratio_mean == pytest.approx(ratio.mean(), rel=1e-5)
    assert seen.ratio_max == pytest.approx(ratio.max(), rel=1e-5)
    assert seen.effective_share == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(), rel=1e-5)
    assert seen.weight_mean == pytest.approx(np.minimum(ratio, 1.005).mean(), rel=1e-5)
    assert seen.cut_share == pytest.approx((ratio > 1.005).mean())
    assert 0 < seen.cut_share < 1


@pytest.mark.parametrize("router", ["frozen", "trained"])
def test_routers_stay_where_they_are_told_to(router):
    trainer = trainer_of(small_config(rl={"router": router}))
    routers = {id(parameter) for parameter in trainer.policy.router_parameters()}
    assert len(routers) == 2
    names = {name for name, parameter in trainer.policy.model.named_parameters() if id(parameter) in routers}
    before = weights(trainer)
    trainer.run_step()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved - names, "nothing was learned"
    assert moved & names == (set() if router == "frozen" else names)


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
