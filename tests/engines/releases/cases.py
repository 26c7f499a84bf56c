"""What is asked of every release: one function for each row of the table.

A case asks a server, holds what comes against the references, and returns what was seen. It raises `RefusedError` with
the server's words, `NoRoutesError` where an answer has none, and `AssertionError` where its subject did not happen.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreroute.capture import decode
from foreroute.trace import SAMPLING
from tests.engines.releases.reference import SPEC, TEMPERATURE, VOCABULARY, Reference, Sequence, planted
from tests.engines.releases.server import BLOCK, BLOCKS, LENGTH, NAME, STEP_TOKENS, Server

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
LOGPROB_ERROR = 1e-4
"""How far log-probs of two float32 implementations may lie apart; those of other weights lie about 1 apart."""
TOP_P = 0.8


MASKS_FLAG = "--return-sampling-mask"


class NoRoutesError(Exception):
    """An answer without routes: where it lacks them."""


@dataclass(frozen=True)
class Setting:
    """What a case asks, the model that it serves, and another of the same sizes, with its checkpoint."""

    server: Server
    old: Reference
    new: Reference
    new_folder: Path


Case = Callable[[Setting], str]


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


def ask(server: Server, tokens: list[int], most: int, start: int = 0, **more) -> list[Sequence]:
    """The choices of a completion, all of them with `most` tokens or as many as were sampled before an abort."""
    body = {"model": NAME, "prompt": tokens, "max_tokens": most, "temperature": TEMPERATURE, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if start:
        body["routed_experts_prompt_start"] = start
    answer = server.post(COMPLETIONS, body | more)
    assert all(choice["prompt_token_ids"] == tokens for choice in answer["choices"])
    return [sequence(tokens, choice, choice["logprobs"]["token_logprobs"], start) for choice in answer["choices"]]


def generate(server: Server, tokens: list[int], most: int, **more) -> tuple[Sequence, dict]:
    """What `/inference/v1/generate` sampled, and its choice as it came."""
    (choice,) = server.post(GENERATE, generate_body(tokens, most, **more))["choices"]
    return sequence(tokens, choice, [step["logprob"] for step in choice["logprobs"]["content"]]), choice


def generate_body(tokens: list[int], most: int, **more) -> dict:
    sampling = {"max_tokens": most, "temperature": TEMPERATURE, "ignore_eos": True, "logprobs": 0}
    return {"model": NAME, "token_ids": tokens, "sampling_params": sampling | more}


def sequence(tokens: list[int], choice: dict, logprobs: list[float], start: int = 0) -> Sequence:
    """One choice, decoded by foreroute."""
    if choice.get("routed_experts") is None:
        raise NoRoutesError("the choice has no routed_experts")
    whole = [*tokens, *choice["token_ids"]]
    trace = decode(
        {"choices": [choice | {"prompt_token_ids": tokens}]},
        model=SPEC,
        token_ids=whole,
        start=start,
        vocabulary_size=VOCABULARY,
    )
    assert np.flatnonzero(trace.valid_N).tolist() == list(range(start, len(whole) - 1))
    return Sequence(trace, len(tokens), np.array(logprobs, np.float64))


def joined(tokens: list[int], chunks: list[dict]) -> tuple[Sequence, dict]:
    """The chunks of a stream as one sequence, and the last of them, which has its routes."""
    carry = [n for n, chunk in enumerate(chunks) if chunk.get("routed_experts")]
    if not carry:
        raise NoRoutesError(f"none of {len(chunks)} chunks has routed_experts")
    assert carry == [len(chunks) - 1], f"chunks {carry} of {len(chunks)} have routes"
    sampled = [token for chunk in chunks for token in chunk["token_ids"] or []]
    steps = [step["logprob"] for chunk in chunks for step in (chunk.get("logprobs") or {}).get("content") or []]
    return sequence(tokens, chunks[-1] | {"token_ids": sampled}, steps), chunks[-1]


def equal(reference: Reference, sequences: list[Sequence], *, logprobs: bool = True) -> str:
    """Hold sequences against the reference: the numbers of those and of their rows, when all of them are equal."""
    for each in sequences:
        differing = reference.differing(each.trace)
        assert not differing, f"{len(differing)} sets differ, the first at row and layer {differing[0]}"
        if logprobs:
            error = reference.logprob_errors_R(each).max()
            assert error < LOGPROB_ERROR, f"log-probs lie {error} from the model's"
    rows = sum(int(each.trace.valid_N.sum()) for each in sequences)
    return f"{len(sequences)} sequence{'s' * (len(sequences) > 1)}, {rows} rows"


def together(asks: list[Callable[[], list[Sequence]]]) -> list[Sequence]:
    """Requests that are under way at once."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return [each for future in [pool.submit(one) for one in asks] for each in future.result()]


@contextmanager
def under_way(server: Server, asked: Callable, *, sampled: int) -> Iterator[Future]:
    """A long request, of which `sampled` tokens exist when the context begins."""
    with ThreadPoolExecutor(1) as pool:
        before = server.metric("generation_tokens_total")
        future = pool.submit(asked)
        while server.metric("generation_tokens_total") < before + sampled and not future.done():
            time.sleep(0.002)
        yield future


def routes(at: Setting) -> str:
    """Prompts of one token and more, and one response of one token."""
    sizes = [(1, 6), (8, 6), (40, 6), (40, 1)]
    found = [each for size, most in sizes for each in ask(at.server, prompt(size, size + most), most)]
    return equal(at.old, found)


def generate_endpoint(at: Setting) -> str:
    """The endpoint of tokens in, tokens out."""
    return equal(at.old, [generate(at.server, prompt(20, 31), 12)[0]])


def planted_change(at: Setting) -> str:
    """The control: one expert of one row is another one, and nothing else is seen."""
    (found,) = ask(at.server, prompt(24, 32), 6)
    changed, place = planted(found.trace, row=13, layer=1), (13, 1)
    seen = at.old.differing(changed)
    assert seen == [place], f"the change at {place} was seen as {seen}"
    return f"seen at row {place[0]}, layer {place[1]}, and nowhere else"


def prefix_cached(at: Setting) -> str:
    """The same prompt again, and one that goes on from it."""
    tokens = prompt(3 * BLOCK + 4, 33)
    ask(at.server, tokens, 4)
    before = at.server.metric("prefix_cache_hits_total")
    found = ask(at.server, tokens, 6) + ask(at.server, [*tokens, *prompt(20, 34)], 6)
    cached = int(at.server.metric("prefix_cache_hits_total") - before)
    assert cached >= 2 * 3 * BLOCK, f"{cached} tokens of the prompts were cached"
    return f"{equal(at.old, found)}, {cached} of them cached"


def chunked_prefill(at: Setting) -> str:
    """Prompts of more tokens than a step takes."""
    sizes = [STEP_TOKENS + 1, 100, 130]
    return f"{equal(at.old, [each for size in sizes for each in ask(at.server, prompt(size, 35 + size), 6)])}"


def several_choices(at: Setting) -> str:
    """Three responses to one prompt, each with all rows."""
    found = ask(at.server, prompt(36, 41), 12, n=3)
    assert len({each.trace.tokens(0).tobytes() for each in found}) == 3, "responses are alike"
    return equal(at.old, found)


def aborted(at: Setting) -> str:
    """A request that is ended in its middle keeps what it sampled."""
    most = LENGTH - 8
    with under_way(at.server, lambda: ask(at.server, prompt(8, 42), most), sampled=5) as asked:
        at.server.post("/abort_requests")
        found = asked.result()
    (sampled,) = (len(each.logprobs_R) for each in found)
    assert sampled < most, "the request ended before it was aborted"
    return equal(at.old, found)


def preempted(at: Setting) -> str:
    """Eight requests in a cache that holds fewer."""
    before = at.server.metric("num_preemptions_total")
    asks = [lambda seed=seed: ask(at.server, prompt(60, seed), 60) for seed in range(50, 58)]
    assert len(asks) * 120 > BLOCK * BLOCKS
    found = together(asks)
    times = int(at.server.metric("num_preemptions_total") - before)
    assert times, "nothing was preempted"
    return f"{equal(at.old, found)}, {times} preemptions"


def prompt_start(at: Setting) -> str:
    """Rows of the prompt are left out: some, and a cached block and more."""
    tokens = prompt(2 * BLOCK + 6, 61)
    return equal(at.old, [each for start in (6, BLOCK + 3) for each in ask(at.server, tokens, 6, start)])


def start_at_the_end(at: Setting) -> str:
    """All rows of the prompt are left out, with the one that gave the first token."""
    tokens = prompt(20, 68)
    return equal(at.old, ask(at.server, tokens, 6, len(tokens)))


def start_beyond_the_prompt(at: Setting) -> str:
    """A start that no prompt of this length has."""
    tokens = prompt(8, 62)
    return equal(at.old, ask(at.server, tokens, 6, len(tokens) + 1))


def streamed(at: Setting) -> str:
    """A stream of the endpoint of tokens, whose chunks are joined."""
    tokens = prompt(30, 63)
    chunks = list(at.server.stream(GENERATE, generate_body(tokens, 12)))
    return f"{equal(at.old, [joined(tokens, chunks)[0]])}, in the last chunk"


def streamed_completion(at: Setting) -> str:
    """A stream of the OpenAI endpoint."""
    body = {"model": NAME, "prompt": prompt(30, 64), "max_tokens": 6, "temperature": TEMPERATURE, "ignore_eos": True}
    choices = list(at.server.stream(COMPLETIONS, body | {"return_token_ids": True}))
    assert sum(len(choice["token_ids"] or []) for choice in choices) == 6
    if not any(choice.get("routed_experts") for choice in choices):
        raise NoRoutesError(f"none of {len(choices)} chunks has routed_experts")
    raise AssertionError("a chunk has routes, which this case does not read")


def seeded_in_chunks(at: Setting) -> str:
    """A request with a seed whose prompt comes in chunks."""
    return equal(at.old, ask(at.server, prompt(130, 67), 6, seed=7))


def updated(at: Setting) -> str:
    """Weights are replaced in the middle of a request: each row is that of the old ones or of the new ones.

    Changes what the server serves: the last case of a server.
    """
    tokens, chunks = prompt(36, 65), []
    for chunk in at.server.stream(GENERATE, generate_body(tokens, LENGTH - len(tokens))):
        chunks.append(chunk)
        if len(chunks) == 8:
            at.server.post("/pause?mode=keep")
            at.server.post("/collective_rpc", {"method": "foreroute_load", "args": [str(at.new_folder)]})
            at.server.post("/update_weight_version", {"new_version": "2"})
            at.server.post("/resume")
    found, last = joined(tokens, chunks)
    rows = int(found.trace.valid_N.sum())
    by_old, by_new = ({row for row, _ in each.differing(found.trace)} for each in (at.old, at.new))
    neither = by_old & by_new
    assert not neither, f"{len(neither)} of {rows} rows are of neither, the first {min(neither)}"
    change = max(by_new, default=-1) + 1
    assert change <= min(by_old, default=rows), "rows of the old and the new weights are mixed"
    assert change < rows, "the request ended before its weights were replaced"
    first = max(change - len(tokens) + 1, 0)  # the first token that the new weights gave
    errors_R = np.concatenate([at.old.logprob_errors_R(found)[:first], at.new.logprob_errors_R(found)[first:]])
    assert errors_R.max() < LOGPROB_ERROR, f"log-probs lie {errors_R.max()} from those of the weights of their rows"
    told = ""
    if spans := last.get("weight_versions"):
        told = "; weight_versions: " + ", ".join(f"{s['version']} of tokens {s['start']} to {s['end']}" for s in spans)
    elsewhere = f"of {rows} rows the first {change} by the old weights, the others by the new"
    return f"{elsewhere}; prompt of {len(tokens)}{told}"


def masked(at: Setting) -> str:
    """Sets of top-p beside the routes: the fewest tokens of the model with that share, and log-probs on them."""
    found, _ = generate(at.server, prompt(24, 66), 12, top_p=TOP_P, top_k=VOCABULARY)
    tokens, masks = found.trace.tokens(0), found.trace.streams[SAMPLING]
    rows = np.arange(found.num_prompt - 1, len(tokens) - 1)
    assert np.array_equal(np.flatnonzero(masks.valid_N), rows), "masks stand on other rows"
    _, logprobs_TV = at.old.forward(tokens)
    sets, kept = masks.take(rows), []
    for row, first, end in zip(rows, sets.offsets[:-1], sets.offsets[1:], strict=True):
        shares = np.exp(logprobs_TV[row])
        own = shares[sets.ids[first:end]]
        kept.append(float(own.sum()))
        assert own.sum() >= TOP_P > own.sum() - own.min(), f"row {row} keeps {own.sum()}"
        assert own.min() >= np.delete(shares, sets.ids[first:end]).max(initial=0), f"row {row} keeps others"
    error = np.abs(logprobs_TV[rows, tokens[rows + 1]] - np.log(kept) - found.logprobs_R).max()
    assert error < LOGPROB_ERROR, f"log-probs on the sets lie {error} from the model's"
    return f"{equal(at.old, [found], logprobs=False)}, {len(rows)} sets"


@dataclass(frozen=True)
class Launch:
    """A server, with flags beside those of all and stand-ins for what a CPU lacks, and what it is asked, in order."""

    cases: dict[str, Case]
    flags: tuple[str, ...] = ()
    stand_ins: bool = True


LAUNCHES = (
    Launch(
        {
            "routes": routes,
            "one expert of one row exchanged by hand": planted_change,
            "prefix-cached": prefix_cached,
            "chunked prefill": chunked_prefill,
            "n = 3": several_choices,
            "abort": aborted,
            "preemption": preempted,
            "prompt start": prompt_start,
            "prompt start at the prompt's length": start_at_the_end,
            "prompt start beyond the prompt": start_beyond_the_prompt,
            "`/inference/v1/generate`": generate_endpoint,
            "streaming, `/inference/v1/generate`": streamed,
            "streaming, `/v1/completions`": streamed_completion,
            "a seed, and chunked prefill": seeded_in_chunks,
            "weights updated in mid-request": updated,
        }
    ),
    Launch({"sampling masks": masked}, (MASKS_FLAG,)),
    Launch({"started without stand-ins": routes}, stand_ins=False),
    Launch({"started without prefix caching": routes}, ("--no-enable-prefix-caching",)),
)
CASES = [case for launch in LAUNCHES for case in launch.cases]
