"""What the papers say, held against the figures: a rule fixed before the runs gives every verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.arms import Arms, Figure, growth, over_steps, reward_last, spikes, static
from experiments.grid import MINI_STEPS
from experiments.intervals import Interval, paired_difference, paired_ratio
from experiments.wording import interval_text

ENOUGH = 3
"""Seeds below which there is no verdict."""

NOT_SHOWN = "not shown"
VERDICTS = ("holds", "the opposite", NOT_SHOWN, "too few seeds")


@dataclass(frozen=True)
class Row:
    """One line of the table of claims.

    Attributes:
        claim: in words, with who says it.
        measured: the quantity, a comma, and what is compared.
        found: the estimate and its interval, in words.
        verdict: one of `VERDICTS`.
        seeds: how many.
    """

    claim: str
    measured: str
    found: str
    verdict: str
    seeds: int

    @property
    def quantity(self) -> str:
        """What is measured."""
        return self.measured.partition(", ")[0]

    @property
    def compared(self) -> str:
        """Of which arms, or of which part of them."""
        return self.measured.partition(", ")[2]


def claims(arms: Arms) -> list[Row]:
    """Every claim for which at least one figure is there."""
    return [row for part in (_static, _training, _replays, _others, _confirmed) for row in part(arms) if row.seeds]


def verdict(interval: Interval | None, null: float, claimed: str) -> str:
    """By the 95 % interval of one comparison.

    Args:
        interval: of the difference or ratio.
        null: its value if there is no effect: 0 or 1.
        claimed: "above" or "below" the null.
    """
    holds, opposite, not_shown, too_few = VERDICTS
    if interval is None or interval.seeds < ENOUGH:
        return too_few
    if not interval.excludes(null):
        return not_shown
    return holds if (interval.mean > null) == (claimed == "above") else opposite


def _static(arms: Arms) -> Iterator[Row]:
    for precision in ("bfloat16", "fp8"):
        moe, dense = f"A/moe/{precision}", f"A/dense/{precision}"
        none, replayed = static("none", "k3"), static("R3", "k3")
        yield _ratio(
            f"The MoE model's mismatch is larger than a dense model's ({precision})",
            "k3, MoE / dense, without replay",
            arms.ratio(moe, dense, none),
            "above",
        )
        yield _ratio(
            f"Routing causes the excess: R3 lowers the mismatch ({precision})",
            "k3, without / with R3",
            arms.ratio(moe, moe, none, replayed),
            "above",
        )
        yield _difference(
            f"R3 removes the tail ({precision})",
            "F(1.5), with minus without R3",
            _within(arms, moe, static("R3", "f1.5"), static("none", "f1.5")),
            "below",
        )
        yield _ratio(
            f"Gate weights replayed too lower it a little more ({precision})",
            "k3, R3 / R3 + weights",
            arms.ratio(moe, moe, replayed, static("R3+weights", "k3")),
            "above",
        )
        yield _ratio(
            f"A trace shifted by one token does harm ({precision})",
            "k3, shifted / without replay",
            arms.ratio(moe, moe, static("shifted", "k3"), none),
            "above",
        )


def _training(arms: Arms) -> Iterator[Row]:
    for steps in (1, 8):
        none, replayed = f"B/none/plain/{steps}", f"B/R3/plain/{steps}"
        words = f"{steps} mini-batch{'es' * (steps > 1)}"
        yield _ratio(
            f"R3 keeps the mismatch low through RL ({words})",
            "k3 over the run, none / R3",
            arms.ratio(none, replayed, over_steps("k3")),
            "above",
        )
        yield _ratio(
            f"Without R3 the mismatch grows through RL ({words})",
            "k3, last third / first third of the run",
            _growth(arms, none),
            "above",
        )
    for steps in MINI_STEPS:
        yield _difference(
            f"R3 raises the reward ({steps} mini-batch{'es' if steps > 1 else '; Qwen: no gain'})",
            "reward of the last 10 steps, R3 minus none",
            arms.difference(f"B/R3/plain/{steps}", f"B/none/plain/{steps}", reward_last),
            "above",
        )


def _replays(arms: Arms) -> Iterator[Row]:
    for steps, better, claimed in ((2, "R2", "below"), (4, "R3", "above"), (8, "R3", "above")):
        for correction, words in (("plain", ""), ("tis", ", with TIS")):
            yield _difference(
                f"{better} is the better replay at {steps} mini-batches{words} (Qwen)",
                "reward of the last 10 steps, R3 minus R2",
                arms.difference(f"B/R3/{correction}/{steps}", f"B/R2/{correction}/{steps}", reward_last),
                claimed,
            )


def _others(arms: Arms) -> Iterator[Row]:
    pairs = (
        (
            "GSPO + R3 is better than GSPO (8 mini-batches)",
            "with minus without R3",
            "C/gspo/R3",
            "C/gspo/none",
            "above",
        ),
        (
            "R3 is better than GSPO (8 mini-batches; asked after the runs)",
            "R3 minus GSPO",
            "B/R3/plain/8",
            "C/gspo/none",
            "above",
        ),
        (
            "TIS on top of R3 is worse than R3 (1 mini-batch)",
            "with minus without TIS",
            "B/R3/tis/1",
            "B/R3/plain/1",
            "below",
        ),
        (
            "TIS on top of R3 is worse than R3 (8 mini-batches)",
            "with minus without TIS",
            "B/R3/tis/8",
            "B/R3/plain/8",
            "below",
        ),
        ("R3 is better than TIS (1 mini-batch)", "R3 minus TIS", "B/R3/plain/1", "B/none/tis/1", "above"),
        ("R3 is better than TIS (8 mini-batches)", "R3 minus TIS", "B/R3/plain/8", "B/none/tis/8", "above"),
        (
            "With frozen routers R3 still helps (8 mini-batches)",
            "R3 minus none",
            "D/frozen/R3",
            "D/frozen/none",
            "above",
        ),
        ("Shifted routes do harm in RL (1 mini-batch)", "shifted minus none", "E/shifted/1", "B/none/plain/1", "below"),
        (
            "Shifted routes do harm in RL (8 mini-batches)",
            "shifted minus none",
            "E/shifted/8",
            "B/none/plain/8",
            "below",
        ),
        (
            "Mismatch costs reward at all (8 mini-batches)",
            "exact minus none",
            "F/part B/exact",
            "B/none/plain/8",
            "above",
        ),
    )
    yield from _compared(arms, pairs)


def _confirmed(arms: Arms) -> Iterator[Row]:
    """On seeds of their own."""
    pairs = (
        ("Mismatch costs reward (8 mini-batches, fresh seeds)", "exact minus none", "G/exact", "G/none", "above"),
        ("R3 raises the reward (8 mini-batches, fresh seeds)", "R3 minus none", "G/R3", "G/none", "above"),
        (
            "R3 leaves less reward than no mismatch at all (8 mini-batches, fresh seeds)",
            "R3 minus exact",
            "G/R3",
            "G/exact",
            "below",
        ),
        (
            "GSPO + R3 is better than GSPO (8 mini-batches, fresh seeds)",
            "with minus without R3",
            "G/gspo/R3",
            "G/gspo/none",
            "above",
        ),
        (
            "R3 is better than GSPO (8 mini-batches, fresh seeds; asked after the runs)",
            "R3 minus GSPO",
            "G/R3",
            "G/gspo/none",
            "above",
        ),
    )
    yield from _compared(arms, pairs)
    spiking = (
        (
            "R3 spares the run gradient spikes (8 mini-batches; asked after the runs)",
            "R3 minus none",
            "B/R3/plain/8",
            "B/none/plain/8",
            "below",
        ),
        (
            "R3 spares the run gradient spikes (8 mini-batches, fresh seeds; asked after the runs)",
            "R3 minus none",
            "G/R3",
            "G/none",
            "below",
        ),
    )
    yield from _compared(arms, spiking, spikes, "share of steps with a gradient norm above 10")


def _compared(
    arms: Arms,
    pairs: tuple[tuple[str, str, str, str, str], ...],
    figure: Figure = reward_last,
    quantity: str = "reward of the last 10 steps",
) -> Iterator[Row]:
    """Of each claim: in words what is compared, two arms, and the side."""
    for claim, words, first, second, claimed in pairs:
        yield _difference(claim, f"{quantity}, {words}", arms.difference(first, second, figure), claimed)


def _within(arms: Arms, arm: str, first: Figure, second: Figure) -> Interval:
    return paired_difference(arms.values(arm, first), arms.values(arm, second))


def _growth(arms: Arms, arm: str) -> Interval | None:
    grown = arms.values(arm, growth("k3"))
    return paired_ratio(grown, dict.fromkeys(grown, 1.0))


def _ratio(claim: str, measured: str, interval: Interval | None, claimed: str) -> Row:
    return _row(claim, measured, interval, 1.0, claimed, " times")


def _difference(claim: str, measured: str, interval: Interval, claimed: str) -> Row:
    return _row(claim, measured, interval, 0.0, claimed, "")


def _row(claim: str, measured: str, interval: Interval | None, null: float, claimed: str, unit: str) -> Row:
    found = "" if interval is None else interval_text(interval, unit, signed=not null)
    return Row(claim, measured, found, verdict(interval, null, claimed), 0 if interval is None else interval.seeds)
