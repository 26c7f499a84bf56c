"""The page: what it says follows from the results, and nothing else."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import PAGE, RESULTS
from experiments.arms import Arms, Measure, at, reward_first, reward_last
from experiments.arms import static as static_of
from experiments.claimed import PASSES, claims
from experiments.claims import judged, verdict
from experiments.grid import ARMS, FEW, FRESH, SEEDS, grid
from experiments.intervals import Interval, interval_text
from experiments.page import figures_text, page_text, write_page
from experiments.page_tables import tables
from experiments.plots import PICTURES
from experiments.runner import current

ROUTES = "H/routes"
KEPT = current(grid(), RESULTS)


def planted(arm, change):
    """The results that are kept, with `change(figures, seed)` in the cells of an arm."""
    lines = {name: deepcopy(line) for name, line in KEPT.items() if line["arm"] == arm}
    for line in lines.values():
        change(line["figures"], line["seed"])
    return KEPT | lines


def decided(results):
    return {row.claim: row for row in judged(claims(), Arms(results))}


def table(name, arms):
    return tables()[name].lines(arms)


def changed_verdicts(results):
    before = decided(KEPT)
    return {claim: row.verdict for claim, row in decided(results).items() if row.verdict != before[claim].verdict}


@pytest.mark.parametrize(
    ("low", "high", "seeds", "expected"),
    [
        (0.1, 0.3, 5, "holds"),
        (-0.3, -0.1, 5, "the opposite"),
        (-0.1, 0.3, 5, "not shown"),
        (0.1, 0.3, 2, "too few seeds"),
    ],
)
def test_verdicts_follow_from_the_interval(low, high, seeds, expected):
    interval = Interval((low + high) / 2, low, high, seeds)
    assert verdict(interval, 0.0, "above") == expected
    mirrored = Interval(-interval.mean, -high, -low, seeds)
    assert verdict(mirrored, 0.0, "below") == expected


def test_every_claim_and_table_asks_for_arms_and_figures_of_the_grid():
    arms = {cell.arm for cell in grid()}
    for claim in claims():
        measures = claim.effect.first, getattr(claim.effect, "second", None)
        assert {measure.arm for measure in measures if measure} <= arms
    assert len({(claim.words, claim.quantity) for claim in claims()}) == len(claims()) == 114
    done = Arms(KEPT)
    assert all(len(table.lines(done)) == len(table.rows) for table in tables().values())


def test_an_interval_near_a_round_number_shows_its_ends():
    assert interval_text(Interval(1.0002, 1.0001, 1.0004, 5)) == "1.0002 [1.0001, 1.0004]"
    assert interval_text(Interval(0.5, 0.4, 0.6, 5), signed=True) == "+0.5 [0.4, 0.6]"
    assert interval_text(Interval(0.0, 0.0, 0.0, 5)) == "0 [0, 0]"


def test_the_page_tells_what_every_arm_of_a_regime_did():
    """Also where no replay collapses less, or where an exact engine brings more."""
    text, regimes = PAGE.read_text(), {row[0]: row[1:] for row in table("boundary", Arms(KEPT))}
    none, replayed, exact = (cell.partition("; ")[2] for cell in regimes["learning rate 8e-4"][:3])
    assert (none, replayed, exact) == ("0/5", "2/5", "2/5")
    assert f"{none} runs collapse without replay, {replayed} with R3 and\n  {exact} with an exact engine" in text
    assert (
        f"an exact engine changes the reward by {regimes['12 operands'][4]}, and R3 by\n  {regimes['12 operands'][3]}"
        in text
    )


def test_claims_are_decided_by_the_arms_that_they_name():
    for claim, row in decided(KEPT).items():
        seeds = FRESH if "fresh seeds" in claim else FEW if "400 steps" in claim or "vLLM" in claim else SEEDS
        assert row.seeds == len(seeds), claim

    def better(figures, seed):
        figures["reward_last"] += 1 + 0.001 * (seed % 2)

    assert changed_verdicts(planted("B/R3/plain/8", better)) == {
        "R3 raises the reward (8 mini-batches)": "holds",
        "R3 is the better replay at 8 mini-batches (Qwen)": "holds",
        "R3 is better than GSPO (8 mini-batches; asked after the runs)": "holds",
        "TIS on top of R3 is worse than R3 (8 mini-batches)": "holds",
        "R3 is better than TIS (8 mini-batches)": "holds",
        "Ten times the steps raise the reward with R3 (8 mini-batches, 400 steps)": "the opposite",
    }

    def apart(figures, seed):
        figures["none"]["k3"], figures["R3"]["k3"] = 4e-3 * (1 + seed), 1e-4 * (1 + seed)

    fp8 = decided(planted("A/moe/fp8", apart))["Routing causes the excess: R3 lowers the mismatch (fp8)"]
    assert fp8.found.startswith("40 times")

    def grows(figures, seed):
        figures["binned"]["k3"] = [1.0] * 4 + [2.0] * 4 + [3.0 + 0.1 * seed] * 4

    grown = decided(planted("B/none/plain/8", grows))["Without R3 the mismatch grows through RL (8 mini-batches)"]
    assert grown.found.startswith("3.2 times")


def test_tables_hold_means_over_seeds():
    def change(figures, seed):
        figures["none"] |= {"k3": 4e-3 * (1 + 0.1 * seed), "f2": 0.01, "f1.5": 0.01, "differing_share": 0.02}

    rows = table("static", Arms(planted("A/moe/bfloat16", change)))
    (row,) = [row for row in rows if row[:3] == ["MoE", "bfloat16", "none"]]
    assert row[3] == "2 %"
    assert row[4].startswith("0.0048 [")
    assert row[5:] == ["0.01", "0.01"]


def test_a_page_without_results_says_so(tmp_path):
    write_page(grid(), tmp_path / "results.jsonl", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert f"0 of {len(grid())} cells" in text
    assert (tmp_path / "results.md").read_text().count("Not finished.") == len(tables()) - 2
    assert not list((tmp_path / "page").iterdir())


@pytest.mark.slow
def test_a_page_of_a_part_of_the_grid_is_whole(tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in KEPT.values() if line["seed"] < 2))
    write_page(grid(), results, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    drawn = [path.name for path in (tmp_path / "page").iterdir()]
    assert set(drawn) == {f"{name}.svg" for name in PICTURES}
    assert all(f"(page/{picture})" in text for picture in drawn)
    assert "too few seeds. [All of them" in text
    assert "| too few seeds |" in (tmp_path / "results.md").read_text()


def test_the_page_in_the_documentation_is_that_of_the_results():
    folder = PAGE.with_suffix("")
    pictures = {name: words for name, (_, words) in PICTURES.items() if (folder / f"{name}.svg").exists()}
    expected = page_text(grid(), KEPT, pictures, PAGE.stem)
    assert Path(PAGE).read_text() == expected, "redraw it with: python -m experiments page"
    assert RESULTS.with_suffix(".md").read_text() == figures_text(grid(), KEPT)


def test_what_the_page_says_in_short_rests_on_verdicts():
    found = {claim: row.verdict for claim, row in decided(KEPT).items()}
    fresh = "(8 mini-batches, fresh seeds)"
    said = {
        "holds": [
            "Routing causes the excess: R3 lowers the mismatch (bfloat16)",
            "Routing causes the excess: R3 lowers the mismatch (fp8)",
            "R3 keeps the mismatch low through RL (8 mini-batches)",
            "R3 spares the run gradient spikes (8 mini-batches, fresh seeds; asked after the runs)",
            "R3 steadies the gradient norm (8 mini-batches, fresh seeds; asked after the runs)",
            "Shifted routes do harm in RL (1 mini-batch)",
            "Shifted routes do harm in RL (8 mini-batches)",
            "Mismatch costs reward at all (8 mini-batches)",
            "GSPO + R3 is better than GSPO (8 mini-batches)",
            "The load of a step is stable from step to step (ForeMoE)",
            "Micro-steps fluctuate strongly (1 sequence a rank; ForeMoE)",
            "The step before does not level micro-steps (1 sequence a rank; ForeMoE)",
            "R3 keeps the mismatch low through RL (8 mini-batches, 400 steps)",
            "Routing causes the excess: R3 lowers the mismatch (fp8, base start)",
            *(claim for claim in found if "Routes known beforehand level them" in claim),
            *(claim for claim in found if "The step before does not" in claim and "kind after kind" in claim),
        ],
        "the opposite": [
            *(claim for claim in found if "most of it is the number of sequences" in claim),
            "The step before does not level micro-steps (8 sequences a rank; ForeMoE)",
        ],
        "not shown": [
            "R3 steadies the entropy (8 mini-batches, fresh seeds; asked after the runs)",
            "Experts specialise on kinds of text (the model of these routes)",
            "Without R3 the mismatch grows through RL (8 mini-batches, 400 steps)",
            "Mismatch costs reward (8 mini-batches, 400 steps)",
            "R3 raises the reward (8 mini-batches, 400 steps)",
            "A base start has more mismatch than a supervised one (fp8, base start)",
            *(claim for claim in found if "reward (8 mini-batches, base start)" in claim),
            f"Mismatch costs reward {fresh}",
            f"R3 raises the reward {fresh}",
            f"GSPO + R3 is better than GSPO {fresh}",
            "R3 is better than GSPO (8 mini-batches, fresh seeds; asked after the runs)",
            *(claim for claim in found if "is the better replay" in claim or "TIS" in claim),
        ],
    }
    for verdict_said, those in said.items():
        assert {claim: found[claim] for claim in those} == dict.fromkeys(those, verdict_said)


def test_what_the_page_says_of_loads_rests_on_figures():
    arms = Arms(KEPT)

    def mean(*path):
        return arms.mean(Measure(ROUTES, at(*path))).mean

    for setting in ("8x1", "8x8"):
        drawn, mixed = ([mean(of, setting, name) for name in ("swing", "step_change")] for of in ("workload", "mixed"))
        assert drawn[0] > 2 * mixed[0]
        assert drawn[1] > 3 * mixed[1]
        made_up = [mean("synthetic", setting, name) for name in ("swing", "step_change")]
        assert all(2 / 3 < ours / real < 4 / 3 for ours, real in zip(made_up, mixed, strict=True))
        calibrated = [mean("calibrated", setting, name) for name in ("swing", "imbalance")]
        real = [mean("mixed", setting, name) for name in ("swing", "imbalance")]
        assert calibrated == pytest.approx(real, rel=0.08)
        assert mean("calibrated", setting, "step_change") < 1.5 * mixed[1]
    plans, history = (
        [mean(on, name) for on in ("simulated", "workload_simulated")] for name in ("ours", "eplb_previous")
    )
    assert plans[0] == pytest.approx(plans[1], rel=0.03)
    assert history[0] > 1.05 * history[1]


def test_what_the_page_says_of_the_engines_own_noise_rests_on_figures():
    arms = Arms(KEPT)
    for arm in ("I/bfloat16", "I/fp8"):
        for name in ("again", "neighbours", "prefix"):
            assert set(arms.values(Measure(arm, static_of(name, "max_abs_log_ratio"))).values()) == {0.0}
    for name in set(PASSES) - {"neighbours"}:
        for measure in ("max_abs_log_ratio", "differing_share"):
            assert list(arms.values(Measure("I/vllm", static_of(name, measure))).values()) == [0.0] * len(FEW)
    found = {row.claim: row.verdict for row in judged(claims(), arms)}
    chunks = "One engine chooses other experts in another pass (chunked prefill, {}; R3 paper)"
    assert [found[chunks.format(engine)] for engine in ("bfloat16", "fp8", "vLLM")] == ["holds", "holds", "not shown"]


def test_what_the_page_says_of_long_runs_and_base_starts_rests_on_figures():
    arms = Arms(KEPT)
    for arm in ARMS:
        assert arms.collapsed(f"J/{arm}") == (0, len(FEW))
        assert all(0.71 < reward < 0.96 for reward in arms.values(Measure(f"J/{arm}", reward_last)).values())
        assert arms.collapsed(f"K/{arm}") == (0, len(SEEDS))
        first, last = (arms.mean(Measure(f"K/{arm}", metric)).mean for metric in (reward_first, reward_last))
        assert last < first == pytest.approx(0.2, abs=0.01)


def test_the_table_of_the_simulator_is_that_of_the_results():
    arms = Arms(KEPT)
    simulated = [row[:1] + [cell.partition(" ")[0] for cell in row[1:]] for row in table("simulated", arms)]
    rows = [f"| {' | '.join(row)} |" for row in simulated]
    text = (PAGE.parent / "simulate.md").read_text()
    assert "\n".join(rows) in text
    drawn, real = (
        [arms.mean(Measure(ROUTES, at(of, size, "swing"))).mean for size in ("8x1", "8x8")]
        for of in ("workload", "mixed")
    )
    swings = np.divide(drawn, real)
    assert f"swing {swings[0]:.1f} to {swings[1]:.1f} times as much" in text
