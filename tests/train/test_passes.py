"""What a step really does: whose routes the update runs on, which log-probs it starts from, what it counts and leaves.

The routes are those that the experts were given, seen by a hook on them, not those that the trainer says it used.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from foreroute.adapters.hf.response_logprobs import inputs, pad, response_log_probs, response_logits
from foreroute.layout.packing import padded_batches
from foreroute.plan.counts import contiguous_imbalance
from foreroute.train import loop
from foreroute.train.chain import VOCABULARY, ChainTask, draw_chain, encode, right_share
from foreroute.train.config import METHODS, RLConfig, TaskConfig
from foreroute.train.loop import _in_order, make_schedule
from foreroute.train.objective import coefficients
from foreroute.train.policy import Alone, OneProcess, ScheduledPass
from tests.replay.session_subject import router_paths
from tests.tiers import grid
from tests.train.small_runs import SIZES, always_informative, random_rewards, same_state, small_config, trainer_of

DISAGREEING = {"rollout": {"precision": "fp8"}}
ALL = ScheduledPass("recompute", 0, [np.arange(24)])


@pytest.fixture(autouse=True)
def rewards_that_differ(monkeypatch):
    """Those of an untrained model are all zero."""
    monkeypatch.setattr(ChainTask, "rewards", random_rewards())


@cache
def seen_step(**rl):
    """Run one step; returns the trainer, its rollout, its record, and what went into and on in the update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainTask, "rewards", random_rewards())
        return taken_step(trainer_of(small_config(rollout={"prompts": 8, "precision": "fp8"}, rl=rl)))


def taken_step(trainer):
    trainer.run_step()  # a second step has weights that differ from the engine's in more than precision
    seen = {"experts": [], "own": []}

    def router_seen(router, args):
        hidden = args[0].detach().reshape(-1, router.weight.shape[1])
        seen["own"].append((hidden @ router.weight.detach().T).topk(router.top_k).indices.numpy())

    def watched(experience, mini_batches, old_logprobs_R, routes, **options):
        handles = []
        for layer, path in enumerate(router_paths(trainer.policy)):
            block = trainer.policy.model.get_submodule(path.removesuffix(".gate"))
            handles.append(block.gate.register_forward_pre_hook(router_seen))
            handles.append(
                block.experts.register_forward_pre_hook(
                    lambda _, args, layer=layer: seen["experts"].append((layer, args[1].clone().numpy()))
                )
            )
        seen["old"], seen["mini_batches"] = old_logprobs_R, mini_batches
        seen["result"] = update(experience, mini_batches, old_logprobs_R, routes, **options)
        seen["lr"] = trainer.optimizer.param_groups[0]["lr"]
        for handle in handles:
            handle.remove()
        return seen["result"]

    passes, recompute, update = [], trainer.recompute, trainer.update
    trainer.recompute = lambda *a: passes.append(recompute(*a)) or passes[-1]
    trainer.update = watched
    experience, record = trainer.run_step()
    return trainer, experience, record, passes, seen


def executed_rows(experience, result, seen, num_layers):
    """Per micro-step and layer, the ids at the experts without padding, and the rows of the trace they belong to."""
    generation = experience.generation
    order = np.random.default_rng([0, 1, 2]).permutation(np.flatnonzero(experience.informative_S))
    calls = iter(seen["experts"])
    for micro_step in range(result.micro_step_S.max() + 1):
        members = [s for s in order if result.micro_step_S[s] == micro_step]
        part = inputs(generation.select(members).trace)
        kept = pad(part)[1].reshape(-1).astype(bool)
        for _ in range(num_layers):
            layer, ids = next(calls)
            yield part, members, layer, ids[kept]
    assert next(calls, None) is None


@grid(("routing", "mini_steps"), [("R3", 2), ("R2", 2), ("none", 1)], quick=2)
def test_the_update_runs_on_the_routes_it_should(routing, mini_steps):
    trainer, experience, _, passes, seen = seen_step(routing=routing, mini_steps=mini_steps)
    native = passes[0 if routing != "R3" else 1].executed
    agree = {"rollout": [], "native": []}
    for part, members, layer, ids in executed_rows(experience, seen["result"], seen, trainer.policy.spec.num_layers):
        routed = part.valid_N
        agree["rollout"].append((np.sort(part.expert_ids_NLK[routed, layer]) == np.sort(ids[routed])).all())
        own = inputs(native.select(members)).expert_ids_NLK[:, layer]
        agree["native"].append((np.sort(own[routed]) == np.sort(ids[routed])).all())
    if routing == "R3":
        assert all(agree["rollout"])
        assert not all(agree["native"])
    else:
        assert all(agree["native"])
        assert not all(agree["rollout"])
    assert seen["lr"] == pytest.approx(trainer.config.rl.learning_rate * 2 / 3), "the second of three that warm up"
    # and it starts from the recomputed log-probs
    assert np.array_equal(seen["old"], passes[0].logprobs_R)
    assert not np.array_equal(seen["old"], experience.generation.logprobs_R)


def test_load_and_clipping_are_those_of_the_update():
    _, experience, record, _, seen = seen_step(mini_steps=6, learning_rate=0.05)
    result, trace = seen["result"], experience.generation.trace
    counts = np.zeros((result.micro_step_S.max() + 1, 2, 16), np.int64)
    for s in np.flatnonzero(result.micro_step_S >= 0):
        for row in range(int(trace.offsets[s]), int(trace.offsets[s + 1]) - 1):
            for layer in range(2):
                counts[result.micro_step_S[s], layer, trace.expert_ids_NLK[row, layer]] += 1
    assert len(counts) > 6, "the case must have several micro-steps in a mini-batch"
    assert record.expert_load["4"] == pytest.approx(contiguous_imbalance(counts, 4))
    assert 0 < record.clip_share < 1


def test_live_agreement_is_of_the_routers_inputs_in_the_update():
    """Live routes that have moved from replayed ones, against what routers and experts were seen to be given."""
    changes = {"mini_steps": 3, "learning_rate": 0.02, "warmup_steps": 0}
    trainer, experience, record, _, seen = seen_step(routing="R2", **changes)
    pairs = zip(seen["own"], seen["experts"], strict=True)
    differing = iter([(np.sort(own) != np.sort(ids)).any(axis=-1).sum() for own, (_, ids) in pairs])
    num_layers, lengths = trainer.policy.spec.num_layers, experience.generation.trace.lengths
    expected = []
    for each in seen["mini_batches"]:
        apart = sum(next(differing) for _ in range(len(each.micro_steps) * num_layers))
        expected.append(1 - apart / (num_layers * (lengths[np.concatenate(each.micro_steps)] - 1).sum()))
    assert record.live_agreement == pytest.approx(expected)
    assert expected[2] < expected[0]
    assert expected[0] == 1, "the routes of R2 are of the weights that its first mini-batch still has"


def one_step(checkpointing):
    """A record, the state after it, and how often the experts of the first layer ran."""
    config = small_config(model={"gradient_checkpointing": checkpointing}, rollout={"precision": "fp8"})
    trainer, runs = trainer_of(config), []
    experts = trainer.policy.model.get_submodule(router_paths(trainer.policy)[0].removesuffix("gate") + "experts")
    experts.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    _, record = trainer.run_step()
    return replace(record, seconds={}), trainer.state(), len(runs)


def test_activations_computed_again_change_no_bit(monkeypatch):
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    record, state, runs = one_step(checkpointing=False)
    assert record.grad_norm > 0
    native = record.mismatch["native"]
    assert native.differing_share > 0, "routes of another kind would be seen"
    assert list(native.differing_share_by_layer) == ["decoder 0", "decoder 1"]
    assert np.mean([*native.differing_share_by_layer.values()]) == pytest.approx(native.differing_share)
    other_record, other_state, more_runs = one_step(checkpointing=True)
    assert more_runs > runs
    assert other_record == record
    assert same_state(other_state, state)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.policy.model.state_dict().items()}


@grid("method", METHODS, quick=1)
def test_no_grouping_of_a_mini_batch_changes_losses_or_gradients(method, monkeypatch):
    """In float64: by length, at random, and all in one micro-step."""
    groupings = groupings_of(method)
    by_length = learned(*groupings["length"])
    for name in ("random", "one"):
        same_to_the_last_digits(learned(*groupings[name]), by_length)
    # a control: the same, if the loss were a mean over each micro-step
    monkeypatch.setattr(loop, "coefficients", lambda lengths_S, *a: coefficients(lengths_S, *a) / len(lengths_S))
    with pytest.raises(AssertionError, match="not close"):
        same_to_the_last_digits(learned(*groupings["random"]), learned(*groupings["length"]))


def groupings_of(method):
    """Ways to group the sequences of two mini-batches, and the arguments of an update beside."""
    model = {"experts_implementation": "eager", "sizes": SIZES}  # grouped_mm knows no float64
    rl = {"method": method, "micro_step_tokens": 32, "mini_steps": 2, "correction": {"kind": "tis", "high": 1.01}}
    trainer = trainer_of(small_config(rl=rl, model=model, rollout={"precision": "fp8", "prompts": 4}))
    trainer.policy.model.double()
    experience = trainer.roll_out()
    routes, rng = experience.generation.trace, np.random.default_rng(0)
    recompute, by_length = make_schedule(experience, trainer.config.rl, Alone(), seed=(0, 0))
    old_R = trainer.recompute(experience.generation, recompute, "replayed").logprobs_R
    old_R = old_R + rng.normal(0, 0.2, len(old_R))  # so that ratios are not 1, and some are clipped
    assert min(len(each.micro_steps) for each in by_length) >= 2
    groupings = {"length": by_length, "random": [], "one": []}
    for each in by_length:
        members, sizes = np.concatenate(each.micro_steps), list(map(len, each.micro_steps))
        at_random = np.split(rng.permutation(members), np.cumsum(sizes)[:-1])
        for name, parts in (("random", at_random), ("one", [members])):
            groupings[name].append(replace(each, micro_steps=parts))
    start = weights(trainer)
    return {name: ((trainer, start, experience, old_R, routes), each) for name, each in groupings.items()}


def learned(given, mini_batches):
    trainer, start, experience, old_R, routes = given
    trainer.policy.model.load_state_dict(start)
    # with AdamW, rounding of a gradient near 0 would decide where a weight goes
    trainer.optimizer, seen = torch.optim.SGD(trainer.policy.model.parameters(), lr=0.0), []
    finish = OneProcess.finish_gradients

    def seen_gradients(self, max_norm):
        seen.extend(parameter.grad.clone() for parameter in trainer.policy.model.parameters())
        return finish(self, max_norm)

    with mock.patch.object(OneProcess, "finish_gradients", seen_gradients):
        updated = trainer.update(experience, mini_batches, old_R, routes)
    assert updated.grad_norm > 0
    assert updated.tokens_4R[0].any(), "the case must clip"
    return [torch.tensor([updated.loss, updated.tokens_4R[0].sum()]), *seen]


def same_to_the_last_digits(ours, truth):
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


def test_metrics_of_a_step_are_those_of_its_tokens():
    tis = {"correction": {"kind": "tis", "high": 1.005}, "routing": "none"}
    experience, record = trainer_of(small_config(rl=tis, **DISAGREEING)).run_step()
    recomputed = trainer_of(small_config(rl=tis, **DISAGREEING)).recompute(experience.generation, ALL, "native")
    ratio = np.exp(recomputed.logprobs_R.astype(np.float64) - experience.generation.logprobs_R)
    seen = record.importance
    assert seen.ratio_mean == pytest.approx(ratio.mean(), rel=1e-5)
    assert seen.ratio_max == pytest.approx(ratio.max(), rel=1e-5)
    assert seen.effective_share == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(), rel=1e-5)
    assert seen.weight_mean == pytest.approx(np.minimum(ratio, 1.005).mean(), rel=1e-5)
    assert seen.cut_share == pytest.approx((ratio > 1.005).mean())
    assert 0 < seen.cut_share < 1


@pytest.mark.parametrize("router", ["frozen", "train"])
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


@pytest.mark.slow
def test_all_ranks_are_dealt_from_one_list_of_prompts():
    """Each has its block of it, and samples for itself."""
    prompts = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        trainer = trainer_of(small_config(rollout={"prompts": 8}))
        trainer.execution.ranks.rank, trainer.execution.ranks.size = rank, size
        generation = trainer.roll_out().generation
        prompts.append([generation.trace.tokens(s)[:n].tolist() for s, n in enumerate(generation.prompt_lengths)])
    assert prompts[0] == prompts[1] + prompts[2]
    assert prompts[1] != prompts[2]


def test_answers_are_right_and_verified(monkeypatch):
    monkeypatch.undo()  # the rewards of this file
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
    [("3749;", 1), ("", 0), ("9749;", 0), ("37 9;", 2 / 5), ("3749;;", 1)],
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
