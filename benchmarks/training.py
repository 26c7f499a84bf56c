"""Tokens per second of recompute and update against TRL's GRPOTrainer, and what R3 costs from rollout to update.

**Against TRL.** Both train copies of one model on the same rollouts, in turn within one process, on one thread. Per
rollout both compute the old log-probs of all sequences, then take two optimizer steps, each on the same half of the
sequences, with the same loss (GSPO, with the group's mean as baseline), in float32, with the same AdamW and the same
clipping of gradients. That it is the same work is checked: after all rollouts the weights of both have to agree, or the
benchmark fails. Both may put as many token slots into a forward. TRL takes a fixed number of sequences and pads each on
both sides to the longest prompt and response of the whole rollout; the trainer deals sequences of like lengths to a
forward and pads on the right to the longest of it. Both have activation checkpointing off, and TRL its auxiliary loss.
Tokens are those of prompts and responses, without padding. Time is processor time of the thread, of everything between
two rollouts but scoring. TRL is given no routes and replays none; ours is measured with `routing = "none"`, which is
the same work, and with R3, on random routes.

Where the advantage comes from is told apart: `equal_lengths` has nothing to pad. TRL computes the logits of prompts too
on the CPU; on a GPU it leaves them out as the trainer does, so that less is left of the advantage there.

**R3's cost.** Whole steps of the trainer, rollout, recompute and update, with R3 over those with no replay: the same
weights and prompts, so that the sampled tokens are the same too. The model has one layer of those that `replay` times,
half as wide as those of Qwen3-30B-A3B: what replay costs is a fixed time for each router and forward, and counts for
several times as much in a toy. The side without replay has an engine that records nothing. Mismatch is measured on both
alike. A time that the run does not resolve is None (`harness.pairs`).
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness import training_trl
from benchmarks.harness.models import Sizes, keep_memory
from benchmarks.harness.pairs import PairedRatio, compare, median_interval, near_one
from benchmarks.harness.training_trl import Batches
from benchmarks.replay import SMALLER
from foreroute.adapters import hf
from foreroute.capture import Generation
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trace import RoutingTrace
from foreroute.train import TrainConfig
from foreroute.train.chain import ChainTask, Problem
from foreroute.train.loop import Trainer, make_schedule, make_trainer
from foreroute.train.policy import Alone, make_policy
from foreroute.train.prompts import make_task
from foreroute.train.record import Experience

SIZES = Sizes(hidden=256, heads=8, kv_heads=2, experts=16, top_k=4, expert_width=128, layers=4, vocabulary=1024)
"""The output head has a tenth of the active weights, as in Qwen3-30B-A3B."""

BATCHES = Batches(sequences=16, group_size=4, mini_steps=2, micro_batch=4)
PROMPTS, RESPONSES = (16, 64), (8, 128)
LEARNING_RATE = 1e-4
AGREEMENT = 1e-3
"""Of the weights after training, relative to how far they moved: Adam divides by the root of what rounding disturbs."""


def run(*, quick: bool) -> dict[str, Any]:
    """Medians over interleaved rollouts and steps."""
    torch.set_num_threads(1)
    keep_memory()
    mixed = _against_trl(4 if quick else 17, PROMPTS, RESPONSES, ("none", "R3"))
    equal = _against_trl(3 if quick else 9, (40, 40), (43, 43), ("none",))
    if equal["none_interval"] is None:  # near 1, where a few rollouts mislead
        equal |= {"none_over_trl": None, "none_reason": "not resolved: a 95 % interval takes six rollouts"}
    cost = _r3_cost(5 if quick else 46)
    return {
        "metrics": {
            "tokens_per_s_over_trl": mixed.pop("none_over_trl"),
            "r3_tokens_per_s_over_trl": mixed.pop("R3_over_trl"),
            **mixed,
            "equal_lengths": equal,
            **near_one("r3_cost", cost, as_cost=True),
        },
        "baselines": {"step_without_replay": asdict(cost)},
        "setting": {
            "sizes": SIZES._asdict(),
            "r3_cost_sizes": SMALLER._asdict(),
            "batches": asdict(BATCHES),
            "prompts": PROMPTS,
            "responses": RESPONSES,
        },
    }


def _against_trl(
    num_rollouts: int, prompts: tuple[int, int], responses: tuple[int, int], routings: tuple[str, ...]
) -> dict[str, Any]:
    """Medians over the rollouts but the first, which warms up."""
    rng = np.random.default_rng(0)
    theirs = hf.build_model("qwen3_moe", seed=0, pad_token_id=0, initializer_range=0.05, **SIZES.of_hf()).train()
    begun = {name: weight.clone() for name, weight in theirs.state_dict().items()}
    width = prompts[1] + responses[1]
    ours = {routing: _Ours(copy.deepcopy(theirs), routing, width) for routing in routings}
    experiences = [_rollout(rng, ours["none"].routed.spec, prompts, responses) for _ in range(num_rollouts)]
    rollouts = [(each, ours["none"].order(each, number)) for number, each in enumerate(experiences)]

    def before_each(number: int) -> None:
        for trainer in ours.values():
            trainer.train(experiences[number], number)

    seconds = training_trl.train(theirs, rollouts, BATCHES, learning_rate=LEARNING_RATE, before_each=before_each)
    apart = _apart(theirs.state_dict(), ours["none"].routed.model.state_dict(), begun)
    if apart > AGREEMENT:
        raise RuntimeError(f"TRL and the trainer did not do the same: weights are {apart:.1e} of their way apart")
    tokens = [each.generation.trace.num_rows for each in experiences]
    figures: dict[str, Any] = {}
    for routing, trainer in ours.items():
        ratios = [theirs / mine for theirs, mine in zip(seconds[1:], trainer.seconds[1:], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        interval = median_interval(ratios)
        figures |= {
            f"{routing}_over_trl": round(median, 3),
            f"{routing}_interval": None if interval is None else [round(end, 3) for end in interval],
            f"{routing}_quartiles": [round(low, 3), round(high, 3)],
        }
    rate = statistics.median(count / taken for count, taken in zip(tokens[1:], seconds[1:], strict=True))
    return figures | {"trl_tokens_per_s": round(rate), "weights_apart": float(f"{apart:.1e}")}


class _Ours:
    """The trainer's recompute and update on rollouts that are given to it.

    Attributes:
        seconds: of each.
    """

    def __init__(self, model: Any, routing: str, width: int) -> None:
        self.seconds: list[float] = []
        self.routed = hf.attach(model)
        slots = BATCHES.micro_batch * width
        self._config = TrainConfig(
            name="training",
            rl={  # type: ignore[arg-type]  # pydantic makes it a table
                "routing": routing,
                "method": "gspo",
                "mini_steps": BATCHES.mini_steps,
                "micro_step_tokens": slots,
                "learning_rate": LEARNING_RATE,
                "warmup_steps": 0,
            },
        )
        engine = EmbeddedEngine(model, "float32")  # samples nothing here
        task = make_task(self._config)  # none of its problems are asked for
        self._trainer = make_trainer(self._config, task, self.routed, engine)

    def order(self, experience: Experience, number: int) -> list[int]:
        """The sequences of each mini-batch, one after another."""
        _, mini_batches = make_schedule(experience, self._config.rl, Alone(), seed=(0, number))
        return [int(s) for mini_batch in mini_batches for part in mini_batch.micro_steps for s in part]

    def train(self, experience: Experience, number: int) -> None:
        """One rollout."""
        begun = time.thread_time()
        replay = self._config.rl.routing == "R3"
        recompute, mini_batches = make_schedule(experience, self._config.rl, Alone(), seed=(0, number))
        generation = experience.generation
        old = self._trainer.recompute(generation, recompute, "replayed" if replay else "native")
        self._trainer.update(experience, mini_batches, old.logprobs_R, generation.trace if replay else None)
        self.seconds.append(time.thread_time() - begun)


def _rollout(rng: np.random.Generator, spec: Any, prompts: tuple[int, int], responses: tuple[int, int]) -> Experience:
    """Random tokens, routes and rewards. Prompts are of any length between two, responses log-uniform between two."""
    groups = BATCHES.sequences // BATCHES.group_size
    prompt_S = rng.integers(prompts[0], prompts[1] + 1, groups).repeat(BATCHES.group_size)
    low, high = np.log(responses)
    response_S = np.exp(rng.uniform(low, high, BATCHES.sequences)).round().astype(np.int64)
    tokens = [rng.integers(2, SIZES.vocabulary, n).astype(np.int32) for n in prompt_S + response_S]
    shapes = [(len(each) - 1, spec.num_layers, spec.num_experts) for each in tokens]
    routes = [np.argsort(rng.random(shape), axis=-1)[..., : spec.top_k] for shape in shapes]
    trace = RoutingTrace.from_sequences(spec, tokens, routes, weight_version=0)
    logprobs = np.zeros(int(response_S.sum()), np.float32)
    rewards = rng.random(BATCHES.sequences)
    by_prompt = rewards.reshape(-1, BATCHES.group_size)
    advantages = (by_prompt - by_prompt.mean(axis=1, keepdims=True)).reshape(-1)
    return Experience(Generation(trace, prompt_S, logprobs), rewards, advantages, np.ones(len(rewards), bool))


def _r3_cost(pairs: int) -> PairedRatio:
    """Whole steps with R3 over those without replay, whose engine records nothing."""
    sizes = {name: size for name, size in SMALLER.of_hf().items() if name != "vocab_size"}
    steps: dict[str, Callable[[], object]] = {}
    for routing in ("R3", "none"):
        config = TrainConfig(
            name="training",
            model={"sizes": sizes},  # type: ignore[arg-type]  # pydantic makes them tables
            rollout={"prompts": 4, "group_size": 4},  # type: ignore[arg-type]
            # weights stay, to the bit where it matters, and so do the sampled tokens
            rl={"routing": routing, "learning_rate": 1e-12, "mini_steps": 2},  # type: ignore[arg-type]
            measure={"compare_every": 999_999},  # type: ignore[arg-type]
        )
        task = _Told(config.task)
        policy = make_policy(config, task)
        engine = (EmbeddedEngine if routing == "R3" else _Silent)(policy.model, "bfloat16")
        steps[routing] = partial(_step, make_trainer(config, task, policy, engine))
    return compare(steps["R3"], steps["none"], pairs=pairs, clock=time.thread_time)


def _step(trainer: Trainer) -> None:
    trainer.step = 1
    _, record = trainer.run_step()
    if not record["grad_norm"]:
        raise RuntimeError("the step updated nothing")


class _Told(ChainTask):
    """Rewards that differ within a group: all answers of an untrained model are worth 0, and would update nothing."""

    def rewards(self, problems: Sequence[Problem], responses: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        return np.array([crc32(tokens.tobytes()) / 2**32 for tokens in responses])


class _Silent(EmbeddedEngine):
    """Records the first rollout, and hands out its routes with all others, which have the same tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kept: list[_Kept] = []
        self._next = 0
        super().__init__(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Generation:
        """Sample as always."""
        self._next = 0
        return super().generate(*args, **kwargs)

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        if self._next == len(self._kept):
            with super()._recording() as recording:
                self._kept.append(_Kept(recording))
                yield self._kept[-1]
        else:
            yield self._kept[self._next]
        self._next += 1


class _Kept:
    """A recording that is asked once, and answers the same from then on."""

    def __init__(self, recording: Any) -> None:
        self.trace = cache(recording.trace)
        self._rollout = recording.rollout
        self._answer: RoutingTrace | None = None

    def rollout(self, *args: Any) -> RoutingTrace:
        """Answer as `Recording.rollout`."""
        if self._answer is None:
            self._answer = self._rollout(*args)
        return self._answer


def _apart(weights: dict[str, Tensor], others: dict[str, Tensor], begun: dict[str, Tensor]) -> float:
    """The distance of two models over the way that they went."""

    def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in begun))

    return distance(weights, others) / distance(others, begun)
