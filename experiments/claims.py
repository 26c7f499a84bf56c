"""What the papers say, held against the figures: a rule fixed before the runs gives every verdict."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.arms import Arms, Figure, collapse, growth, over_steps, reward_last, roughness, spikes, static
from experiments.grid import MINI_STEPS
from experiments.intervals import Interval, paired_ratio
from experiments.premise import premise
from experiments.rows import Row, bound_row, difference_row, ratio_row

PASSES = {
    "again": "the same batches again",
    "neighbours": "other neighbours in a batch",
    "alone": "a batch of one",
    "chunks": "chunked prefill",
    "prefix": "a reused prefix",
    "sampled": "token by token",
}
"""What the passes of `noise.py` are called; each is compared with whole sequences in batches."""
ENGINES = {"I/bfloat16": "bfloat16", "I/fp8": "fp8", "I/float32": "float32", "I/vllm": "vLLM"}
"""Of part I: the embedded engine in three precisions, and vLLM in bfloat16."""


def claims(arms: Arms) -> list[Row]:
    """Every claim for which at least one figure is there."""
    parts = (_static, _training, _replays, _others, _confirmed, premise, _noise, _long, _weak)
    return [row for part in parts for row in part(arms) if row.seeds]


def _static(arms: Arms) -> Iterator[Row]:
    for precision in ("bfloat16", "fp8"):
        moe, dense = f"A/moe/{precision}", f"A/dense/{precision}"
        none, replayed = static("none", "k3"), static("R3", "k3")
        yield ratio_row(
            f"The MoE model's mismatch is larger than a dense model's ({precision})",
            "k3, MoE / dense, without replay",
            arms.ratio(moe, dense, none),
            "above",
        )
        yield ratio_row(
            f"Routing causes the excess: R3 lowers the mismatch ({precision})",
            "k3, without / with R3",
            arms.ratio(moe, moe, none, replayed),
            "above",
        )
        yield difference_row(
            f"R3 removes the tail ({precision})",
            "F(1.5), with minus without R3",
            arms.difference(moe, moe, static("R3", "f1.5"), static("none", "f1.5")),
            "below",
        )
        yield ratio_row(
            f"Gate weights replayed too lower it a little more ({precision})",
            "k3, R3 / R3 + weights",
            arms.ratio(moe, moe, replayed, static("R3+weights", "k3")),
            "above",
        )
        yield ratio_row(
            f"A trace shifted by one token does harm ({precision})",
            "k3, shifted / without replay",
            arms.ratio(moe, moe, static("shifted", "k3"), none),
            "above",
        )


def _training(arms: Arms) -> Iterator[Row]:
    for steps in (1, 8):
        none, replayed = f"B/none/plain/{steps}", f"B/R3/plain/{steps}"
        words = f"{steps} mini-batch{'es' * (steps > 1)}"
        yield ratio_row(
            f"R3 keeps the mismatch low through RL ({words})",
            "k3 over the run, none / R3",
            arms.ratio(none, replayed, over_steps("k3")),
            "above",
        )
        yield ratio_row(
            f"Without R3 the mismatch grows through RL ({words})",
            "k3, last third / first third of the run",
            _growth(arms, none),
            "above",
        )
    for steps in MINI_STEPS:
        yield difference_row(
            f"R3 raises the reward ({steps} mini-batch{'es' if steps > 1 else '; Qwen: no gain'})",
            "reward of the last 10 steps, R3 minus none",
            arms.difference(f"B/R3/plain/{steps}", f"B/none/plain/{steps}", reward_last),
            "above",
        )


def _replays(arms: Arms) -> Iterator[Row]:
    for steps, better, claimed in ((2, "R2", "below"), (4, "R3", "above"), (8, "R3", "above")):
        for correction, words in (("plain", ""), ("tis", ", with TIS")):
            yield difference_row(
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
    for name, words in (("grad_norm", "gradient norm"), ("entropy", "entropy")):
        yield ratio_row(
            f"R3 steadies the {words} (8 mini-batches, fresh seeds; asked after the runs)",
            f"changes of the {words} between twelfths of a run over its mean, none / R3",
            arms.ratio("G/none", "G/R3", roughness(name)),
            "above",
        )


def _noise(arms: Arms) -> Iterator[Row]:
    """One engine against itself, and beside it the trainer against the same rollout."""
    for arm, engine in ENGINES.items():
        if engine == "float32":
            continue
        for name, words in PASSES.items():
            yield bound_row(
                f"One engine chooses other experts in another pass ({words}, {engine}; R3 paper)",
                "routers that differ between two passes of one engine, share",
                arms.mean(arm, static(name, "differing_share")),
                0.0,
                "above",
            )
        for name, asked in (("sampled", ""), ("chunks", "; asked after the first seed")):
            words = f"{PASSES[name]}, {engine}{asked}"
            noise = static(name, "k3")
            yield difference_row(
                f"The mismatch with the trainer is larger than the engine's own noise ({words})",
                "k3, the trainer's minus the engine's own",
                arms.difference(arm, arm, static("trainer", "k3"), noise),
                "above",
            )
            yield difference_row(
                f"R3 leaves less than the engine's own noise ({words})",
                "k3, the trainer's with R3 minus the engine's own",
                arms.difference(arm, arm, static("trainer R3", "k3"), noise),
                "below",
            )


def _long(arms: Arms) -> Iterator[Row]:
    """Runs of ten times as many steps as others."""
    words = "8 mini-batches, 400 steps"
    for arm, claim in (("none", "Without R3 the mismatch grows"), ("R3", "With R3 what is left grows too")):
        yield ratio_row(
            f"{claim} through RL ({words})",
            "k3, last third / first third of the run",
            _growth(arms, f"J/{arm}"),
            "above",
        )
    yield ratio_row(
        f"R3 keeps the mismatch low through RL ({words})",
        "k3 over the run, none / R3",
        arms.ratio("J/none", "J/R3", over_steps("k3")),
        "above",
    )
    yield from _compared(
        arms,
        (
            (f"Mismatch costs reward ({words})", "exact minus none", "J/exact", "J/none", "above"),
            (f"R3 raises the reward ({words})", "R3 minus none", "J/R3", "J/none", "above"),
            (
                f"Ten times the steps raise the reward ({words})",
                "minus 40 steps, none",
                "J/none",
                "B/none/plain/8",
                "above",
            ),
            (
                f"Ten times the steps raise the reward with R3 ({words})",
                "minus 40 steps, R3",
                "J/R3",
                "B/R3/plain/8",
                "above",
            ),
        ),
    )
    prevented = ((f"R3 prevents collapse ({words})", "R3 minus none", "J/R3", "J/none", "below"),)
    yield from _compared(arms, prevented, collapse, "share of runs that collapse")


def _weak(arms: Arms) -> Iterator[Row]:
    """From a base start: taught to a loss of 1 nat instead of 0.3."""
    words = "base start"
    none = static("none", "k3")
    yield ratio_row(
        f"A base start has more mismatch than a supervised one (fp8, {words})",
        "k3, base / supervised, without replay",
        arms.ratio("K/static", "A/moe/fp8", none),
        "above",
    )
    yield ratio_row(
        f"Routing causes the excess: R3 lowers the mismatch (fp8, {words})",
        "k3, without / with R3",
        arms.ratio("K/static", "K/static", none, static("R3", "k3")),
        "above",
    )
    yield ratio_row(
        f"R3 keeps the mismatch low through RL (8 mini-batches, {words})",
        "k3 over the run, none / R3",
        arms.ratio("K/none", "K/R3", over_steps("k3")),
        "above",
    )
    pairs = (
        (f"Mismatch costs reward (8 mini-batches, {words})", "exact minus none", "K/exact", "K/none", "above"),
        (f"R3 raises the reward (8 mini-batches, {words})", "R3 minus none", "K/R3", "K/none", "above"),
    )
    yield from _compared(arms, pairs)
    prevented = ((f"R3 prevents collapse (8 mini-batches, {words})", "R3 minus none", "K/R3", "K/none", "below"),)
    yield from _compared(arms, prevented, collapse, "share of runs that collapse")


def _compared(
    arms: Arms,
    pairs: tuple[tuple[str, str, str, str, str], ...],
    figure: Figure = reward_last,
    quantity: str = "reward of the last 10 steps",
) -> Iterator[Row]:
    """Of each claim: in words what is compared, two arms, and the side."""
    for claim, words, first, second, claimed in pairs:
        yield difference_row(claim, f"{quantity}, {words}", arms.difference(first, second, figure), claimed)


def _growth(arms: Arms, arm: str) -> Interval | None:
    grown = arms.values(arm, growth("k3"))
    return paired_ratio(grown, dict.fromkeys(grown, 1.0))
