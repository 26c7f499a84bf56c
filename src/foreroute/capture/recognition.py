"""Which form an engine's output has, and where in it the routes lie. Objects are told by their attributes.

The output is somebody else's: its attributes may raise, and its lists may be no lists. So its fields and entries are
asked for through the functions at the end of this file, which other files of this room use too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.wires import WireKind
from foreroute.errors import CaptureError, InputError
from foreroute.files import parse_json

NPY_MAGIC = b"\x93NUMPY"
NEMO_MAGIC = "nrlre1:"
MAX_TEXT = 1 << 28
"""Characters of one text, JSON or base64: 256 Mi, some hundred thousand tokens of a large model as JSON lists."""

MAX_INT32 = 2**31 - 1
_NPY_BASE64 = "k05VTVBZ"  # the magic of a .npy file, in base64
_TABLE = {"data", "shape", "dtype"}
_SEQUENCES = (list, tuple)
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 40


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
class RawSequence:
    """The routes of one sequence as they were found, and the facts beside them.

    Attributes:
        routes: an array, nested lists, text, bytes or a table, as the form has it.
        prompt_routes: the prompt's rows where the form keeps them apart.
        prompt_token_ids, response_token_ids: the tokens, where the output carries them.
        start: the position of the first row, where the output states it.
        dtype: the dtype that the engine advertises for bytes without a header.
        token_ids: all tokens, where the output does not tell prompt and response apart.
        sampling_mask: the sets that its tokens were drawn from, where the output has them.
        indexer_topk: what its sparse-attention indexers chose, where the output has that.
    """

    routes: Any
    prompt_routes: Any = None
    prompt_token_ids: Any = None
    response_token_ids: Any = None
    start: Any = None
    dtype: Any = None
    token_ids: Any = None
    sampling_mask: Any = None
    indexer_topk: Any = None


def recognise(output: object) -> Recognised:
    """Say which form `output` has, without decoding the routes.

    Args:
        output: a response (parsed, or as JSON text or bytes), an in-process output, a list of them, or bare routes.

    Raises:
        CaptureError: when the form is unknown or carries no routes.
    """
    kind, sequences = read_container(output)
    return Recognised(kind, kind.description, len(sequences))


def read_container(output: Any) -> tuple[WireKind, list[RawSequence]]:
    """Return the form of `output`, and the sequences in it as they were found."""
    output = _as_text(output)
    if isinstance(output, str) and output.strip()[:1] in ("{", "["):
        output = parse_text(output.strip())
    return _from_list(output) if isinstance(output, _SEQUENCES) else _from_one(output)


def _from_one(output: Any) -> tuple[WireKind, list[RawSequence]]:
    """Do as `read_container`, for what is no list of outputs."""
    output = _as_text(output)
    if isinstance(output, bytes):
        return WireKind.NPY, [RawSequence(output)]
    if isinstance(output, str):
        return _from_text(output.strip())
    return _from_array(output) if is_array(output) else _from_record(output)


def _as_text(output: Any) -> Any:
    """Return bytes as text, but those of a .npy file, and whatever is no bytes, as they are."""
    if not isinstance(output, bytes | bytearray | memoryview):
        return output
    try:
        data = bytes(output)
    except ValueError as error:  # a view that was released
        raise CaptureError(f"the {type(output).__name__} cannot be read ({error})") from error
    if data.startswith(NPY_MAGIC):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CaptureError(
            f"{len(data)} bytes starting with {data[:8]!r} are neither a .npy file nor text; expected engine output"
        ) from error


def _from_text(text: str) -> tuple[WireKind, list[RawSequence]]:
    if text[:1] == "{":
        return _from_record(parse_text(text))
    return _kind_of_text(text, raw=WireKind.RAW_INT32, npy=WireKind.NPY), [RawSequence(text)]


def _from_list(values: Any) -> tuple[WireKind, list[RawSequence]]:
    items = items_of(values, "the list of outputs")
    if not items or isinstance(items[0], _SEQUENCES):
        return WireKind.LISTS, [RawSequence(_nested(items, "the list"))]
    if isinstance(items[0], int | float | None):
        raise CaptureError(
            f"a flat list starting with {shown(items[0])} is no engine output; expected [rows, layers, K]"
        )
    if any(isinstance(item, _SEQUENCES) for item in items):
        raise CaptureError("a list of outputs holds another list; expected one output in each entry")
    found = [_from_one(item) for item in items]
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        raise CaptureError(f"the outputs mix forms ({', '.join(sorted(kinds))}); decode each form on its own")
    return found[0][0], [sequence for _, sequences in found for sequence in sequences]


def _nested(lists: Any, what: str) -> Any:
    """Return lists that begin as [rows, layers, K] do. Their other entries are looked at when they are read."""
    inner, depth = lists, 0
    while depth < 4 and isinstance(inner, _SEQUENCES):
        entries = items_of(inner, what)
        if not entries and (depth in (0, 2)):
            return lists
        inner, depth = entries[0] if entries else None, depth + 1
    if depth != 3:
        raise CaptureError(
            f"{what} is nested {'deeper' if depth > 3 else f'{depth} deep'}; expected lists [rows, layers, K], "
            "three deep"
        )
    return lists


def _num_axes(array: Any) -> int:
    try:
        return len(array.shape)
    except Exception as error:
        raise CaptureError(f"a {type(array).__name__} has no shape ({shown(error)}); expected an array") from error


def _from_array(array: Any) -> tuple[WireKind, list[RawSequence]]:
    if _num_axes(array) == 4:
        raise CaptureError(
            f"an array of shape {tuple(array.shape)} is a padded batch, and which rows are padding is not in it; "
            "pass the batch with routed_experts, input_ids and attention_mask"
        )
    return WireKind.ARRAY, [RawSequence(array)]


def _from_record(record: Any) -> tuple[WireKind, list[RawSequence]]:
    meta, extension = field_of(record, "meta_info"), _first(field_of(record, "sglext"), field_of(record, "sgl_ext"))
    if meta is not None:
        return WireKind.SGLANG, [_sglang(meta, record)]
    if extension is not None:
        return WireKind.SGLANG, [_sglang(extension, _only_choice(record))]
    if isinstance(record, Mapping) and all(field_of(record, name) is not None for name in _TABLE):
        return _kind_of_table(record), [RawSequence(record, start=field_of(record, "start"))]
    batch = field_of(record, "batch")  # verl's DataProto
    if batch is not None and not isinstance(record, Mapping):
        return WireKind.VERL, _verl(batch)
    choices = _first(field_of(record, "outputs"), field_of(record, "choices"))
    if isinstance(choices, _SEQUENCES) and choices:
        return _from_choices(record, choices)
    routes = field_of(record, "routed_experts")
    if routes is None:
        raise _no_routes(record)
    if is_array(routes) and _num_axes(routes) == 4:
        return WireKind.VERL, _verl(record)
    return _from_choices(record, [record])


def _from_choices(record: Any, choices: Any) -> tuple[WireKind, list[RawSequence]]:
    prompt_routes, prompt = field_of(record, "prompt_routed_experts"), field_of(record, "prompt_token_ids")
    sequences = []
    for choice in items_of(choices, "the choices"):
        routes = field_of(choice, "routed_experts")
        if routes is None:
            raise _no_routes(choice)
        response = _first(field_of(choice, "token_ids"), field_of(choice, "generation_token_ids"))
        start = field_of(routes, "start") if isinstance(routes, Mapping) else None
        own_prompt = _first(field_of(choice, "prompt_token_ids"), prompt)
        mask = field_of(choice, "sampling_mask")
        sequences.append(RawSequence(routes, prompt_routes, own_prompt, response, start, sampling_mask=mask))
    kinds = {_kind_of_field(record, sequence) for sequence in sequences}
    if len(kinds) > 1:
        raise CaptureError(f"the choices of one output mix forms ({', '.join(sorted(kinds))}); expected one")
    return kinds.pop(), sequences


def _kind_of_field(record: Any, sequence: RawSequence) -> WireKind:
    """Tell the form of a `routed_experts` field by its type."""
    routes = sequence.routes
    if isinstance(routes, str) and field_of(record, "input_token_len") is not None:
        return WireKind.LMDEPLOY
    if isinstance(routes, str):
        return _kind_of_text(routes, raw=WireKind.SGLANG_JAX, npy=WireKind.VLLM_NPY)
    if isinstance(routes, Mapping):
        return _kind_of_table(routes)
    if isinstance(routes, _SEQUENCES):
        _nested(routes, "routed_experts")
    if sequence.prompt_routes is not None or "prompt_routed_experts" in _keys(record):
        return WireKind.VLLM_SPLIT
    if isinstance(routes, _SEQUENCES) or field_of(record, "input_token_len") is not None:
        return WireKind.LMDEPLOY
    if is_array(routes):
        maker = type(record).__module__.split(".")[0]
        return WireKind.TENSORRT_LLM if maker == "tensorrt_llm" else WireKind.VLLM
    raise CaptureError(f"routed_experts is a {type(routes).__name__}; expected an array, lists, text or a table")


def _kind_of_text(text: str, *, raw: WireKind, npy: WireKind) -> WireKind:
    if text.startswith(NEMO_MAGIC):
        return WireKind.NEMO_RL
    return npy if text.startswith(_NPY_BASE64) else raw


def _kind_of_table(table: Mapping[str, Any]) -> WireKind:
    if any(field_of(table, name) is None for name in _TABLE):
        raise CaptureError(f"the table has keys {_keys(table)[:12]}; expected data, shape and dtype")
    return WireKind.PRIME_RL if "start" in _keys(table) else WireKind.SKYRL


def _sglang(holder: Any, record: Any) -> RawSequence:
    routes = field_of(holder, "routed_experts")
    if not isinstance(routes, str):
        raise _no_routes(holder)
    start, dtype = field_of(holder, "routed_experts_start_len"), field_of(holder, "routed_experts_dtype")
    prompt = field_of(record, "prompt_token_ids")
    response = _first(field_of(record, "output_ids"), field_of(record, "token_ids"))
    mask, choices = field_of(holder, "output_token_sampling_mask"), field_of(holder, "indexer_topk")
    return RawSequence(routes, None, prompt, response, start, dtype, sampling_mask=mask, indexer_topk=choices)


def _only_choice(record: Any) -> Any:
    choices = field_of(record, "choices")
    if isinstance(choices, _SEQUENCES) and len(choices) > 1:
        raise CaptureError(
            f"the response has {len(choices)} choices, and SGLang returns the routes of the first alone; "
            "ask for n = 1, or use /generate"
        )
    return items_of(choices, "the choices")[0] if isinstance(choices, _SEQUENCES) and choices else record


def _verl(batch: Any) -> list[RawSequence]:
    names = ("routed_experts", "input_ids", "attention_mask")
    fields = {name: field_of(batch, name) for name in names}
    if missing := [name for name, value in fields.items() if value is None]:
        raise CaptureError(
            f"the batch lacks {', '.join(missing)}; expected routed_experts [b, T, layers, K], input_ids and "
            "attention_mask [b, T]"
        )
    routes, tokens = (read_array(fields[name], name) for name in names[:2])
    mask = as_array(fields["attention_mask"], "attention_mask")
    if routes.ndim != 4 or tokens.shape != routes.shape[:2] or mask.shape != tokens.shape:
        raise CaptureError(
            f"routed_experts has shape {routes.shape}, input_ids {tokens.shape}, attention_mask {mask.shape}; "
            "expected [b, T, layers, K], [b, T] and [b, T]"
        )
    kept = kept_by_mask(mask)
    return [RawSequence(routes[b, rows], token_ids=tokens[b, rows]) for b, rows in enumerate(kept)]


def kept_by_mask(mask_BT: NDArray[Any]) -> list[slice]:
    """Find where the tokens of each sequence lie in a padded batch.

    Raises:
        CaptureError: for a mask that is neither bool nor integers 0 and 1, and for one with padding between tokens.
    """
    if mask_BT.dtype.kind not in "biu" or ((mask_BT != 0) & (mask_BT != 1)).any():
        raise CaptureError(
            f"attention_mask is {mask_BT.dtype} and not of 0 and 1 alone; expected 1 for a token and 0 for padding"
        )
    mask = mask_BT.astype(np.bool_)
    counts, starts = mask.sum(axis=1), mask.argmax(axis=1) if mask.shape[1] else np.zeros(len(mask), np.int64)
    kept = [slice(int(start), int(start + count)) for start, count in zip(starts, counts, strict=True)]
    for sequence, tokens in enumerate(kept):
        if not mask[sequence, tokens].all():
            raise CaptureError(
                f"attention_mask of sequence {sequence} has padding between its tokens, at position "
                f"{tokens.start + int(np.argmin(mask[sequence, tokens]))}; expected padding at both ends alone. A row "
                "was dropped, or masks of two batches were mixed"
            )
    return kept


def _no_routes(record: Any) -> CaptureError:
    if isinstance(record, int | float | complex | None):
        return CaptureError(
            f"the {type(record).__name__} {shown(record)} is no engine output; expected a response (parsed, JSON text "
            "or bytes), an in-process output, a list of them, or bare routes"
        )
    seen = _keys(record)[:12] if isinstance(record, Mapping) else f"a {type(record).__name__}"
    return CaptureError(
        f"no routed_experts in {seen}; start the engine with --enable-return-routed-experts, ask for them in the "
        "request (SGLang, LMDeploy), and pass the final output: streams and unfinished requests carry none"
    )


def _keys(record: Any) -> list[str]:
    """Return the names in a mapping, none of another object."""
    return (
        sorted(key for key in items_of(record, "the keys") if type(key) is str) if isinstance(record, Mapping) else []
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def shown(value: object) -> str:
    """Return a short text of any value. One nested deep, very long, or whose `repr` raises, is named by its type."""
    try:
        return _SHORT.repr(value)[:120]
    except Exception:
        return f"of type {type(value).__name__}"


def whole_number(value: object, name: str, low: int, high: int, *, kind: type[InputError] = CaptureError) -> int:
    """Return an integer of Python or numpy from `low` to `high`.

    Raises:
        kind: for other numbers, and for what is no integer: fractions, texts and booleans are not cast.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise kind(f"{name} is {shown(value)}; expected an integer from {low} to {high}")
    return int(value)


def field_of(record: Any, name: str) -> Any:
    """Return a field of a mapping, or of another object its attribute or else its item; None when it has none.

    Raises:
        CaptureError: when the record does not let itself be asked.
    """
    try:
        if isinstance(record, Mapping):
            return record.get(name)
        value = getattr(record, name, None)
        return _item_of(record, name) if value is None and hasattr(type(record), "__getitem__") else value
    except Exception as error:
        raise CaptureError(f"{name} of a {type(record).__name__} cannot be read ({shown(error)})") from error


def items_of(values: Any, name: str) -> list[Any]:
    """Return the entries of a list or tuple.

    Raises:
        CaptureError: when it does not give them.
    """
    try:
        return [*values]
    except Exception as error:
        raise CaptureError(f"{name} cannot be read ({shown(error)}); expected a list") from error


def is_array(value: Any) -> bool:
    """Say whether it is an array of some library. A tensor dictionary may have a shape and a dtype, but has keys."""
    kind = type(value)
    return hasattr(kind, "__array__") and not hasattr(kind, "keys") and not isinstance(value, np.generic)


def as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    """Return what numpy makes of an array of any library.

    Raises:
        CaptureError: when it makes none, or entries are masked, which a plain array cannot say.
    """
    try:
        array = np.asarray(values)
    except Exception as error:
        raise CaptureError(
            f"{name}, a {type(values).__name__}, cannot be read as an array ({shown(error)}); "
            "copy it to host memory first"
        ) from error
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise CaptureError(f"{name} is an array with masked entries; expected a value everywhere")
    return array


def read_array(value: Any, name: str = "the routes") -> NDArray[Any]:
    """Return the integer array behind an in-process value (numpy, or anything that numpy can view)."""
    array = as_array(value, name)
    if array.dtype.kind not in "iu":
        raise CaptureError(f"{name}: dtype {array.dtype}; expected integers")
    return array


def parse_text(text: str | bytes, *, name: str = "the text, which starts like JSON and may have been cut,") -> Any:
    """Return the value of a JSON text, bounded in length and depth. `name` says which, for the message."""
    if len(text) > MAX_TEXT:
        raise CaptureError(f"{name} has {len(text)} characters; expected at most {MAX_TEXT}")
    return parse_json(text, CaptureError, name=name)


def _item_of(record: Any, name: str) -> Any:
    try:
        return record[name]
    except (KeyError, IndexError, TypeError):
        return None
