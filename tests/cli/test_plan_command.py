"""`foreroute plan` as a user meets it."""

import html
import re
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest

import foreroute as fr
from foreroute.costs.cluster_file import load_cluster
from foreroute.layout import pack_sequences
from foreroute.plan import PlanOptions, Topology, load_plan, save_plan, verify
from foreroute.plan.counts import packed_counts, save_counts, tokens_digest
from foreroute.planner.homes import place_homes
from foreroute.report.format import size, step_time
from foreroute.simulate.compare import compare_plan, timed_plan
from foreroute.simulate.methods import BALANCERS
from foreroute.simulate.step_files import read_step
from foreroute.simulate.ways import ways_to_level
from foreroute.testing.routes import synthetic_trace
from tests.cli.command import CLUSTER, foreroute, refused
from tests.plan.random_plans import LINKS
from tests.tiers import grid
from tests.traces import random_trace, spec_of

pytestmark = pytest.mark.usefixtures("unpainted")


def plan(words, folder):
    return foreroute("plan", *words.split(), cwd=folder, columns=80)


def read(folder, paths, token_budget=40, **options):
    cluster = load_cluster(folder / "cluster.toml")
    options = PlanOptions(**options)
    return read_step(paths, cluster.topology, cluster.costs, token_budget=token_budget, options=options)


def counts(seed=0):
    """Every layer routes the same tokens of a rank, to two experts each."""
    rng = np.random.default_rng(seed)
    share = rng.pareto(2.0, (3, 2, 1, 8))
    drawn = rng.multinomial(rng.poisson(160, (3, 1, 4)), share / share.sum(axis=3, keepdims=True))
    return drawn + np.roll(drawn, 1, axis=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A topology, counts, and two traces of one step, as `foreroute demo` writes them."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "cluster.toml").write_text(CLUSTER)
    save_counts(counts(), folder / "counts.safetensors")
    save_counts(counts(1), folder / "before.safetensors")
    two = Topology(2, 2, 0, LINKS)
    save_plan(fr.planner.plan(np.ones((1, 2, 2, 8), np.int64), two), folder / "two.safetensors")
    for n in range(2):
        trace = synthetic_trace(spec_of(), [20, 12, 12, 12, 12, 20, 12, 20], seed=n, correlation=0.7)
        fr.save(trace, folder / f"step-{n:06d}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda counts: counts, ""),
        (lambda counts: counts // 4, "layer 1 has .* of rank 0 in micro-step 0: layer 0 .* layers route"),
        (lambda counts: np.concatenate([counts[..., :1] + 1, counts[..., 1:]], axis=3), "no multiple of top_k 2"),
        (lambda counts: np.stack([counts.sum(-1), *[0 * counts.sum(-1)] * 7], -1), "one expert has more than 1/2 of"),
        (lambda counts: counts[:, :, :1].repeat(4, axis=2), "all ranks have the same counts"),
        (lambda counts: counts * (np.arange(4) < 2)[:, None], "ranks 2, 3 have no tokens"),
        (lambda counts: counts[:, [1, 1]], "layers 0 and 1 have the same counts"),
        (lambda counts: np.full_like(counts, 40), ""),
    ],
)
def test_counts_that_no_step_has_are_told(files, tmp_path, change, told):
    save_counts(change(counts()), tmp_path / "counts.safetensors")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read(files, tmp_path / "counts.safetensors")
    assert [bool(re.search(told, str(each.message))) for each in found] == [True] * bool(told)


def test_counts_to_table_plan_and_page(files, tmp_path):
    output = tmp_path / "out.safetensors"
    given = f"counts.safetensors --topology cluster.toml --output {output}"
    result = plan(f"{given} --previous before.safetensors --set home_moves=2", files)
    lines = result.stdout.splitlines()
    for label in ("static", "EPLB, previous step", "EPLB, per micro-step", "foreroute", "lower bound"):
        assert sum(line.startswith(f"{label} ") and "\N{MULTIPLICATION SIGN}" in line for line in lines) == 1
    assert "modelled" in result.stdout
    found = load_plan(output)
    verify(found, counts(), PlanOptions(home_moves=2))
    page = output.with_suffix(".html").read_text()
    for made in (rf"foreroute {fr.__version__}, \d{{4}}-\d\d-\d\d: ", "--set home_moves=2", "cluster.toml"):
        assert re.search(made, page)
    assert "4 ranks in nodes of 2," in result.said
    for shown in (page, result.stdout):
        words = " ".join(shown.split())
        assert "Use the plan" in words or "Do not use the plan" in words
        loaded = f"load_plan('{output}'), then routed.execute: docs/experts.md"
        assert (loaded in html.unescape(words)) == ("Use the plan" in words)
        assert re.search(r"of the model's 48 layers.*assignments: [\d,]+ tokens at top-2", html.unescape(words))
    warm = f"before.safetensors --previous {output} --output {tmp_path / 'next.safetensors'} --no-baselines"
    result = plan(f"--topology cluster.toml {warm} --set threads=2", files)
    assert np.array_equal(load_plan(tmp_path / "next.safetensors").previous_home_LE, found.home_LE)
    assert "EPLB" not in result.stdout


def slowest_over_mean(counts_MLGE, home_LE):
    over, num_ranks = [], counts_MLGE.shape[2]
    for m, layer in np.ndindex(counts_MLGE.shape[:2]):
        loads_E = counts_MLGE[m, layer].sum(axis=0)
        over.append(max(sum(loads_E[home_LE[layer] == rank]) for rank in range(num_ranks)) * num_ranks / loads_E.sum())
    return f"{np.mean(over):.3f}"


def test_what_is_reached_with_less_than_the_plan(files, tmp_path):
    """Of traces packed by routes, and homes moved: the figures by loops."""
    traces, home_LE = sorted(files.glob("step-*.safetensors")), np.tile(np.arange(8) // 2, (3, 1))
    step = read(files, traces)
    both, moved_LE = step.sequences().with_homes(step.topology, home_LE)
    model, output = step.costs.model, tmp_path / "a.safetensors"
    given = f"{' '.join(path.name for path in traces)} --token-budget 40"
    result = plan(f"{given} --topology cluster.toml --no-baselines --output {output}", files)
    found = dict(re.findall(r"^(\w[\w, ]*\w) {2,}(\d.*)$", result.stdout, re.MULTILINE))
    assert found["as it is"].split()[0] == slowest_over_mean(step.counts_MLGE, home_LE)
    packed = step.sequences().packed_for(home_LE).counts_MLGE()
    assert found["packed by routes"].split()[0] == slowest_over_mean(packed, home_LE)
    assert found["packed by routes, homes moved"].split()[0] == slowest_over_mean(both.counts_MLGE(), moved_LE)
    moved = (moved_LE != home_LE).sum() * model.expert_parameters * (model.weight_bytes + 12) / 4
    assert [label for label, line in found.items() if size(moved) in line] == ["packed by routes, homes moved"]


def test_attention_is_priced_by_the_lengths_of_the_sequences(files, tmp_path):
    """By loops, of all that the page compares."""
    step = read(files, traces := sorted(files.glob("step-*.safetensors")))
    lengths_S, attention_s = np.concatenate([fr.load(path).lengths for path in traces]), 0.0
    for m in range(step.packing.num_micro_steps):
        held = [lengths_S[step.packing.sequences(m, rank)] for rank in range(4)]
        # no last token has a route
        attention_s += 3 * max(step.costs.attention_seconds(sum(own - 1), sum(own**2)) for own in held)
    found, static = timed_plan(step, PlanOptions(home_moves=2)), {"static": BALANCERS["static"]}
    compared, level = compare_plan(found, step, static), compare_plan(found, replace(step, squares_MG=None), static)
    ways = [way for way in ways_to_level(found.plan, step, step.costs, None) if way.name != "homes"]
    assert [one.recompute_parts["attention"] for one in (*compared.methods, *ways)] == pytest.approx([attention_s] * 4)
    without, bounds = level.methods[0].training_s, (level.least_s, compared.least_s)
    assert compared.methods[0].training_s - without == pytest.approx(bounds[1] - bounds[0]) != 0
    saved = []  # by the decision on a pass, which knows the lengths too
    for one in (step, replace(step, squares_MG=None)):
        found = timed_plan(one, PlanOptions())
        saved.append(
            found.plan.gains["recompute"] * sum(compare_plan(found, one, static).methods[0].recompute_parts.values())
        )
    assert saved[0] == pytest.approx(saved[1])
    given = f"--topology cluster.toml --token-budget 40 --no-baselines --output {tmp_path / 'a.safetensors'}"
    shown = plan(f"{' '.join(path.name for path in traces)} {given}", files).said.replace("\N{NO-BREAK SPACE}", " ")
    assert f" {step_time(compared.methods[0].training_s)} ".replace("\N{NO-BREAK SPACE}", " ") in shown


def test_traces_are_packed_by_length_or_by_routes_for_the_homes_of_the_step(files, tmp_path):
    traces = sorted(files.glob("step-*.safetensors"))
    loaded = [fr.load(path) for path in traces]
    by_length = read(files, traces)
    lengths = np.concatenate([trace.lengths for trace in loaded])
    packing = pack_sequences(lengths, 4, 40, square_cost=by_length.costs.square_cost)
    assert np.array_equal(by_length.counts_MLGE, packed_counts(loaded, packing))
    for moves in (0, 3):
        step = read(files, traces, packing="routes", home_moves=moves)
        home_LE = place_homes(by_length.counts_MLGE, step.topology, step.home_LE, max_moves=moves)
        found = step.packing.certificate
        loads_MLE = step.counts_MLGE.sum(axis=2)
        onto_LEG = home_LE[..., None] == np.arange(4)
        assert found.slowest == np.einsum("mle,leg->mlg", loads_MLE, onto_LEG).max(axis=2).sum()
        assert found.slowest < found.by_length
        assert np.array_equal(step.counts_MLGE, packed_counts(loaded, step.packing))
    named, output = " ".join(path.name for path in traces), tmp_path / "plan.safetensors"
    given = f"{named} --topology cluster.toml --token-budget 40 --no-baselines --output {output}"
    assert "16 sequences by length, at most 40 tokens" in plan(given, files).said
    assert "16 sequences by routes" in plan(f"{given} --overwrite --set packing=routes --set home_moves=3", files).said
    made = load_plan(output)
    verify(made, step.counts_MLGE, PlanOptions(home_moves=3))
    assert made.tokens_digest == tokens_digest(loaded)
    assert np.array_equal(made.packing.micro_step_S, step.packing.micro_step_S)


def test_traces_of_other_weights_than_the_first_are_warned_of(files, tmp_path):
    """Rollouts that share a version may be of one step, where weights changed underway."""
    first, second = (fr.load(path) for path in sorted(files.glob("step-*.safetensors")))
    mixed = fr.concatenate([second.select([0]).with_weight_version(6), second.select([1]).with_weight_version(7)])
    told = {"6": first.with_weight_version(6), "7": second.with_weight_version(7), "mixed": mixed}
    for name, trace in told.items():
        fr.save(trace, tmp_path / name)
    with pytest.warns(UserWarning, match=r"7 .*versions \[7\], others under \[6\]"):
        read(files, [tmp_path / "6", tmp_path / "7"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # by way of "mixed"
        read(files, [tmp_path / each for each in ("6", "7", "mixed")])


def test_rows_that_were_not_recorded_are_told(files, tmp_path):
    """All but the last of a sequence, which was sampled and never computed."""
    trace = fr.load(sorted(files.glob("step-*.safetensors"))[0])
    ids_NLK = np.where(trace.valid_N[:, None, None], trace.expert_ids_NLK.astype(int), -1)
    routes = np.split(ids_NLK, trace.offsets[1:-1])
    for rows in routes:
        rows[:2] = -1
    tokens = [trace.tokens(s) for s in range(len(trace))]
    fr.save(fr.RoutingTrace.from_sequences(trace.spec, tokens, routes), tmp_path / "gaps")
    gaps = sum(min(2, len(rows) - 1) for rows in routes)
    with pytest.warns(UserWarning, match=rf"{gaps} of {sum(trace.lengths)} tokens .*no routes"):
        read(files, [tmp_path / "gaps"])


@grid(
    ("words", "message"),
    [
        ("counts.safetensors step-000000.safetensors", "counts of a whole step; leave out the 1 other"),
        ("counts.safetensors --token-budget 40", "--token-budget is for traces"),
        ("counts.safetensors --set packing=routes", "packing=routes is for traces; counts are packed"),
        ("counts.safetensors --set home-moves=2", "home-moves: unknown key; did you mean home_moves?"),
        ("counts.safetensors --previous three.safetensors", "has 3 layers of 8 experts"),
        ("counts.safetensors --previous two.safetensors", "is a plan of [2, 8] layers and experts on 2 ranks"),
        ("step-000000.safetensors --previous step-000000.safetensors", "sequences of the step itself"),
        ("step-000000.safetensors other.safetensors", "other.safetensors"),
        ("deep.safetensors", "48 routed layers with top-2 of 8 experts, and the step of deep.safetensors has 49"),
    ],
    quick=4,
)
def test_a_users_error_is_one_message_and_exit_code_2(files, words, message):
    save_counts(np.ones((1, 3, 4, 8), np.int64), files / "three.safetensors", overwrite=True)
    fr.save(random_trace(0, num_layers=2), files / "other.safetensors", overwrite=True)
    save_counts(np.ones((1, 49, 4, 8), np.int64), files / "deep.safetensors", overwrite=True)
    refused(message, "plan", "--topology", "cluster.toml", *words.split(), cwd=files)
    assert not list(files.glob("plan.*")), "nothing is written"


def test_counts_of_the_step_itself_are_not_those_of_the_step_before(files, tmp_path):
    """Nor, on the way, is a link priced that one node does not have."""
    save_counts(counts()[::-1], tmp_path / "same.safetensors")
    (tmp_path / "one.toml").write_text(CLUSTER.replace("ranks_per_node = 2, ", "") + "links.cluster_bytes_per_s = 9e9")
    output = tmp_path / "a.safetensors"
    given = f"counts.safetensors --topology {tmp_path / 'one.toml'} --no-baselines --output {output} --overwrite"
    result = plan(f"{given} --previous {tmp_path / 'same.safetensors'}", files)
    assert "the very counts of the step itself" in " ".join(result.stderr.split())
    assert "which needs no cluster link" in result.said
    refused("is a plan of the step itself", "plan", *f"{given} --previous {output}".split(), cwd=files)


def test_existing_files_are_replaced_only_when_asked(files, tmp_path):
    for name in ("cluster.toml", "counts.safetensors"):
        shutil.copy(files / name, tmp_path)
    given = "counts.safetensors", "--topology", "cluster.toml", "--no-baselines"
    page, output = tmp_path / "plan.html", tmp_path / "plan.safetensors"
    trace = (files / "step-000000.safetensors").read_bytes()
    for path, content, more, message in (
        (page, b"mine", "", "plan.html already exists; pass another --output, or --overwrite"),
        (page, b"mine", "--overwrite", "plan.html exists and is no page that foreroute wrote"),
        (output, trace, "--overwrite", "plan.safetensors is no plan, which is all that --overwrite replaces"),
    ):
        path.write_bytes(content)
        refused(message, "plan", *given, *more.split(), cwd=tmp_path, columns=400)
        assert path.read_bytes() == content
        path.unlink()
    assert not list(tmp_path.glob("plan.*"))


def test_rows_that_buffers_must_hold(files, tmp_path):
    """After a step before, as `known_rows` has them."""
    home_LE = np.tile(np.arange(8) // 2, (3, 1))
    traces = [fr.load(files / f"step-00000{n}.safetensors") for n in (0, 1)]
    of_traces = [fr.plan.known_rows(trace, home_LE, packing=pack_sequences(trace.lengths, 4, 40)) for trace in traces]
    words = "step-000001.safetensors --previous step-000000.safetensors --token-budget 40 --set replicas=false"
    given = f"--topology cluster.toml --rows --no-baselines {words} --output {tmp_path / 'a.safetensors'}"
    shown = plan(given, files).said
    assert "Rows that ranks receive at homes: recompute and update" in shown
    assert "Rows that buffers must hold" in (tmp_path / "a.html").read_text()
    for one in of_traces[1].policies(of_traces[0]):
        assert f"{one.name} {one.largest:,} " in shown
