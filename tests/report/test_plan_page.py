"""The page of a plan: its rows, tiles and finding."""

import re
import tomllib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from foreroute.costs.cluster_file import Cluster, parse_cluster
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.plan import Topology
from foreroute.plan.options import PASS_NAMES
from foreroute.report.format import duration, percentage, size, step_time
from foreroute.report.methods import BOUND
from foreroute.report.plan import plan_finding, plan_table, plan_tiles, ways_table, write_plan_page
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import TimedPlan, compare_plan
from foreroute.simulate.methods import BALANCERS
from tests.plan.random_plans import LINKS, random_counts, random_plan
from tests.report.pages import rows_of, text_of

COSTS = CostModel(
    model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"), plan_s_per_count=1e-9, begin_s=1e-6
)
ONE_NODE = Topology(4, 4, 2, LINKS)


@cache
def case(topology=None, shape=(3, 2, 4, 8), *, empty=False, at_home=()):
    topology = topology or ONE_NODE
    counts = random_counts(0, shape, most=1 if empty else 900)
    plan = random_plan(counts, topology, seed=1, moves=4)
    if at_home:
        plan = replace(plan, gains={name: 0.0 if name in at_home else 0.5 for name in PASS_NAMES}, priced_paths="host")
    problem = BalancerInput(counts, topology, plan.previous_home_LE, costs=COSTS)
    others = {name: BALANCERS[name] for name in ("static", "eplb_micro_step")}
    return compare_plan(TimedPlan(plan, {}, 0.1, 0.0123), problem, others)


def cells(table, label):
    place = table.column("Method").index(label)
    return {column.heading: cell for column, cell in zip(table.columns, table.rows[place].cells, strict=True)}


def test_everything_is_on_the_page(tmp_path):
    found = case()
    cluster, ways = Cluster(found.plan.topology, COSTS), ways_of(static=2.0, homes=1.5, plan=1.0)
    facts = {"step": "3 micro-steps"}
    html = write_plan_page(found, facts, tmp_path / "page.html", cluster=cluster, ways=ways).read_text()
    text, table = text_of(html), plan_table(found)
    assert "With less than a plan" in text
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "is not shown" not in html
    assert plan_finding(found, ways).replace("\N{NO-BREAK SPACE}", " ") in text
    for tile in plan_tiles(found):
        assert f"{tile.name} {tile.value} {tile.against}".strip().replace("\N{NO-BREAK SPACE}", " ") in text
    shown = rows_of(html)
    for row in table.rows:
        assert shown[row.cells[0]] == [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row.cells[1:]]
    assert [row.strong for row in table.rows] == [False, False, True, False]
    planned, bound = (cells(table, label) for label in ("foreroute", BOUND))
    assert planned["Experts fetched per cell"] == f"{found.plan.hosts.fetched_R.sum() / 6:.1f}"
    assert bound["Recompute and update, modelled"] == step_time(found.least_s)
    assert bound["In the worst cell"] == f"{found.least_over_mean_ML.max():.3f}"
    assert "3 micro-steps" in text
    rates = {key: value for key, (value, *_) in shown.items() if "." in key}
    assert (rates["topology.num_ranks"], rates["hardware.gemm_flops_per_s"]) == ("4", "6e+14")
    read = tomllib.loads(
        "\n".join(f"{key} = {value if value[0].isdigit() else repr(value)}" for key, value in rates.items())
    )
    assert parse_cluster(read, source="the page") == cluster, "seconds can be computed again"
    replicas, gap = plan_tiles(found)
    gap_ML = found.planned.over_mean_SMLG[0].max(axis=-1) / found.least_over_mean_ML - 1
    assert replicas.value == f"{found.plan.num_replicas_ML.mean():.1f}"
    kept = (len(found.plan.hosts.fetched_R) - found.plan.hosts.fetched_R.sum()) / 6
    assert replicas.against.startswith(f"{kept:.1f} stay in their slots")
    assert (gap.value, gap.against.split(" at most")[0]) == tuple(map(percentage, (np.median(gap_ML), gap_ML.max())))


@pytest.mark.parametrize(
    ("at_home", "begins", "tone", "titles"),
    [
        ((), "Use the plan: by the cost model, recompute and update are ", "fine", "by the plan"),
        (
            ("recompute",),
            "Use the plan in the update; the recompute runs with every expert at its home",
            "note",
            "by the plan (update)",
        ),
        (
            ("recompute", "update"),
            "Do not use the plan: both passes run with every expert at its home, where the slowest rank has",
            "warning",
            "by the plan (not run)",
        ),
    ],
)
@pytest.mark.usefixtures("unpainted")
def test_the_page_says_first_whether_to_use_the_plan(tmp_path, at_home, begins, tone, titles):
    found = paying(case(at_home=at_home))
    html = write_plan_page(found, {}, tmp_path / "page.html").read_text()
    finding = plan_finding(found)
    assert finding.startswith(begins)
    assert "as planned" not in finding, "the plan is no method beside itself"
    assert f'<p class="card finding {tone}">{finding}' in html
    assert f"; {titles} " in html
    labels = plan_table(found).column("Method")
    assert labels[2:-1] == [*["foreroute, as planned"] * bool(at_home), "foreroute"]
    if len(at_home) == 2:
        assert f"{found.methods[-1].imbalance:.3f} times the mean load. Under the plan" in finding
        assert f"would have {found.methods[-2].imbalance:.3f} times the mean, and" in finding


def priced(record, seconds):
    parts = [
        {part: value * seconds / record.training_s for part, value in parts.items()}
        for parts in (record.recompute_parts, record.update_parts)
    ]
    return replace(record, recompute_parts=parts[0], update_parts=parts[1], moves_s=0.0)


def paying(found):
    """The same in seconds in which the plan saves half."""
    return replace(found, methods=tuple(priced(one, 1.0 if one.is_plan else 2.0) for one in found.methods))


BOTH = ("planning", "votes")


@pytest.mark.parametrize(
    ("unpriced", "clock_s", "processors_s", "once_s", "said"),
    [
        ((), 9.0, 9.0, 0.0, "Use the plan:"),
        (BOTH, 0.25, 1.5, 0.0, "Use the plan:.*Planning took 250 ms here .measured., and the plan saves 1 s"),
        (BOTH, 1.5, 0.25, 0.0, "Use the plan:.*Planning took 250 ms here"),
        (BOTH, 1.5, 1.5, 0.0, "Do not use the plan in a step that waits.* 1.5 s of planning .measured.* it saves 1 s"),
        ((), 0.1, 0.1, 1.2, "Do not use the plan: once a step it takes 1.2 s of all that is priced .* it saves 1 s"),
        (BOTH[:1], 0.1, 0.1, 1.2, "Do not use the plan .*takes 100 ms of planning .measured. and 1.2 s of all"),
    ],
)
def test_what_a_plan_takes_once_a_step_is_set_beside_what_it_saves(unpriced, clock_s, processors_s, once_s, said):
    """Planning by the clock, or of the processors where others used them too."""
    found = replace(paying(case()), elapsed_s=clock_s, unpriced=unpriced, once_s=once_s)
    methods = (*found.methods[:-1], replace(found.methods[-1], planning_s=processors_s))
    finding = plan_finding(replace(found, methods=methods)).replace("\N{NO-BREAK SPACE}", " ")
    assert re.match(said, finding)
    assert ("foreroute measure" in finding) is bool(unpriced)


@pytest.mark.parametrize(
    ("moves_s", "begins", "speedup"),
    [
        (0.25, "Use the plan: by the cost model, homes that move in 250 ms, recompute and update are 1.60 times", 1.6),
        (3.0, "Do not use the plan: by the cost model, homes that move in 3 s, recompute and update are 0.50", 0.5),
    ],
)
def test_homes_that_move_are_a_cost_of_the_step(moves_s, begins, speedup):
    """Of EPLB's too, which is as fast without them."""
    found = paying(case())
    static, other, planned = found.methods
    others = [replace(other, label="moves"), replace(other, label="stays")]
    priced_others = [replace(priced(one, 1.5), moves_s=move) for one, move in zip(others, (1.0, 0.0), strict=True)]
    found = replace(found, methods=(static, *priced_others, replace(planned, moves_s=moves_s)))
    finding = plan_finding(found).replace("\N{NO-BREAK SPACE}", " ")
    assert finding.startswith(begins)
    assert f"{1.5 / (1 + moves_s):.2f} times as fast as stays, the fastest other balancer" in finding
    row = cells(plan_table(found), "foreroute")
    assert row["Speedup over static, home moves too"].startswith(f"{speedup:.2f}")
    assert row["Homes move in, modelled"] == duration(moves_s)
    assert cells(plan_table(found), "moves")["Speedup over static, home moves too"].startswith("0.80")


def ways_of(**step_s):
    """Each way by its seconds; what moves is of the last two."""
    reached = {"static": 1.55, "packing": 1.49, "homes": 1.026, "plan": 1.0}
    return tuple(
        replace(
            priced(case().methods[0], seconds - 0.25 * (name == "homes")),
            name=name,
            label=f"the {name}",
            imbalance=reached[name],
            moves_s=0.25 * (name == "homes"),
            home_bytes=2.43e9 * (name == "homes"),
            fetched_bytes=1.1e9 * (name == "plan"),
        )
        for name, seconds in step_s.items()
    )


@pytest.mark.parametrize(
    ("seconds", "enough"),
    [
        ({"static": 2.0, "packing": 1.99, "homes": 1.99, "plan": 1.981}, "the static"),
        ({"static": 2.0, "packing": 1.9, "homes": 1.9, "plan": 1.89}, "the packing"),
        ({"static": 2.0, "packing": 1.9, "homes": 1.5, "plan": 1.49}, "the homes"),
        ({"static": 2.0, "packing": 1.9, "homes": 1.5, "plan": 1.24}, "the plan"),
    ],
)
def test_what_is_enough_is_marked_among_the_ways(seconds, enough):
    ways = ways_of(**seconds)
    table = ways_table(ways)
    assert [row.cells[0] for row in table.rows if row.strong] == [enough]
    shown = [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in table.rows[2].cells]
    assert shown[:2] + shown[3:] == ["the homes", "1.026", "250 ms", "2.43 GB", ""]
    assert shown[2] == f"{seconds['homes'] - 0.25:.2f} s"


ALIKE = "If the next steps route alike, "


@pytest.mark.parametrize(
    ("seconds", "once_s", "said"),
    [
        ({"packing": 1.9, "homes": 1.5, "plan": 1.2}, 0.0, ""),
        (
            {"homes": 1.5, "plan": 1.2},
            0.1,
            f"{ALIKE}homes that move once do as well without the plan: recompute and update take 1.25 s, and 1.30 s "
            "under it, planning too.",
        ),
        (
            {"packing": 1.2, "homes": 1.45, "plan": 1.19},
            0.0,
            "Sequences packed by routes do as well without the plan: recompute and update take 1.20 s, and 1.19 s",
        ),
    ],
)
def test_the_finding_says_where_less_than_the_plan_would_do_in_the_next_steps(seconds, once_s, said):
    ways, found = ways_of(static=2.0, **seconds), replace(paying(case()), once_s=once_s)
    finding = plan_finding(found, ways).replace("\N{NO-BREAK SPACE}", " ")
    alone = plan_finding(found).replace("\N{NO-BREAK SPACE}", " ")
    assert finding.startswith(f"{alone} {said}".strip())
    assert bool(said) is (finding != alone)
    unused = replace(found, once_s=9.0)
    assert plan_finding(unused, ways) == plan_finding(unused), "nobody is told of less than what is not used"


@pytest.mark.parametrize("slots", ["layer", "shared"])
def test_memory_of_slots_is_that_of_the_layers_that_have_them(slots):
    """Counted slot by slot: of all layers with a replica, or of one and of the one fetched ahead."""
    found = case(shape=(3, 5, 4, 8))
    replicas_ML = [[0, 0, 2, 0, 0], [1, 0, 2, 0, 0], [1, 0, 0, 3, 0]]
    hosts = found.plan.hosts._replace(offsets=np.append(0, np.cumsum(replicas_ML)))
    plan = replace(found.plan, hosts=hosts, slots=slots)
    *_, memory = plan_tiles(replace(found, plan=plan), Cluster(plan.topology, COSTS))
    one = 3 * COSTS.model.hidden * COSTS.model.intermediate * 2
    assert memory.value == size(sum(one for _ in range(3 if slots == "layer" else 2) for _ in range(2)))
    assert f"up to {size(2 * one)} more" in memory.against
    empty = case(replace(ONE_NODE, redundant_slots=0))
    for found, cluster in ((empty, Cluster(empty.plan.topology, COSTS)), (case(), None)):
        assert "slots of a rank" not in " ".join(tile.name for tile in plan_tiles(found, cluster))
