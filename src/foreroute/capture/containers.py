"""Which form an engine's output has, and where in it the routes lie. Objects are told by their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreroute.capture.kinds import RULES, WireKind
from foreroute.capture.wire import NEMO_MAGIC, NPY_MAGIC, parse_json, read_array
from foreroute.errors import CaptureError

NPY_BASE64 = "k05VTVBZ"  # the magic of a .npy file, in base64
_TABLE = {"data", "shape", "dtype"}
_SEQUENCES = (list, tuple)
_SHARED = {
    WireKind.VLLM: (WireKind.TENSORRT_LLM, WireKind.LMDEPLOY),
    WireKind.SGLANG: (WireKind.SGLANG_JAX,),
    WireKind.RAW_INT32: (WireKind.SGLANG, WireKind.SGLANG_JAX),
    WireKind.ARRAY: (WireKind.VLLM, WireKind.TENSORRT_LLM, WireKind.LMDEPLOY),
    WireKind.LISTS: (WireKind.LMDEPLOY,),
}


@dataclass(frozen=True)
class Recognised:
    """What an engine's output is.

    Attributes:
        kind: the form.
        description: the form in words.
        num_sequences: sequences that it carries routes of.
    """

    kind: WireKind
    description: str
    num_sequences: int


@dataclass(frozen=True)
class Payload:
    """The routes of one sequence as they were found, and the facts beside them.

    Attributes:
        routes: an array, nested lists, text, bytes or a table, as the form has it.
        prompt_routes: the prompt's rows where the form keeps them apart.
        prompt_token_ids, response_token_ids: the tokens, where the output carries them.
        start: the position of the first row, where the output states it.
        dtype: the dtype that the engine advertises for bytes without a header.
        token_ids: all tokens, where the output does not tell prompt and response apart.
    """

    routes: Any
    prompt_routes: Any = None
    prompt_token_ids: Any = None
    response_token_ids: Any = None
    start: Any = None
    dtype: Any = None
    token_ids: Any = None


def recognise(output: object) -> Recognised:
    """Say which form `output` has, without decoding the routes.

    Args:
        output: a response (parsed, or as JSON text or bytes), an in-process output, a list of them, or bare routes.

    Raises:
        CaptureError: when the form is unknown or carries no routes.
    """
    kind, payloads = read_container(output)
    return Recognised(kind, RULES[kind].description, len(payloads))


def read_container(output: Any) -> tuple[WireKind, list[Payload]]:
    """The form of `output`, and one payload for each sequence in it."""
    if isinstance(output, bytes | bytearray | memoryview):
        return _from_bytes(bytes(output))
    if isinstance(output, str):
        return _from_text(output)
    if isinstance(output, _SEQUENCES):
        return _from_list(output)
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        return _from_array(output)
    return _from_record(output)


def _from_bytes(data: bytes) -> tuple[WireKind, list[Payload]]:
    if data.startswith(NPY_MAGIC):
        return WireKind.NPY, [Payload(data)]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CaptureError(
            f"{len(data)} bytes starting with {data[:8]!r} are neither a .npy file nor text; expected engine output"
        ) from error
    return _from_text(text)


def _from_text(text: str) -> tuple[WireKind, list[Payload]]:
    bare = text.strip()
    if bare[:1] in ("{", "["):
        return read_container(parse_json(bare))
    return _kind_of_text(bare, raw=WireKind.RAW_INT32, npy=WireKind.NPY), [Payload(bare)]


def _from_list(items: Any) -> tuple[WireKind, list[Payload]]:
    if not items or isinstance(items[0], _SEQUENCES):
        return WireKind.LISTS, [Payload(items)]
    if isinstance(items[0], int | float | None):
        raise CaptureError(
            f"a flat list starting with {items[0]!r:.40} is no engine output; expected [rows, layers, K]"
        )
    found = [read_container(item) for item in items]
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        raise CaptureError(f"the outputs mix forms ({', '.join(sorted(kinds))}); decode each form on its own")
    return found[0][0], [payload for _, payloads in found for payload in payloads]


def _from_array(array: Any) -> tuple[WireKind, list[Payload]]:
    if len(array.shape) == 4:
        raise CaptureError(
            f"an array of shape {tuple(array.shape)} is a padded batch, and which rows are padding is not in it; "
            "pass the batch with routed_experts, input_ids and attention_mask"
        )
    return WireKind.ARRAY, [Payload(array)]


def _from_record(record: Any) -> tuple[WireKind, list[Payload]]:
    meta, extension = _get(record, "meta_info"), _get(record, "sglext") or _get(record, "sgl_ext")
    if meta is not None:
        return WireKind.SGLANG, [_sglang(meta, record)]
    if extension is not None:
        return WireKind.SGLANG, [_sglang(extension, _only_choice(record))]
    if isinstance(record, Mapping) and record.keys() >= _TABLE:
        return _kind_of_table(record), [Payload(record, start=record.get("start"))]
    batch = _get(record, "batch")  # verl's DataProto
    if batch is not None and not isinstance(record, Mapping):
        return WireKind.VERL, _verl(batch)
    choices = _get(record, "outputs") or _get(record, "choices")
    if isinstance(choices, _SEQUENCES) and choices:
        return _from_choices(record, choices)
    routes = _get(record, "routed_experts")
    if len(getattr(routes, "shape", ())) == 4:
        return WireKind.VERL, _verl(record)
    if routes is None:
        raise _no_routes(record)
    return _from_choices(record, [record])


def _from_choices(record: Any, choices: Any) -> tuple[WireKind, list[Payload]]:
    prompt_routes, prompt = _get(record, "prompt_routed_experts"), _get(record, "prompt_token_ids")
    payloads = []
    for choice in choices:
        routes = _get(choice, "routed_experts")
        if routes is None:
            raise _no_routes(choice)
        response = _first(_get(choice, "token_ids"), _get(choice, "generation_token_ids"))
        start = routes.get("start") if isinstance(routes, Mapping) else None
        own_prompt = _first(_get(choice, "prompt_token_ids"), prompt)
        payloads.append(Payload(routes, prompt_routes, own_prompt, response, start))
    kinds = {_kind_of_field(record, payload) for payload in payloads}
    if len(kinds) > 1:
        raise CaptureError(f"the choices of one output mix forms ({', '.join(sorted(kinds))}); expected one")
    return kinds.pop(), payloads


def _kind_of_field(record: Any, payload: Payload) -> WireKind:
    """The form of a `routed_experts` field, by its type."""
    routes = payload.routes
    if isinstance(routes, str) and _get(record, "input_token_len") is not None:
        return WireKind.LMDEPLOY
    if isinstance(routes, str):
        return _kind_of_text(routes, raw=WireKind.SGLANG_JAX, npy=WireKind.VLLM_NPY)
    if isinstance(routes, Mapping):
        return _kind_of_table(routes)
    if payload.prompt_routes is not None or (isinstance(record, Mapping) and "prompt_routed_experts" in record):
        return WireKind.VLLM_SPLIT
    if isinstance(routes, _SEQUENCES) or _get(record, "input_token_len") is not None:
        return WireKind.LMDEPLOY
    if hasattr(routes, "shape"):
        maker = type(record).__module__.split(".")[0]
        return WireKind.TENSORRT_LLM if maker == "tensorrt_llm" else WireKind.VLLM
    raise CaptureError(f"routed_experts is a {type(routes).__name__}; expected an array, lists, text or a table")


def _kind_of_text(text: str, *, raw: WireKind, npy: WireKind) -> WireKind:
    if text.startswith(NEMO_MAGIC):
        return WireKind.NEMO_RL
    return npy if text.startswith(NPY_BASE64) else raw


def _kind_of_table(table: Mapping[str, Any]) -> WireKind:
    if not table.keys() >= _TABLE:
        raise CaptureError(f"the table has keys {sorted(map(str, table))[:8]}; expected data, shape and dtype")
    return WireKind.PRIME_RL if "start" in table else WireKind.SKYRL


def _sglang(holder: Any, record: Any) -> Payload:
    routes = _get(holder, "routed_experts")
    if not isinstance(routes, str):
        raise _no_routes(holder)
    start, dtype = _get(holder, "routed_experts_start_len"), _get(holder, "routed_experts_dtype")
    prompt = _get(record, "prompt_token_ids")
    response = _first(_get(record, "output_ids"), _get(record, "token_ids"))
    return Payload(routes, None, prompt, response, start, dtype)


def _only_choice(record: Any) -> Any:
    choices = _get(record, "choices")
    if isinstance(choices, _SEQUENCES) and len(choices) > 1:
        raise CaptureError(
            f"the response has {len(choices)} choices, and SGLang returns the routes of the first alone; "
            "ask for n = 1, or use /generate"
        )
    return choices[0] if isinstance(choices, _SEQUENCES) and choices else record


def _verl(batch: Any) -> list[Payload]:
    try:
        fields = [read_array(batch[name]) for name in ("routed_experts", "input_ids", "attention_mask")]
    except (KeyError, TypeError) as error:
        raise CaptureError(
            f"the batch lacks {error}; expected routed_experts [b, T, layers, K], input_ids and attention_mask [b, T]"
        ) from error
    routes, tokens, mask = fields
    if routes.ndim != 4 or tokens.shape != routes.shape[:2] or mask.shape != tokens.shape:
        raise CaptureError(
            f"routed_experts has shape {routes.shape}, input_ids {tokens.shape}, attention_mask {mask.shape}; "
            "expected [b, T, layers, K], [b, T] and [b, T]"
        )
    kept = [np.flatnonzero(row) for row in mask]
    return [Payload(routes[b, rows], token_ids=tokens[b, rows]) for b, rows in enumerate(kept)]


def with_engine(kind: WireKind, engine: str) -> WireKind:
    """The form, made exact by the engine's name where several engines share a container."""
    return next((named for named in _SHARED.get(kind, ()) if named == engine), kind)


def _no_routes(record: Any) -> CaptureError:
    seen = sorted(map(str, record))[:12] if isinstance(record, Mapping) else type(record).__name__
    return CaptureError(
        f"no routed_experts in {seen}; start the engine with --enable-return-routed-experts, ask for them in the "
        "request (SGLang, LMDeploy), and pass the final output: streams and unfinished requests carry none"
    )


def _get(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
