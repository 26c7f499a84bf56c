"""Forms of engines' output, and the place of routes in each. Objects are told by their attributes.

vllm    `routed_experts` on each choice: an array in process, base64 of a .npy file over HTTP; those of the prompt may
        be apart from it (`prompt_routed_experts` of 0.21)
sglang  `routed_experts` in `meta_info` (/generate) or `sglext` (OpenAI): base64 of int32, without a shape
verl    a padded batch of `routed_experts`, `input_ids` and `attention_mask`, or a packed one; by other names of SkyRL
array   an array of any library, nested lists, a table, or the bytes of a .npy file: the door for every other engine;
        and branches of verifiers
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from foreroute.capture.arrays import (
    BYTES,
    NPY_MAGIC,
    TABLE,
    as_bytes,
    field_of,
    is_array,
    is_nested,
    is_table,
    items_of,
    parse_text,
    read_base64,
)
from foreroute.capture.verl_batch import sequences_of
from foreroute.checks import as_array
from foreroute.errors import CaptureError, shown

NPY_BASE64 = b64encode(NPY_MAGIC).decode()
"""First characters of routes in the answer of a vLLM server."""
PADDED = ("routed_experts", "rollout_expert_indices")
"""Names of the routes of a padded batch: verl's, and SkyRL's."""


class Form(StrEnum):
    """A form of engine output."""

    VLLM = "vllm"
    SGLANG = "sglang"
    VERL = "verl"
    ARRAY = "array"


@dataclass(frozen=True)
class RawSequence:
    """The routes of one sequence as they were found, and the facts beside them, None where the output lacks them."""

    routes: Any  # an array, a table, nested lists, base64 of int32, or the bytes of a .npy file
    valid: Any = None  # bool [rows], False where a row was never routed
    prompt_token_ids: Any = None
    response_token_ids: Any = None
    token_ids: Any = None  # all tokens, where the output does not tell prompt and response apart
    sampling_mask: Any = None  # the sets that its tokens were drawn from
    indexer_topk: Any = None  # what its sparse-attention indexers chose
    weight_versions: Any = None  # spans of generated tokens and the weights that produced them
    prompt_routes: Any = None  # those of the prompt, where they are apart; `routes` are then of what follows
    start: Any = None  # the position of the first row, where a table states it
    logprobs: Any = None  # of its sampled tokens


def read_output(output: Any) -> tuple[Form, list[RawSequence]]:
    """Return the form of an engine's output, and the sequences in it as they were found."""
    output = _parsed(output)
    if not isinstance(output, list | tuple) or is_nested(output):
        return _from_one(output)
    items = items_of(output, "the list of outputs")
    if not items:
        raise CaptureError("the list of outputs is empty; pass what the engine answered")
    found = []
    for number, item in enumerate(items):
        try:
            found.append(_from_one(_parsed(item)))
        except CaptureError as error:
            raise CaptureError(f"output {number}: {error}") from error
    forms = {form for form, _ in found}
    if len(forms) > 1:
        raise CaptureError(f"the outputs mix forms ({', '.join(sorted(forms))}); decode each form on its own")
    return found[0][0], [sequence for _, sequences in found for sequence in sequences]


def _parsed(output: Any) -> Any:
    """Return the value of JSON text or bytes; the bytes of a .npy file, and what is neither, as they are."""
    if isinstance(output, str):
        return read_base64(output, "the routes") if output.startswith(NPY_BASE64) else parse_text(output)
    if not isinstance(output, BYTES):
        return output
    data = as_bytes(output)
    return data if data.startswith(NPY_MAGIC) else parse_text(data)


def _from_one(output: Any) -> tuple[Form, list[RawSequence]]:
    """Do as `read_output`, for what is no list of outputs."""
    if output is None or (isinstance(output, Mapping) and not output):
        raise CaptureError(f"the output is {shown(output)}, which is empty; pass what the engine answered")
    if not isinstance(output, Mapping) and all(field_of(output, name) is not None for name in ("status_code", "json")):
        raise CaptureError("the output is the response object of an HTTP library; pass its text or its json()")
    if is_array(output) and field_of(output, "ndim") == 4:
        raise CaptureError(
            "routes [B, T, layers, picks] alone do not say what is padding: RoutingTrace.from_padded takes them with "
            "tokens and mask; or pass a dict of routed_experts, input_ids and attention_mask, or a list with an array "
            "[rows, layers, picks] for each sequence"
        )
    if isinstance(output, bytes) or is_array(output) or is_nested(output):
        return Form.ARRAY, [RawSequence(output)]
    if is_table(output):
        return Form.ARRAY, [RawSequence(output, start=field_of(output, "start"))]
    if field_of(output, "sampled_mask") is not None and field_of(output, "routed_experts") is not None:
        # a branch of verifiers, with a row for each token
        return Form.ARRAY, [RawSequence(field_of(output, "routed_experts"), token_ids=field_of(output, "token_ids"))]
    if (meta := field_of(output, "meta_info")) is not None:
        return Form.SGLANG, [_sequence(meta, output, output, "the answer")]
    if (extension := field_of(output, "sglext")) is not None:
        choice = _only_choice(output)
        return Form.SGLANG, [_sequence(extension, choice, choice, "the answer")]
    batch = None if isinstance(output, Mapping) else field_of(output, "batch")  # verl's DataProto
    if batch is not None:
        return Form.VERL, _verl(batch)
    choices = _first(output, "outputs", "choices")
    if isinstance(choices, list | tuple) and choices:
        given = enumerate(items_of(choices, "the choices"))
        found = [_sequence(choice, choice, output, f"choice {number}") for number, choice in given]
    elif _is_padded(_first(output, *PADDED)):
        return Form.VERL, _verl(output)
    else:
        found = [_sequence(output, output, output, "the answer")]
    return Form.VLLM, [
        replace(each, routes=_of_vllm(each.routes), prompt_routes=_of_vllm(each.prompt_routes)) for each in found
    ]


def _is_padded(routes: Any) -> bool:
    """Say whether routes are those of a padded batch, by their axes."""
    return is_array(routes) and as_array(routes, name="routed_experts", error=CaptureError).ndim == 4


def _of_vllm(routes: Any) -> Any:
    """Return the file that vLLM's text is, with the shape and the dtype in it."""
    return read_base64(routes, "the routes") if isinstance(routes, str) else routes


def _sequence(holder: Any, choice: Any, record: Any, what: str) -> RawSequence:
    """Return what one answer of vLLM or SGLang says: `holder` has the routes, `choice` or else `record` the tokens."""
    routes, of_prompt = field_of(holder, "routed_experts"), field_of(choice, "prompt_routed_experts")
    of_prompt = field_of(record, "prompt_routed_experts") if of_prompt is None else of_prompt
    if routes is None and of_prompt is None:
        raise _no_routes(holder, what)
    for each in (routes, of_prompt):
        if not isinstance(each, str | list | tuple | None) and not is_array(each) and not is_table(each):
            raise CaptureError(
                f"routed_experts of {what} is a {type(each).__name__}; expected an array, base64 as vLLM and SGLang "
                f"write it, nested lists, or a table of {', '.join(TABLE)}"
            )
    prompt = field_of(choice, "prompt_token_ids")
    # SGLang's; those of the truncated distribution that was sampled from come first, where it has both
    logprobs = _first(holder, "output_token_sampling_logprobs", "output_token_logprobs")
    return RawSequence(
        [] if routes is None else routes,  # one token was sampled, or none
        prompt_routes=of_prompt,
        start=field_of(routes, "start") if is_table(routes) else None,
        prompt_token_ids=field_of(record, "prompt_token_ids") if prompt is None else prompt,
        response_token_ids=_first(choice, "output_ids", "token_ids"),
        sampling_mask=_first(holder, "sampling_mask", "output_token_sampling_mask"),
        indexer_topk=field_of(holder, "indexer_topk"),
        weight_versions=field_of(holder, "weight_versions"),
        logprobs=field_of(choice, "logprobs") if logprobs is None else logprobs,
    )


def _only_choice(record: Any) -> Any:
    """Return the one choice of a response; the response itself where it has none."""
    choices = field_of(record, "choices")
    if not isinstance(choices, list | tuple) or not choices:
        return record
    if len(choices) > 1:
        raise CaptureError(
            f"the response has {len(choices)} choices, and SGLang returns the routes of the first alone; "
            "ask for n = 1, or use /generate"
        )
    return items_of(choices, "the choices")[0]


def _verl(batch: Any) -> list[RawSequence]:
    """Return the sequences of a padded or packed batch."""
    fields = {
        "routed_experts": _first(batch, *PADDED),
        "input_ids": _first(batch, "input_ids", "sequences"),
        # ms-swift's for Megatron, whose other one is of every query and key
        "attention_mask": _first(batch, "attention_mask_2d", "attention_mask"),
        **{name: field_of(batch, name) for name in ("position_ids", "seq_lens")},
    }
    return [RawSequence(rows_TAK, valid_T, token_ids=tokens_T) for rows_TAK, valid_T, tokens_T in sequences_of(fields)]


def _no_routes(record: Any, what: str = "the output") -> CaptureError:
    """Make the error for an output without routes."""
    reason = field_of(record, "finish_reason")
    reason = field_of(reason, "type") if isinstance(reason, Mapping) else reason
    if isinstance(reason, str) and reason == "abort":
        return CaptureError(
            f"{what} was aborted (finish_reason abort) and has no routed_experts, as nothing of it was computed; leave "
            "it out, with its tokens"
        )
    seen = shown(record)
    if isinstance(record, Mapping):
        error = field_of(record, "error")
        error = field_of(error, "message") if isinstance(error, Mapping) else error
        error = field_of(record, "message") if field_of(record, "object") == "error" else error
        error = field_of(record, "detail") if error is None else error  # of a path that the server lacks
        if error is not None:
            said = repr(error[:300]) if type(error) is str else shown(error)
            return CaptureError(
                f"{what} is an error of the engine: {said}; ask as it says, or read the server's log if it failed"
            )
        if field_of(record, "choices") == []:
            return CaptureError(f"{what} has no choices, so nothing was sampled; leave it out")
        keys = (key for key in items_of(record, "the keys") if type(key) is str and field_of(record, key) is not None)
        seen = str(sorted(keys)[:12])
    return CaptureError(
        f"{what} has no routed_experts in {seen}; start the engine with --enable-return-routed-experts, ask for them "
        "in the request (SGLang), and pass the final output, since streams and unfinished requests carry none"
    )


def have_all(found: Sequence[Any], what: str) -> bool:
    """Say whether every sequence has what an output may carry beside routes; some and not others is refused."""
    there = [each is not None for each in found]
    if any(there) and not all(there):
        raise CaptureError(f"sequence {there.index(False)} has no {what} and others have; ask for all of them")
    return any(there)


def _first(record: Any, *names: str) -> Any:
    """Return the first of these fields that there is."""
    return next((value for name in names if (value := field_of(record, name)) is not None), None)
