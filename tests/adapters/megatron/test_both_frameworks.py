"""One trace, two frameworks, the same weights: both compute what is written down in float64."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.pipeline.policy import Policy
from foreroute.adapters.checkpoint import ModelWriter
from foreroute.testing.models import same_bits
from tests.adapters.hf.session_subject import HuggingFaceSubject
from tests.adapters.megatron import qwen3_moe
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import initialize
from tests.adapters.megatron.one_rank import MegatronSubject
from tests.replay.session_subject import batch_of, foreign, recorded, refuses

BATCH = batch_of(12, 9, 5)
REAL = BATCH.real_BT[:, 1:].numpy()
LASTS = [(s, length - 1) for s, length in enumerate(BATCH.lengths)]
ROUNDING = 16
"""How much further from float64 a framework may be than a float32 run of what is written down: its sums have another
order, and its norms and softmaxes other intermediate steps."""


@on_ranks(1)
def test_a_trace_is_replayed_by_both_and_a_checkpoint_is_loaded_and_exported():
    both = Both()
    trace = recorded(both.transformers, BATCH)
    assert both.require_as_written(trace) < 1e-4
    with torch.no_grad():
        native = both.transformers.run(BATCH).numpy()[REAL]
    assert np.array_equal(run(both.transformers, trace), native)
    for absent in ([], LASTS):  # and routes that neither would take
        both.require_as_written(foreign(trace.spec, BATCH, absent=absent))
    assert both.exported.keys() == both.checkpoint.keys()
    assert all(same_bits(both.exported[name], weight) for name, weight in both.checkpoint.items())


@pytest.mark.slow
@on_ranks(1)
def test_other_routes_are_seen():
    """The control: each framework under another trace is far from what is written down for this one."""
    both = Both()
    trace, other = (foreign(both.transformers.routed.spec, BATCH, seed) for seed in (3, 4))
    for on in (both.transformers, both.megatron):
        off = np.abs(run(on, other) - both.written(trace, torch.float64)).max()
        assert off > 1000 * both.tolerance(trace), off
        refuses(AssertionError, "float32", lambda on=on: both.require_as_written(trace, {on: other}))


def run(on, trace):
    with torch.no_grad(), on.routed.replay(trace):
        return on.run(BATCH).numpy()[REAL]


class Both:
    """Both models, attached; the second one made of the checkpoint of the first, whose first layer is dense."""

    def __init__(self):
        self.transformers = HuggingFaceSubject(qwen3_moe.of_transformers())
        self.weights = self.transformers.model.state_dict()
        initialize(Cell())
        with tempfile.TemporaryDirectory() as folder:
            ModelWriter(self.transformers.model).write(Path(folder))
            self.checkpoint, policy = (
                load_file(Path(folder, "model.safetensors")),
                Policy.of(Path(folder), torch.float32),
            )
        self.exported = dict(policy.exported())
        self.megatron = MegatronSubject(policy.model)
        assert self.transformers.routed.spec.layers == self.megatron.routed.spec.layers

    def written(self, trace, dtype):
        """As written down; a last token without a route is no token's input, so that any will do."""
        ids = torch.zeros(*BATCH.ids_BT.shape, trace.spec.num_layers, trace.spec.top_k, dtype=torch.int64)
        ids[BATCH.real_BT] = torch.from_numpy(trace.expert_ids_NLK.astype(np.int64))
        return qwen3_moe.written_down(self.weights, BATCH.ids_BT, ids, dtype).double().numpy()[REAL]

    def tolerance(self, trace):
        exact, rounded = self.written(trace, torch.float64), self.written(trace, torch.float32)
        return ROUNDING * np.abs(rounded - exact).max()

    def require_as_written(self, trace, others=None):
        """Each of the two, on this trace or another, is as near to float64 as float32 lets it be."""
        tolerance, exact = self.tolerance(trace), self.written(trace, torch.float64)
        for on, given in (others or {self.transformers: trace, self.megatron: trace}).items():
            off = np.abs(run(on, given) - exact).max()
            assert off <= tolerance, f"{off:.3g} from float64, where float32 explains {tolerance:.3g}"
        return tolerance
