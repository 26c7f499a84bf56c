"""Which kernels of the planner are compiled, in a process where nothing was planned before."""

import sys

import numpy as np
from numba.core.dispatcher import Dispatcher

from foreroute.plan import PlanOptions, Topology
from foreroute.train.config import ParallelConfig
from foreroute.train.expert_parallel import LINKS, _plan, compile_planner


def compiled():
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("foreroute.planner", "foreroute.plan", "foreroute.costs"))
    ]
    kernels = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)}
    return {(f.__qualname__, str(signature)) for f in kernels.values() for signature in f.signatures}


def compiled_before_and_after_plans(rank):
    """What is compiled at first, after `compile_planner`, and after plans as runs make them."""
    before = compiled()
    compile_planner(ParallelConfig(expert=4))
    ready = compiled()
    for slots, per_node in (("layer", 4), ("shared", 2)):
        topology = Topology(4, per_node, 2, LINKS)
        counts_MLGE = np.random.default_rng(0).poisson(3, (3, 2, 4, 16)).astype(np.int32)
        homes_LE = np.tile(topology.contiguous_home_E(16), (2, 1))
        plan, _ = _plan(counts_MLGE, topology, PlanOptions(slots=slots), homes_LE)
        assert len(plan.expert_R)
    return before, ready, compiled()
