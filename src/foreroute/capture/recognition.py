"""Which form an engine's output has, and where in it the routes lie. Objects are told by their attributes.

vllm    `routed_experts` on each choice: an array in process, base64 of a .npy file over HTTP
sglang  `routed_experts` in `meta_info` (/generate) or `sglext` (OpenAI): base64 of int32, without a shape
verl    a padded batch of `routed_experts`, `input_ids` and `attention_mask`
array   an array of any library, or the bytes of a .npy file: the door for every other engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from foreroute.capture.arrays import NPY_MAGIC, as_array, field_of, is_array, items_of, parse_text, read_base64
from foreroute.capture.verl_batch import sequences_of
from foreroute.errors import CaptureError, shown


class Form(StrEnum):
    """A form of engine output."""

    VLLM = "vllm"
    SGLANG = "sglang"
    VERL = "verl"
    ARRAY = "array"


@dataclass(frozen=True)
class RawSequence:
    """The routes of one sequence as they were found, and the facts beside them.

    Attributes:
        routes: an array, base64 of int32, or the bytes of a .npy file.
        valid: bool [rows], False where a row was never routed; None where the form has no such rows.
        prompt_token_ids, response_token_ids: the tokens, where the output carries them.
        token_ids: all tokens, where the output does not tell prompt and response apart.
        sampling_mask: the sets that its tokens were drawn from, where the output has them.
        indexer_topk: what its sparse-attention indexers chose, where the output has that.
        weight_versions: spans of generated tokens and the weights that produced them, where the output has them.
    """

    routes: Any
    valid: Any = None
    prompt_token_ids: Any = None
    response_token_ids: Any = None
    token_ids: Any = None
    sampling_mask: Any = None
    indexer_topk: Any = None
    weight_versions: Any = None


def read_output(output: Any) -> tuple[Form, list[RawSequence]]:
    """Return the form of an engine's output, and the sequences in it as they were found.

    Args:
        output: a response (parsed, or JSON text or bytes), an in-process output, a list of them, or a bare array.

    Raises:
        CaptureError: when the form is unknown or carries no routes.
    """
    output = _parsed(output)
    if not isinstance(output, list | tuple):
        return _from_one(output)
    items = items_of(output, "the list of outputs")
    if not items:
        raise _no_routes(items)
    found = [_from_one(_parsed(item)) for item in items]
    forms = {form for form, _ in found}
    if len(forms) > 1:
        raise CaptureError(f"the outputs mix forms ({', '.join(sorted(forms))}); decode each form on its own")
    return found[0][0], [sequence for _, sequences in found for sequence in sequences]


def _parsed(output: Any) -> Any:
    """Return the value of JSON text or bytes; the bytes of a .npy file, and what is neither, as they are."""
    if isinstance(output, str):
        return parse_text(output)
    if not isinstance(output, bytes | bytearray | memoryview):
        return output
    try:
        data = bytes(output)
    except ValueError as error:  # a view that was released
        raise CaptureError(f"the {type(output).__name__} cannot be read ({error})") from error
    return data if data.startswith(NPY_MAGIC) else parse_text(data)


def _from_one(output: Any) -> tuple[Form, list[RawSequence]]:
    """Do as `read_output`, for what is no list of outputs."""
    if is_array(output) and field_of(output, "ndim") == 4:
        raise CaptureError(
            "routes [B, T, layers, picks] alone do not say what is padding: RoutingTrace.from_padded takes them with "
            "tokens and mask; or pass a dict of routed_experts, input_ids and attention_mask, or a list with an array "
            "[rows, layers, picks] for each sequence"
        )
    if isinstance(output, bytes) or is_array(output):
        return Form.ARRAY, [RawSequence(output)]
    if (meta := field_of(output, "meta_info")) is not None:
        return Form.SGLANG, [_sequence(meta, output, output)]
    if (extension := field_of(output, "sglext")) is not None:
        choice = _only_choice(output)
        return Form.SGLANG, [_sequence(extension, choice, choice)]
    batch = None if isinstance(output, Mapping) else field_of(output, "batch")  # verl's DataProto
    if batch is not None:
        return Form.VERL, _verl(batch)
    choices = _first(output, "outputs", "choices")
    if isinstance(choices, list | tuple) and choices:
        found = [_sequence(choice, choice, output) for choice in items_of(choices, "the choices")]
    elif is_array(routes := field_of(output, "routed_experts")) and as_array(routes, "routed_experts").ndim == 4:
        return Form.VERL, _verl(output)
    else:
        found = [_sequence(output, output, output)]
    # vLLM's text is a file, with the shape and the dtype in it
    read = [read_base64(each.routes, "the routes") if isinstance(each.routes, str) else each.routes for each in found]
    return Form.VLLM, [replace(each, routes=routes) for each, routes in zip(found, read, strict=True)]


def _sequence(holder: Any, choice: Any, record: Any) -> RawSequence:
    """Return what one answer of vLLM or SGLang says: `holder` has the routes, `choice` or else `record` the tokens."""
    routes = field_of(holder, "routed_experts")
    if routes is None:
        raise _no_routes(holder)
    if not isinstance(routes, str) and not is_array(routes):
        raise CaptureError(
            f"routed_experts is a {type(routes).__name__}; expected an array, or base64 as vLLM and SGLang write it"
        )
    prompt = field_of(choice, "prompt_token_ids")
    return RawSequence(
        routes,
        prompt_token_ids=field_of(record, "prompt_token_ids") if prompt is None else prompt,
        response_token_ids=_first(choice, "output_ids", "token_ids"),
        sampling_mask=_first(holder, "sampling_mask", "output_token_sampling_mask"),
        indexer_topk=field_of(holder, "indexer_topk"),
        weight_versions=field_of(holder, "weight_versions"),
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
    """Return the sequences of a padded batch."""
    fields = {name: field_of(batch, name) for name in ("routed_experts", "input_ids", "attention_mask")}
    return [RawSequence(rows_TAK, valid_T, token_ids=tokens_T) for rows_TAK, valid_T, tokens_T in sequences_of(fields)]


def _no_routes(record: Any) -> CaptureError:
    seen = shown(record)
    if isinstance(record, Mapping):
        seen = str(sorted(key for key in items_of(record, "the keys") if type(key) is str)[:12])
    return CaptureError(
        f"no routed_experts in {seen}; start the engine with --enable-return-routed-experts, ask for them in the "
        "request (SGLang), and pass the final output, since streams and unfinished requests carry none; or pass routes "
        "as arrays, which numpy.asarray makes of nested lists"
    )


def have_all(found: Sequence[Any], what: str) -> bool:
    """Say whether every sequence has what an output may carry beside routes.

    Raises:
        CaptureError: when some sequences have it and others do not.
    """
    there = [each is not None for each in found]
    if any(there) and not all(there):
        raise CaptureError(f"sequence {there.index(False)} has no {what} and others have; ask for all of them")
    return any(there)


def _first(record: Any, *names: str) -> Any:
    """Return the first of these fields that there is."""
    return next((value for name in names if (value := field_of(record, name)) is not None), None)
