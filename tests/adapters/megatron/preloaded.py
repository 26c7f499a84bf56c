"""Imported once by the process that ranks are forked from: Megatron on the CPU, the adapter, and all that they import.

A rank that imported numba, read compiled kernels and traced Megatron's fused functions would take a second for it.
"""

import gc
import warnings

warnings.filterwarnings("ignore")

from foreroute.testing import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402, F401
import torch.distributed  # noqa: E402
import torch.export._trace  # noqa: E402, F401
import transformers.models.auto.modeling_auto  # noqa: E402, F401
from megatron.core.models.gpt import GPTModel  # noqa: E402, F401
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402, F401

from foreroute import RoutedLayer, RoutingSpec  # noqa: E402
from foreroute.adapters import hf, megatron  # noqa: E402, F401
from foreroute.plan import Links, PlanOptions, Topology  # noqa: E402
from foreroute.plan.schedule import ExecutionSchedule  # noqa: E402
from foreroute.planner import plan  # noqa: E402
from foreroute.testing.routes import synthetic_trace  # noqa: E402
from tests.seeds import seed_no_absent_devices  # noqa: E402


def _load_kernels():
    """Those of traces, planner and schedule, which else each rank would read from numba's cache, or compile."""
    synthetic_trace(RoutingSpec(8, 2, (RoutedLayer(0),)), [4], seed=0)
    counts_MLGE = np.ones((1, 1, 2, 8), np.int32) * np.arange(1, 9, dtype=np.int32)
    topology = Topology(2, 2, 1, Links(4e9, 1e9, 2e9, 1e-5, 5e-5))
    made = plan(counts_MLGE, topology, PlanOptions(tolerance=0.0, slots="shared"))
    ExecutionSchedule(made, counts_MLGE, 0).cell(0, 0)


_load_kernels()
seed_no_absent_devices()
# ranks live for seconds, and a full collection would walk all of this
gc.freeze()
