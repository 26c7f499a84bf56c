"""A trainer, and engines that are right or wrong in a known way."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from foreroute.capture import Sampling
from foreroute.engines.embedded import EmbeddedEngine

VERSION = 3


@cache
def generation(model, precision="float32", *, temperature=1.0, below=49, indexers=False):
    """Two responses to each of some prompts, sampled once for a model."""
    engine = EmbeddedEngine(model, precision, indexers=indexers)
    engine.load_weights(model.state_dict(), VERSION)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, below, n).astype(np.int32) for n in rng.integers(4, 10, 8)]
    sampling = Sampling(group_size=2, max_new_tokens=16, end_token=below, temperature=temperature)
    return engine.generate(prompts, sampling, torch.Generator().manual_seed(0))


def shifted(good):
    """Row p holds the routes of row p - 1, and the first row those of the second."""
    trace = good.trace
    source = np.arange(trace.num_rows) - 1
    source[trace.offsets[:-1]] = trace.offsets[:-1] + 1
    ids = np.where(trace.valid_N[:, None, None], trace.expert_ids_NLK[source], 0)
    return replace(good, trace=replace(trace, expert_ids_NLK=ids))


def older(model):
    """The model a few updates ago."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter += 0.25 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return other
