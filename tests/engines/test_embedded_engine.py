"""The embedded engine against full forwards of the model that it copied: routes, log-probs, and choices of indexers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.capture import Sampling
from foreroute.engines.embedded import EmbeddedEngine, _round_to_e4m3
from foreroute.errors import ConfigError
from foreroute.mismatch.decisions import stream_difference
from foreroute.replay import masked_logprobs_of_logits
from foreroute.testing.models import tiny
from foreroute.trace import SAMPLING
from tests.adapters.hf.families import FAMILIES, SPARSE, build
from tests.adapters.hf.model_runs import with_lora
from tests.engines.small_policy import END, forward, require_routes, response_logprobs
from tests.tiers import grid
from tests.traces import sets_of

PROMPTS = [np.array(p, np.int32) for p in ([5, 6, 7, 8], [9, 10], [11, 12, 13, 14], [15, 16])]


def sampled(engine, seed=1, prompts=PROMPTS, **changes):
    sampling = replace(Sampling(group_size=3, max_new_tokens=7, end_token=END), **changes)
    return engine.generate(prompts, sampling, torch.Generator().manual_seed(seed))


@grid(("family", "temperature"), [(f, t) for f in ("qwen3_moe", "gpt_oss", "deepseek_v3") for t in (0.7, 1.0)], quick=1)
def test_routes_and_log_probs_are_those_of_a_full_forward(family, temperature):
    """In float32 the engine's cached decode and the model's full forward agree; order, groups and lengths are kept."""
    model = tiny(family).eval()
    engine = EmbeddedEngine(model, "float32")
    engine.load_weights(model.state_dict(), 4)
    generation = sampled(engine, temperature=temperature)
    for s in range(len(PROMPTS) * 3):
        assert np.array_equal(generation.trace.tokens(s)[: len(PROMPTS[s // 3])], PROMPTS[s // 3])
    routed = hf.attach(model)
    require_routes(generation.trace, forward(routed, generation.trace)[0])
    np.testing.assert_allclose(generation.logprobs_R, response_logprobs(routed, generation, temperature), atol=2e-5)


def test_responses_end_with_the_end_token_or_at_the_limit_be_it_the_first():
    assert sampled(EmbeddedEngine(tiny("qwen3_moe")), max_new_tokens=1).response_lengths.tolist() == [1] * 12
    model = tiny("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[END] = 0.25 * model.lm_head.weight.sum(0)  # makes ends frequent
    generation = sampled(EmbeddedEngine(model, "float32"), max_new_tokens=6)
    for response in map(generation.response, range(len(generation))):
        assert END not in response[:-1]
        assert response[-1] == END or len(response) == 6
    assert len({*generation.response_lengths.tolist()}) > 1, "the case must hold responses of several lengths"


def test_weights_come_one_by_one_and_all_of_them():
    model, old = tiny("qwen3_moe"), tiny("qwen3_moe", seed=1)
    engine, other = EmbeddedEngine(old, "float32"), EmbeddedEngine(model, "float32", weights=model.named_parameters())
    assert not np.array_equal(sampled(engine).logprobs_R, sampled(other).logprobs_R)
    engine.load_weights(model.state_dict(), 7)
    assert np.array_equal(sampled(engine).logprobs_R, sampled(other).logprobs_R)
    engine.load_weights(model.state_dict(), 7)
    with pytest.warns(UserWarning, match=r"weights .*version 7"):
        engine.load_weights(old.state_dict(), 7)
    with pytest.raises(ConfigError, match=r"1 weights.*'lm_head.weight'"):
        engine.load_weights(((n, each) for n, each in model.named_parameters() if n != "lm_head.weight"), 1)
    model.config.distributed_config = object()  # as transformers leaves it
    with pytest.raises(ConfigError, match=r"weights=routed\.gather_weights"):
        EmbeddedEngine(model)


def test_what_the_engine_cannot_take_is_refused():
    model = tiny("qwen3_moe")
    engine, size = EmbeddedEngine(model), model.config.vocab_size
    with pytest.raises(ConfigError, match=r"precision .*'float16'.*float32, bfloat16, fp8"):
        EmbeddedEngine(model, "float16")
    with pytest.raises(ConfigError, match=r"version .* 'x'"):
        engine.load_weights(model.state_dict(), "x")
    for prompt in ([5.7, 6.2], [5, -1], [5, size]):
        with pytest.raises(ConfigError, match=r"prompt 0 .*(float64|from -1|token \d+)"):
            sampled(engine, prompts=[np.array(prompt)])
    with pytest.raises(ConfigError, match=r"one array \[2, 3\]; .* without padding"):
        sampled(engine, prompts=np.array([[0, 5, 6], [4, 5, 6]]))
    with pytest.raises(ConfigError, match="generator is 0; "):
        engine.generate([np.array([5])], Sampling(1, -1, 1), 0)
    with pytest.raises(ConfigError, match=rf"end_token is {size}; .*0 to {size - 1}"):
        sampled(engine, end_token=size)
    with pytest.raises(ConfigError, match="group_size"):
        sampled(engine, group_size=2.5)
    assert sampled(engine, end_token=-1).response_lengths.tolist() == [7] * 12
    with pytest.raises(ConfigError, match=r"given a .* with adapters; .* Merge adapters"):
        EmbeddedEngine(with_lora(model))


@grid("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v4"], quick=2)
def test_fp8_rounds_projections_and_experts_and_leaves_routers(family):
    """And tables of experts, and what stays in float32."""
    model = build(family)
    bf16, fp8 = EmbeddedEngine(model, "bfloat16"), EmbeddedEngine(model, "fp8")
    plain, rounded = bf16._model.state_dict(), fp8._model.state_dict()
    changed = {name for name in plain if not torch.equal(plain[name], rounded[name])}
    assert any("experts" in name for name in changed)
    assert any("attn" in name for name in changed)
    kept = [name for name in plain if any(w in name for w in ("gate.weight", "router", "embed", "lm_head", "norm"))]
    assert kept
    assert not changed & set(kept)
    assert {plain[name].dtype for name in changed} == {torch.bfloat16}


@pytest.mark.parametrize("input_axis", [-1, -2])
def test_e4m3_round_trip_has_one_scale_per_output_channel(input_axis):
    weight = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    weight = weight if input_axis == -1 else weight.T.contiguous()
    error = (_round_to_e4m3(weight, input_axis) - weight).abs()
    bound = weight.abs() * 2**-4 + weight.abs().amax(input_axis, keepdim=True) / 448 * 2**-10
    assert (error <= bound).all()
    assert error.max() > 0


@grid("name", ["afmoe", *sorted(FAMILIES.keys() - {"afmoe"})], quick=1, day=3)
def test_weights_are_held_in_the_dtypes_that_transformers_loads(name, tmp_path):
    """What a family keeps in float32 stays so, and what it rounds is rounded, buffers too."""
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, use_safetensors=True)
    hf.attach(loaded)
    held = EmbeddedEngine(model, "bfloat16")._model
    assert dtypes_of(held) == dtypes_of(loaded)
    assert torch.bfloat16 in {parameter.dtype for parameter in held.parameters()}


def dtypes_of(model):
    return {name: each.dtype for name, each in [*model.named_parameters(), *model.named_buffers()]}


def kept_by_hand(logits_V, *, top_k=0, top_p=1.0, min_p=0.0):
    """The set that is left of one distribution, in plain Python: min-p, top-k with ties, top-p of what is left."""
    left = {i: float(x) for i, x in enumerate(logits_V)}
    if min_p:
        left = {i: x for i, x in left.items() if x >= max(left.values()) + np.log(min_p)}
    if top_k:
        lowest = sorted(left.values())[-min(top_k, len(left))]
        left = {i: x for i, x in left.items() if x >= lowest}
    total, kept, mass = sum(np.exp(x) for x in left.values()), set(), 0.0
    for i in sorted(left, key=left.get, reverse=True):
        if kept and mass >= top_p:
            break
        kept.add(i)
        mass += np.exp(left[i]) / total
    return kept


@grid("kept", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 20, "min_p": 0.02}], quick=1)
def test_masks_are_the_sets_that_tokens_were_drawn_from(kept):
    """With them the log-probs of a full forward are the engine's; without them the mean ratio is the kept mass."""
    model = tiny("qwen3_moe").eval()
    generation = sampled(EmbeddedEngine(model, "float32"), temperature=0.7, **kept)
    trace, logprobs, masses = generation.trace, [], []
    masks = trace.streams[SAMPLING]
    for s in range(len(trace)):
        tokens = torch.from_numpy(trace.tokens(s).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0] / 0.7
        first, rows = int(generation.prompt_lengths[s]), np.arange(*trace.offsets[s : s + 2])
        own = masks.take(rows)
        assert own.valid_N.tolist() == [first - 1 <= p < len(tokens) - 1 for p in range(len(tokens))]
        for p, sets in enumerate(sets_of(own)):
            for ids in sets or ():
                assert {*ids} == kept_by_hand(logits[p].double(), **kept)
                masses.append(logits[p].softmax(-1)[ids].sum().item())
        predicting = np.flatnonzero(own.valid_N)
        logprobs.append(masked_logprobs_of_logits(logits[predicting], tokens[predicting + 1], own.take(predicting)))
    assert np.mean(masses) < 0.95
    ratios = torch.cat(logprobs).exp().numpy() / np.exp(generation.logprobs_R)
    np.testing.assert_allclose(ratios, 1, atol=1e-4)
    assert generation.select([1, 0]).trace.equals(trace.select([1, 0]))


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"min_p": 1.0}, {"top_p": 0.5, "temperature": 0}, {"top_k": True}])
def test_truncations_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(max_new_tokens=3, end_token=END, **wrong)


def test_choices_are_those_of_a_full_forward():
    """Over a cache that prompts share, one token at a time; in float32 both choose the same.

    Of few heads many scores are exactly 0, and ties are broken by the shape of the batch.
    """
    model = build("deepseek_v32", **SPARSE["deepseek_v32"], index_n_heads=16)
    engine = EmbeddedEngine(model, "float32", indexers=True)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (14, 9, 14)]
    trace = sampled(engine, prompts=prompts, group_size=2).trace
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
