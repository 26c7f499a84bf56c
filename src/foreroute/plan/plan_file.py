"""Plans on disk, and as bytes between ranks: what `docs/formats.md` calls a plan file, checked on reading."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, PlanError, few
from foreroute.files import FileFormat, HeldBytes, TensorSchema, parse_json
from foreroute.layout import Packing
from foreroute.plan.checker import check_structure
from foreroute.plan.options import SlotSharing
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Links, Topology

PLAN_FILE = FileFormat(
    name="plan",
    version=3,
    kind=PlanError,
    metadata=("topology", "shape", "slots", "counts_digest", "tokens_digest"),
    tensors={
        "previous_home_LE": TensorSchema("I16", "LE"),
        "home_LE": TensorSchema("I16", "LE"),
        "offsets": TensorSchema("I64", "C"),
        "expert_R": TensorSchema("I16", "R"),
        "rank_R": TensorSchema("I16", "R"),
        "slot_R": TensorSchema("I16", "R"),
        "fetched_R": TensorSchema("U8", "R"),
        "used_bits": TensorSchema("U8", "B"),
        "tokens": TensorSchema("U8 U16 U32", "U"),
        "max_load_ML": TensorSchema("I64", "ML"),
        "bound_ML": TensorSchema("F64", "ML"),
        "micro_step_S": TensorSchema("I32", "S"),
        "sequence_rank_S": TensorSchema("I32", "S"),
    },
    made_by="foreroute plan and foreroute.plan.save_plan write plans",
)
_AS_THEY_ARE = (
    "previous_home_LE",
    "home_LE",
    "offsets",
    "expert_R",
    "rank_R",
    "slot_R",
    "max_load_ML",
    "bound_ML",
)
"""Tensors that are attributes of a plan, of the same name and type."""


def save_plan(plan: StepPlan, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `plan` to `path`: the whole file or nothing. The same plan is the same bytes.

    Args:
        plan: what to write.
        path: where to.
        overwrite: whether an existing file may be replaced.

    Raises:
        PlanError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole. When the
            plan contradicts itself.
    """
    check_structure(plan)
    return PLAN_FILE.write(path, *encode_plan(plan), overwrite=overwrite)


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """Read a plan and check all that can be checked without its counts; `plan.verify` does the rest.

    Raises:
        PlanError: when the file is missing, not a plan, of another version, truncated or damaged.
    """
    return _decoded(str(path), *PLAN_FILE.read(path))


def plan_to_bytes(plan: StepPlan) -> bytes:
    """The content of a plan's file.

    Raises:
        PlanError: when the plan contradicts itself.
    """
    check_structure(plan)
    return PLAN_FILE.to_bytes(*encode_plan(plan))


def plan_from_bytes(content: bytes) -> StepPlan:
    """The plan of which `plan_to_bytes` made this, on another rank of the same run.

    Raises:
        PlanError: when it cannot be right.
    """
    source = HeldBytes(content, "a plan from another rank")
    return _decoded(source.name, *PLAN_FILE.read(source))


def encode_plan(plan: StepPlan) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors. Of `tokens_RG`, only what is not 0 is kept, in the fewest bytes that hold all."""
    used = plan.tokens_RG.reshape(-1) != 0
    tokens = plan.tokens_RG.reshape(-1)[used]
    none_S = np.zeros(0, np.int32)
    places = (none_S, none_S) if plan.packing is None else (plan.packing.micro_step_S, plan.packing.rank_S)
    tensors = {
        **{name: getattr(plan, name) for name in _AS_THEY_ARE},
        "fetched_R": plan.fetched_R.astype(np.uint8),
        "used_bits": np.packbits(used, bitorder="little"),
        "tokens": tokens.astype(np.min_scalar_type(int(tokens.max(initial=0)))),
        **dict(zip(("micro_step_S", "sequence_rank_S"), (place.astype(np.int32) for place in places), strict=True)),
    }
    metadata = {
        "topology": json.dumps(asdict(plan.topology)),
        "shape": json.dumps(plan.shape),
        "slots": plan.slots,
        "counts_digest": plan.counts_digest,
        "tokens_digest": plan.tokens_digest,
    }
    return metadata, tensors


def _decoded(name: str, metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> StepPlan:
    try:
        plan = decode_plan(metadata, tensors)
        check_structure(plan)
    except InputError as error:
        raise PlanError(f"{name} is no readable plan file: {error}. Plan again, or copy the file again") from error
    return plan


def decode_plan(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> StepPlan:
    """Unpack what `encode_plan` made, for `check_structure` to look at.

    Raises:
        InputError: when it cannot be unpacked.
    """
    topology = _topology_from_json(metadata["topology"])
    shape = parse_json(metadata["shape"], PlanError, name="the shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size >= 0 for size in shape)):
        raise PlanError(f"shape is {shape!r:.80}; expected [M, L, E]")
    for name in ("counts_digest", *(("tokens_digest",) if metadata["tokens_digest"] else ())):
        if not re.fullmatch("[0-9a-f]{32}", metadata[name]):
            raise PlanError(f"the {name} is {metadata[name]:.40}; expected 32 hexadecimal digits")
    packing = None
    if metadata["tokens_digest"]:
        packing = Packing(tensors["micro_step_S"], tensors["sequence_rank_S"], shape[0], topology.num_ranks)
    elif len(tensors["micro_step_S"]):
        raise PlanError("it packs sequences and states no digest of their tokens")
    if metadata["slots"] not in get_args(SlotSharing):
        raise PlanError(f"its slots are {metadata['slots']:.40}; expected one of {', '.join(get_args(SlotSharing))}")
    if tensors["fetched_R"].max(initial=0) > 1:
        raise PlanError(f"fetched_R has values up to {tensors['fetched_R'].max()}; expected 0 and 1")
    num_replicas = len(tensors["rank_R"])
    return StepPlan(
        topology=topology,
        shape=(shape[0], shape[1], shape[2]),
        fetched_R=tensors["fetched_R"].astype(np.bool_),
        tokens_RG=_unpack_tokens(tensors["used_bits"], tensors["tokens"], num_replicas, topology.num_ranks),
        counts_digest=metadata["counts_digest"],
        slots=cast("SlotSharing", metadata["slots"]),
        packing=packing,
        tokens_digest=metadata["tokens_digest"],
        **{name: tensors[name] for name in _AS_THEY_ARE},
    )


def _unpack_tokens(bits: NDArray[np.uint8], tokens: NDArray[Any], replicas: int, ranks: int) -> NDArray[np.int32]:
    size = replicas * ranks
    if len(bits) != (size + 7) // 8:
        raise PlanError(f"used_bits has {len(bits)} bytes for {replicas} replicas and {ranks} ranks")
    used = np.unpackbits(bits, bitorder="little")
    if used[size:].any() or int(used.sum()) != len(tokens):
        raise PlanError(f"used_bits marks {int(used.sum())} splits, {len(tokens)} are there")
    if len(tokens) and (tokens.min() == 0 or tokens.max() > np.iinfo(np.int32).max):
        raise PlanError(f"splits are {tokens.min()} to {tokens.max()}; expected 1 to 2**31 - 1")
    tokens_RG = np.zeros(size, np.int32)
    tokens_RG[used[:size] != 0] = tokens
    return tokens_RG.reshape(replicas, ranks)


def _topology_from_json(text: str) -> Topology:
    values = parse_json(text, PlanError, name="the topology")
    _check_keys("topology", values, Topology)
    links = values.pop("links")
    _check_keys("links", links, Links)
    memory = values["slot_memory_bytes"]
    if not all(type(v) is int for name, v in values.items() if name != "slot_memory_bytes" or memory is not None):
        raise PlanError(f"the topology {values!r:.200} is not of integers")
    if not all(type(v) in (int, float) for v in links.values()):
        raise PlanError(f"the links {links!r:.200} are not numbers")
    return Topology(**values, links=Links(**links))


def _check_keys(what: str, values: Any, kind: type[Topology] | type[Links]) -> None:
    expected = {field.name for field in fields(kind)}
    if not isinstance(values, dict) or set(values) != expected:
        found = f"has the keys {few(values)}" if isinstance(values, dict) else f"is {values!r:.80}"
        raise PlanError(f"the {what} {found}; expected {few(expected)}")
