"""The sentinel: which planted faults it finds in their batch, how often it alarms in healthy runs, and what it costs.

A small model is trained by eight optimizer's steps to a rollout; its engine, bfloat16 or FP8-like, routes the text.
Faults are planted into the routes of rollouts behind the warm-up, and replayed as all others are.

- `found`: by fault, whether all trials were found in their batch; `named`, how many got the right name.
- `false_alarms`: what the sentinel says is a bound. Measured are healthy rollouts with their eight mini-batches, each
  with a past of its own; and sequences that are drawn anew, each from the blocks of 8 rows of a healthy one, so that
  `sequences` at a threshold is the share of drawn sequences whose bound was below it, and `least_bound` the lowest.
- `cost`: processor seconds of counting, reading and judging over those of the step: a pass with gradients and one
  without. That counting adds no wait of the host, tests/adapters/hf/test_host_waits.py shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.pairs import quickest
from benchmarks.replay import Bench
from foreroute.adapters import hf
from foreroute.core.passes import Interceptor, Pass, RecordOptions
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.mismatch import LooksLike, RootCounts, Sentinel, Suspicion
from foreroute.mismatch.sentinel import WARM_UP
from foreroute.replay import RootRows
from foreroute.trace import NO_VERSION, RoutingTrace

VOCABULARY, SEQUENCES, TOKENS, MINI_BATCHES, LAYERS = 256, 8, 160, 8, 6
PICKS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 32,
    "num_experts_per_tok": PICKS,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
}
PRECISIONS = ("bfloat16", "fp8")
RATES = (1e-4, 1e-5, 3e-4, 1e-3)
"""Learning rates of AdamW at which weights of some steps ago are looked for."""
HEALTHY, TRIALS, DRAWN = (2, 8), (2, 5), (20_000, 1_000_000)
"""Rollouts behind the warm-up in which nothing is planted, those in which something is, and sequences that are drawn;
quick and not."""
THRESHOLDS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass
class Run:
    """A trainer, its engine and the sentinel between them."""

    precision: Any
    learning_rate: float = 1e-5

    def __post_init__(self) -> None:
        self.model: Any = hf.build_model("qwen3_moe", seed=0, **SIZES)
        self.engine = EmbeddedEngine(self.model, self.precision)
        self.routed = hf.attach(self.model)
        self.sentinels = [Sentinel(self.routed.spec) for _ in range(MINI_BATCHES)]  # of each mini-batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)
        self.weights = [copy.deepcopy(self.model.state_dict())]  # before each optimizer's step
        self.draw = torch.Generator().manual_seed(0)
        self.counted: list[RootCounts] = []  # of healthy rollouts
        self.alarms: list[Suspicion] = []  # in them

    def text(self) -> torch.Tensor:
        """Tokens of which each depends on the one before."""
        noise = torch.randint(0, 16, (SEQUENCES, TOKENS), generator=self.draw)
        first = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=self.draw)
        return (first + torch.cumsum(7 * noise, 1)) % VOCABULARY

    def drawn(self) -> tuple[torch.Tensor, RoutingTrace]:
        """Text, and the engine's routes of it."""
        text = self.text()
        return text, self.routes(text)

    @torch.no_grad()
    def routes(self, text: torch.Tensor, steps_ago: int = 0) -> RoutingTrace:
        """Routes of the engine at the weights of some optimizer's steps ago."""
        now = self.model.state_dict()
        self.engine.load_weights(self.weights[-steps_ago] if steps_ago else now, NO_VERSION)
        with self.engine._routed.record() as recording:
            self.engine._model(input_ids=text, use_cache=False)
        return recording.trace()

    def counts(self, text: torch.Tensor, trace: RoutingTrace, *, grad: bool = False) -> tuple[RootCounts, Any]:
        """Replay them in the trainer."""
        rows = RootRows(self.routed)
        with torch.set_grad_enabled(grad), self.routed.replay(trace), self.routed.listening(rows):
            logits = self.model(input_ids=text, use_cache=False).logits
        return rows.read(trace.lengths), logits

    def rollout(self, text: torch.Tensor, trace: RoutingTrace) -> None:
        """Take a healthy rollout: its recomputation, and eight mini-batches."""
        counts, _ = self.counts(text, trace)
        self.counted.append(counts)
        self.alarms += self.sentinels[0].judge(counts)
        for number in range(MINI_BATCHES):
            rows = np.arange(number, SEQUENCES, MINI_BATCHES)
            counts, logits = self.counts(text[rows], trace.select(rows), grad=True)
            self.alarms += self.sentinels[number].judge(counts) if number else []
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[rows, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.weights = [*self.weights[-MINI_BATCHES:], copy.deepcopy(self.model.state_dict())]
            self.optimizer.step()


class Fault(NamedTuple):
    """What is planted: changes the ids of a rollout, given those of the one before and a place; and its name."""

    plant: Callable[[NDArray[Any], NDArray[Any], int], None]
    looks_like: LooksLike


def _stale_block(ids: NDArray[Any], before: NDArray[Any], s: int) -> None:
    ids[s, 50:114] = before[s, 50:114]


def _swapped(ids: NDArray[Any], before: NDArray[Any], s: int) -> None:
    ids[[s, s - 1]] = ids[[s - 1, s]]


def _stale_layer(ids: NDArray[Any], before: NDArray[Any], s: int) -> None:
    ids[:, :, s % LAYERS] = before[:, :, s % LAYERS]


def _shift(ids: NDArray[Any], before: NDArray[Any], s: int) -> None:
    ids[:, 1:] = ids[:, :-1].copy()


def _frozen(ids: NDArray[Any], before: NDArray[Any], s: int) -> None:
    ids[s, 60:] = ids[s, 60]


FAULTS = {
    "stale_block": Fault(_stale_block, LooksLike.STALE_ROWS),
    "swapped_sequences": Fault(_swapped, LooksLike.OTHER_SEQUENCE),
    "stale_layer": Fault(_stale_layer, LooksLike.STALE_LAYER),
    "shift": Fault(_shift, LooksLike.SHIFT),
    "frozen_rows": Fault(_frozen, LooksLike.FROZEN),
}


def run(*, quick: bool) -> dict[str, Any]:
    """Everything at both precisions."""
    torch.set_num_threads(1)
    num_healthy, num_trials, num_drawn = (each[not quick] for each in (HEALTHY, TRIALS, DRAWN))
    found, named, alarms, curves, older = {}, {}, {}, {}, {}
    for precision in PRECISIONS:
        run = Run(precision)
        for _ in range(WARM_UP + num_healthy):
            run.rollout(*run.drawn())
        alarms[precision] = {
            "rollouts": num_healthy,
            "mini_batches": num_healthy * (MINI_BATCHES - 1),
            "alarms": len(run.alarms),
        }
        trials = {name: [_planted(run, fault, s) for s in range(1, num_trials + 1)] for name, fault in FAULTS.items()}
        found[precision] = {name: all(seen) for name, seen in trials.items()}
        named[precision] = {
            name: [sum(FAULTS[name].looks_like in seen for seen in of_fault), len(of_fault)]
            for name, of_fault in trials.items()
        }
        curves[precision] = _false_alarms(run, num_drawn // len(PRECISIONS))
        older[precision] = {f"{rate:g}": _older(precision, rate) for rate in RATES[: 1 if quick else None]}
    by_fault: dict[str, Any] = {name: all(found[precision][name] for precision in PRECISIONS) for name in FAULTS}
    for steps in (1, 8):
        by_fault[f"weights_{steps}_ago"] = {
            f"{precision}, {rate}": of_rate[str(steps)]["found"]
            for precision, of_rates in older.items()
            for rate, of_rate in of_rates.items()
        }
    return {
        "metrics": {
            "found": by_fault,
            "named": named,
            "older_weights": older,
            "false_alarms": {"healthy": alarms, "drawn": curves},
            **_cost(),
        },
        "baselines": {},
        "setting": {"sizes": SIZES, "sequences": SEQUENCES, "tokens": TOKENS, "warm_up": WARM_UP},
    }


def _planted(run: Run, fault: Fault, s: int) -> set[LooksLike]:
    """Plant a fault into a rollout, of which nothing is learnt, and give what the sentinel calls it."""
    _, before = run.drawn()
    text, trace = run.drawn()
    shape = SEQUENCES, TOKENS, LAYERS, PICKS
    ids = trace.expert_ids_NLK.reshape(shape).copy()
    fault.plant(ids, before.expert_ids_NLK.reshape(shape), s)
    counts, _ = run.counts(text, replace(trace, expert_ids_NLK=ids.reshape(trace.expert_ids_NLK.shape)))
    return {each.looks_like for each in copy.deepcopy(run.sentinels[0]).judge(counts)}


def _older(precision: str, learning_rate: float) -> dict[str, Any]:
    """Route a rollout by weights of some optimizer's steps ago; the more they differ, the more rows do."""
    run = Run(precision, learning_rate)
    for _ in range(2 * WARM_UP):
        run.rollout(*run.drawn())
    text, trace = run.drawn()
    now, result = _share(run.counts(text, trace)[0]), {}
    for steps in (1, MINI_BATCHES):
        counts, _ = run.counts(text, run.routes(text, steps))
        suspicions = copy.deepcopy(run.sentinels[0]).judge(counts)
        result[str(steps)] = {"share": _share(counts), "share_now": now, "found": bool(suspicions)}
    return result


def _share(counts: RootCounts) -> float:
    return round(float(counts.roots_N.mean()) / LAYERS, 4)


def _false_alarms(run: Run, num_sequences: int) -> dict[str, Any]:
    """Draw rollouts from healthy ones and judge them by the past that the run has."""
    rng, width, num_blocks = np.random.default_rng(0), 8, TOKENS // 8
    rows_ST = np.concatenate([each.roots_N for each in run.counted]).reshape(-1, TOKENS)
    blocks_SXW = rows_ST.reshape(len(rows_ST), num_blocks, width)
    at_once, chances = 1000, []
    lengths = np.full(at_once, TOKENS)
    for _ in range(num_sequences // at_once):
        of_S = rng.integers(0, len(rows_ST), (at_once, 1))
        roots_N = blocks_SXW[of_S, rng.integers(0, num_blocks, (at_once, num_blocks))].reshape(-1)
        chances += _chances(run.sentinels[0], roots_N, lengths)
    worst = min(chances, default=1.0)
    return {
        "sequences": {f"{limit:g}": sum(each <= limit for each in chances) / num_sequences for limit in THRESHOLDS},
        "of": num_sequences // at_once * at_once,
        "from": len(rows_ST),
        "least_bound": worst,
        # the variance of sums over blocks of rows by that of as many rows that were independent
        "dependence": {str(rows): _dependence(rows_ST, rows) for rows in (2, width, TOKENS)},
    }


def _dependence(rows_ST: NDArray[np.int64], width: int) -> float:
    return round(float(rows_ST.reshape(-1, width).sum(1).var() / (width * rows_ST.var())), 2)


def _chances(sentinel: Sentinel, roots_N: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[float]:
    """Give the bounds of sequences that are below one in ten."""
    loose = copy.deepcopy(sentinel)
    loose._rate = THRESHOLDS[0]
    past = loose._past.usual_L
    # layers as they always are: what is asked are sequences
    roots_L = np.round(past * len(roots_N)).astype(np.int64)
    found = loose.judge(RootCounts(roots_N, 0 * roots_N, 0 * roots_N, 0 * roots_N, roots_L, lengths))
    return [each.chance for each in found if each.sequence is not None]


class _Kept(Interceptor):
    """Keeps a pass."""

    options = RecordOptions(native=True)

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        self.seen = args, current


def _cost() -> dict[str, Any]:
    """Time a step, and what the sentinel adds to it."""
    bench, kept = Bench.of("grouped_mm"), _Kept()
    with bench.routed.replay(bench.trace), bench.routed.listening(kept):
        bench.forward()
    args, current = kept.seen
    sentinel, rows = Sentinel(bench.routed.spec), RootRows(bench.routed)

    def watch() -> None:
        rows.end_pass(0, args, current)
        sentinel.judge(rows.read(bench.trace.lengths))

    for _ in range(WARM_UP):
        watch()

    def step() -> None:
        with bench.routed.replay(bench.trace):
            bench.forward()
            bench.step()

    seconds = {"watching_s": quickest(watch, 20), "step_s": quickest(step, 4)}
    return {"cost": round(seconds["watching_s"] / seconds["step_s"], 5), **seconds, "cost_tokens": bench.trace.num_rows}
