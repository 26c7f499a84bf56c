"""Imported once by the process that ranks are forked from: Megatron on the CPU, the adapter, and all that they import.

A rank that imported it all and traced Megatron's fused functions would take a second for it.
"""

import gc
import warnings

warnings.filterwarnings("ignore")

from foreroute.testing import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import numpy.ma  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch.distributed.tensor.debug  # noqa: E402
import torch.export._trace  # noqa: E402, F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: E402, F401
from megatron.core.models.gpt import GPTModel  # noqa: E402, F401
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402, F401

from foreroute.adapters import megatron  # noqa: E402, F401
from foreroute.adapters.hf import attaching  # noqa: E402, F401
from foreroute.planner import plan  # noqa: E402, F401
from foreroute.testing import routes  # noqa: E402, F401
from tests.seeds import seed_no_absent_devices  # noqa: E402

seed_no_absent_devices()
# ranks live for seconds, and a full collection would walk all of this
gc.freeze()
