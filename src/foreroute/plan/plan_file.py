"""Plans on disk: one safetensors file, written atomically, sealed, and checked on reading.

`docs/formats.md` is the format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, PlanError
from foreroute.files import TensorFile, parse_json, seal_file, write_atomically, writing_named
from foreroute.layout import Packing
from foreroute.plan.checker import check_structure
from foreroute.plan.options import SlotUse
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Links, Topology

FORMAT_VERSION = 2
KEY = "foreroute."
MOST_HEADER_BYTES = 1 << 20
"""Of the safetensors header: a parsed one takes far more memory than its bytes."""
METADATA = tuple(KEY + name for name in ("plan_version", "topology", "shape", "slots", "counts", "tokens", "digest"))
TENSORS: dict[str, tuple[tuple[str, ...], int]] = {
    "previous_home_LE": (("<i2",), 2),
    "home_LE": (("<i2",), 2),
    "offsets": (("<i8",), 1),
    "expert_R": (("<i2",), 1),
    "rank_R": (("<i2",), 1),
    "slot_R": (("<i2",), 1),
    "fetched_R": (("|u1",), 1),
    "used_bits": (("|u1",), 1),
    "tokens": (("|u1", "<u2", "<u4"), 1),
    "max_load_ML": (("<i8",), 2),
    "bound_ML": (("<f8",), 2),
    "micro_step_S": (("<i4",), 1),
    "sequence_rank_S": (("<i4",), 1),
}
"""Types and number of axes of every tensor."""
_COLUMNS = [
    name for name in TENSORS if name not in ("used_bits", "tokens", "fetched_R", "micro_step_S", "sequence_rank_S")
]
"""Those that are attributes of a plan as they are."""


def save_plan(plan: StepPlan, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `plan` to `path`: the whole file or nothing.

    Args:
        plan: what to write.
        path: where to.
        overwrite: whether an existing file may be replaced.

    Raises:
        PlanError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole. When the
            plan contradicts itself.
    """
    target = Path(path)
    with writing_named(target, PlanError):
        if target.exists() and not overwrite:
            raise PlanError(f"{target} already exists; pass another path, or overwrite=True to replace it")
        write_atomically(target, plan_to_bytes(plan), overwrite=overwrite)
    return target


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """Read a plan and check all that can be checked without its counts; `plan.verify` does the rest.

    Raises:
        PlanError: when the file is missing, not a plan, of a newer format, truncated or damaged.
    """
    source = Path(path)
    with TensorFile(source, PlanError, most_header_bytes=MOST_HEADER_BYTES) as file:
        _check_version(source, file.metadata)
        try:
            return decode_plan(file.metadata, _read_tensors(file))
        except InputError as error:
            raise PlanError(f"{source} is not a readable plan: {error}. Plan again, or copy the file again") from error


def plan_to_bytes(plan: StepPlan) -> bytes:
    """The content of a plan's file.

    Raises:
        PlanError: when the plan contradicts itself.
    """
    from safetensors.numpy import save

    check_structure(plan)
    metadata, tensors = encode_plan(plan)
    content: bytes = save(tensors, metadata=metadata)
    return content


def plan_from_bytes(content: bytes) -> StepPlan:
    """The plan of which `plan_to_bytes` made this, on another rank of the same run.

    Raises:
        PlanError: when it cannot be right.
    """
    from safetensors.numpy import load

    size = int.from_bytes(content[:8], "little")
    return decode_plan(json.loads(content[8 : 8 + size])["__metadata__"], load(content))


def encode_plan(plan: StepPlan) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata, sealed, and tensors. Of `tokens_RG`, only what is not 0 is kept, in the fewest bytes that hold all."""
    used = plan.tokens_RG.reshape(-1) != 0
    tokens = plan.tokens_RG.reshape(-1)[used]
    widest = int(tokens.max(initial=0))
    none_S = np.zeros(0, np.int32)
    places = (none_S, none_S) if plan.packing is None else (plan.packing.micro_step_S, plan.packing.rank_S)
    tensors = {
        **{name: np.ascontiguousarray(getattr(plan, name)) for name in _COLUMNS},
        "fetched_R": plan.fetched_R.astype(np.uint8),
        "used_bits": np.packbits(used, bitorder="little"),
        "tokens": tokens.astype(np.min_scalar_type(widest)),
        **dict(zip(("micro_step_S", "sequence_rank_S"), (place.astype(np.int32) for place in places), strict=True)),
    }
    metadata = {
        "foreroute.plan_version": str(FORMAT_VERSION),
        "foreroute.topology": json.dumps(asdict(plan.topology)),
        "foreroute.shape": json.dumps(plan.shape),
        "foreroute.slots": plan.slots,
        "foreroute.counts": plan.counts_digest,
        "foreroute.tokens": plan.tokens_digest,
    }
    return {**metadata, "foreroute.digest": seal_file(metadata, tensors)}, tensors


def decode_plan(metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> StepPlan:
    """Check and unpack what `encode_plan` made.

    Raises:
        InputError: when it cannot be right.
    """
    ours = {key: value for key, value in metadata.items() if key.startswith(KEY)}
    if set(ours) != set(METADATA):
        raise PlanError(f"metadata are {_few(ours)}, expected {_few(METADATA)}")
    if not all(value.isascii() for value in ours.values()):
        raise PlanError("its metadata hold letters that no plan has")
    stated = ours.pop("foreroute.digest")
    digest = seal_file(ours, tensors)
    if digest != stated:
        raise PlanError(f"its digest is {digest}, the file states {stated:.40}")
    topology = _topology_from_json(ours["foreroute.topology"])
    shape = parse_json(ours["foreroute.shape"], PlanError, name="foreroute.shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size >= 0 for size in shape)):
        raise PlanError(f"shape is {shape!r:.80}; expected [M, L, E]")
    for name in ("counts", *(("tokens",) if ours["foreroute.tokens"] else ())):
        if not re.fullmatch("[0-9a-f]{32}", ours[KEY + name]):
            raise PlanError(f"the digest of its {name} is {ours[KEY + name]:.40}; expected 32 hexadecimal digits")
    packing = None
    if ours["foreroute.tokens"]:
        if tensors["micro_step_S"].shape != tensors["sequence_rank_S"].shape or shape[0] < 1:
            raise PlanError(
                f"it packs {len(tensors['micro_step_S'])} and {len(tensors['sequence_rank_S'])} sequences into "
                f"{shape[0]} micro-steps; expected as many of both, into one or more"
            )
        packing = Packing(tensors["micro_step_S"], tensors["sequence_rank_S"], shape[0], topology.num_ranks)
    elif len(tensors["micro_step_S"]) or len(tensors["sequence_rank_S"]):
        raise PlanError("it packs sequences and states no digest of their tokens")
    slots = ours["foreroute.slots"]
    if slots not in get_args(SlotUse):
        raise PlanError(f"its slots are {slots!r:.40}; expected one of {', '.join(get_args(SlotUse))}")
    columns = {name: tensors[name] for name in _COLUMNS}
    if tensors["fetched_R"].max(initial=0) > 1:
        raise PlanError(f"fetched_R has values up to {tensors['fetched_R'].max()}; expected 0 and 1")
    plan = StepPlan(
        topology=topology,
        shape=(shape[0], shape[1], shape[2]),
        fetched_R=tensors["fetched_R"].astype(np.bool_),
        tokens_RG=_unpack_tokens(tensors["used_bits"], tensors["tokens"], len(columns["rank_R"]), topology.num_ranks),
        counts_digest=ours["foreroute.counts"],
        slots=cast("SlotUse", slots),
        packing=packing,
        tokens_digest=ours["foreroute.tokens"],
        **columns,
    )
    check_structure(plan)
    return plan


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
    values = parse_json(text, PlanError, name="foreroute.topology")
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
        found = f"has the keys {_few(values)}" if isinstance(values, dict) else f"is {values!r:.80}"
        raise PlanError(f"the {what} {found}; expected {_few(expected)}")


def _read_tensors(file: TensorFile) -> dict[str, NDArray[Any]]:
    """All tensors, each looked at before it is read: what is read is no larger than the file."""
    if set(file.names) != set(TENSORS):
        raise PlanError(f"its tensors are {_few(file.names)}, expected {_few(TENSORS)}")
    for name, (dtypes, axes) in TENSORS.items():
        dtype, shape = file.dtype(name), file.shape(name)
        if dtype.str not in dtypes or len(shape) != axes:
            raise PlanError(f"tensor {name} is {dtype} {list(shape)}, expected {' or '.join(dtypes)} of {axes} axes")
    return {name: file.read(name) for name in TENSORS}


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(f"{name:.40}" for name in listed[:16]) + (", ..." if len(listed) > 16 else "")


def _check_version(source: Path, metadata: Mapping[str, str]) -> None:
    version = metadata.get("foreroute.plan_version")
    if version is None:
        raise PlanError(f"{source} is a safetensors file but not a plan (no foreroute.plan_version in it)")
    if version != str(FORMAT_VERSION):
        raise PlanError(
            f"{source} has plan format {version:.40}; this foreroute reads {FORMAT_VERSION}. Plan again with it"
        )
