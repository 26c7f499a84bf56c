"""Sparse attention on two ranks: the choices of the rollout's indexers are replayed as on one process.

DeepSeek-V3.2's router takes its logits in float32, whatever the model's precision. A product of matrices in float32 has
other last bits when it has other rows, and ranks cut micro-steps otherwise than one process: after two steps weights
of routers are 4e-10 apart, and 8e-10 in DeepSeek-V3, which has no indexer. The model here takes these steps in
float64, and what is left is 1e-15.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from tests.attended import SIZES
from tests.train.expert_parallel_steps import config_of, parallel_steps
from tests.train.test_expert_parallel import STEPS, learned_alike


class Wide:
    """torch, in which float32 is float64."""

    def __getattr__(self, name):
        return getattr(torch, "float64" if name == "float32" else name)


@contextmanager
def widened():
    with patch.object(modeling_deepseek_v32, "torch", Wide()):
        yield


def wide_steps(rank, config, count):
    with widened():
        return parallel_steps(rank, config, count)


def without_choices(generation):
    return replace(generation, trace=generation.trace.without_streams("indexer"))


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["replicated", pytest.param("fsdp2", marks=pytest.mark.exhaustive)])
def test_two_ranks_learn_what_one_process_learns_with_the_choices(workers, dense):
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    model = {"family": "deepseek_v32", "sizes": sizes, "gradient_checkpointing": dense == "fsdp2"}
    steps, *_ = workers(2).run(wide_steps, config_of(2, model=model, dense=dense), STEPS)
    assert steps.generations[0].trace.streams["indexer"].ids.size
    alone = config_of(1, model=model)
    with widened():
        learned_alike(steps, alone)
        # the control: choices make a difference that is seen
        steps.generations = [without_choices(each) for each in steps.generations]
        with pytest.raises(AssertionError):
            learned_alike(steps, alone)
