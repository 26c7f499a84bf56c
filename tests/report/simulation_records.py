"""Records of simulations that never ran, for pages and tables."""

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.simulate import SimulatedMethod, SimulationRecord, parse_config
from foreroute.simulate.engine import PARTS
from foreroute.simulate.methods import METHODS, PRESETS
from foreroute.simulate.records import PhaseSeconds

TRAINING = {
    "static": 17.72,
    "eplb_previous": 15.6,
    "eplb_step": 15.1,
    "eplb_micro_step": 13.18,
    "laer": 13.9,
    "llep": 14.9,
    "ours": 13.21,
    "ours_exact": 13.15,
    "ours_rehomed": 13.2,
    "ours_traffic": 9.8,
}
"""Seconds of recompute and update."""
LABELS = {name: method.label for name, method in (METHODS | OTHER_BALANCERS).items()}
FORCED, BOUND = 13.1, 6.2


def config(**tables):
    values = {"cluster": {"gpus": 64, "expert_parallel": 16}, "workload": {"tokens_per_rank": 8192}}
    return parse_config(values | tables, source="the test")


def method(name):
    """A fifth of recompute and update is recompute; parts are shares of these. Other balancers are not executed."""
    training = TRAINING[name]
    waits = 0.0 if name == "static" else 0.0123
    shares = [0.35, 0.3, 0.28, 0.03, 0.0, 0.04, 0.0]
    recompute, update = 0.2 * training, 0.8 * training
    parts = [dict(zip(PARTS, [share * s for share in shares], strict=True)) for s in (recompute, update)]
    parts[0]["waiting for the plan"] = waits
    phases = PhaseSeconds(waits, 0.31 if name == "ours_rehomed" else 0.0, 0.0, recompute, update, 0.42, 0.011)
    return SimulatedMethod(
        name=name,
        label=LABELS[name],
        not_executed=() if name == "static" or name in PRESETS else ("plans of other balancers",),
        phases=phases,
        recompute_parts=parts[0],
        update_parts=parts[1],
        imbalance=2.09 if name == "static" else 1.02,
        imbalance_99=2.5,
        imbalance_worst=3.0,
        cross_node_share=0.25,
        home_moves=0,
        share_of_forced_balance=FORCED / training,
        share_of_bound=BOUND / training,
        speedup_over_static=TRAINING["static"] / training,
        groups_waiting=0.012,
        planning_s=0.0 if name == "static" else 2.13,
        fetches_per_cell=0.0 if name == "static" else 120.4 if name == "eplb_micro_step" else 3.1,
        moved_bytes={"rows": {"node": 2.5e9, "cluster": 1.25e9}},
        gpu_hours=sum(phases) * 64 / 3600,
        gpu_hours_saved=(TRAINING["static"] + 0.431 - sum(phases)) * 64 / 3600,
    )


def record(names=tuple(TRAINING)):
    return SimulationRecord(
        facts={"cluster": "64 x h100, expert parallel 16", "model": "qwen3-30b-a3b: 48 routed layers"},
        gpus=64,
        expert_parallel=16,
        groups=4,
        groups_simulated=2,
        tokens_per_rank=8190.25,
        cells_per_group=1536,
        forced_balance_s=FORCED,
        bound_s=BOUND,
        rollout_s=0.0,
        methods=tuple(map(method, names)),
    )
