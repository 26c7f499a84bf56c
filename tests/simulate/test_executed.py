"""What is called executed is executed: the rows of the simulator's table, on processes."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.adapters.hf.loading import spread
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.plan.capabilities import EXECUTES, Ability, warn_of_lacks
from foreroute.planner import plan
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.methods import METHODS, PRESETS, HomesAlone, Planner, serve
from foreroute.trace import RoutingTrace
from tests.adapters.hf.families import skip_where_nothing_is_spread
from tests.simulate.simulate_cases import small_config
from tests.train.small_runs import SIZES

RANKS, MICRO_STEPS = 4, 2
ROWS = ("static", *PRESETS)
HOMES_ALONE = ("foreroute_homes", "foreroute_homes_previous")
COSTS = CostModel(
    # all but rows costs next to nothing, so that no transfer is left out, and plans of few tokens pay
    model=replace(MODELS["qwen3-30b-a3b"], num_experts=16, top_k=2),
    hardware=replace(
        HARDWARE["h100"], links=Links(1e15, 1e15, 1e15, 1e-9, 1e-9), layer_s=1e-9, tile_rows=1, memory_bytes_per_s=1e20
    ),
    paths="host",
)


@pytest.fixture(scope="module")
def executed(workers):
    """Counts of a step, and of every row the plan, the loads and the loss that four processes found."""
    skip_where_nothing_is_spread()
    return workers(RANKS).run(execute)


def planned(counts_MLGE, name, home_LE):
    method = METHODS[name].method
    is_plan = isinstance(method, Planner)
    topology = Topology(RANKS, RANKS, (is_plan and method.redundant_slots) or 2, COSTS.hardware.links)
    if isinstance(method, HomesAlone):
        return method(method.prepared(problem_of(counts_MLGE, topology, home_LE)))[1]
    options = method.options if is_plan else PlanOptions(replicas=False)
    return plan(counts_MLGE, topology, options, home_LE=home_LE, costs=COSTS)


def problem_of(counts_MLGE, topology, home_LE):
    """Loads of the step before are those of its first micro-step."""
    return BalancerInput(counts_MLGE, topology, home_LE, counts_MLGE[0].sum(axis=1, dtype=np.int64))


def execute(rank):
    """Every row under its plan: forward and backward on routes that favour some experts, others in every micro-step."""
    routed = hf.attach(spread(hf.build_model("qwen3_moe", seed=0, **SIZES, vocab_size=64), torch.device("cpu")))
    model, home_LE, rng = routed.model, routed.home_LE, np.random.default_rng(rank)
    batches = [rng.integers(1, 64, (2, 40)) for _ in range(MICRO_STEPS)]
    traces = []
    for m, batch in enumerate(batches):
        scores = rng.gumbel(size=(2, 40, 2, 16)) - 0.2 * ((np.arange(16) + 5 * m) % 16)
        ids = np.argsort(-scores, axis=-1)[..., :2]
        traces.append(RoutingTrace.from_sequences(routed.spec, list(batch), list(ids)))
    counts_MLGE = routed.gather_counts(traces)
    found = {}
    for name in ROWS:
        step_plan, loss = planned(counts_MLGE, name, home_LE), 0.0
        routed.move_homes(step_plan.home_LE)
        routed.use(TransferOptions(paths="host"))
        with routed.execute(step_plan, counts_MLGE, traces) as execution:
            for batch, trace in zip(batches, traces, strict=True):
                with routed.replay(trace):
                    logits = model(input_ids=torch.from_numpy(batch), use_cache=False).logits
                    part = logits.double().log_softmax(-1)[..., 0].mean()
                    part.backward()
                loss += float(part.detach())
        model.zero_grad(set_to_none=True)
        routed.move_homes(home_LE)
        found[name] = (step_plan, execution.executed_ML, loss)
    routed.close()
    return counts_MLGE, home_LE, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_called_executed_are_executed_as_simulated(executed, name):
    counts_MLGE, home_LE, found = executed[0]
    step_plan, _, loss = found[name]
    assert (len(step_plan.hosts.expert_R) > 0) == (name != "static" and name not in HOMES_ALONE)
    assert (step_plan.home_LE != step_plan.previous_home_LE).any() == (name in ("foreroute_rehomed", "foreroute_homes"))
    assert (step_plan.home_LE != home_LE).any() == (name == "foreroute_rehomed" or name in HOMES_ALONE)
    simulated = serve(METHODS[name], problem_of(counts_MLGE, step_plan.topology, home_LE), COSTS)
    simulated_MLG = simulated.loads(step_plan.topology).served_SMLG[1]
    assert np.array_equal(np.stack([of_rank[name][1] for _, _, of_rank in executed], axis=-1), simulated_MLG)
    assert loss == pytest.approx(found["static"][2], rel=1e-6)


def test_static_and_plans_of_ours_are_what_executes_and_nothing_else_is():
    found = simulate(small_config(methods=METHODS))
    assert {method.name for method in found.methods if not method.not_executed} == set(ROWS)
    assert found["eplb_step"].not_executed == ("plans of other balancers",)
    assert found.as_dict()["methods"][0]["not_executed"] == ()
    for change, missing in (
        ({"costs": {"dispatcher": "dedup"}}, "deduplicated dispatch"),
        ({"execution": {"overlap": 0.5}}, "all-to-alls hidden behind compute"),
        ({"hardware": {"preset": "h100", "ranks_per_node": 2}}, "expert-parallel ranks on several nodes"),
    ):
        found = simulate(parse_config(small_config(gpus=4).model_dump() | change, source="the test"))
        assert set(found["foreroute"].not_executed) == set(found["static"].not_executed) == {missing}


def test_a_plan_for_what_the_executor_lacks_is_warned_of(monkeypatch):
    counts = np.ones((1, 1, RANKS, 16), np.int64)
    across = plan(counts, Topology(RANKS, 2, 1, COSTS.hardware.links))
    with pytest.warns(UserWarning, match=r"several.*machine"):
        warn_of_lacks(across, "hf", "direct")
    gains = {"recompute": 0.0, "update": 0.5}
    uneven = plan(counts * np.arange(1, 17) ** 2, Topology(RANKS, RANKS, 1, COSTS.hardware.links))
    unpriced = replace(uneven, gains=gains, unpriced=("planning", "votes"))
    with pytest.warns(UserWarning, match="planning.*votes.*no price"):
        warn_of_lacks(unpriced, "hf", COSTS.paths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lacks(planned(counts, "foreroute", None), "hf", COSTS.paths)
        warn_of_lacks(replace(unpriced, gains=dict.fromkeys(gains, 0.0)), "hf", COSTS.paths)
        monkeypatch.setitem(EXECUTES, "hf", EXECUTES["hf"] | {Ability.NODES})
        warn_of_lacks(across, "hf", "direct")
