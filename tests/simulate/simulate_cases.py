"""Small random work for the engine."""

import numpy as np

from foreroute.simulate import parse_config
from foreroute.simulate.engine import ExecutionModel, PassWork

FREE_OF_ALL_BUT_ROWS = {"preset": "h100", "layer_s": 1e-9, "tile_rows": 1, "memory_bytes_per_s": 1e20}
"""Hardware on which few tokens are enough for a plan to pay."""
FAST_LINKS = dict.fromkeys(("node_bytes_per_s", "cluster_bytes_per_s", "host_bytes_per_s"), 1e15)
FAST_LINKS |= dict.fromkeys(("node_latency_s", "cluster_latency_s"), 1e-9)


def random_work(seed, *, micro_steps=3, layers=4, ranks=2, transfers=1.0):
    """Work of about one second a phase; a third of the cells fetch nothing."""
    rng = np.random.default_rng(seed)
    cells = (micro_steps, layers)
    return PassWork(
        attention_MG2=rng.random((micro_steps, ranks, 2)),
        head_MG=rng.random((micro_steps, ranks)),
        all_to_all_ML=rng.random(cells) / 2,
        rows_ML2=np.zeros((*cells, 2)),
        experts_MLG2=rng.random((*cells, ranks, 2)),
        layer_s=0.05,
        host_KMLG=transfers * rng.random((2, *cells, ranks)) * 4 * (rng.random((2, *cells, ranks)) < 0.5),
        direct_KMLG4=transfers * rng.random((2, *cells, ranks, 4)) * (rng.random((2, *cells, 1, 1)) < 0.6),
        gradient_MLG4=transfers * rng.random((*cells, ranks, 4)) * 2,
    )


def rules(**changes):
    given = {"overlap": 0.0, "prefetch": 1, "keeps_slots": False}
    return ExecutionModel(**(given | changes))


def small_values(
    *,
    gpus=4,
    expert_parallel=4,
    experts=8,
    micro_steps=2,
    groups=1,
    methods=("static", "foreroute"),
    links=None,
    costs=None,
    **execution,
):
    """Four layers of a small model with top-2 routing, of which two are drawn."""
    model = {"num_layers": 4, "num_experts": experts, "top_k": 2, "hidden": 512, "intermediate": 256}
    model |= {"dense_parameters": 100_000, "attention_width": 512, "vocabulary": 1000}
    values = {
        "cluster": {"gpus": gpus, "expert_parallel": expert_parallel},
        "model": model,
        "workload": {"micro_steps": micro_steps, "layers": 2, "groups": groups, "tokens_per_rank": 512},
        "execution": {"planning_s": 0.0} | execution,
        "links": links or {},
        "costs": costs or {"dispatcher": "copies"},
    }
    return values if methods is None else values | {"methods": list(methods)}


def small_config(**changes):
    return parse_config(small_values(**changes), source="the test")
