"""verl's own agent loop with a tool, on a stand-in for its servers, turn by turn.

verl keeps the routes of the last request alone, which has a row for each token of the turns before it.
"""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from examples.trl.tiny import chat_tokenizer, look_up
from tests.trainers.given_experts import differing, drawn_anew, native, watched
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict

CALL = 'hm <tool_call>{"name": "look_up", "arguments": {"text": "abc"}}</tool_call>'
WIDTHS = (16, 400)
END = 1


class Servers:
    """Answers requests with these texts, as verl's client of its servers does, and with routes of all tokens."""

    def __init__(self, texts, routes):
        self._texts, self._routes = [[*chat_tokenizer()(text)["input_ids"], END] for text in texts], routes

    async def generate(self, request_id, *, prompt_ids, **_):
        response = self._texts.pop(0)
        routes = self._routes([*prompt_ids, *response])
        log_probs = [-1.0] * len(response)
        return TokenOutput(token_ids=response, log_probs=log_probs, routed_experts=routes, stop_reason="completed")


async def looped(servers, *, response_length):
    """What verl's agent loop makes of a conversation."""
    multi_turn = SimpleNamespace(
        max_user_turns=None,
        max_assistant_turns=None,
        max_parallel_calls=1,
        max_tool_response_length=64,
        tool_response_truncate_side="right",
        format="hermes",
    )
    rollout = SimpleNamespace(
        multi_turn=multi_turn, prompt_length=WIDTHS[0], response_length=response_length, full_determinism=False
    )
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    schema = OpenAIFunctionToolSchema.model_validate(get_json_schema(look_up))
    loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=servers,
        tokenizer=chat_tokenizer(),
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap({}),
        tools=ToolListWrap([FunctionTool("look_up", look_up, schema)]),
    )
    return await loop.run({"logprobs": True}, raw_prompt=[{"role": "user", "content": "how many"}])


async def agent_loop_batch(outputs, widths):
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


@pytest.mark.shows("verl, FSDP engine", "agent loop with tools")
def test_verls_engine_gives_experts_the_routes_of_every_turn(group, folder):
    """Of which a part is drawn at random, so that the model would not take them by itself."""
    model, rng, routes = Book(folder, count=1).model, np.random.default_rng(5), {}

    def drawn(tokens):
        routes[tuple(tokens)] = rows = drawn_anew(native(model, tokens)[0][:-1], 0.1, rng)
        return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1).astype(np.uint8)

    servers = [Servers(texts, drawn) for texts in (["no call"], [CALL, CALL, "and so"])]
    outputs = [asyncio.run(looped(each, response_length=300)) for each in servers]
    batch = asyncio.run(agent_loop_batch(outputs, (WIDTHS[0], 300)))
    del batch.batch["rollout_log_probs"]  # the server's are none of a model
    engine = make(folder, "R3", lr=0.0)
    with watched(engine.module) as forwards:
        old_log_probs(engine, tensordict(batch.batch, max_token_len_per_gpu=400))
    whole = {tokens: routes[tokens] for tokens in (tuple(o.prompt_ids + o.response_ids) for o in outputs)}
    own, *replayed = forwards
    assert differing([own], whole)[1] > 0  # the first is held against the model's own routes
    # in two layers
    assert differing(replayed, whole) == (2 * sum(map(len, whole.values())), 0)
