"""The page: what it says follows from the results, and nothing else."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from experiments.__main__ import PAGE, RESULTS
from experiments.arms import Arms, at, metric, reward_first, reward_last
from experiments.arms import static as static_of
from experiments.claims import claims, entries, verdict
from experiments.grid import ARMS, FEW, FRESH, SEEDS, grid
from experiments.intervals import Interval
from experiments.page import figures_text, page_text, write_page
from experiments.plots import PICTURES
from experiments.runner import current, digest_of
from experiments.tables import layouts, table
from experiments.unevenness import RANKS, SEQUENCES
from experiments.wording import interval_text, number

ROUTES = "H/routes"
PASSES = layouts()["noise"]["each"]["pass"][2:]
METHODS = dict(zip(*(layouts()["balancers"]["each"][name] for name in ("method", "words")), strict=True))
K3 = {"none": 4e-3, "R3": 1e-4, "R3+weights": 9e-5, "shifted": 2.0}


def line(cell, reward=0.5):
    """Of a cell: figures that vary with the seed by a known factor."""
    factor = 1 + 0.1 * cell.seed
    return {
        "cell": cell.name,
        "digest": digest_of(cell),
        "arm": cell.arm,
        "seed": cell.seed,
        "figures": figures(cell, factor, reward),
        "processor_s": 36.0,
        "versions": {"torch": "2.13.0"},
    }


def figures(cell, factor, reward):
    if cell.kind == "routes":
        return routes(cell.seed)
    if cell.kind in ("noise", "served"):
        found = noise(factor)
        return found if cell.kind == "noise" else {name: found[name] for name in found if name != "neighbours"}
    return static(cell, factor) if cell.kind == "static" else run(cell, factor, reward)


def routes(seed):
    """Steps as stable, micro-steps as uneven and balancers as good as a believer expects."""
    noise = 0.001 * seed
    swings = {"shuffled": 0.05, "even": 0.1, "mixed": 0.11, "sorted": 0.3, "workload": 0.2, "calibrated": 0.1}
    swings["synthetic"] = 0.02
    steps = {"step_correlation": 0.97, "step_change": 0.03, "step_imbalance": 1.2, "micro_correlation": 0.5}
    settings = [f"{ranks}x{sequences}" for ranks in RANKS for sequences in SEQUENCES]
    loads = {
        order: {
            setting: {name: value + noise for name, value in steps.items()}
            | {"swing": swing + noise, "variance": swing**2, "imbalance": 1.5 + noise}
            for setting in settings
        }
        for order, swing in swings.items()
    }
    left = {"eplb_previous": 1.4, "eplb_last": 1.6, "llep": 1.2, "ours": 1.01}
    balanced = {
        setting: {name: {"imbalance": left.get(name, 1.3) + noise, "fetches": 3.0} for name in METHODS}
        for setting in settings
    }
    gains = dict.fromkeys(("eplb_previous", "eplb_micro_step", "llep", "ours", "forced_balance"), 1.2)
    return loads | {
        "loss": 1.5,
        "tokens": 24000.0,
        "kind_share": 0.8,
        "kind_bits": {"untrained": 0.1 + noise, "trained": 0.4},
        "balanced": balanced,
        "sorted_balanced": deepcopy(balanced),
        "workload_balanced": balanced,
        "simulated": gains,
        "workload_simulated": gains,
    }


def static(cell, factor):
    dense = cell.start == "dense"
    names = ["none"] if dense else list(K3)
    share = 1e-3 if dense else 1e-2
    return {
        name: {"k3": (2e-4 if dense else K3[name]) * factor, "f2": share, "f1.5": share, "differing_share": 0.02}
        for name in names
    }


def noise(factor):
    """An engine whose passes differ a little, and are the same when repeated."""
    passes = {name: {"k3": 1e-3 * factor, "differing_share": 1e-3 * factor} for name in PASSES}
    trainer = {"trainer": {"k3": 4e-3 * factor, "differing_share": 0.02}}
    trainer["trainer R3"] = {"k3": 1e-4 * factor, "differing_share": 0.0}
    return passes | trainer | {"again": {"k3": 0.0, "differing_share": 0.0}}


def run(cell, factor, reward):
    mean = {"k3": 1e-3 * factor, "f2": 1e-4, "clip_share": 0.01}
    mini_steps = cell.settings["rl"]["mini_steps"]
    stale = [] if cell.settings["rl"]["routing"] == "none" else [0.01 * n for n in range(mini_steps)]
    return {
        "reward": [reward] * 60,
        "reward_last": reward + 0.001 * cell.seed,
        "reward_mean": reward,
        "collapsed_at": None,
        "diverged": False,
        "spikes": 0.25,
        "mean": mean,
        "binned": {"k3": [1e-3] * 4 + [2e-3] * 4 + [3e-3 * factor] * 4}
        | dict.fromkeys(("grad_norm", "entropy"), [2.0, 1.0 + 0.1 * factor] * 6),
        "stale_share_by_mini_step": stale,
    }


def results_of(cells, **changes):
    return {cell.name: line(cell, **changes) for cell in cells}


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
    cells = grid()
    arms = {cell.arm for cell in cells}
    for entry in entries():
        assert {
            *entry.get("ratio", ()),
            *entry.get("difference", ()),
            *([entry["arm"]] if "arm" in entry else ()),
        } <= arms
        assert ("{" in str(entry)) is False or "each" not in entry
    assert len({(entry["claim"], entry["measured"]) for entry in entries()}) == len(entries()) == 114
    with pytest.raises(KeyError):
        metric("no_such:metric")
    done = Arms(results_of(cells))
    assert all(len(table(name, done)) == len(next(iter(layout["each"].values()))) for name, layout in layouts().items())


def test_an_interval_near_a_round_number_shows_its_ends():
    assert interval_text(Interval(1.0002, 1.0001, 1.0004, 5)) == "1.0002 [1.0001, 1.0004]"
    assert interval_text(Interval(0.5, 0.4, 0.6, 5), signed=True) == "+0.5 [0.4, 0.6]"
    assert interval_text(Interval(0.0, 0.0, 0.0, 5)) == "0 [0, 0]"


def test_the_page_tells_what_every_arm_of_a_regime_did():
    """Also where no replay collapses less, or where an exact engine brings more."""
    text, regimes = PAGE.read_text(), {row[0]: row[1:] for row in table("boundary", Arms(current(grid(), RESULTS)))}
    none, replayed, exact = (cell.partition("; ")[2] for cell in regimes["learning rate 8e-4"][:3])
    assert (none, replayed, exact) == ("0/5", "2/5", "2/5")
    assert f"{none} runs collapse without replay, {replayed} with R3 and\n  {exact} with an exact engine" in text
    assert (
        f"an exact engine changes the reward by {regimes['12 operands'][4]}, and R3 by\n  {regimes['12 operands'][3]}"
        in text
    )


def test_claims_are_decided_by_the_arms_that_they_name():
    cells = grid()
    done = results_of(cells)
    for cell in cells:
        if cell.arm == "B/R3/plain/8":
            done[cell.name]["figures"]["reward_last"] += 0.1 + 0.001 * (cell.seed % 2)
    verdicts = {row.claim: row for row in claims(Arms(done))}
    for row in verdicts.values():
        seeds = (
            FRESH if "fresh seeds" in row.claim else FEW if "400 steps" in row.claim or "vLLM" in row.claim else SEEDS
        )
        assert row.seeds == len(seeds), row.claim
    for claim, expected in {
        "Routing causes the excess: R3 lowers the mismatch (fp8)": "holds",
        "The MoE model's mismatch is larger than a dense model's (bfloat16)": "holds",
        "R3 raises the reward (8 mini-batches)": "holds",
        "R3 raises the reward (1 mini-batch; Qwen: no gain)": "not shown",
        "R3 is the better replay at 8 mini-batches (Qwen)": "holds",
        "TIS on top of R3 is worse than R3 (8 mini-batches)": "holds",
        "Without R3 the mismatch grows through RL (8 mini-batches)": "holds",
        "GSPO + R3 is better than GSPO (8 mini-batches)": "not shown",
    }.items():
        assert verdicts[claim].verdict == expected, claim
    assert verdicts["Routing causes the excess: R3 lowers the mismatch (fp8)"].found.startswith("40 times")


def test_claims_about_loads_follow_from_bounds_and_comparisons():
    done = results_of([cell for cell in grid() if cell.kind == "routes"])
    found = {row.claim: row for row in claims(Arms(done))}
    assert {row.verdict for row in found.values()} == {"holds"}
    assert len(found) == 28
    assert found["But most of it is the number of sequences (8 sequences a rank)"].found.startswith("0.826")
    for line in done.values():
        line["figures"]["mixed"]["8x1"] |= {"swing": 0.05, "step_correlation": 0.9}
        line["figures"]["balanced"]["8x8"]["ours"]["imbalance"] = 1.06
    changed = {row.claim: row.verdict for row in claims(Arms(done)) if row.verdict != "holds"}
    assert changed == {
        "The load of a step is stable from step to step (ForeMoE)": "not shown",
        "Micro-steps fluctuate strongly (1 sequence a rank; ForeMoE)": "the opposite",
        "Chance mixtures of kinds add to it (1 sequence a rank)": "the opposite",
        "Routes known beforehand level them (8 sequences a rank; ForeMoE)": "the opposite",
    }
    row = next(row for row in table("loads", Arms(done)) if row[:2] == ["8", "2"])
    assert row == ["8", "2", "0.052", "0.112", "0.102", "0.302", "1.5", "1.5", "1.5"]


def test_tables_hold_means_over_seeds():
    done = results_of(grid())
    row = next(row for row in table("static", Arms(done)) if row[:3] == ["MoE", "bfloat16", "none"])
    assert row[3] == "2 %"
    assert row[4].startswith(f"{K3['none'] * 1.2:.3g} [")
    assert row[5:] == ["0.01", "0.01"]
    regimes = table("boundary", Arms(done))
    assert len(regimes) == 6
    assert all(row[1].endswith("; 0/5") for row in regimes)


def test_a_page_without_results_says_so(tmp_path):
    write_page(grid(), tmp_path / "results.jsonl", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert f"0 of {len(grid())} cells" in text
    assert (tmp_path / "results.md").read_text().count("Not finished.") == len(layouts()) - 2
    assert not list((tmp_path / "page").iterdir())


@pytest.mark.slow
def test_a_page_of_a_part_of_the_grid_is_whole(tmp_path):
    cells = [cell for cell in grid() if cell.seed < 2]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(one) + "\n" for one in results_of(cells).values()))
    write_page(grid(), results, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    drawn = [path.name for path in (tmp_path / "page").iterdir()]
    assert set(drawn) == {f"{name}.svg" for name in PICTURES}
    assert all(f"(page/{picture})" in text for picture in drawn)
    assert "too few seeds. [All of them" in text
    assert "| too few seeds |" in (tmp_path / "results.md").read_text()


def test_the_page_in_the_documentation_is_that_of_the_results():
    done = current(grid(), RESULTS)
    folder = PAGE.with_suffix("")
    pictures = {name: words for name, (_, words) in PICTURES.items() if (folder / f"{name}.svg").exists()}
    expected = page_text(grid(), done, pictures, PAGE.stem)
    assert Path(PAGE).read_text() == expected, "redraw it with: python -m experiments page"
    assert RESULTS.with_suffix(".md").read_text() == figures_text(grid(), done)


def test_what_the_page_says_in_short_rests_on_verdicts():
    found = {row.claim: row.verdict for row in claims(Arms(current(grid(), RESULTS)))}
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
    arms = Arms(current(grid(), RESULTS))

    def mean(*path):
        return arms.mean(ROUTES, at(*path)).mean

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
    arms = Arms(current(grid(), RESULTS))
    for arm in ("I/bfloat16", "I/fp8"):
        for name in ("again", "neighbours", "prefix"):
            assert set(arms.values(arm, static_of(name, "max_abs_log_ratio")).values()) == {0.0}
    for name in set(PASSES) - {"neighbours"}:
        for measure in ("max_abs_log_ratio", "differing_share"):
            assert list(arms.values("I/vllm", static_of(name, measure)).values()) == [0.0] * len(FEW)
    found = {row.claim: row.verdict for row in claims(arms)}
    chunks = "One engine chooses other experts in another pass (chunked prefill, {}; R3 paper)"
    assert [found[chunks.format(engine)] for engine in ("bfloat16", "fp8", "vLLM")] == ["holds", "holds", "not shown"]


def test_what_the_page_says_of_long_runs_and_base_starts_rests_on_figures():
    arms = Arms(current(grid(), RESULTS))
    for arm in ARMS:
        assert arms.collapsed(f"J/{arm}") == (0, len(FEW))
        assert all(0.71 < reward < 0.96 for reward in arms.values(f"J/{arm}", reward_last).values())
        assert arms.collapsed(f"K/{arm}") == (0, len(SEEDS))
        first, last = (arms.mean(f"K/{arm}", figure).mean for figure in (reward_first, reward_last))
        assert last < first == pytest.approx(0.2, abs=0.01)


def test_the_tables_of_planner_and_simulator_are_those_of_the_results():
    arms = Arms(current(grid(), RESULTS))

    def row(label, *paths):
        return "| " + " | ".join([label, *(number(arms.mean(ROUTES, at(*path)).mean) for path in paths)]) + " |"

    places = ("balanced", "sorted_balanced", "workload_balanced")
    left = ("static", "eplb_previous", "eplb_micro_step", "llep", "ours")
    planner = [row(METHODS[name], *((place, "8x1", name, "imbalance") for place in places)) for name in left]
    assert "\n".join(planner) in (PAGE.parent / "simulate.md").read_text()
    simulated = [row[:1] + [cell.partition(" ")[0] for cell in row[1:]] for row in table("simulated", arms)]
    rows = [f"| {' | '.join(row)} |" for row in simulated]
    text = (PAGE.parent / "simulate.md").read_text()
    assert "\n".join(rows) in text
    swings = [
        arms.mean(ROUTES, at("workload", size, "swing")).mean / arms.mean(ROUTES, at("mixed", size, "swing")).mean
        for size in ("8x1", "8x8")
    ]
    assert f"swing {swings[0]:.1f} to {swings[1]:.1f} times as much" in text
