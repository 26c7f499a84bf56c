"""Sampling masks of verl's rollouts: from vLLM's answer through verl's server, client and agent loop, and scored."""

import asyncio
import copy
import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from examples.verl import verl_on_cpu  # noqa: F401, I001  before verl, in spawned processes too
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.config import HFModelConfig
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.utils.padding import left_right_2_no_padding

from foreroute.errors import BatchMismatchError, EngineError, ReplayError
from foreroute.trainers.verl import trace_of
from foreroute.trainers.verl.packed_batch import PackedBatch, PackedRoutes, require_routed
from foreroute.trainers.verl.settings import MASKS
from tests.trainers.verl.masked_book import TEMPERATURE, Scores, require_learned, require_scored
from tests.trainers.verl.test_verl_data import agent_loop_batch
from tests.trainers.verl.test_verl_tools import CALL, WIDTHS, Engine, client_of, drawn_from, looped, routes_of
from tests.trainers.verl.verl_batches import SPEC
from tests.trainers.verl.verl_engines import make, mean_log_prob, old_log_probs, on_cpu, tensordict
from tests.trainers.verl.verl_ranks import run


@pytest.fixture(scope="module", autouse=True)
def masks(folder):
    """What naming the module in `external_lib` does, undone after the tests: verl imports it with its configuration."""
    server = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    with pytest.MonkeyPatch.context() as undone:
        for place, name in (
            (server, "extract_prompt_logprobs"),
            (LLMServerClient, "generate"),
            (AgentLoopBase, "__init__"),
        ):
            undone.setattr(place, name, getattr(place, name))
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


LAYOUTS = {"packed": {}, "padded": {"use_remove_padding": False}, "with the entropy": {"calculate_entropy": True}}


@pytest.mark.parametrize(
    ("form", "layout"), [("a field", "packed"), ("extra fields", "padded"), ("extra fields", "with the entropy")]
)
def test_log_probs_are_those_of_dense_logits_outside_of_the_sets_at_minus_infinity(form, layout, engine, scores):
    td = tensordict(scores.batch(form), temperature=TEMPERATURE, **LAYOUTS[layout])
    found, output = old_log_probs(engine, td)
    require_scored(found, scores)
    if "entropy" in layout:  # of all tokens, as without masks
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
def test_gradients_are_those_of_dense_logits_and_the_rollout_is_met(engine, scores):
    old_log_probs(engine, tensordict(scores.batch(), temperature=TEMPERATURE))
    gradients, output = learned(engine, scores)
    require_learned(gradients, scores.gradients)
    assert output["metrics"]["mismatch/k3"][0] < 1e-9
    assert output["metrics"]["mismatch/disagreement"] == [0.0]
    with pytest.raises(EngineError, match=r"are \S+ nats \(k3\)"):
        old_log_probs(without_masks(engine), tensordict(scores.batch(), temperature=TEMPERATURE))


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


ASKS = {
    "one turn, cut": (SingleTurnAgentLoop, ["a long text that is cut"], 7, 1, True),
    "turns with a tool": (ToolAgentLoop, [CALL, CALL, "and so"], 400, 3, False),
    "cut in the second turn": (ToolAgentLoop, [CALL, "a long text"], 95, 2, True),
    "stopped twice": (ToolAgentLoop, [CALL, "and so"], 400, 4, False),
}
STOPS = (None, 3, 0)
"""Weights may change while a request of asynchronous rollouts is stopped."""


def expected_of(answers, response_length):
    """By what the engine was asked and answered: tokens, their sets, log-probs of the response, and the rows known."""
    prompt, tokens, sets, logprobs, rows = len(answers[0][0]), list(answers[0][0]), [[]] * len(answers[0][0]), [], []
    for request, (asked, response) in enumerate(answers):
        assert asked[: len(tokens)] == tokens
        if len(asked) > len(tokens):
            rows = []  # verl keeps those of the last turn, which has a row for each token of the turns before it
        known = routes_of(asked + response, request)
        rows = [*rows, *known[len(rows) :]]  # rows of a part that was stopped are of its own weights
        between = len(asked) - len(tokens)
        tokens = asked + response
        sets += [[]] * between + [drawn_from(tokens[p], p) for p in range(len(asked), len(tokens))]
        logprobs += [0.0] * between + [-1.0 - request] * len(response)
    kept = prompt + response_length
    return tokens[:kept], [*sets[1:kept], []], logprobs[:response_length], np.array(rows)[:kept, 1:]


@pytest.mark.parametrize("name", ASKS)
def test_each_token_has_its_row_and_a_sampled_one_its_set_through_verls_server_client_and_agent_loop(
    name, masks, monkeypatch
):
    """Beside another conversation at the same time, in the batch of either trainer of verl."""
    kind, texts, response_length, requests, is_cut = ASKS[name]
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", lambda _: nothing())
    client, stops = (FullyAsyncLLMServerClient, STOPS) if "stopped" in name else (LLMServerClient, ())
    engines = [Engine(texts, stops=stops), Engine(["another"])]

    async def at_once():
        talks = [looped(client_of(each, client), response_length=response_length, kind=kind) for each in engines]
        outputs = await asyncio.gather(*talks)
        return outputs, await agent_loop_batch(outputs, (WIDTHS[0], response_length))

    outputs, batch = asyncio.run(at_once())
    assert [len(engine.answers) for engine in engines] == [requests, 1]
    expected = [expected_of(engine.answers, response_length) for engine in engines]
    fields = []
    for output, (tokens, _, logprobs, _) in zip(outputs, expected, strict=True):
        assert output.response_logprobs == logprobs
        fields.append(output.as_dict() | {"input_ids": torch.tensor(tokens)})
    assert (len(expected[0][3]) == len(expected[0][0])) == is_cut
    legacy = left_right_2_no_padding(batch.to_tensordict())
    newer = tu.list_of_dict_to_tensordict(fields)
    for key in ("input_ids", "responses", "response_mask"):  # also where all are of one length
        newer[key] = torch.nested.as_nested_tensor([each[key] for each in fields], layout=torch.jagged)
    for td in (legacy, newer):
        for part, numbers in zip(*rearrange_micro_batches(td, max_token_len=500), strict=True):
            counts, ids = masks.packed_sets(part)
            ends = counts.cumsum()
            found = [sorted(ids[a:b].tolist()) for a, b in zip(ends - counts, ends, strict=True)]
            assert found == [each for number in numbers for each in expected[number][1]]
    for form in (batch, legacy):
        trace, packed = trace_of(form, model=SPEC), PackedBatch(form)
        for s, (tokens, sets, _, rows) in enumerate(expected):
            own = slice(*trace.offsets[s : s + 2])
            assert trace.tokens(s).tolist() == tokens
            assert trace.valid_N[own].tolist() == [p < len(rows) for p in range(len(tokens))]
            assert np.array_equal(trace.expert_ids_NLK[own][: len(rows)], rows)
            assert packed.trained_N[own].tolist() == [False, *map(bool, sets[:-1])]
        require_routed(trace, form)
    there = PackedRoutes(PackedBatch(legacy), SPEC, lambda: pytest.fail("refused")).trace()
    assert np.array_equal(there.valid_N, trace.valid_N)
    assert np.array_equal(there.expert_ids_NLK, trace.expert_ids_NLK)


async def nothing():
    return None


def test_vllm_is_asked_for_masks_by_the_line_that_the_module_names(masks):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server_module = sys.modules["verl.workers.rollout.vllm_rollout.vllm_async_server"]
    lines = [line.strip() for line in masks.__doc__.splitlines() if "actor_rollout_ref." in line]
    with initialize_config_module("verl.trainer.config", version_base=None):
        ours = compose("ppo_trainer", overrides=lines).actor_rollout_ref
    assert ours.model.external_lib == ["foreroute.trainers.verl.fsdp", MASKS]
    asked = server_module.build_cli_args_from_config(dict(ours.rollout.engine_kwargs.vllm))
    assert AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(asked).return_sampling_mask
