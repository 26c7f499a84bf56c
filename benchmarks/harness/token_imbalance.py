"""Workloads W0 to W7 of Megatron-LM's token-imbalance benchmark, its oracle, and its trace format.

After NVIDIA/Megatron-LM pull request 7488 (open; issue 6757 calls for it), as its files stand at commit f5c50249. From
there: the experts that a token may pick in each workload, how picks and gates follow from (workload, seed, step), the
checksum of a workload, the files, fields and dtypes of a trace and what a reader refuses, and the checks of the oracle.

Three things are a reading. There all ranks get the same tokens, in W4 too, though W4 is described as uneven sources;
here W4's tokens are dealt so that rank g has 2 (g + 1) / (G (G + 1)) of them. A step there is a micro-step here, and a
workload has one layer. The oracle sends rows through the schedule that executors index, where theirs runs Megatron's
dispatcher; of its checks those of gradients and losses are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.errors import ConfigError, TraceContentError, TraceFileError, shown
from foreroute.layout import Packing
from foreroute.plan import CellPlan
from foreroute.plan.schedule import CellSchedule
from foreroute.trace import RoutingTrace

Ints = NDArray[np.int64]

WORKLOADS = {
    "W0_balanced": "every expert in turn",
    "W1_hot_expert_set": "three tokens of four pick from the first quarter of the experts",
    "W2_hot_rank": "the same, drawn otherwise; contiguous homes put the hot experts on few ranks",
    "W3_spread_hot_experts": "three tokens of four pick from every other expert",
    "W4_source_ragged": "all experts alike, ranks with uneven numbers of tokens",
    "W5_zero_expert_rank": "the first half of the experts is never picked",
    "W6_rotating_hotspot": "as W1, and the hot quarter moves on every third step",
    "W7_burst": "every other token of each fourth step picks from the first quarter, all else is drawn from all",
}
SCHEMA_VERSION = 1
DTYPES = {"token_ids": torch.int64, "gates": torch.float32, "source_rank": torch.int32, "expert_ids": torch.int64}
"""Tensors of a trace: [T, K], [T, K], [T], and [T, K] again, equal to the first."""
REQUIRED = dict.fromkeys(("seed", "logical_num_tokens", "num_experts", "topk", "world_size"), int) | {
    "workload_checksum": str,
    "tensors": dict,
}
"""Fields of a manifest that a reader needs. There may be others."""


@dataclass(frozen=True)
class Setting:
    """How large a workload is: experts, picks of a token, tokens of a rank in a step, and ranks."""

    num_experts: int
    top_k: int
    tokens: int
    num_ranks: int


@cache
def routes(name: str, num_experts: int, top_k: int, tokens: int, step: int, seed: int) -> tuple[Ints, NDArray[Any]]:
    """One step of a workload: int64 [T, K], distinct experts of every token, and float32 [T, K], gates that add to 1.

    Raises:
        ConfigError: when there is no such workload, or it has fewer experts than picks to choose from.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"no workload is called {name}; known are {', '.join(WORKLOADS)}")
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{name}|{seed}|{step}".encode()).hexdigest()[:8], 16))
    hot, everyone = torch.tensor(_hot(name, num_experts, top_k, step)), torch.arange(num_experts)
    pools = [hot if _is_hot(name, step, token) else everyone for token in range(tokens)]
    if (fewest := min(map(len, pools), default=0)) < top_k:
        raise ConfigError(f"{name} picks {top_k} of {fewest} experts; expected as many to pick from at least")
    if name == "W0_balanced":
        ids_TK = torch.arange(tokens * top_k).view(tokens, top_k) % num_experts
    else:
        picks = [pool[torch.randperm(len(pool), generator=generator)[:top_k]] for pool in pools]
        ids_TK = torch.stack(picks).sort(dim=1).values
    gates_TK = torch.rand((tokens, top_k), generator=generator) / 2 + 0.5
    return ids_TK.numpy(), (gates_TK / gates_TK.sum(dim=1, keepdim=True)).numpy()


def _hot(name: str, num_experts: int, top_k: int, step: int) -> list[int]:
    """The experts that a hot token picks from."""
    width = max(top_k, num_experts // 4)
    if name == "W3_spread_hot_experts":
        spread = sorted({2 * i % num_experts for i in range(max(top_k, num_experts // 2))})
        return spread if len(spread) >= top_k else list(range(num_experts))
    if name == "W5_zero_expert_rank":
        return list(range(num_experts // 2, num_experts))
    first = step // 3 * width if name == "W6_rotating_hotspot" else 0
    return [(first + i) % num_experts for i in range(width)]


def _is_hot(name: str, step: int, token: int) -> bool:
    if name in ("W0_balanced", "W4_source_ragged"):
        return False
    if name == "W7_burst":
        return step % 4 == 3 and token % 2 == 0
    return name == "W5_zero_expert_rank" or token % 4 != 0


def checksum(name: str, setting: Setting, steps: int, seed: int) -> str:
    """Of the first steps of a workload: what `workload_checksum` of a trace says."""
    size = setting.num_experts, setting.top_k, setting.tokens
    state = hashlib.sha256("|".join(map(str, (name, *size, steps, seed, setting.num_ranks))).encode())
    for step in range(steps):
        for array in routes(name, *size, step, seed):
            state.update(array.tobytes())
    return state.hexdigest()[:16]


def sources(name: str, tokens: int, num_ranks: int) -> NDArray[np.int32]:
    """int32 [T * G], the rank of each token of a group; the tokens of `routes` follow each other G times."""
    shares_G = np.arange(1, num_ranks + 1) if name == "W4_source_ragged" else np.ones(num_ranks, np.int64)
    ends_G = np.cumsum(shares_G) * tokens * num_ranks // shares_G.sum()
    return np.repeat(np.arange(num_ranks, dtype=np.int32), np.diff(ends_G, prepend=0))


def step_counts(name: str, setting: Setting, steps: Sequence[int], seed: int = 1234) -> NDArray[np.int32]:
    """counts_MLGE: int32 [M, 1, G, E], of so many steps."""
    size = setting.num_experts, setting.top_k, setting.tokens
    source_T = sources(name, setting.tokens, setting.num_ranks)
    return np.stack(
        [
            counted(np.tile(routes(name, *size, step, seed)[0], (setting.num_ranks, 1)), source_T, setting)[None]
            for step in steps
        ]
    )


def counted(ids_TK: Ints, source_T: NDArray[np.integer], setting: Setting) -> NDArray[np.int32]:
    """counts_GE of the tokens of one cell."""
    counts_GE = np.zeros((setting.num_ranks, setting.num_experts), np.int32)
    np.add.at(counts_GE, (source_T[:, None], ids_TK), 1)
    return counts_GE


def recorded_cell(trace: RoutingTrace, packing: Packing, micro_step: int, layer: int) -> tuple[Any, Any, Any]:
    """What `write_trace` takes of one cell of packed routes; rows without a route are left out, and gates are alike."""
    sequence_N = np.repeat(np.arange(len(trace)), trace.lengths)
    here_N = trace.valid_N & (packing.micro_step_S[sequence_N] == micro_step)
    ids_TK = trace.expert_ids_NLK[here_N, layer].astype(np.int64)
    return ids_TK, np.full(ids_TK.shape, 1 / ids_TK.shape[1]), packing.rank_S[sequence_N[here_N]]


def write_trace(
    folder: Path,
    ids_TK: NDArray[np.integer],
    gates_TK: NDArray[np.floating],
    source_T: NDArray[np.integer],
    *,
    num_experts: int,
    world_size: int,
    seed: int,
    workload_checksum: str,
    **others: Any,
) -> None:
    """Write the routes of one cell as a trace. What is named goes into the manifest, such as `workload_id`, `step_id`.

    Raises:
        TraceFileError: when the folder is not empty.
        TraceContentError: when a reader would refuse the routes.
    """
    if folder.exists() and any(folder.iterdir()):
        raise TraceFileError(f"{folder} is not empty; a trace is written into a folder of its own")
    tensors = {
        name: torch.tensor(np.asarray(array)).to(DTYPES[name])
        for name, array in zip(DTYPES, (ids_TK, gates_TK, source_T, ids_TK), strict=True)
    }
    size = {"logical_num_tokens": len(ids_TK), "topk": int(ids_TK.shape[1]), "num_experts": num_experts}
    fields = {**others, **size, "world_size": world_size, "seed": seed, "workload_checksum": workload_checksum}
    _refuse_untrue(fields, tensors, folder)
    (folder / "tensors").mkdir(parents=True)
    listed = {}
    for name, tensor in tensors.items():
        path = folder / "tensors" / f"{name}.pt"
        torch.save(tensor, path)
        listed[name] = {
            "file": f"tensors/{name}.pt",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
    manifest = {"schema_version": SCHEMA_VERSION, **fields, "tensors": listed}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read_trace(folder: Path) -> tuple[dict[str, Any], Ints, NDArray[np.float32], NDArray[np.int32]]:
    """Read a trace: its manifest; expert ids, int64 [T, K]; gates, float32 [T, K]; source ranks, int32 [T].

    Raises:
        TraceFileError: when a file or a field is missing, or a file is not what the manifest says.
        TraceContentError: when the routes cannot be true.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceFileError(f"{folder / 'manifest.json'} cannot be read as JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise TraceFileError(f"{folder} has no manifest of schema_version {SCHEMA_VERSION}: {shown(manifest)}")
    if wrong := [key for key, kind in REQUIRED.items() if not isinstance(manifest.get(key), kind)]:
        raise TraceFileError(f"the manifest of {folder} lacks {', '.join(wrong)}, or has another type there")
    tensors = {name: _read_tensor(folder, name, manifest["tensors"].get(name)) for name in DTYPES}
    _refuse_untrue(manifest, tensors, folder)
    return manifest, tensors["expert_ids"].numpy(), tensors["gates"].numpy(), tensors["source_rank"].numpy()


def _read_tensor(folder: Path, name: str, listed: Any) -> torch.Tensor:
    if not isinstance(listed, dict) or not (path := folder / str(listed.get("file"))).is_file():
        raise TraceFileError(f"{folder} lacks the tensor {name}")
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != listed.get("sha256"):
        raise TraceFileError(f"{path} has the SHA-256 {found}; the manifest says {listed.get('sha256')}")
    try:
        tensor: torch.Tensor = torch.load(path, weights_only=True)  # builds tensors and plain containers alone
    except Exception as error:
        raise TraceFileError(f"{path} cannot be read as a tensor: {error}") from error
    said, right = [listed.get("shape"), listed.get("dtype")], str(DTYPES[name])
    seen = [list(tensor.shape), str(tensor.dtype)] if torch.is_tensor(tensor) else "no tensor"
    if seen != [said[0], f"torch.{said[1]}"] or seen[1] != right:
        raise TraceFileError(f"{path} is {seen}; the manifest says {said}, and the format {right}")
    return tensor


def _refuse_untrue(fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse what a checksum cannot find: whole files that say what cannot be."""
    ids_TK, gates_TK, source_T = tensors["expert_ids"], tensors["gates"], tensors["source_rank"]
    size = (fields["logical_num_tokens"], fields["topk"])
    sorted_TK = ids_TK.sort(dim=-1).values
    wrong = {
        f"tensors of {len(source_T)} x {list(ids_TK.shape)} tokens, where the manifest says {list(size)}": (
            ids_TK.shape != size or gates_TK.shape != size or source_T.shape != size[:1]
        ),
        "no tokens": len(ids_TK) == 0,
        "token_ids that differ from expert_ids": not torch.equal(tensors["token_ids"], ids_TK),
        f"experts beyond the {fields['num_experts']}": bool(((ids_TK < 0) | (ids_TK >= fields["num_experts"])).any()),
        "a token that picks an expert twice": bool((sorted_TK[..., 1:] == sorted_TK[..., :-1]).any()),
        "gates that are negative or not finite": not bool((torch.isfinite(gates_TK) & (gates_TK >= 0)).all()),
        "gates that do not add up to 1": bool(((gates_TK.sum(dim=-1) - 1).abs() > 2e-4).any()),
        f"source ranks beyond the {fields['world_size']}": bool(
            ((source_T < 0) | (source_T >= fields["world_size"])).any()
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise TraceContentError(f"{folder} has {what}")


def failed_checks(cell: CellPlan, ids_TK: Ints, source_T: NDArray[np.integer], setting: Setting) -> list[str]:
    """The oracle: its checks that a planned cell fails, by their names there; whole numbers, compared exactly.

    Every rank's rows are sent as its schedule says, given back as they came, and returned; then the rows of a token's
    picks add up to K times the token.
    """
    sorted_TK = np.sort(ids_TK, axis=1)
    checks = {
        "distinct_topk_ok": bool((sorted_TK[:, 1:] > sorted_TK[:, :-1]).all()),
        "id_range_ok": bool((ids_TK >= 0).all() and (ids_TK < setting.num_experts).all()),
    }
    if not all(checks.values()):
        return [name for name, holds in checks.items() if not holds]
    counts_GE = counted(ids_TK, source_T, setting)
    ranks = [CellSchedule.of(cell, counts_GE, rank) for rank in range(setting.num_ranks)]
    tokens = [np.flatnonzero(source_T == rank) for rank in range(setting.num_ranks)]
    rows_TD = np.arange(4 * len(ids_TK)).reshape(-1, 4)  # no two tokens alike
    order = [np.argsort(ids_TK[here].ravel(), kind="stable") for here in tokens]
    taken = [by_expert[_index(rank.send_segments)] for by_expert, rank in zip(order, ranks, strict=True)]
    sent = [rows_TD[here[pick // setting.top_k]] for here, pick in zip(tokens, taken, strict=True)]
    received = list(_exchanged(sent, [rank.send_G for rank in ranks]))
    none = np.zeros((1, rows_TD.shape[1]), np.int64)  # a row beyond those received is padding
    served = [
        np.concatenate([rows, none])[np.minimum(_index(rank.expert_segments), len(rows))]
        for rows, rank in zip(received, ranks, strict=True)
    ]
    given = [rows[_index(rank.return_segments)] for rows, rank in zip(served, ranks, strict=True)]
    back = _exchanged(given, [rank.receive_G for rank in ranks])
    sums_TD = np.zeros_like(rows_TD)
    for here, pick, rows in zip(tokens, taken, back, strict=True):
        np.add.at(sums_TD, here[pick // setting.top_k], rows)
    checks = {
        "global_histogram_exact": int(counts_GE.sum()) == len(ids_TK) * setting.top_k,
        "local_counts_sum_ok": all(
            len(rows) == int(rank.group_rows_S.sum()) for rows, rank in zip(served, ranks, strict=True)
        ),
        "recv_splits_assignments_ok": [int(rank.receive_G.sum()) for rank in ranks] == cell.loads_G(counts_GE).tolist(),
        "roundtrip_exact": np.array_equal(sums_TD, setting.top_k * rows_TD),
    }
    return [name for name, holds in checks.items() if not holds]


def _index(segments: Ints) -> Ints:
    """Rows of segments, each a first row and a length."""
    return np.concatenate([np.arange(first, first + length) for first, length in segments] or [np.zeros(0, np.int64)])


def _exchanged(rows_G: Sequence[Ints], sizes_G: Sequence[Ints]) -> Iterator[Ints]:
    """What each rank gets when all send so many rows to each: an all-to-all."""
    pieces = [np.split(rows, np.cumsum(sizes)[:-1]) for rows, sizes in zip(rows_G, sizes_G, strict=True)]
    for target in range(len(rows_G)):
        yield np.concatenate([piece[target] for piece in pieces])
