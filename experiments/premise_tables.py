"""The tables of part H: loads of micro-steps, what balancers leave, and generators beside real routes."""

from __future__ import annotations

from experiments.arms import Arms
from experiments.intervals import Interval
from experiments.premise import BASE_RANKS, ORDERS, RANKS, ROUTES, SEQUENCES, at
from experiments.tables import Table
from experiments.wording import interval_text, number, percent

METHODS = {
    "static": "homes alone",
    "eplb_previous": "EPLB by the step before",
    "eplb_last": "EPLB by the micro-step before",
    "eplb_step": "EPLB by this step",
    "eplb_micro_step": "EPLB by this micro-step",
    "laer": "LAER-style",
    "llep": "LLEP-style",
    "llep_free": "LLEP-style with a slot for every expert",
    "ours": "foreroute (exact)",
}
"""What methods are called, in the order of the table; the first four do not see the micro-step that they place for."""
FIGURES = {
    "step_correlation": "correlation of a step's loads with the step before",
    "step_change": "change from step to step",
    "step_imbalance": "imbalance of a step",
    "micro_correlation": "correlation of a micro-step's loads with the one before",
    "swing": "swing of micro-steps",
    "imbalance": "imbalance of micro-steps",
}


SUMMARY = ("static", "eplb_previous", "eplb_last", "eplb_micro_step", "llep", "ours")
PLACES = {
    f"{n}{words}": (loads, balanced, f"{BASE_RANKS}x{n}")
    for loads, balanced, words in (
        ("mixed", "balanced", ""),
        ("sorted", "sorted_balanced", ", one kind"),
        ("workload", "workload_balanced", ", drawn"),
    )
    for n in (SEQUENCES[0], SEQUENCES[-1])
}
"""Columns of the summary: where their loads and their balancers are."""


def summary_table(arms: Arms) -> Table:
    """Swing, then what some methods leave, by `PLACES`."""
    swing = ["swing", *(percent(_figure(arms, loads, setting, "swing").mean) for loads, _, setting in PLACES.values())]
    left = [
        [
            METHODS[name],
            *(_mean(arms, balanced, setting, name, "imbalance") for _, balanced, setting in PLACES.values()),
        ]
        for name in SUMMARY
    ]
    return [swing, *left] if ROUTES in arms else []


def facts_table(arms: Arms) -> Table:
    """What the models of the seeds learned, and how far their experts keep to kinds of text."""
    facts = {
        "loss after learning, nats per character": ("loss",),
        "tokens of a step": ("tokens",),
        "part of the variance of expert shares between sequences that kinds explain": ("kind_share",),
        "bits that an expert says about the kind before learning, of 2": ("kind_bits", "untrained"),
        "bits after learning": ("kind_bits", "trained"),
    }
    return [[words, _mean(arms, *path)] for words, path in facts.items()] if ROUTES in arms else []


def loads_table(arms: Arms) -> Table:
    """Ranks, sequences a rank, swing by order and of shuffled tokens, imbalance by order."""
    rows = []
    for ranks in RANKS:
        for sequences in SEQUENCES:
            setting = f"{ranks}x{sequences}"
            swings = [_mean(arms, order, setting, "swing") for order in ORDERS]
            tokens = _mean(arms, "shuffled", setting, "swing") if ranks == BASE_RANKS else "-"
            uneven = [_mean(arms, order, setting, "imbalance") for order in ORDERS]
            rows.append([str(ranks), str(sequences), tokens, *swings, *uneven])
    return rows if ROUTES in arms else []


def balancers_table(arms: Arms) -> Table:
    """By method: imbalance, and experts moved for a cell, by sequences a rank; then of one kind, and drawn."""
    if ROUTES not in arms:
        return []
    places = [("balanced", f"{BASE_RANKS}x{n}") for n in SEQUENCES]
    places += [
        (source, f"{BASE_RANKS}x{n}")
        for source in ("sorted_balanced", "workload_balanced")
        for n in (SEQUENCES[0], SEQUENCES[-1])
    ]
    return [
        [
            label,
            *(f"{_mean(arms, *place, name, 'imbalance')}; {_mean(arms, *place, name, 'fetches')}" for place in places),
        ]
        for name, label in METHODS.items()
    ]


def generators_table(arms: Arms) -> Table:
    """Figure by figure: real routes, two presets of `simulate.workload`, `synthetic_trace`, by sequences a rank."""
    sources = ("mixed", "workload", "calibrated", "synthetic")
    settings = [f"{BASE_RANKS}x{n}" for n in (SEQUENCES[0], SEQUENCES[-1])]
    rows = [
        [words, *(_mean(arms, source, setting, name) for setting in settings for source in sources)]
        for name, words in FIGURES.items()
    ]
    return rows if ROUTES in arms else []


def simulated_table(arms: Arms) -> Table:
    """By method: modelled seconds of homes alone over its own, on real routes and on drawn loads."""
    names = {name: METHODS[name] for name in ("eplb_previous", "eplb_micro_step", "llep")}
    names |= {"ours": "foreroute (1.02 times the mean)", "forced_balance": "forced balance"}
    sources = ("simulated", "workload_simulated")
    rows = [
        [words, *(interval_text(_figure(arms, source, name)) for source in sources)] for name, words in names.items()
    ]
    return rows if ROUTES in arms else []


def _figure(arms: Arms, *path: str) -> Interval:
    return arms.mean(ROUTES, at(*path))


def _mean(arms: Arms, *path: str) -> str:
    return number(_figure(arms, *path).mean)
