"""Which engine wrote an output, and whether its version numbers experts as the model does."""

from __future__ import annotations

import re

from foreroute.capture.arguments import shown
from foreroute.capture.kinds import WireKind
from foreroute.errors import CaptureError

ENGINES = ("vllm", "sglang", "sglang-jax", "tensorrt-llm", "lmdeploy")
"""The engines that `decode` knows by name."""

_WRITES: dict[WireKind, dict[str, WireKind]] = {
    WireKind.VLLM: {
        "vllm": WireKind.VLLM,
        "tensorrt-llm": WireKind.TENSORRT_LLM,
        "lmdeploy": WireKind.LMDEPLOY,
    },
    WireKind.VLLM_SPLIT: {"vllm": WireKind.VLLM_SPLIT},
    WireKind.VLLM_NPY: {"vllm": WireKind.VLLM_NPY},
    WireKind.SGLANG: {"sglang": WireKind.SGLANG, "sglang-jax": WireKind.SGLANG_JAX},
    WireKind.SGLANG_JAX: {"sglang": WireKind.SGLANG, "sglang-jax": WireKind.SGLANG_JAX},
    WireKind.TENSORRT_LLM: {"tensorrt-llm": WireKind.TENSORRT_LLM},
    WireKind.LMDEPLOY: {"lmdeploy": WireKind.LMDEPLOY, "vllm": WireKind.VLLM},
}
"""For every form that an engine gives its own output: the engines that do, and the exact form with each."""

_REFINED: dict[WireKind, dict[str, WireKind]] = {
    WireKind.RAW_INT32: {"sglang": WireKind.SGLANG, "sglang-jax": WireKind.SGLANG_JAX},
    WireKind.ARRAY: {
        "vllm": WireKind.VLLM,
        "tensorrt-llm": WireKind.TENSORRT_LLM,
        "lmdeploy": WireKind.LMDEPLOY,
    },
    WireKind.LISTS: {"lmdeploy": WireKind.LMDEPLOY},
}
"""For bare forms, which anybody may have written: the exact form with some engines."""

_FIRST_LOGICAL_SGLANG = (0, 5, 10)


def known_engine(name: object) -> str:
    """The engine's name as it is listed in `ENGINES`, or nothing when none is given.

    Raises:
        CaptureError: for a name that is not listed. Letters may be large or small.
    """
    if isinstance(name, str) and (not name or name.lower() in ENGINES):
        return name.lower()
    raise CaptureError(f"engine is {shown(name)}; expected one of {', '.join(ENGINES)}, or nothing")


def named_kind(kind: WireKind, engine: str) -> WireKind:
    """The form, made exact by the engine's name where several engines share a container.

    Raises:
        CaptureError: when another engine writes this form.
    """
    if engine and engine not in (writers := _WRITES.get(kind, {engine: kind})):
        raise CaptureError(
            f"engine is {engine!r}, but the output has the form {kind.value}, which {' or '.join(writers)} writes; "
            "leave engine out, or pass the output of that engine"
        )
    return {**_WRITES, **_REFINED}.get(kind, {}).get(engine, kind)


def require_logical_ids(kind: WireKind, engine: str, version: object) -> None:
    """Raise `CaptureError` for a version whose ids are slots of a load balancer, and for one that says nothing.

    Args:
        kind: the exact form.
        engine: as `known_engine` has it.
        version: of the engine, as the caller states it.
    """
    # vLLM's ids are logical in every version, and builds of it may state one without a number
    numberless = isinstance(version, str) and version and not re.search(r"\d", version) and engine != "vllm"
    if not isinstance(version, str) or numberless:
        raise CaptureError(f"engine_version is {shown(version)}; expected text such as '0.5.12', or nothing")
    if not version:
        return
    if not engine and kind not in _WRITES:
        raise CaptureError(
            f"engine_version is {version!r}, and neither engine= nor the output says of which engine; pass engine, one "
            f"of {', '.join(ENGINES)}"
        )
    numbers = tuple(int(n) for n in re.findall(r"\d{1,9}", version)[:3])
    if (engine or kind.value) == "sglang" and numbers < _FIRST_LOGICAL_SGLANG:
        raise CaptureError(
            f"SGLang {version} captures routes after its load balancer has mapped them, so the ids are physical "
            "slots, and the mapping is not in the output; upgrade SGLang to 0.5.10 or newer"
        )
