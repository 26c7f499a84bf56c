"""verl's own agent loop with a tool, on a stand-in for its server that answers as vLLM's does, turn by turn.

verl keeps the routes of the last request alone, which has a row for each token of the turns before it. Routes say here
to which token, position and request they belong.
"""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from transformers.utils import get_json_schema
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.padding import left_right_2_no_padding

from examples.trl.tiny import chat_tokenizer, look_up
from foreroute.errors import CaptureError, ReplayError
from foreroute.trainers.verl import trace_of
from foreroute.trainers.verl.packed_batch import PackedBatch, require_routed
from tests.trainers.verl.test_verl_data import agent_loop_batch
from tests.trainers.verl.verl_batches import SPEC, telling_routes
from tests.trainers.verl.verl_book import Book, followed, watched
from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict

CALL = 'hm <tool_call>{"name": "look_up", "arguments": {"text": "abc"}}</tool_call>'
WIDTHS = (16, 400)
END = 1


def routes_of(tokens, request):
    """Those of one request: uint8 [T - 1, 3, 2]."""
    return telling_routes(np.asarray(tokens) + 1000 * request).astype(np.uint8)


class Server:
    """Answers each request with the next text, and with routes as vLLM does: of all tokens but the last.

    Attributes:
        answers: (prompt, response) of each request.
    """

    def __init__(self, texts, *, routes=routes_of):
        self.answers, self._texts, self._routes = [], texts, routes

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        request = len(self.answers)
        response = [*chat_tokenizer()(self._texts[request])["input_ids"], END]
        self.answers.append((list(prompt_ids), response))
        routes = self._routes([*prompt_ids, *response], request)
        return TokenOutput(token_ids=response, log_probs=[-1.0 - request] * len(response), routed_experts=routes)


async def looped(server, *, response_length, kind=ToolAgentLoop):
    """What verl's agent loop makes of a conversation, as one sequence of a padded batch."""
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
    loop = kind(
        trainer_config=DictConfigWrap(config),
        server_manager=server,
        tokenizer=chat_tokenizer(),
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap({}),
        tools=ToolListWrap([FunctionTool("look_up", look_up, schema)]),
    )
    output = await loop.run({}, raw_prompt=[{"role": "user", "content": "how many"}])
    return output, await agent_loop_batch([output], (WIDTHS[0], response_length))


def expected_of(answers, response_length):
    """Tokens, which of them were sampled and their log-probs, by what the server was asked and what it answered."""
    prompt = answers[0][0]
    tokens, sampled, logprobs = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    for request, (asked, response) in enumerate(answers):
        assert asked[: len(tokens)] == tokens
        tokens = asked + response
        between = len(asked) - len(sampled)
        sampled += [False] * between + [True] * len(response)
        logprobs += [0.0] * between + [-1.0 - request] * len(response)
    kept = len(prompt) + response_length
    return tokens[:kept], np.array(sampled[:kept]), logprobs[:kept], len(prompt)


@pytest.mark.parametrize(
    ("texts", "response_length", "requests", "is_cut"),
    [
        (["no call"], 400, 1, False),
        ([CALL, "and so"], 400, 2, False),
        ([CALL, CALL, CALL, "and so"], 400, 4, False),
        ([CALL, "a long text"], 95, 2, True),
        ([CALL, "unused"], 80, 1, False),
        ([CALL * 2, "unused"], 90, 1, True),
    ],
    ids=["one-turn", "two-turns", "four-turns", "cut-in-a-turn", "no-room-for-the-answer", "cut-in-the-first-turn"],
)
def test_every_row_is_that_of_its_token_in_the_last_request_and_sampled_tokens_alone_are_trained(
    texts, response_length, requests, is_cut
):
    server = Server(texts)
    output, batch = asyncio.run(looped(server, response_length=response_length))
    assert len(server.answers) == requests
    tokens, sampled, logprobs, prompt = expected_of(server.answers, response_length)
    whole = [token for turn in server.answers[-1:] for part in turn for token in part]
    rows = routes_of(whole, requests - 1)[: len(tokens), 1:]
    assert output.response_logprobs == logprobs[prompt:]
    assert (len(rows) == len(tokens)) == is_cut
    for form in (batch, left_right_2_no_padding(batch.to_tensordict())):
        trace = trace_of(form, model=SPEC)
        assert trace.tokens(0).tolist() == tokens
        assert trace.valid_N.tolist() == [True] * len(rows) + [False] * (len(tokens) - len(rows))
        assert np.array_equal(trace.expert_ids_NLK[: len(rows)], rows)
        packed = PackedBatch(form)
        assert np.array_equal(packed.trained_N[packed.index_N >= 0], sampled[prompt:])
        require_routed(trace, form)


@pytest.mark.parametrize(
    ("routed", "error", "message"),
    [
        (lambda request: request < 2, ReplayError, "has no route at position"),
        (lambda request: False, CaptureError, "no 'routed_experts'"),
    ],
    ids=["last-turn-without", "no-turn-with"],
)
def test_turns_without_routes_are_refused(routed, error, message):
    server = Server(
        [CALL, CALL, "and so"], routes=lambda tokens, request: routes_of(tokens, request) if routed(request) else None
    )
    _, batch = asyncio.run(looped(server, response_length=400))
    with pytest.raises(error, match=message):
        require_routed(trace_of(batch, model=SPEC), batch)


@pytest.mark.shows("verl, FSDP engine", "agent loop with tools")
def test_verls_engine_gives_experts_the_routes_of_every_turn(group, folder):
    """Of which a part is drawn at random, so that the model would not take them by itself."""
    book, rng = Book(folder, count=1), np.random.default_rng(5)

    def drawn(tokens, request):
        rows = book.native_of(np.array(tokens))[0][:-1].copy()
        cells = rng.random(rows.shape[:2]) < 0.1
        rows[cells] = np.argsort(rng.random((*rows.shape[:2], 8)), axis=-1)[cells][:, :2]
        book.routes.append(rows)
        return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1).astype(np.uint8)

    outputs, chosen = [], []
    book.pairs, book.routes = [], []
    for texts in (["no call"], [CALL, CALL, "and so"]):
        output, _ = asyncio.run(looped(Server(texts, routes=drawn), response_length=300))
        outputs.append(output)
        book.pairs.append((np.array(output.prompt_ids), np.array(output.response_ids)))
        chosen.append(book.routes[-1])
    book.routes = chosen
    batch = asyncio.run(agent_loop_batch(outputs, (WIDTHS[0], 300)))
    del batch.batch["rollout_log_probs"]  # the server's are none of a model
    engine = make(folder, "R3", lr=0.0)
    with watched(engine.module) as forwards:
        old_log_probs(engine, tensordict(batch.batch, max_token_len_per_gpu=400))
    own, *replayed = [followed(forward, book) for forward in forwards]
    assert own[1] > 0  # the first is held against the model's own routes
    assert sorted(s for *_, sequences in replayed for s in sequences) == [0, 1]
    assert all((yes, no) == (2, 0) for yes, no, _ in replayed)


def test_a_resumed_request_keeps_the_rows_that_its_tokens_were_sampled_with(monkeypatch):
    """verl's client of asynchronous rollouts, whose weights may change while a request is stopped."""
    parts = iter([([7, 8, 9], "aborted"), ([], "aborted"), ([10, 11], "completed")])
    asked = []

    async def answer(self, request_id, *, prompt_ids, **_):
        response, reason = next(parts)
        routes = routes_of([*prompt_ids, *response], len(asked))
        asked.append(len(prompt_ids))
        return TokenOutput(
            token_ids=response, log_probs=[-1.0] * len(response), routed_experts=routes, stop_reason=reason
        )

    async def at_once(_):
        pass

    monkeypatch.setattr(LLMServerClient, "generate", answer)
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", at_once)
    client = object.__new__(FullyAsyncLLMServerClient)
    client.config = SimpleNamespace()
    output = asyncio.run(client.generate("0", prompt_ids=[2, 3, 4], sampling_params={}))
    assert asked == [3, 6, 6]
    tokens = [2, 3, 4, *output.token_ids]
    assert output.token_ids == [7, 8, 9, 10, 11]
    # the row of the last token of the first part was routed when the request went on
    assert np.array_equal(output.routed_experts, np.concatenate([routes_of(tokens, 0)[:5], routes_of(tokens, 2)[5:]]))
