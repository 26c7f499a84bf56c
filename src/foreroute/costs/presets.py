"""Models and hardware by name.

Sizes of models are those of their published configurations. Bandwidths are what one rank reaches, in each direction:
peaks are from the vendors' data sheets, and where no measurement is named beside it, the share of the peak that is
reached (60 % of dense bf16 for grouped products, 40 % for the attention core, 80 % of memory, 75 % of NVLink, 90 % of
the NIC, 80 % of PCIe) is general knowledge, as are latencies. Measure your own cluster before you buy one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from foreroute.costs.model import Hardware, ModelShape
from foreroute.errors import ConfigError, shown
from foreroute.plan.topology import Links

Preset = TypeVar("Preset")


def model_preset(name: str) -> ModelShape:
    """The sizes of a known model. Raises `ConfigError` for an unknown name, with the known ones."""
    return _named(MODELS, name, "model")


def hardware_preset(name: str) -> Hardware:
    """The rates of known hardware. Raises `ConfigError` for an unknown name, with the known ones."""
    return _named(HARDWARE, name, "hardware")


def _named(presets: Mapping[str, Preset], name: str, what: str) -> Preset:
    if not isinstance(name, str) or name not in presets:
        near = difflib.get_close_matches(str(name), presets, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no {what} preset is called {shown(name)}; {hint}known are {', '.join(presets)}")
    return presets[name]


def _grouped_query(hidden: int, heads: int, kv_heads: int, head_width: int) -> tuple[int, int]:
    """Parameters of the projections of grouped-query attention, and the width of its core."""
    return 2 * hidden * head_width * (heads + kv_heads), heads * head_width


def _latent(hidden: int, heads: int) -> tuple[int, int]:
    """The same of DeepSeek's latent attention: latents of 1536 and 512 + 64, query heads of 192, value heads of 128."""
    queries = hidden * 1536 + 1536 * heads * 192
    keys_and_values = hidden * (512 + 64) + 512 * heads * (128 + 128)
    return queries + keys_and_values + heads * 128 * hidden, heads * (192 + 128) // 2


def _gated_query(hidden: int, heads: int, kv_heads: int, head_width: int) -> tuple[int, int]:
    """Grouped-query attention whose output passes a gate, which is projected with the queries."""
    projections, width = _grouped_query(hidden, heads, kv_heads, head_width)
    return projections + hidden * width, width


def _gated_delta(hidden: int) -> tuple[int, int]:
    """The linear attention of Qwen3-Next: 16 query and key heads, 32 value heads of 128, a gate; no core in squares."""
    keys, values = 16 * 128, 32 * 128
    return hidden * (2 * keys + 2 * values) + values * hidden + hidden * 2 * 32, 0


def _mixed(linear: tuple[int, int], full: tuple[int, int]) -> tuple[int, int]:
    """The mean layer of three with linear attention and one with full attention."""
    return (3 * linear[0] + full[0]) // 4, (3 * linear[1] + full[1]) // 4


def _model(attention: tuple[int, int], *, shared: int = 0, **sizes: int) -> ModelShape:
    """A model of these `sizes`, with its attention, and with shared experts of this width in all."""
    projections, width = attention
    dense = projections + 3 * sizes["hidden"] * shared
    return ModelShape(dense_parameters=dense, attention_width=width, **sizes)


MODELS: Mapping[str, ModelShape] = {
    "qwen3-30b-a3b": _model(
        _grouped_query(2048, 32, 4, 128),
        num_layers=48, num_experts=128, top_k=8, hidden=2048, intermediate=768, vocabulary=151_936,
    ),
    "qwen3-235b-a22b": _model(
        _grouped_query(4096, 64, 4, 128),
        num_layers=94, num_experts=128, top_k=8, hidden=4096, intermediate=1536, vocabulary=151_936,
    ),
    "glm-4.5-air": _model(
        _grouped_query(4096, 96, 8, 128),
        num_layers=45, num_experts=128, top_k=8, hidden=4096, intermediate=1408, vocabulary=151_552, shared=1408,
    ),
    "glm-4.5": _model(
        _grouped_query(5120, 96, 8, 128),
        num_layers=89, num_experts=160, top_k=8, hidden=5120, intermediate=1536, vocabulary=151_552, shared=1536,
    ),
    "qwen3-next-80b-a3b": _model(
        _mixed(_gated_delta(2048), _gated_query(2048, 16, 2, 256)),
        num_layers=48, num_experts=512, top_k=10, hidden=2048, intermediate=512, vocabulary=151_936, shared=512,
    ),
    "deepseek-v3": _model(
        _latent(7168, 128),
        num_layers=58, num_experts=256, top_k=8, hidden=7168, intermediate=2048, vocabulary=129_280, shared=2048,
    ),
    "kimi-k2": _model(
        _latent(7168, 64),
        num_layers=60, num_experts=384, top_k=8, hidden=7168, intermediate=2048, vocabulary=163_840, shared=2048,
    ),
}  # fmt: skip
"""Routed layers only: the first dense layers of GLM, DeepSeek and Kimi are left out."""

# SXM5: 989 TFLOP/s bf16, 3.35 TB/s, NVLink 450 GB/s, one 400 Gb/s NIC and PCIe 5 x16 per rank.
H100 = Hardware(
    gemm_flops_per_s=600e12,
    attention_flops_per_s=400e12,
    memory_bytes_per_s=2.7e12,
    links=Links(340e9, 45e9, 50e9, 20e-6, 50e-6),
)

HARDWARE: Mapping[str, Hardware] = {
    "h100": H100,
    # As H100 with NVLink cut to 200 GB/s. DeepEP's README measures 153-158 GB/s over NVLink and 43-47 GB/s over a
    # 400 Gb/s NIC at 16 to 32 ranks.
    "h800": replace(H100, links=replace(H100.links, node_bytes_per_s=156e9)),
    # As H100 with 4.8 TB/s.
    "h200": replace(H100, memory_bytes_per_s=3.85e12),
    # SXM4 80 GB: 312 TFLOP/s, 2.04 TB/s, NVLink 300 GB/s, one 200 Gb/s NIC and PCIe 4 x16 per rank.
    "a100": Hardware(
        gemm_flops_per_s=190e12,
        attention_flops_per_s=125e12,
        memory_bytes_per_s=1.6e12,
        links=Links(225e9, 22.5e9, 25e9, 20e-6, 50e-6),
    ),
    # NVL72, one NVLink domain of 72 ranks: 2,500 TFLOP/s, 8 TB/s, NVLink 900 GB/s, one 400 Gb/s NIC per rank. Two ranks
    # share the 450 GB/s of one Grace's NVLink-C2C.
    "gb200": Hardware(
        gemm_flops_per_s=1500e12,
        attention_flops_per_s=1000e12,
        memory_bytes_per_s=6.4e12,
        links=Links(680e9, 45e9, 180e9, 20e-6, 50e-6),
        ranks_per_node=72,
    ),
}
