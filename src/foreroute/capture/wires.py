"""The forms in which engines and frameworks hand out routes, what each promises, and which engine writes which."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WireKind(StrEnum):
    """A form of engine output that `decode` reads."""

    VLLM = "vllm"
    VLLM_SPLIT = "vllm-split"
    VLLM_NPY = "vllm-npy"
    SGLANG = "sglang"
    SGLANG_JAX = "sglang-jax"
    TENSORRT_LLM = "tensorrt-llm"
    LMDEPLOY = "lmdeploy"
    NEMO_RL = "nemo-rl"
    PRIME_RL = "prime-rl"
    SKYRL = "skyrl"
    VERL = "verl"
    NPY = "npy"
    RAW_INT32 = "raw-int32"
    LISTS = "lists"
    ARRAY = "array"

    @property
    def description(self) -> str:
        """The form in words, and who emits it."""
        return RULES[self].description


class LastRow(StrEnum):
    """What becomes of a row for the last token, which a sampling engine never computes: bare routes may have one.

    FILLER drops it if it has the same picks in every layer, as padding has; any other content means a wrong start.
    """

    REFUSE = "refuse"
    DROP = "drop"
    FILLER = "filler"
    KEEP = "keep"


class Absent(StrEnum):
    """How a form marks a row that was never routed."""

    NEVER = "never"
    MINUS_ONE = "-1"
    ZERO = "0"


@dataclass(frozen=True)
class WireRules:
    """What a form promises.

    Attributes:
        description: what it is and who emits it.
        last_row: whether T rows may come for T tokens.
        absent: how a missing row is written.
        dense_is_constant: whether the columns of dense layers hold one constant, so that routes in them prove a shift.
    """

    description: str
    last_row: LastRow = LastRow.REFUSE
    absent: Absent = Absent.NEVER
    dense_is_constant: bool = True


RULES = {
    WireKind.VLLM: WireRules(
        "vLLM request output with integer arrays [T-1-start, layers, K] (int32 in 0.14-0.20, uint8 or uint16 from 0.22)"
    ),
    WireKind.VLLM_SPLIT: WireRules(
        "vLLM 0.21 output with prompt rows and generated rows apart, MoE layers only (arrays, or JSON lists)",
        last_row=LastRow.DROP,
    ),
    WireKind.VLLM_NPY: WireRules("vLLM 0.22+ HTTP response with a base64 .npy file for each choice"),
    WireKind.SGLANG: WireRules("SGLang response with base64 of raw int32 bytes that carry no shape"),
    WireKind.SGLANG_JAX: WireRules("sglang-jax response with base64 of raw int32 bytes, -1 in dense layers"),
    WireKind.TENSORRT_LLM: WireRules("TensorRT-LLM request output with arrays [T-1, MoE layers, K]"),
    WireKind.LMDEPLOY: WireRules(
        "LMDeploy response with uint16 arrays or lists [T-1, all layers, K], dense layers uninitialised",
        dense_is_constant=False,
    ),
    WireKind.NEMO_RL: WireRules(
        "NeMo RL envelope nrlre1:dtype:SxLxK:base64, rows of -1 where nothing was routed",
        last_row=LastRow.FILLER,
        absent=Absent.MINUS_ONE,
    ),
    WireKind.PRIME_RL: WireRules(
        "prime-rl table of data, shape, start and dtype, zero rows where nothing was routed",
        last_row=LastRow.FILLER,
        absent=Absent.ZERO,
    ),
    WireKind.SKYRL: WireRules("SkyRL table of data, shape and dtype", last_row=LastRow.FILLER, absent=Absent.MINUS_ONE),
    WireKind.VERL: WireRules(
        "verl batch [b, padded length, layers, K] with input_ids and attention_mask, zero rows where none",
        last_row=LastRow.FILLER,
        absent=Absent.ZERO,
    ),
    WireKind.NPY: WireRules("a .npy file, bare or in base64"),
    WireKind.RAW_INT32: WireRules("base64 of raw int32 bytes that carry no shape"),
    WireKind.LISTS: WireRules("nested lists [rows, layers, K]", last_row=LastRow.KEEP, absent=Absent.MINUS_ONE),
    WireKind.ARRAY: WireRules("an integer array [rows, layers, K]", last_row=LastRow.KEEP, absent=Absent.MINUS_ONE),
}
"""The promises of every form."""

ENGINES = ("vllm", "sglang", "sglang-jax", "tensorrt-llm", "lmdeploy")
"""The engines that `decode` knows by name."""

WRITERS: dict[WireKind, dict[str, WireKind]] = {
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

REFINED: dict[WireKind, dict[str, WireKind]] = {
    WireKind.RAW_INT32: {"sglang": WireKind.SGLANG, "sglang-jax": WireKind.SGLANG_JAX},
    WireKind.ARRAY: {
        "vllm": WireKind.VLLM,
        "tensorrt-llm": WireKind.TENSORRT_LLM,
        "lmdeploy": WireKind.LMDEPLOY,
    },
    WireKind.LISTS: {"lmdeploy": WireKind.LMDEPLOY},
}
"""For bare forms, which anybody may have written: the exact form with some engines."""

FIRST_LOGICAL_SGLANG = (0, 5, 10)
"""Older versions of SGLang return physical slots of their load balancer, whose mapping is not in the output."""
