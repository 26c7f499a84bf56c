"""The claims of papers about replay and about loads, part by part of the grid."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from experiments.arms import (
    Measure,
    Metric,
    at,
    collapse,
    growth,
    over,
    over_steps,
    reward_last,
    roughness,
    spikes,
    static,
)
from experiments.claims import Claim, Difference, Level, Ratio, Side

ENGINES = ("bfloat16", "fp8")
BATCHES = {1: "1 mini-batch", 8: "8 mini-batches"}
SIZES = {"8x1": "1 sequence a rank", "8x8": "8 sequences a rank"}
"""Ranks and sequences of a rank in a micro-step, in words."""
DEALT = {
    ("balanced", "8x1"): SIZES["8x1"],
    ("balanced", "8x8"): SIZES["8x8"],
    ("sorted_balanced", "8x1"): f"{SIZES['8x1']}, kind after kind; asked after the first seed",
    ("sorted_balanced", "8x8"): f"{SIZES['8x8']}, kind after kind; asked after the first seed",
}
"""How sequences are dealt to micro-steps that are balanced, and how many, in words."""
PASSES = {
    "again": "the same batches again",
    "neighbours": "other neighbours in a batch",
    "alone": "a batch of one",
    "chunks": "chunked prefill",
    "prefix": "a reused prefix",
    "sampled": "token by token",
}
"""Passes of an engine over the same tokens (`noise.py`), in words."""
SELF = {"bfloat16": "bfloat16", "fp8": "fp8", "vllm": "vLLM"}
"""Engines that are held against themselves, in words."""
REWARD = "reward of the last 10 steps"


@cache
def claims() -> tuple[Claim, ...]:
    """List all claims, in the order of the page."""
    parts = (_fixed_weights, _training, _fresh_seeds, _loads, _balance, _noise, _long_runs, _base_start)
    return tuple(claim for part in parts for claim in part())


def _fixed_weights() -> Iterator[Claim]:
    """Claim what A measures: mismatch at fixed weights."""

    def of(model: str, engine: str, replay: str, name: str = "k3") -> Measure:
        return Measure(f"A/{model}/{engine}", static(replay, name))

    for engine in ENGINES:
        effect = Ratio(of("moe", engine, "none"), of("dense", engine, "none"))
        words = f"The MoE model's mismatch is larger than a dense model's ({engine})"
        yield Claim(words, "k3", "MoE / dense, without replay", effect)
    for engine in ENGINES:
        words = f"Routing causes the excess: R3 lowers the mismatch ({engine})"
        yield Claim(words, "k3", "without / with R3", Ratio(of("moe", engine, "none"), of("moe", engine, "R3")))
    for engine in ENGINES:
        tail = Difference(of("moe", engine, "R3", "f1.5"), of("moe", engine, "none", "f1.5"))
        yield Claim(f"R3 removes the tail ({engine})", "F(1.5)", "with minus without R3", tail, "below")
    for engine in ENGINES:
        words = f"Gate weights replayed too lower it a little more ({engine})"
        effect = Ratio(of("moe", engine, "R3"), of("moe", engine, "R3+weights"))
        yield Claim(words, "k3", "R3 / R3 + weights", effect)
    for engine in ENGINES:
        effect = Ratio(of("moe", engine, "shifted"), of("moe", engine, "none"))
        words = f"A trace shifted by one token does harm ({engine})"
        yield Claim(words, "k3", "shifted / without replay", effect)


def _training() -> Iterator[Claim]:
    """Claim what B to F measure: runs of RL."""
    for batches, words in BATCHES.items():
        yield _lasting(words, f"B/none/plain/{batches}", f"B/R3/plain/{batches}")
    for batches, words in BATCHES.items():
        yield _growing(f"Without R3 the mismatch grows through RL ({words})", f"B/none/plain/{batches}")
    for batches in (1, 2, 4, 8):
        words = f"{BATCHES[1]}; Qwen: no gain" if batches == 1 else f"{batches} mini-batches"
        yield _reward(f"R3 raises the reward ({words})", "R3 minus none", "B/R3/plain/{}", "B/none/plain/{}", batches)
    for batches in (2, 4, 8):
        side: Side = "below" if batches == 2 else "above"
        better = "R2" if batches == 2 else "R3"
        for correction, words in {"plain": "", "tis": ", with TIS"}.items():
            claim = f"{better} is the better replay at {batches} mini-batches{words} (Qwen)"
            first, second = f"B/R3/{correction}/{{}}", f"B/R2/{correction}/{{}}"
            yield _reward(claim, "R3 minus R2", first, second, batches, side)
    yield _reward("GSPO + R3 is better than GSPO (8 mini-batches)", "with minus without R3", "C/gspo/R3", "C/gspo/none")
    words = "R3 is better than GSPO (8 mini-batches; asked after the runs)"
    yield _reward(words, "R3 minus GSPO", "B/R3/plain/8", "C/gspo/none")
    for batches, size in BATCHES.items():
        words = f"TIS on top of R3 is worse than R3 ({size})"
        yield _reward(words, "with minus without TIS", "B/R3/tis/{}", "B/R3/plain/{}", batches, "below")
    for batches, size in BATCHES.items():
        yield _reward(f"R3 is better than TIS ({size})", "R3 minus TIS", "B/R3/plain/{}", "B/none/tis/{}", batches)
    words = "With frozen routers R3 still helps (8 mini-batches)"
    yield _reward(words, "R3 minus none", "D/frozen/R3", "D/frozen/none")
    for batches, size in BATCHES.items():
        words = f"Shifted routes do harm in RL ({size})"
        yield _reward(words, "shifted minus none", "E/shifted/{}", "B/none/plain/{}", batches, "below")
    words = "Mismatch costs reward at all (8 mini-batches)"
    yield _reward(words, "exact minus none", "F/part B/exact", "B/none/plain/8")


def _fresh_seeds() -> Iterator[Claim]:
    """Claim what G measures, on seeds that had no part in its questions."""
    fresh, late = "(8 mini-batches, fresh seeds)", "(8 mini-batches, fresh seeds; asked after the runs)"
    yield _reward(f"Mismatch costs reward {fresh}", "exact minus none", "G/exact", "G/none")
    yield _reward(f"R3 raises the reward {fresh}", "R3 minus none", "G/R3", "G/none")
    words = f"R3 leaves less reward than no mismatch at all {fresh}"
    yield _reward(words, "R3 minus exact", "G/R3", "G/exact", side="below")
    yield _reward(f"GSPO + R3 is better than GSPO {fresh}", "with minus without R3", "G/gspo/R3", "G/gspo/none")
    yield _reward(f"R3 is better than GSPO {late}", "R3 minus GSPO", "G/R3", "G/gspo/none")
    for asked, replayed, native in (
        ("(8 mini-batches; asked after the runs)", "B/R3/plain/8", "B/none/plain/8"),
        (late, "G/R3", "G/none"),
    ):
        effect = Difference(Measure(replayed, spikes), Measure(native, spikes))
        quantity = "share of steps with a gradient norm above 10"
        yield Claim(f"R3 spares the run gradient spikes {asked}", quantity, "R3 minus none", effect, "below")
    for name, words in {"grad_norm": "gradient norm", "entropy": "entropy"}.items():
        steadier = Ratio(Measure("G/none", roughness(name)), Measure("G/R3", roughness(name)))
        quantity = f"changes of the {words} between twelfths of a run over its mean"
        yield Claim(f"R3 steadies the {words} {late}", quantity, "none / R3", steadier)


def _loads() -> Iterator[Claim]:
    """Claim what H measures of loads.

    ForeMoE says that the expert load of an RL step is stable from step to step, that its micro-steps fluctuate
    strongly, so that balancing by history fails, and that routes known beforehand turn prediction into planning. The
    bounds stood before the runs: *stable* is a correlation above 0.9, *strongly* at least twice the change from step
    to step, *not level* an imbalance above 1.1, *level* one below 1.05.
    """
    bits = Ratio(_routes(at("kind_bits", "trained")), _routes(at("kind_bits", "untrained")))
    words = "Experts specialise on kinds of text (the model of these routes)"
    yield Claim(words, "bits that an expert says about the kind", "after / before learning", bits)
    stable = Level(_routes(at("mixed", "8x1", "step_correlation")), 0.9)
    words = "The load of a step is stable from step to step (ForeMoE)"
    yield Claim(words, "correlation of experts' loads", "step with step before", stable)
    for size, words in SIZES.items():
        strong = Level(_routes(over(at("mixed", size, "swing"), at("mixed", size, "step_change"))), 2.0)
        quantity = "swing of micro-steps over the change from step to step"
        yield Claim(f"Micro-steps fluctuate strongly ({words}; ForeMoE)", quantity, "mixed", strong)
    for claim, compared, above, below in (
        (
            "Few sequences make micro-steps swing, whatever their kinds",
            "sequences with kinds dealt evenly / as many shuffled tokens",
            "even",
            "shuffled",
        ),
        ("Chance mixtures of kinds add to it", "mixed / kinds dealt evenly", "mixed", "even"),
    ):
        yield from _swings(claim, compared, above, below)
    for size, words in SIZES.items():
        left = Level(_routes(over(at("even", size, "variance"), at("mixed", size, "variance"))), 0.5)
        quantity = "part of the variance of mixed micro-steps that is left with kinds dealt evenly"
        yield Claim(f"But most of it is the number of sequences ({words})", quantity, "mean", left)
    yield from _swings(
        "Micro-steps of one kind swing more than mixed ones", "sorted by kind / mixed", "sorted", "mixed"
    )


def _balance() -> Iterator[Claim]:
    """Claim what H measures of balancers."""

    def of(dealt: tuple[str, str], method: str) -> Measure:
        return _routes(at(*dealt, method, "imbalance"))

    quantity = "imbalance of a cell"
    for dealt, words in DEALT.items():
        claim = f"The step before does not level micro-steps ({words}; ForeMoE)"
        yield Claim(claim, quantity, "EPLB by the step before", Level(of(dealt, "eplb_previous"), 1.1))
    for dealt, words in DEALT.items():
        guide = Difference(of(dealt, "eplb_last"), of(dealt, "eplb_previous"))
        claim = f"The micro-step before is a worse guide than the step before ({words})"
        yield Claim(claim, quantity, "EPLB by the micro-step before minus by the step before", guide)
    for dealt, words in DEALT.items():
        claim = f"Routes known beforehand level them ({words}; ForeMoE)"
        yield Claim(claim, quantity, "planned", Level(of(dealt, "foreroute_exact"), 1.05), "below")
    for dealt, words in DEALT.items():
        claim = f"LLEP leaves more than a plan with as many slots ({words})"
        yield Claim(claim, quantity, "LLEP minus planned", Difference(of(dealt, "llep"), of(dealt, "foreroute_exact")))


def _noise() -> Iterator[Claim]:
    """Claim what I measures: one engine against itself, and beside it the trainer against the same rollout."""

    def of(arm: str, side: str, name: str = "k3") -> Measure:
        return Measure(f"I/{arm}", static(side, name))

    for arm, engine in SELF.items():
        for name, words in PASSES.items():
            if (arm, name) == ("vllm", "neighbours"):
                continue  # vLLM chooses who stands beside whom
            claim = f"One engine chooses other experts in another pass ({words}, {engine}; R3 paper)"
            quantity = "routers that differ between two passes of one engine"
            yield Claim(claim, quantity, "share", Level(of(arm, name, "differing_share"), 0.0))
    asked = {"sampled": "token by token, {}", "chunks": "chunked prefill, {}; asked after the first seed"}
    for arm, engine in SELF.items():
        for name, words in asked.items():
            claim = f"The mismatch with the trainer is larger than the engine's own noise ({words.format(engine)})"
            effect = Difference(of(arm, "trainer"), of(arm, name))
            yield Claim(claim, "k3", "the trainer's minus the engine's own", effect)
    for arm, engine in SELF.items():
        for name, words in asked.items():
            claim = f"R3 leaves less than the engine's own noise ({words.format(engine)})"
            effect = Difference(of(arm, "trainer R3"), of(arm, name))
            yield Claim(claim, "k3", "the trainer's with R3 minus the engine's own", effect, "below")


def _long_runs() -> Iterator[Claim]:
    """Claim what J measures: ten times the steps."""
    long = "(8 mini-batches, 400 steps)"
    yield _growing(f"Without R3 the mismatch grows through RL {long}", "J/none")
    yield _growing(f"With R3 what is left grows too through RL {long}", "J/R3")
    yield _lasting("8 mini-batches, 400 steps", "J/none", "J/R3")
    yield _reward(f"Mismatch costs reward {long}", "exact minus none", "J/exact", "J/none")
    yield _reward(f"R3 raises the reward {long}", "R3 minus none", "J/R3", "J/none")
    words = f"Ten times the steps raise the reward {long}"
    yield _reward(words, "minus 40 steps, none", "J/none", "B/none/plain/8")
    words = f"Ten times the steps raise the reward with R3 {long}"
    yield _reward(words, "minus 40 steps, R3", "J/R3", "B/R3/plain/8")
    for part, words in {"J": "400 steps", "K": "base start"}.items():
        effect = Difference(Measure(f"{part}/R3", collapse), Measure(f"{part}/none", collapse))
        claim = f"R3 prevents collapse (8 mini-batches, {words})"
        yield Claim(claim, "share of runs that collapse", "R3 minus none", effect, "below")


def _base_start() -> Iterator[Claim]:
    """Claim what K measures: runs from a base start, taught to a loss of 1 nat instead of 0.3."""
    none, replayed = (Measure("K/static", static(replay, "k3")) for replay in ("none", "R3"))
    words = "A base start has more mismatch than a supervised one (fp8, base start)"
    supervised = Measure("A/moe/fp8", static("none", "k3"))
    yield Claim(words, "k3", "base / supervised, without replay", Ratio(none, supervised))
    words = "Routing causes the excess: R3 lowers the mismatch (fp8, base start)"
    yield Claim(words, "k3", "without / with R3", Ratio(none, replayed))
    yield _lasting("8 mini-batches, base start", "K/none", "K/R3")
    for words, arm in {"Mismatch costs reward": "exact", "R3 raises the reward": "R3"}.items():
        yield _reward(f"{words} (8 mini-batches, base start)", f"{arm} minus none", f"K/{arm}", "K/none")


def _reward(words: str, compared: str, first: str, second: str, batches: int = 0, side: Side = "above") -> Claim:
    """Compare rewards of two arms, in whose names {} stands for mini-batches."""
    above, below = (Measure(arm.format(batches), reward_last) for arm in (first, second))
    return Claim(words, REWARD, compared, Difference(above, below), side)


def _lasting(words: str, none: str, replayed: str) -> Claim:
    """Compare k3 of whole runs."""
    effect = Ratio(Measure(none, over_steps("k3")), Measure(replayed, over_steps("k3")))
    return Claim(f"R3 keeps the mismatch low through RL ({words})", "k3 over the run", "none / R3", effect)


def _growing(words: str, arm: str) -> Claim:
    """Compare k3 of the end of a run with that of its beginning."""
    return Claim(words, "k3", "last third / first third of the run", Ratio(Measure(arm, growth("k3"))))


def _swings(words: str, compared: str, above: str, below: str) -> Iterator[Claim]:
    """Compare the swing of micro-steps that are dealt in two ways, by their size."""
    for size, name in SIZES.items():
        effect = Ratio(_routes(at(above, size, "swing")), _routes(at(below, size, "swing")))
        yield Claim(f"{words} ({name})", "swing", compared, effect)


def _routes(metric: Metric) -> Measure:
    """A figure of the routes that were really made."""
    return Measure("H/routes", metric)
