"""Small random work for the engine."""

import numpy as np

from foreroute.simulate.engine import Rules
from foreroute.simulate.work import Compute, Transfers


def random_work(seed, *, micro_steps=3, layers=4, ranks=2, transfers=1.0):
    """Compute and transfers of about one second a phase; a third of the cells fetch nothing."""
    rng = np.random.default_rng(seed)
    cells = (micro_steps, layers)
    compute = Compute(
        attention_MG2=rng.random((micro_steps, ranks, 2)),
        head_MG=rng.random((micro_steps, ranks)),
        leg_ML=rng.random(cells) / 2,
        experts_MLG2=rng.random((*cells, ranks, 2)),
        layer_s=0.05,
        send_M=rng.random(micro_steps) / 4,
    )
    moved = Transfers(
        host_KMLG=transfers * rng.random((2, *cells, ranks)) * 4 * (rng.random((2, *cells, ranks)) < 0.5),
        direct_KMLG4=transfers * rng.random((2, *cells, ranks, 4)) * (rng.random((2, *cells, 1, 1)) < 0.6),
        gradient_MLG4=transfers * rng.random((*cells, ranks, 4)) * 2,
    )
    return compute, moved


def rules(**changes):
    given = {"ranks_per_node": 2, "processors_per_node": 2, "overlap": 0.0, "prefetch": 1, "keeps_slots": False}
    return Rules(**(given | changes))
