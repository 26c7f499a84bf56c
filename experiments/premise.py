"""The premise of balancing by foresight, held against routes that were really made; the rules stand before the runs.

ForeMoE (arXiv 2606.11867) says that the expert load of an RL step is stable from step to step, that its micro-steps
fluctuate strongly, so that balancing by history fails, and that routes known beforehand turn prediction into planning.
Bounds are on one node of eight ranks unless a row says otherwise. A rank has two redundant slots in every method.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.arms import Arms, Figure
from experiments.rows import Row, bound_row, difference_row, ratio_row

ROUTES = "H/routes"
RANKS = (4, 8, 16)
SEQUENCES = (1, 2, 4, 8)
"""Of a rank in a micro-step."""
BASE_RANKS = 8
"""Of what is measured for one number of ranks alone."""
ORDERS = ("mixed", "even", "sorted")
"""How sequences are dealt to micro-steps; `unevenness.py` says what these are."""
STABLE = 0.9
"""Correlation of the experts' loads in steps that follow each other, above which a step is stable."""
STRONG = 2.0
"""How many times the change from step to step micro-steps swing at least when they fluctuate strongly."""
UNEVEN, EVEN = 1.1, 1.05
"""Slowest rank over the mean: above the first a cell is not balanced, below the second it is."""
MOST = 0.5
"""The part of a whole that is most of it."""
SIZES = ((1, "1 sequence a rank"), (8, "8 sequences a rank"))


def at(*path: str) -> Figure:
    """A figure by the names that lead to it."""

    def of(figures: dict[str, object]) -> float:
        found: object = figures
        for name in path:
            assert isinstance(found, dict)
            found = found[name]
        assert isinstance(found, float | int)
        return float(found)

    return of


def premise(arms: Arms) -> Iterator[Row]:
    """Every claim about loads, in the order of the argument."""
    yield ratio_row(
        "Experts specialise on kinds of text (the model of these routes)",
        "bits that an expert says about the kind, after / before learning",
        arms.ratio(ROUTES, ROUTES, at("kind_bits", "trained"), at("kind_bits", "untrained")),
        "above",
    )
    yield bound_row(
        "The load of a step is stable from step to step (ForeMoE)",
        "correlation of experts' loads, step with step before",
        arms.mean(ROUTES, at("mixed", "8x1", "step_correlation")),
        STABLE,
        "above",
    )
    for sequences, words in SIZES:
        yield from _of_micro_steps(arms, f"8x{sequences}", words)
    yield from _of_balancers(arms)


def _of_micro_steps(arms: Arms, setting: str, words: str) -> Iterator[Row]:
    yield bound_row(
        f"Micro-steps fluctuate strongly ({words}; ForeMoE)",
        "swing of micro-steps over the change from step to step, mixed",
        arms.mean(ROUTES, _over(at("mixed", setting, "swing"), at("mixed", setting, "step_change"))),
        STRONG,
        "above",
    )
    yield ratio_row(
        f"Few sequences make micro-steps swing, whatever their kinds ({words})",
        "swing, sequences with kinds dealt evenly / as many shuffled tokens",
        arms.ratio(ROUTES, ROUTES, at("even", setting, "swing"), at("shuffled", setting, "swing")),
        "above",
    )
    yield ratio_row(
        f"Chance mixtures of kinds add to it ({words})",
        "swing, mixed / kinds dealt evenly",
        arms.ratio(ROUTES, ROUTES, at("mixed", setting, "swing"), at("even", setting, "swing")),
        "above",
    )
    yield bound_row(
        f"But most of it is the number of sequences ({words})",
        "part of the variance of mixed micro-steps that is left with kinds dealt evenly, mean",
        arms.mean(ROUTES, _over(at("even", setting, "variance"), at("mixed", setting, "variance"))),
        MOST,
        "above",
    )
    yield ratio_row(
        f"Micro-steps of one kind swing more than mixed ones ({words})",
        "swing, sorted by kind / mixed",
        arms.ratio(ROUTES, ROUTES, at("sorted", setting, "swing"), at("mixed", setting, "swing")),
        "above",
    )


def _of_balancers(arms: Arms) -> Iterator[Row]:
    asked_later = "kind after kind; asked after the first seed"
    orders = [("balanced", sequences, words) for sequences, words in SIZES]
    orders += [("sorted_balanced", sequences, f"{words}, {asked_later}") for sequences, words in SIZES]
    for order, sequences, words in orders:
        imbalance = {
            name: at(order, f"8x{sequences}", name, "imbalance")
            for name in ("eplb_previous", "eplb_last", "ours", "llep")
        }
        measured = "imbalance of a cell"
        yield bound_row(
            f"The step before does not level micro-steps ({words}; ForeMoE)",
            f"{measured}, EPLB by the step before",
            arms.mean(ROUTES, imbalance["eplb_previous"]),
            UNEVEN,
            "above",
        )
        yield difference_row(
            f"The micro-step before is a worse guide than the step before ({words})",
            f"{measured}, EPLB by the micro-step before minus by the step before",
            arms.difference(ROUTES, ROUTES, imbalance["eplb_last"], imbalance["eplb_previous"]),
            "above",
        )
        yield bound_row(
            f"Routes known beforehand level them ({words}; ForeMoE)",
            f"{measured}, planned",
            arms.mean(ROUTES, imbalance["ours"]),
            EVEN,
            "below",
        )
        yield difference_row(
            f"LLEP leaves more than a plan with as many slots ({words})",
            f"{measured}, LLEP minus planned",
            arms.difference(ROUTES, ROUTES, imbalance["llep"], imbalance["ours"]),
            "above",
        )


def _over(first: Figure, second: Figure) -> Figure:
    def of(figures: dict[str, object]) -> float | None:
        above, below = first(figures), second(figures)
        return above / below if above is not None and below else None

    return of
