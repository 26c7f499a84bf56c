"""The tables of `results.md` and `evidence.md`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from experiments.arms import Measure, at, growth, over_steps, reward_first, reward_last, spikes, static
from experiments.claimed import PASSES
from experiments.grid import ARMS, MINI_STEPS, PRECISIONS, REGIMES
from experiments.intervals import interval_text, percent_text
from experiments.tables import Apart, Collapsed, Row, Shown, Table
from experiments.unevenness import BASE_RANKS, ORDERS, RANKS, SEQUENCES

REPLAYS = ("none", "R3", "R3+weights", "shifted")
"""Passes of the trainer at fixed weights that the page has of an MoE and a coarse engine."""
METHODS = {
    "static": "homes alone",
    "eplb_previous": "EPLB by the step before",
    "eplb_last": "EPLB by the micro-step before",
    "eplb_step": "EPLB by this step",
    "eplb_micro_step": "EPLB by this micro-step",
    "laer": "LAER-style",
    "llep": "LLEP-style",
    "llep_free": "LLEP-style with a slot for every expert",
    "foreroute_exact": "foreroute (exact)",
}
ENGINES = {"bfloat16": "bfloat16", "fp8": "fp8", "float32": "float32", "vllm": "vLLM"}
SIMULATED = ("eplb_previous", "eplb_micro_step", "llep", "foreroute", "forced_balance")
SUMMARY = ("static", "eplb_previous", "eplb_last", "eplb_micro_step", "llep", "foreroute_exact")
SPREADS = {
    "step_correlation": "correlation of a step's loads with the step before",
    "step_change": "change from step to step",
    "step_imbalance": "imbalance of a step",
    "micro_correlation": "correlation of a micro-step's loads with the one before",
    "swing": "swing of micro-steps",
    "imbalance": "imbalance of micro-steps",
}
PLACES = ["sequences a rank", "1", "8", "1, one kind", "8, one kind", "1, drawn", "8, drawn"]
RUNS = (
    *("C/gspo/none", "C/gspo/R3", "D/frozen/none", "D/frozen/R3", "E/shifted/1", "E/shifted/8"),
    *("G/none", "G/R3", "G/exact", "G/gspo/none", "G/gspo/R3"),
)


@cache
def tables() -> dict[str, Table]:
    """Make all tables, by name; what stands above them is in the templates of the pages."""
    return {
        "static": Table(["model", "engine", "replay", "routers that differ", "k3", "F(1.5)", "F(2)"], _static_rows()),
        "replays": Table(
            ["mini-batches", "correction", "reward: no replay", "R2", "R3", "k3: no replay", "R2", "R3", "collapsed"],
            _replay_rows(),
        ),
        "runs": Table(["arm", "reward", "k3", "gradient norm > 10", "collapsed"], map(_run_row, RUNS)),
        "boundary": Table(
            ["regime", "no replay", "R3", "exact", "R3 minus no replay", "exact minus no replay"], _boundary_rows()
        ),
        "facts": Table(["mean over seeds", ""], _fact_rows()),
        "loads": Table(
            ["ranks", "sequences a rank", "swing: tokens", *ORDERS, "imbalance: mixed", *ORDERS[1:]], _load_rows()
        ),
        "balancers": Table(
            ["", "1 sequence a rank", "2", "4", "8", "sorted, 1", "sorted, 8", "drawn, 1", "drawn, 8"], _balancer_rows()
        ),
        "generators": Table(
            ["", "real, 1", "G8", "R8", "synthetic", "real, 8", "G8", "R8", "synthetic"], _generator_rows()
        ),
        "simulated": Table(["", "real routes", "drawn"], _simulated_rows()),
        "noise": Table(
            ["", *(name for engine in ENGINES.values() for name in (f"{engine}: routers", "k3"))], _noise_rows()
        ),
        "later": Table(
            ["arm", "reward of the first step", "of the last ten", "k3", "growth", "gradient norm > 10", "collapsed"],
            (_run_row(f"{part}/{arm}", is_later=True) for part in "JK" for arm in ARMS),
        ),
        "swing": Table(PLACES, _swing_rows()),
        "summary": Table(PLACES, _summary_rows()),
    }


def _routes(*path: str) -> Shown:
    return Shown(Measure("H/routes", at(*path)))


def _static_rows() -> Iterable[Row]:
    for start, model in {"moe": "MoE", "dense": "dense"}.items():
        for engine in PRECISIONS:
            arm, is_routed = f"A/{start}/{engine}", start == "moe"
            for replay in REPLAYS if is_routed and engine != "float32" else REPLAYS[:1]:
                k3, tail, far, differing = (
                    Measure(arm, static(replay, name)) for name in ("k3", "f1.5", "f2", "differing_share")
                )
                # replayed routes never differ, and a dense model has none
                share = Shown(differing, percent_text) if is_routed and replay == "none" else "-"
                yield model, engine, replay, share, Shown(k3, interval_text), Shown(tail), Shown(far)


def _replay_rows() -> Iterable[Row]:
    for batches in MINI_STEPS:
        for correction, words in {"plain": "none", "tis": "TIS"}.items():
            arms = [f"B/{routing}/{correction}/{batches}" for routing in ("none", "R2", "R3")]
            figures = [Shown(Measure(arm, metric)) for metric in (reward_last, over_steps("k3")) for arm in arms]
            yield (str(batches), words, *figures, Collapsed(tuple(arms)))


def _run_row(arm: str, *, is_later: bool = False) -> Row:
    reward, k3 = Shown(Measure(arm, reward_last), interval_text), Shown(Measure(arm, over_steps("k3")))
    common = Shown(Measure(arm, spikes), percent_text), Collapsed((arm,))
    if not is_later:
        return (f"`{arm}`", reward, k3, *common)
    return (f"`{arm}`", Shown(Measure(arm, reward_first)), reward, k3, Shown(Measure(arm, growth("k3"))), *common)


def _boundary_rows() -> Iterable[Row]:
    regimes = {"part B, 8 mini-batches": ("B/none/plain/8", "B/R3/plain/8", "F/part B/exact")}
    regimes |= {name: (f"F/{name}/none", f"F/{name}/R3", f"F/{name}/exact") for name in REGIMES}
    for regime, arms in regimes.items():
        none, *others = (Measure(arm, reward_last) for arm in arms)
        runs = [(Shown(Measure(arm, reward_last)), Collapsed((arm,))) for arm in arms]
        yield (regime, *runs, *(Apart(other, none) for other in others))


def _fact_rows() -> Iterable[Row]:
    yield "loss after learning, nats per character", _routes("loss")
    yield "tokens of a step", _routes("tokens")
    yield "part of the variance of expert shares between sequences that kinds explain", _routes("kind_share")
    yield "bits that an expert says about the kind before learning, of 2", _routes("kind_bits", "untrained")
    yield "bits after learning", _routes("kind_bits", "trained")


def _load_rows() -> Iterable[Row]:
    for ranks in RANKS:
        for sequences in SEQUENCES:
            size = f"{ranks}x{sequences}"
            dealt = [_routes(order, size, figure) for figure in ("swing", "imbalance") for order in ORDERS]
            yield (
                str(ranks),
                str(sequences),
                _routes("shuffled", size, "swing") if ranks == BASE_RANKS else "-",
                *dealt,
            )


def _balancer_rows() -> Iterable[Row]:
    places = [("balanced", f"8x{n}") for n in SEQUENCES]
    places += [(order, f"8x{n}") for order in ("sorted_balanced", "workload_balanced") for n in (1, 8)]
    for method, words in METHODS.items():
        yield (words, *(tuple(_routes(*at, method, name) for name in ("imbalance", "fetches")) for at in places))


def _generator_rows() -> Iterable[Row]:
    made = ("mixed", "workload", "calibrated", "synthetic")
    for figure, words in SPREADS.items():
        yield (words, *(_routes(each, size, figure) for size in ("8x1", "8x8") for each in made))


def _simulated_rows() -> Iterable[Row]:
    named = METHODS | {"foreroute": "foreroute (1.02 times the mean)", "forced_balance": "forced balance"}
    for method in SIMULATED:
        figures = (Measure("H/routes", at(of, method)) for of in ("simulated", "workload_simulated"))
        yield (named[method], *(Shown(figure, interval_text) for figure in figures))


def _noise_rows() -> Iterable[Row]:
    sides = {"trainer": "the trainer, its own routes", "trainer R3": "the trainer, R3"}
    for side, words in (sides | {name: f"the engine, {words}" for name, words in PASSES.items()}).items():
        row: list[str | Shown] = [words]
        for engine in ENGINES:
            arm = f"I/{engine}"
            share = Shown(Measure(arm, static(side, "differing_share")), percent_text)
            row += ["-" if side == "trainer R3" else share, Shown(Measure(arm, static(side, "k3")))]
        yield tuple(row)


def _summary_rows() -> Iterable[Row]:
    orders = ("balanced", "sorted_balanced", "workload_balanced")
    for method in SUMMARY:
        places = ((order, size) for order in orders for size in ("8x1", "8x8"))
        yield (METHODS[method], *(_routes(*place, method, "imbalance") for place in places))


def _swing_rows() -> Iterable[Row]:
    orders = ("mixed", "sorted", "workload")
    figures = (Measure("H/routes", at(order, size, "swing")) for order in orders for size in ("8x1", "8x8"))
    yield ("swing", *(Shown(figure, percent_text) for figure in figures))
