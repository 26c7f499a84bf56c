"""One trace, two frameworks, the same weights: both compute what is written down in float64."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from foreroute.adapters import hf, megatron
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron import qwen3_moe
from tests.adapters.megatron.forked_ranks import on_ranks

LENGTHS = (on.WIDTH, 9, 5)
ROUNDING = 16
"""How much further from float64 a framework may be than a float32 run of what is written down: its sums have another
order, and its norms and softmaxes other intermediate steps."""


@on_ranks(1)
def test_a_trace_of_transformers_is_replayed_by_both():
    both = Both()
    with both.hf.record() as recording:
        native_BT = both.by_transformers()
    trace = recording.trace()
    tolerance = both.require_as_written(trace, both.by_transformers, both.by_megatron)
    assert np.array_equal(both.by_transformers(trace)[both.real], native_BT[both.real])
    assert tolerance < 1e-4
    for complete in (True, False):  # and routes that neither would take
        trace = on.foreign(both.hf.spec, both.tokens, lengths=LENGTHS, complete=complete)
        both.require_as_written(trace, both.by_transformers, both.by_megatron)


@pytest.mark.slow
@on_ranks(1)
def test_other_routes_are_seen():
    """The control: each framework under another trace is far from what is written down for this one."""
    both = Both()
    trace, other = (on.foreign(both.hf.spec, both.tokens, seed, lengths=LENGTHS) for seed in (3, 4))
    for run in (both.by_transformers, both.by_megatron):
        off = np.abs(run(other) - both.written(trace, torch.float64))[both.real].max()
        assert off > 1000 * both.tolerance(trace), off
        on.refuses(AssertionError, "float32", lambda run=run: both.require_as_written(trace, lambda _: run(other)))


class Both:
    """Both models on one batch, padded on the right, attached."""

    def __init__(self):
        self.transformers = qwen3_moe.of_transformers()
        self.weights = self.transformers.state_dict()
        self.model = qwen3_moe.of_megatron(self.weights)
        self.hf, self.megatron = hf.attach(self.transformers), megatron.attach(self.model)
        assert self.hf.spec.layers == self.megatron.spec.layers
        self.tokens = on.tokens(lengths=LENGTHS)
        self.mask = (torch.arange(on.WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
        self.real = self.mask[:, 1:].bool().numpy()

    def by_transformers(self, trace=None, **more):
        return self._run(self.hf, trace, self._logprobs_of_transformers, **more)

    def by_megatron(self, trace=None, **more):
        return self._run(self.megatron, trace, self._logprobs_of_megatron, **more)

    def _run(self, routed, trace, logprobs, **more):
        with torch.no_grad(), nullcontext() if trace is None else routed.replay(trace, **more):
            return logprobs().numpy()

    def _logprobs_of_transformers(self):
        logits = self.transformers(input_ids=self.tokens, attention_mask=self.mask, use_cache=False).logits
        return logits[:, :-1].log_softmax(-1).gather(-1, self.tokens[:, 1:, None])[..., 0]

    def _logprobs_of_megatron(self):
        positions = torch.arange(on.WIDTH).expand_as(self.tokens)
        causal = torch.ones(on.WIDTH, on.WIDTH, dtype=torch.bool).triu(1)[None, None]
        return -self.model(self.tokens, positions, causal, labels=self.tokens.roll(-1, 1))[:, :-1]

    def written(self, trace, dtype):
        """[B, T - 1] as written down; a last token without a route is no token's input, so that any will do."""
        ids = torch.zeros(len(LENGTHS), on.WIDTH, trace.spec.num_layers, trace.spec.top_k, dtype=torch.int64)
        for s, length in enumerate(LENGTHS):
            ids[s, :length] = torch.from_numpy(trace.expert_ids_NLK[trace.offsets[s] :][:length].astype(np.int64))
        return qwen3_moe.written_down(self.weights, self.tokens, ids, dtype).double().numpy()

    def tolerance(self, trace):
        exact, rounded = self.written(trace, torch.float64), self.written(trace, torch.float32)
        return ROUNDING * np.abs(rounded - exact)[self.real].max()

    def require_as_written(self, trace, *runs):
        """Each of the runs is as near to float64 as float32 lets it be, and so to each other."""
        tolerance, exact = self.tolerance(trace), self.written(trace, torch.float64)
        for run in runs:
            off = np.abs(run(trace) - exact)[self.real].max()
            assert off <= tolerance, f"{off:.3g} from float64, where float32 explains {tolerance:.3g}"
        return tolerance
