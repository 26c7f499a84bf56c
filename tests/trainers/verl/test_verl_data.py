"""What the released verl does to a batch, done to batches whose routes say to which token they belong."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from tensordict import TensorDict
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.padding_utils import build_padding_routed_experts
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.utils.padding import left_right_2_no_padding

from foreroute.trainers.verl import trace_of
from tests.trainers.verl.verl_batches import (
    PROMPT,
    RESPONSE,
    SPEC,
    nested,
    padded,
    require_told,
    sequences,
    telling_routes,
)

ENGINES = {
    # what vLLM and SGLang hand to verl: uint8 or int32 of all layers, one row for each token but the last
    "vllm": lambda tokens: telling_routes(tokens).astype(np.uint8),
    "sglang": lambda tokens: telling_routes(tokens).astype(np.int32),
}


def test_mini_and_micro_batches_without_padding_keep_their_routes():
    pairs = sequences(8)
    proto = {name: value for name, value in padded(pairs).items() if name != "loss_mask"}
    batch = left_right_2_no_padding(DataProto.from_single_dict(proto).to_tensordict())
    by_tokens = {tuple(np.concatenate(pair)): pair for pair in pairs}
    require_told(trace_of(batch, model=SPEC), pairs)

    def require_all(parts):
        seen = []
        for part in parts:
            tokens = [tuple(row.tolist()) for row in part["input_ids"].unbind()]
            require_told(trace_of(part, model=SPEC), [by_tokens[t] for t in tokens])
            seen += tokens
        assert sorted(seen) == sorted(by_tokens)

    require_all(tu.chunk_tensordict(batch, 2))
    require_all(tu.make_iterator(batch, mini_batch_size=4, epochs=1, seed=3, dataloader_kwargs={"shuffle": True}))
    micro_batches, order = rearrange_micro_batches(batch, max_token_len=24)
    require_all(micro_batches)
    assert [i for part in order for i in part] != list(range(8))
    require_all([tu.concat_tensordict(tu.chunk_tensordict(batch, 4)[::-1])])


def outputs_of(pairs, engine, spans=None):
    """What verl's agent loop has of a rollout, and of which weights."""
    spans = spans or [(None, None)] * len(pairs)
    return [
        AgentLoopOutput(
            prompt_ids=prompt.tolist(),
            response_ids=response.tolist(),
            response_mask=[1] * len(response),
            routed_experts=ENGINES[engine](np.concatenate([prompt, response])),
            metrics=AgentLoopMetrics(),
            extra_fields=dict(zip(("min_global_steps", "max_global_steps"), span, strict=True)),
        )
        for (prompt, response), span in zip(pairs, spans, strict=True)
    ]


def test_rows_have_the_version_of_the_weights_where_one_sampled_the_sequence():
    """As verl's client for servers says it, of requests that were resumed under other weights too."""
    batch = asyncio.run(
        agent_loop_batch(outputs_of(sequences(6), "vllm", [(3, 3), (4, 4), (3, 4), (None, None), (5, 5), (4, 4)]))
    )
    parts, order = rearrange_micro_batches(left_right_2_no_padding(batch.to_tensordict()), max_token_len=24)
    expected = [3, 4, -1, -1, 5, 4]
    for part, numbers in [(batch, range(6)), *zip(parts, order, strict=True)]:
        trace = trace_of(part, model=SPEC)
        wanted = np.repeat([expected[s] for s in numbers], trace.lengths)
        assert np.array_equal(trace.weight_versions_N, np.where(trace.valid_N, wanted, -1))
        assert trace_of(part, model=SPEC, weight_version=7).versions == (7,)
    assert len(parts) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_the_wire_of_each_engine_arrives_through_verls_agent_loop(engine):
    pairs = sequences(4)
    outputs = outputs_of(pairs, engine)
    for output, pair in zip(outputs, pairs, strict=True):  # the newer trainer's way, one sequence at a time
        fields = output.as_dict()
        assert fields["routed_experts"].dtype == torch.int16
        one = {"input_ids": [*fields["prompts"], *fields["responses"]], "routed_experts": fields["routed_experts"]}
        require_told(trace_of({name: nested([each]) for name, each in one.items()}, model=SPEC), [pair])
    batch = asyncio.run(agent_loop_batch(outputs))
    require_told(trace_of(batch, model=SPEC), pairs)
    require_told(trace_of(left_right_2_no_padding(batch.to_tensordict()), model=SPEC), pairs)


async def agent_loop_batch(outputs, widths=(PROMPT, RESPONSE)):
    """verl's own padding and stacking, on a worker that has no servers."""
    worker = object.__new__(AgentLoopWorker)
    worker.rollout_config = SimpleNamespace(prompt_length=widths[0], response_length=widths[1])
    worker.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()), pad_token="<pad>")
    nothing = lambda *_, **__: none()  # noqa: E731
    worker._compute_multi_modal_inputs = lambda *_: {}
    worker._compute_position_ids = lambda ids, mask, *_: (mask.cumsum(1) - 1).clamp(min=0)
    worker._get_mm_processor_kwargs = lambda *_: None
    worker._compute_score = worker._compute_teacher_logprobs = nothing
    worker.reward_loop_worker_handles = None
    worker.distillation_enabled = False
    inner = [await worker._agent_loop_postprocess(output, False, raw_prompt=[]) for output in outputs]
    return worker._postprocess(inner)


async def none():
    return None


def test_sequences_that_fill_a_batch_up_have_no_routes():
    source = torch.from_numpy(telling_routes(np.arange(1, 9))).short()
    filler = build_padding_routed_experts(source, 5)
    td = {"input_ids": [2] * 5, "routed_experts": filler, "response_mask": [0]}
    td = TensorDict({name: nested([each]) for name, each in td.items()}, batch_size=1)
    assert not trace_of(td, model=SPEC).valid_N.any()
