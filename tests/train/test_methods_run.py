"""The methods inside the trainer: what a step learns from, what it leaves alone, and what it records."""

import copy
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.errors import ConfigError, FunctionError, RunFolderError
from foreroute.mismatch import Signals, alarms
from foreroute.records import parse_step
from foreroute.train import load_checkpoint, parse_config, train
from foreroute.train import rollout as rollout_module
from foreroute.train.config.rl import METHODS
from foreroute.train.model import Reference
from foreroute.train.passes import Stage
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Scores, roll_out
from foreroute.train.tasks import chain
from tests.train.small_runs import SIZES, records, small_config, small_values, trainer_of

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
DISAGREEING = {"rollout": {"precision": "fp8"}}


@pytest.fixture(autouse=True)
def rewards_that_differ(monkeypatch):
    """Those of an untrained model are all zero."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        rollout_module, "score", lambda task, problems, generation, size: Scores(rng.random(len(generation)))
    )


def step(**sections):
    trainer = trainer_of(small_config(**sections))
    experience, record = trainer.run_step()
    return trainer, experience, record


def weights(trainer):
    return {name: value.clone() for name, value in trainer.policy.model.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
def test_neither_micro_steps_nor_their_order_change_what_is_learned(method, monkeypatch):
    seen, learned = [], []
    for tokens in (24, 4096):
        rng = np.random.default_rng(0)
        monkeypatch.setattr(
            rollout_module,
            "score",
            lambda task, problems, generation, size, rng=rng: Scores(rng.random(len(generation))),
        )
        model = {"experts_implementation": "eager", "sizes": SIZES}  # grouped_mm knows no float64
        rl = {"method": method, "micro_step_tokens": tokens, "mini_steps": 2}
        trainer = trainer_of(small_config(rl=rl, model=model, rollout={"precision": "fp8", "prompts": 3}))
        trainer.policy.model.double()
        _, record = trainer.run_step()
        learned.append(weights(trainer))
        seen.append([record["loss"], record["grad_norm"], record["clip_share"], *record["importance"].values()])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-6)
    assert seen[0][1] > 0
    for name, value in learned[0].items():
        torch.testing.assert_close(value, learned[1][name], rtol=1e-6, atol=1e-9)


def test_figures_of_a_step_are_those_of_its_tokens():
    band = {"correction": {"kind": "icepop", "low": 0.99, "high": 1.02}}
    _, experience, record = step(rl=band | {"routing": "none"}, **DISAGREEING)
    old = trainer_of(small_config(rl=band | {"routing": "none"}, **DISAGREEING))
    schedule = SimpleNamespace(recompute=Stage("recompute", 0, [np.arange(24)]))
    recomputed = old._recompute(experience, schedule, "native")
    ratio = np.exp(recomputed.logprobs_R.astype(np.float64) - experience.generation.logprobs_R)
    kept = (ratio >= 0.99) & (ratio <= 1.02)
    seen = record["importance"]
    assert seen["ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert seen["ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    assert seen["effective_share"] == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(), rel=1e-5)
    assert seen["weight_mean"] == pytest.approx((ratio * kept).mean(), rel=1e-5)
    assert seen["cut_share"] == pytest.approx(1 - kept.mean())
    assert 0 < seen["cut_share"] < 1
    assert seen["rejected_sequences"] == 0


@pytest.mark.parametrize("nats", [60.0, 500.0])
def test_weights_that_degenerate_are_figures_and_an_alarm(nats):
    """Products over responses that float32 cannot hold, and float64; in logarithms, token by token, they are exact."""
    rl = {"routing": "none", "correction": {"kind": "mis", "level": "sequence"}, "micro_step_tokens": 24}
    trainer = trainer_of(small_config(rl=rl, **DISAGREEING))
    generate = trainer.engine.generate

    def far_apart(*given, **options):
        generation = generate(*given, **options)
        apart_S = nats * (np.arange(len(generation)) % 3) / 2
        return replace(
            generation, logprobs_R=generation.logprobs_R - np.float32(apart_S.repeat(generation.response_lengths))
        )

    trainer.engine.generate = far_apart
    experience, record = trainer.run_step()
    old = trainer_of(small_config(rl=rl, **DISAGREEING))
    schedule = SimpleNamespace(recompute=Stage("recompute", 0, [np.arange(24)]))
    lengths = experience.generation.response_lengths
    gap = (
        old._recompute(experience, schedule, "native").logprobs_R.astype(np.float64) - experience.generation.logprobs_R
    )
    log_rho = np.array([part.sum() for part in np.split(gap, np.cumsum(lengths)[:-1])]).repeat(lengths)
    total, squares = np.logaddexp.reduce(log_rho), np.logaddexp.reduce(2 * log_rho)
    seen = parse_step(json.dumps({**record, "alarms": []}, allow_nan=False).encode()).importance
    assert log_rho.max() > math.log(np.finfo(np.float32 if nats == 60 else np.float64).max)
    assert seen.effective_share == pytest.approx(np.exp(2 * total - squares) / len(log_rho), rel=1e-3)
    assert 0 < seen.effective_share < 0.5
    largest = np.finfo(np.float64).max
    with np.errstate(over="ignore"):
        assert seen.ratio_max == pytest.approx(min(np.exp(log_rho.max()), largest), rel=1e-3)
    assert seen.ratio_mean <= seen.ratio_max
    (alarm,) = [
        each
        for each in alarms([Signals.of({**record, "step": s}) for s in range(10)])
        if each.kind == "effective_share"
    ]
    assert alarm.value == pytest.approx(seen.effective_share)


def test_rejected_responses_are_as_if_they_were_not_there():
    """Of a rollout cut down to the accepted ones, an update learns the same."""
    rejection = {"kind": "geometric", "low": 0.985, "high": 1.02}
    _, experience, record = step(rl={"rejection": rejection, "method": "grpo"}, **DISAGREEING)
    again = trainer_of(small_config(rl={"method": "grpo"}, **DISAGREEING))
    again.engine.load_weights(again.policy.model.state_dict(), 0)
    schedule = SimpleNamespace(recompute=Stage("recompute", 0, [np.arange(24)]))
    old = again._recompute(experience, schedule, "replayed").logprobs_R - experience.generation.logprobs_R
    ends = np.cumsum(experience.generation.response_lengths)
    drift = np.exp([part.mean() for part in np.split(old, ends[:-1])])
    accepted = (drift >= 0.985) & (drift <= 1.02)
    assert record["importance"]["rejected_sequences"] == (~accepted).sum()
    assert 0 < accepted.sum() < 24
    again._roll_out = lambda: replace(experience, informative_S=accepted)
    _, without = again.run_step()
    assert without["loss"] == pytest.approx(record["loss"], rel=1e-4)
    assert without["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)


def test_where_everything_is_rejected_nothing_is_learned():
    config = small_config(rl={"rejection": {"kind": "sequence", "low": 1e6, "high": 1e7}, "mini_steps": 2})
    trainer = trainer_of(config)
    before = weights(trainer)
    _, record = trainer.run_step()
    assert (record["loss"], record["grad_norm"], record["importance"]["rejected_sequences"]) == (0, 0, 24)
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


@pytest.mark.parametrize(
    ("settings", "routers_move"),
    [
        ({"router": "frozen", "routing": "R3"}, False),
        ({"router": "frozen", "routing": "none"}, False),
        ({"routing": "R3+weights"}, False),
        ({"routing": "R3"}, True),
    ],
)
def test_routers_stay_where_they_are_told_to(settings, routers_move):
    trainer = trainer_of(small_config(rl=settings))
    routers = {id(parameter) for parameter in trainer.policy.router_parameters()}
    assert len(routers) == 2
    names = {name for name, parameter in trainer.policy.model.named_parameters() if id(parameter) in routers}
    before = weights(trainer)
    trainer.run_step()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved - names, "nothing was learned"
    assert (moved & names == names) if routers_move else not moved & names


def test_the_engines_weights_make_a_trainer_of_its_precision_agree():
    """In float32 both ways nothing is left but the order of sums."""
    exact = step(rollout={"precision": "float32"}, rl={"routing": "R3+weights"})[2]["mismatch"]
    assert exact["replayed"]["k3"] < 1e-9
    coarse = {routing: step(rl={"routing": routing}, **DISAGREEING)[2] for routing in ("R3", "R3+weights")}
    k3 = {routing: record["mismatch"]["replayed"]["k3"] for routing, record in coarse.items()}
    assert k3["R3"] != k3["R3+weights"]
    for record in coarse.values():
        assert record["mismatch"]["replayed"]["differing_share"] == 0


def test_a_run_with_a_reference_resumes_bit_for_bit(tmp_path):
    """The reference is where RL began."""
    rl = {"kl_coefficient": 0.1, "method": "minirl", "routing": "none"}

    def config_of(steps):
        return small_config(rl=rl | {"steps": steps}, rollout={"max_rounds": 3}, checkpoint={"every": 1})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_module, "score", lambda task, problems, generation, size: Scores(by_tokens(generation)))
        whole = train(config_of(3), tmp_path / "whole")
        shutil.copytree(whole.path, tmp_path / "cut")
        for step in (2, 3):
            (tmp_path / "cut" / "checkpoints" / f"step-00000{step}.safetensors").unlink()
        resumed = train(config_of(3), tmp_path / "cut", resume=True)
        assert records(resumed.path) == records(whole.path)
        ends = [load_checkpoint(run.last_checkpoint())["model"] for run in (whole, resumed)]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        kl = [record["kl"] for record in records(whole.path)]
        assert kl[0] < 1e-9
        assert min(kl[1:]) > 1e-7
        first = resumed.path / "checkpoints" / "step-000000.safetensors"
        content = first.read_bytes()
        first.write_bytes(content[:-6] + bytes([content[-6] ^ 1]) + content[-5:])  # a number of the last tensor
        with pytest.raises(RunFolderError, match=r"step-000000\.safetensors is damaged: its checksum"):
            train(config_of(4), tmp_path / "cut", resume=True)
        first.unlink()
        with pytest.raises(RunFolderError, match="needs the weights that the run began with"):
            train(config_of(4), tmp_path / "cut", resume=True)


def by_tokens(generation):
    """Rewards that follow from the responses alone, and are all equal in some groups."""
    sums = [int(generation.response(s).sum()) for s in range(len(generation))]
    first = [int(generation.trace.tokens(s)[0]) for s in range(len(generation))]
    return np.array([0 if first[s] < 6 else sums[s] % 3 for s in range(len(generation))], np.float64)


def dynamic(max_rounds, ranks, monkeypatch, step=0):
    monkeypatch.setattr(rollout_module, "score", lambda task, problems, generation, size: Scores(by_tokens(generation)))
    config = small_config(rollout={"max_rounds": max_rounds, "prompts": 8})
    trainer = trainer_of(config)
    return roll_out(trainer.engine, trainer.task, config, step, ranks)


def test_dynamic_sampling_replaces_groups_that_teach_nothing(monkeypatch):
    once = dynamic(1, Ranks(), monkeypatch)
    assert 0 < once.informative_S.mean() < 1
    more = dynamic(10, Ranks(), monkeypatch)
    assert more.informative_S.all()
    assert 1 < more.sampled.rounds < 10
    assert more.sampled.responses == more.sampled.rounds * 32
    assert np.array_equal(more.sampled.first_rewards_S, once.rewards_S)
    assert np.array_equal(more.rewards_S, by_tokens(more.generation)), "rewards stay with their responses"
    for group in range(8):
        prompts = {tuple(more.generation.trace.tokens(4 * group + i)[:4]) for i in range(4)}
        assert len(prompts) == 1, "groups stay together"
    kept = once.informative_S
    assert np.array_equal(more.rewards_S[kept], once.rewards_S[kept]), "what taught something stays in its place"


def test_dynamic_sampling_ends_and_repeats(monkeypatch):
    two = dynamic(2, Ranks(), monkeypatch)
    assert two.sampled.rounds == 2
    again = dynamic(2, Ranks(), monkeypatch)
    assert two.generation.trace.equals(again.generation.trace)
    assert not two.generation.trace.equals(dynamic(2, Ranks(), monkeypatch, step=1).generation.trace)
    monkeypatch.undo()
    monkeypatch.setattr(
        rollout_module, "score", lambda task, problems, generation, size: Scores(np.ones(len(generation)))
    )
    config = small_config(rollout={"max_rounds": 3})
    trainer = trainer_of(config)
    hopeless = roll_out(trainer.engine, trainer.task, config, 0, Ranks())
    assert (hopeless.sampled.rounds, hopeless.informative_S.any()) == (3, False)


def test_a_round_whose_rewards_all_fail_leaves_those_before(monkeypatch):
    def fails(task, problems, generation, size):
        rounds.append(by_tokens(generation) if not rounds else np.full(len(generation), np.nan))
        return Scores(rounds[-1], dict.fromkeys(np.flatnonzero(np.isnan(rounds[-1])).tolist(), "the service is down"))

    rounds = []
    monkeypatch.setattr(rollout_module, "score", fails)
    config = small_config(rollout={"max_rounds": 2, "prompts": 8})
    trainer = trainer_of(config)
    found = roll_out(trainer.engine, trainer.task, config, 0, Ranks())
    assert np.array_equal(found.rewards_S, rounds[0])
    assert found.sampled.failures == ("the service is down",) * 32
    with pytest.raises(FunctionError, match=r"none of 64 responses got a reward\. The first: the service is down"):
        roll_out(trainer.engine, trainer.task, config, 0, Ranks())


def test_all_ranks_are_dealt_from_the_same_rounds(monkeypatch):
    """The prompts of a round are one list, of which each rank has its block."""
    seen = []
    real = chain.sample_problems
    monkeypatch.setattr(chain, "sample_problems", lambda *a, **k: seen.append(real(*a, **k)) or seen[-1])
    rounds = {}
    for rank in range(2):
        seen.clear()
        ranks = Ranks()
        ranks.rank, ranks.size = rank, 2
        part = dynamic(2, ranks, monkeypatch)
        rounds[rank] = [[problem.prompt for problem in problems] for problems in seen]
        assert len(part.rewards_S) == 16
    assert rounds[0] == rounds[1][: len(rounds[0])] or rounds[1] == rounds[0][: len(rounds[1])]


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ConfigError, match=r'"R3\+weights" needs rollout.engine = "embedded"'):
        small_config(rl={"routing": "R3+weights"}, rollout={"engine": "vllm", "vllm": {"python": "python"}})
    with pytest.raises(ConfigError, match=r"rl\.correction\.heigh: unknown key; did you mean high"):
        small_config(rl={"correction": {"kind": "tis", "heigh": 2.0}})


def blocks():
    return re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.strip().splitlines()[0])
def test_a_configuration_of_the_page_runs(block):
    import tomllib

    given = tomllib.loads(block)
    base = small_values(task={"max_operands": 2}, rollout={"prompts": 2})
    for name, section in given.items():
        base[name] = {**base.get(name, {}), **section}
    config = parse_config(base, source="the page")
    trainer = trainer_of(config)
    if config.rl.kl_coefficient:
        with pytest.raises(ConfigError, match="needs a reference"):
            trainer.run_step()
        trainer.reference = Reference(copy.deepcopy(trainer.policy.model))
    _, record = trainer.run_step()
    assert np.isfinite(record["loss"])
    assert record["grad_norm"] > 0 or record["importance"]["rejected_sequences"]


def test_the_page_shows_every_method_correction_and_routing():
    shown = "\n".join(blocks())
    for method in METHODS:
        assert f'method = "{method}"' in shown
    for kind in ("tis", "mis", "icepop", "sequence", "geometric"):
        assert f'kind = "{kind}"' in shown
    for routing in ("none", "R2", "R3", "R3+weights"):
        assert f'routing = "{routing}"' in shown
    for key in ("kl_coefficient", "max_rounds", 'router = "frozen"'):
        assert key in shown
