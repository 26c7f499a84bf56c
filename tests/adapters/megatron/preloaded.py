"""Imported once by the process that ranks are forked from: Megatron, on the CPU."""

import gc
import warnings

warnings.filterwarnings("ignore")

from foreroute.testing import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import pytest  # noqa: E402, F401
from megatron.core.models.gpt import GPTModel  # noqa: E402, F401
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402, F401

# ranks live for seconds, and a full collection would walk all of this
gc.freeze()
