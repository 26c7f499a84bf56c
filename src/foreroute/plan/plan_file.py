"""Plans on disk, and as bytes between ranks: what `docs/formats.md` calls a plan file, checked on reading."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, PlanError, shown
from foreroute.files.container import FileFormat, TensorSchema
from foreroute.files.regular import parse_json
from foreroute.layout import Packing
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.checker import check_structure
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import SlotSharing
from foreroute.plan.step_plan import TENSORS, StepPlan
from foreroute.plan.topology import Links, Topology

PLAN_FILE = FileFormat(
    name="plan",
    version=8,
    error=PlanError,
    metadata=("topology", "slots", "gains", "priced_paths", "unpriced", "counts_digest", "tokens_digest"),
    # splits are most of a plan, and few are large
    tensors=TENSORS | {"tokens_RG": TensorSchema("U8 U16 I32", "RG")},
    made_by="foreroute plan and foreroute.plan.save_plan write plans",
)


def save_plan(plan: StepPlan, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path | str:
    """Write `plan` to a path or a URL: the whole file or nothing. The same plan is the same bytes.

    Raises:
        PlanError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole. When the
            plan contradicts itself.
    """
    return PLAN_FILE.write(path, *plan_content(plan), overwrite=overwrite)


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """Read a plan and check all that can be checked without its counts; `plan.verify` does the rest.

    Raises:
        PlanError: when the file is missing, not a plan, of another version, truncated or damaged.
    """
    return _read(path, str(path))


def plan_to_bytes(plan: StepPlan) -> bytes:
    """Return the content of a plan's file."""
    return PLAN_FILE.to_bytes(*plan_content(plan))


def plan_from_bytes(content: bytes) -> StepPlan:
    """Return the plan that another rank of the same run sent."""
    return _read(BytesIO(content), "a plan from another rank")


def plan_content(plan: StepPlan) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return metadata and tensors of a plan's file, once the plan is consistent."""
    check_structure(plan)
    most = plan.hosts.tokens_RG.max(initial=0)
    # splits are most of the file, and most are small
    narrowest = next(dtype for dtype in (np.uint8, np.uint16, np.int32) if most <= np.iinfo(dtype).max)
    metadata = {
        "topology": json.dumps(asdict(plan.topology), allow_nan=False),
        "slots": plan.slots,
        "gains": json.dumps(dict(plan.gains), allow_nan=False),
        "priced_paths": plan.priced_paths or "",
        "unpriced": " ".join(plan.unpriced),
        "counts_digest": plan.counts_digest,
        "tokens_digest": plan.tokens_digest,
    }
    return metadata, {**plan.tensors, "tokens_RG": plan.hosts.tokens_RG.astype(narrowest)}


def _read(source: str | os.PathLike[str] | BytesIO, name: str) -> StepPlan:
    """Read a plan and check its structure."""
    metadata, tensors = PLAN_FILE.read(source, name=name)
    try:
        # checksums say that a file is whole, not that it is right
        plan = _decoded(metadata, tensors)
        check_structure(plan)
    except InputError as error:
        raise PlanError(f"{name} is no readable plan file: {error}. Plan again, or copy the file again") from error
    return plan


def _decoded(metadata: Mapping[str, str], tensors: dict[str, NDArray[Any]]) -> StepPlan:
    """Make the plan that a file states, for `check_structure` to look at."""
    for name in ("counts_digest", *(("tokens_digest",) if metadata["tokens_digest"] else ())):
        if not re.fullmatch("[0-9a-f]{32}", metadata[name]):
            raise PlanError(f"the {name} is {metadata[name]:.40}; expected 32 hexadecimal digits")
    if metadata["slots"] not in get_args(SlotSharing):
        raise PlanError(f"its slots are {metadata['slots']:.40}; expected one of {', '.join(get_args(SlotSharing))}")
    stated = parse_json(metadata["topology"], PlanError, name="the topology")
    try:
        topology = Topology(**{**stated, "links": Links(**stated["links"])})
    except (TypeError, KeyError) as error:
        raise PlanError(f"the topology is {shown(stated)}; expected keys and values of a Topology") from error
    micro_step_S, rank_S = tensors.pop("micro_step_S"), tensors.pop("sequence_rank_S")
    packing = None
    if metadata["tokens_digest"]:
        packing = Packing(micro_step_S, rank_S, len(tensors["max_load_ML"]), topology.num_ranks)
    elif len(rank_S):
        raise PlanError("it packs sequences and states no digest of their tokens")
    tensors["tokens_RG"] = tensors["tokens_RG"].astype(np.int32)
    return StepPlan(
        topology=topology,
        hosts=Hosts(*(tensors.pop(name) for name in Hosts._fields)),
        counts_digest=metadata["counts_digest"],
        slots=cast("SlotSharing", metadata["slots"]),
        packing=packing,
        tokens_digest=metadata["tokens_digest"],
        gains=parse_json(metadata["gains"], PlanError, name="its gains"),
        priced_paths=cast("FetchPath | None", metadata["priced_paths"] or None),
        unpriced=tuple(metadata["unpriced"].split()),
        **tensors,
    )
