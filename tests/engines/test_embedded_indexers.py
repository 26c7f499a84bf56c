"""The embedded engine on families with sparse-attention indexers: what it records is what a full forward chooses."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.capture import Sampling
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import ConfigError
from foreroute.mismatch.decisions import stream_difference
from foreroute.testing.models import tiny
from tests.adapters.hf.families import SPARSE, build

# Those that choose tokens and have a head for logits.
SAMPLED = [
    pytest.param(family, marks=() if family == "deepseek_v32" else pytest.mark.exhaustive)
    for family in ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4")
]
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (14, 9, 14)]


def sampled(model, precision="float32", **recorded):
    engine = EmbeddedEngine(model, precision, **recorded)
    engine.load_weights(model.state_dict(), 1)
    sampling = Sampling(group_size=2, max_new_tokens=8, end_token=-1)
    return engine.generate(PROMPTS, sampling, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", SAMPLED)
def test_choices_are_those_of_a_full_forward(family):
    """Over a cache that prompts share, one token at a time; in float32 both choose the same.

    Of few heads many scores are exactly 0, and ties are broken by the shape of the batch.
    """
    model = build(family, **SPARSE[family], index_n_heads=16)
    trace = sampled(model, indexers=True).trace
    routed = hf.attach(model)
    stream = trace.streams["indexer"]
    routed.indexers.check(stream, trace.offsets)
    assert np.array_equal(stream.valid_N, trace.valid_N)
    for s in range(len(trace)):
        tokens = torch.from_numpy(trace.tokens(s).astype(np.int64))[None, :-1]
        with routed.record(indexers=True) as recording, torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        own = trace.select([s]).truncated([tokens.shape[1]]).streams["indexer"]
        assert own.counts_ND.any()
        assert stream_difference(recording.trace().streams["indexer"], own).differing == 0


def test_they_are_recorded_on_request_alone_and_never_where_there_are_none():
    model = build("deepseek_v32", **SPARSE["deepseek_v32"])
    assert "indexer" not in sampled(model).trace.streams
    with pytest.raises(ConfigError, match="no sparse-attention indexer"):
        sampled(tiny("qwen3_moe"), indexers=True)
