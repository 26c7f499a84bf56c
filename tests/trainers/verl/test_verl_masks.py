"""Sampling masks of verl's rollouts, scored. test_verl_whole.py has their way from vLLM to the batch."""

import copy
import importlib
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from examples.verl import verl_on_cpu  # noqa: F401, I001  before verl, in spawned processes too
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.llm_server import LLMServerClient

from foreroute.errors import BatchMismatchError, EngineError, ReplayError
from foreroute.trainers.verl.settings import MASKS
from tests.trainers.verl.verl_book import TEMPERATURE, Scores, require_learned, require_scored
from tests.trainers.verl.verl_engines import make, mean_log_prob, old_log_probs, on_cpu, tensordict
from tests.trainers.verl.verl_ranks import run


@pytest.fixture(scope="module", autouse=True)
def masks(folder):
    """What naming the module in `external_lib` does, undone after the tests: verl imports it with its configuration."""
    server = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(server, "extract_prompt_logprobs", server.extract_prompt_logprobs)
        undone.setattr(LLMServerClient, "generate", LLMServerClient.generate)
        undone.setattr(AgentLoopBase, "__init__", AgentLoopBase.__init__)
        undone.delitem(sys.modules, MASKS, raising=False)
        HFModelConfig(path=folder, external_lib=MASKS)
        yield sys.modules[MASKS]
        del sys.modules[MASKS]


@pytest.fixture(scope="module")
def scores(folder):
    return Scores(folder)


def masked(folder, model=None, **settings):
    return make(folder, model={"external_lib": MASKS} | (model or {}), **settings)


@pytest.fixture(scope="module")
def engine(group, folder):
    return masked(folder)


@pytest.mark.parametrize("layout", [{"use_remove_padding": False}, {"calculate_entropy": True}])
def test_log_probs_are_those_of_dense_logits_outside_of_the_sets_at_minus_infinity(layout, engine, scores):
    td = tensordict(scores.batch("extra fields"), temperature=TEMPERATURE, **layout)
    found, output = old_log_probs(engine, td)
    require_scored(found, scores)
    if "calculate_entropy" in layout:  # of all tokens, as without masks
        del td["rollout_log_probs"]
        expected = old_log_probs(without_masks(engine), td)[1]["model_output"]["entropy"]
        assert torch.equal(output["model_output"]["entropy"].values(), expected.values())


def learned(engine, scores):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(tensordict(scores.batch(), temperature=TEMPERATURE), mean_log_prob)
        return {name: each.grad.full_tensor() for name, each in engine.module.named_parameters()}, output


def without_masks(engine):
    plain = copy.copy(engine)
    plain.model_config = replace(engine.model_config, external_lib=None)
    return plain


@pytest.mark.shows("verl, FSDP engine", "`top_p`, `top_k` under vLLM: scored on the sets that tokens were drawn from")
def test_log_probs_and_gradients_are_those_of_dense_logits_and_the_rollout_is_met(engine, scores):
    td = tensordict(scores.batch(), temperature=TEMPERATURE)
    require_scored(old_log_probs(engine, td)[0], scores)
    gradients, output = learned(engine, scores)
    require_learned(gradients, scores.gradients)
    assert output["metrics"]["mismatch/k3"][0] < 1e-9
    assert output["metrics"]["mismatch/disagreement"] == [0.0]
    with pytest.raises(EngineError, match=r"are \S+ nats \(k3\)"):
        old_log_probs(without_masks(engine), td)


def test_a_reference_scores_on_the_sets_and_takes_its_own_routes(group, folder, scores, monkeypatch):
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", lambda **_: None)  # pins memory, without a GPU
    reference = masked(folder, forward_only=True)
    assert reference.routing is None
    found, _ = old_log_probs(reference, tensordict(scores.batch(), temperature=TEMPERATURE))
    for row, own, (_, response) in zip(found, scores.sets, scores.pairs, strict=True):
        assert [float(value) == 0 for value in row[-len(response) :]] == [len(ids) < 2 for ids in own]


def test_masks_that_do_not_arrive_or_are_of_other_tokens_end_the_run(engine, scores):
    with pytest.raises(ReplayError, match=r"sequence 0.*0 sampling"):
        old_log_probs(engine, tensordict(scores.batch("none")))
    first, *others = scores.sets
    with pytest.raises(BatchMismatchError, match=r"leaves.*token"):
        old_log_probs(engine, tensordict(scores.batch(sets=[[[0], *first[1:]], *others])))
    # a sequence that fills the batch up has none
    batch = scores.batch(sets=[[], *others])
    batch["response_mask"][0] = 0
    old_log_probs(engine, tensordict(batch, temperature=TEMPERATURE))


@pytest.mark.shows(
    "verl, FSDP engine", "`use_fused_kernels` with sampling masks", refused="their log-probs are of all tokens"
)
def test_log_probs_made_past_the_logits_are_noticed(group, folder, scores):
    with on_cpu():
        engine = masked(folder, strategy="fsdp", model={"use_fused_kernels": True})
        with pytest.raises(ReplayError, match=r"probs.*logits"):
            old_log_probs(engine, tensordict(scores.batch(), use_fused_kernels=True))


@pytest.mark.slow
def test_ranks_of_ulysses_score_their_part_of_the_rows(folder, scores):
    for log_probs, gradients in run(2, "test_verl_masks.score", folder):
        require_scored(log_probs, scores)
        require_learned(gradients, scores.gradients)


def score(folder):
    scores = Scores(folder)
    with on_cpu():
        engine = masked(folder, ulysses_sequence_parallel_size=2, pad_to_length=True, pad_to_length_bucket=16)
        log_probs, _ = old_log_probs(engine, tensordict(scores.batch(), temperature=TEMPERATURE))
        return log_probs, learned(engine, scores)[0]
