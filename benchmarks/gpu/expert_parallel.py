"""Expert-parallel steps of the transfers: on one rank, with counts known ahead and exchanged, and on two ranks.

Two ranks share the card. NCCL refuses that (before 2.30), so gloo carries their rows and gradients, through the host.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.nn import functional

from benchmarks.gpu.counting import launch_waits, waits_on_cuda
from benchmarks.gpu.part import Part, Skipped
from benchmarks.harness.execution_bench import LINKS, SIZES, Bench, drawn
from benchmarks.harness.pairs import compare
from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup, has_nccl
from foreroute.plan import Hosts, StepPlan, Topology
from foreroute.plan.checker import verify
from foreroute.plan.counts import counts_digest

RANKS = 2
MICRO_STEPS = 2
TIMEOUT_S = 40
CLOSE = 1e-4
"""Of the largest value: sums of float32 in another order."""
MULTI_RANK_NCCL = (2, 30)
"""The first that lets two ranks share a card, where the environment asks for it."""
PAIRS, FEW_PAIRS = 20, 3
LARGE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
}
"""Layers of Qwen3-30B-A3B with a quarter of its experts, as a rank of four has."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of one step.

    Attributes:
        logits: of every rank and micro-step in turn, on the host.
        grads: of the whole model, on the host.
    """

    logits: list[Tensor]
    grads: dict[str, Tensor]


def one_rank(part: Part) -> None:
    """A distributed model under a plan against the model that is not: in float32, and in bfloat16."""
    with part.check("one rank under a plan is the undistributed model"):
        exact = alone(1, part.device)
        require_close(step_under(bench_on(0, 1, part.device), 0), exact)
    with part.check("one rank under a plan in bfloat16 is as near to float32 as the undistributed model"):
        own = distance(alone(1, part.device, torch.bfloat16), exact)
        ours = distance(step_under(bench_on(0, 1, part.device, torch.bfloat16), 0), exact)
        part.record(bfloat16_error_share=round(own, 5), bfloat16_error_distributed_share=round(ours, 5))
        if ours > 2 * own:
            raise AssertionError(f"it is {ours:.2e} of the largest value away, the undistributed model {own:.2e}")


def empty_groups(part: Part) -> None:
    """Experts without a token, whose gradients some kernels leave as the memory was (pytorch issue 172439)."""
    with part.check("an expert without a token gets no gradient in bfloat16"):
        ends = torch.tensor([96, 96, 256, 256], device=part.device, dtype=torch.int32)
        weight = torch.ones(len(ends), 128, 128, device=part.device, dtype=torch.bfloat16, requires_grad=True)
        rows = weight.new_ones(256, 128)
        torch.full_like(weight, torch.nan)  # memory that the gradient may be given next
        out = functional.grouped_mm(rows, weight, offs=ends)
        out.backward(torch.ones_like(out))
        assert weight.grad is not None, "it took part"
        expected = weight.new_tensor([96, 0, 160, 0])[:, None, None]
        if not (weight.grad == expected).all():
            found = [float(grad.float().abs().max()) for grad in weight.grad]
            raise AssertionError(f"experts with 96, 0, 160 and 0 tokens have gradients up to {found}")


def two_ranks(part: Part) -> None:
    """The same on two ranks that share the device, with replicas by host memory and from peer to peer."""
    with part.check("two ranks on one device, by gloo"):
        _two_ranks(part, "gloo", "")
    with part.check("two ranks on one device, by NCCL"):
        if part.device.type == "cpu":
            raise Skipped("NCCL needs a GPU")
        if torch.cuda.nccl.version()[:2] < MULTI_RANK_NCCL:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            raise Skipped(f"NCCL {version} refuses two ranks on one card, before {'.'.join(map(str, MULTI_RANK_NCCL))}")
        _two_ranks(part, "cpu:gloo,cuda:nccl", "nccl_")


def waits(part: Part) -> None:
    """Of the host, between the rows of a planned step."""
    with part.check("a planned step waits for the device nowhere between its rows"):
        if part.device.type == "cpu":
            raise Skipped("only a GPU is waited for; tests/ep/test_host_waits.py counts on a stand-in")
        if not waits_on_cuda(lambda: torch.ones(1, device=part.device).item()):
            raise Skipped(
                "PyTorch's sync debug mode sees no wait in an .item() here, so that it would see none elsewhere"
            )
        bench = bench_on(0, 1, part.device, torch.bfloat16)
        _require_no_waits(part, "planned_step_waits", launch_waits(partial(step_under, bench, 0)))


def _require_no_waits(part: Part, name: str, places: list[str]) -> None:
    part.record(**{name: len(places)})
    if places:
        raise AssertionError(f"the host waits for the device at {places}")


def passes(part: Part) -> None:
    """Forward and backward with counts known ahead, over the same with counts exchanged in every layer."""
    with part.check("counts known ahead and exchanged"):
        sizes = LARGE if part.full else LARGE | {"hidden_size": 128, "moe_intermediate_size": 48, "head_dim": 8}
        model = hf.build_model("qwen3_moe", seed=0, **sizes).to(part.device, torch.bfloat16)
        routed = hf.attach(model)
        batch = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (4, 1024 if part.full else 32)))
        placed = hf.distribute(model, timeout_s=TIMEOUT_S)
        with routed.record() as recording, torch.no_grad():
            model(input_ids=batch.to(part.device), use_cache=False)
        trace = recording.trace()
        rows = BatchRows.replayed(trace, batch)
        assert rows.routed_LE is not None, "routes that are replayed are known"
        counts_MLGE = rows.routed_LE[None, :, None].astype(np.int32)
        plan = halved_plan(counts_MLGE, placed.home_LE)
        launches: dict[bool, list[float]] = {True: [], False: []}

        def passing(known: bool) -> Callable[[], None]:
            def run() -> None:
                placed.begin_step(0, plan, counts_MLGE if known else None, [rows])
                with routed.replay(trace), placed.executing(0):
                    begun = time.perf_counter()
                    logits = model(input_ids=batch.to(part.device), use_cache=False).logits
                    launches[known].append(time.perf_counter() - begun)
                    logits.float().log_softmax(-1)[..., 0].mean().backward()
                model.zero_grad(set_to_none=True)
                part.synchronize()

            return run

        ratio = compare(passing(True), passing(False), pairs=PAIRS if part.full else FEW_PAIRS)
        per_cell_ms = {known: statistics.median(s) * 1e3 / len(placed.layers) for known, s in launches.items()}
        part.record(
            known_over_exchanged_ratio=round(ratio.ratio, 4),
            known_over_exchanged_ratio_quartiles=[round(ratio.low, 4), round(ratio.high, 4)],
            known_launch_per_cell_ms=round(per_cell_ms[True], 4),
            exchanged_launch_per_cell_ms=round(per_cell_ms[False], 4),
            pass_with_exchange_ms=round(ratio.baseline_ms, 3),
        )
    gc.collect()
    if part.device.type == "cuda":
        torch.cuda.empty_cache()


def bench_on(rank: int, num_ranks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Bench:
    """The model of a rank, distributed, and its routes."""
    model = hf.build_model("qwen3_moe", seed=0, **SIZES).to(device, dtype)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=TIMEOUT_S)
    return Bench.routed_anew(routed, placed, rank, num_ranks, micro_steps=MICRO_STEPS)


def alone(num_ranks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Outcome:
    """The step of so many ranks by one process and the plain model."""
    model = hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", **SIZES).to(device, dtype)
    routed = hf.attach(model)
    logits = []
    for rank in range(num_ranks):
        for batch, trace in zip(*drawn(routed.spec, rank, micro_steps=MICRO_STEPS), strict=True):
            with routed.replay(trace):
                logits.append(_forward_and_backward(model, batch, device))
    return Outcome(logits, {name: _grad(parameter) for name, parameter in model.named_parameters()})


def step_under(bench: Bench, step: int) -> Outcome:
    """A step under a plan, with the logits of this rank and the gradients of all."""
    plan = halved_plan(bench.counts_MLGE, bench.placed.home_LE)
    model, placed = bench.routed.model, bench.placed
    device = next(model.parameters()).device
    placed.begin_step(step, plan, bench.counts_MLGE, bench.rows_M)
    logits = []
    for m, (batch, trace) in enumerate(zip(bench.batches, bench.traces, strict=True)):
        with bench.routed.replay(trace), placed.executing(m):
            logits.append(_forward_and_backward(model, batch, device))
    placed.sum_gradients()
    grads = {name: placed.whole(each, _grad(each)) for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Outcome(logits, grads)


def halved_plan(counts_MLGE: NDArray[np.int32], home_LE: NDArray[np.int16]) -> StepPlan:
    """Each rank serves half of the busiest expert that lives elsewhere.

    Made by hand, for the planner takes long to compile.
    """
    num_micro_steps, num_layers, num_ranks, _ = counts_MLGE.shape
    replicas: list[tuple[int, int]] = []
    tokens: list[NDArray[np.int32]] = []
    offsets = [0]
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        counts_GE = counts_MLGE[m, layer]
        for rank in range(num_ranks if num_ranks > 1 else 0):
            elsewhere_E = np.where(home_LE[layer] == rank, -1, counts_GE.sum(axis=0))
            expert = int(elsewhere_E.argmax())
            others = [tokens[r] for r in range(offsets[-1], len(replicas)) if replicas[r][0] == expert]
            replicas.append((expert, rank))
            tokens.append((counts_GE[:, expert] - sum(others)) // 2)
        offsets.append(len(replicas))
    expert_R, rank_R = np.array(replicas, np.int16).reshape(-1, 2).T
    plan = StepPlan(
        topology=Topology(num_ranks, num_ranks, 1, LINKS),
        previous_home_LE=home_LE,
        hosts=Hosts(
            home_LE=home_LE,
            offsets=np.array(offsets, np.int64),
            expert_R=expert_R,
            rank_R=rank_R,
            slot_R=np.zeros(len(expert_R), np.int16),
            fetched_R=np.ones(len(expert_R), np.bool_),
            tokens_RG=np.array(tokens, np.int32).reshape(-1, num_ranks),
        ),
        max_load_ML=np.zeros((num_micro_steps, num_layers), np.int64),
        bound_ML=counts_MLGE.sum(axis=(2, 3)) / num_ranks,
        counts_digest=counts_digest(counts_MLGE),
        slots="shared",
    )
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        plan.max_load_ML[m, layer] = plan.cell(m, layer).loads_G(counts_MLGE[m, layer]).max()
    verify(plan, counts_MLGE)
    return plan


def require_close(found: Outcome, expected: Outcome) -> None:
    """Raise `AssertionError` unless they are equal but for the order of sums of float32."""
    far = distance(found, expected)
    if far > CLOSE:
        raise AssertionError(
            f"outputs and gradients differ by {far:.2e} of the largest value, expected {CLOSE:.0e} at most"
        )


def distance(found: Outcome, expected: Outcome) -> float:
    """The largest difference of any tensor, over that tensor's largest value."""
    pairs = list(zip(found.logits, expected.logits, strict=True))
    pairs += [(found.grads[name], grad) for name, grad in expected.grads.items()]
    return max(
        float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))
        for one, other in pairs
    )


def _forward_and_backward(model: Any, batch: Tensor, device: torch.device) -> Tensor:
    logits = model(input_ids=batch.to(device), use_cache=False).logits
    logits.float().log_softmax(-1)[..., 0].sum().backward()
    on_host: Tensor = logits.detach().cpu()
    return on_host


def _grad(parameter: Tensor) -> Tensor:
    """On the host, where gloo gathers it."""
    assert parameter.grad is not None, "every parameter has a part in the loss"
    return parameter.grad.cpu()


def _two_ranks(part: Part, backend: str, prefix: str) -> None:
    answers = _in_processes(part, backend)
    if refusals := [answer["refused"] for answer in answers if "refused" in answer]:
        raise Skipped(f"the card takes no second process: {refusals[0]}")
    expected = alone(RANKS, part.device)
    for path in ("host", "direct"):
        logits = [one for answer in answers for one in answer[path].logits]
        require_close(Outcome(logits, answers[0][path].grads), expected)
        for rank, answer in enumerate(answers):
            moved, other = answer[f"{path}_bytes"], "direct" if path == "host" else "host"
            if moved[path] == 0 or moved[other] > 0:
                raise AssertionError(f"rank {rank} fetched {moved} bytes by a plan for the {path} path")
        if prefix:  # by gloo, the host carries what is sent
            waits = [place for answer in answers for place in answer[f"{path}_waits"]]
            _require_no_waits(part, f"{prefix}two_ranks_{path}_launch_waits", waits)


def _in_processes(part: Part, backend: str) -> list[dict[str, Any]]:
    """What `_rank` keeps, of both ranks."""
    ends_at = time.monotonic() + min(part.seconds_left, TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        # imports take long, but what has used CUDA cannot be forked
        method = "fork" if part.device.type == "cpu" else "spawn"
        context = start_processes(_rank, (folder, backend, str(part.device)), RANKS, join=False, start_method=method)
        try:
            while not context.join(max(0.1, ends_at - time.monotonic())):
                if time.monotonic() > ends_at:
                    raise AssertionError("two ranks did not come to an end in time")
        except ProcessRaisedException as error:
            raise AssertionError(str(error).strip().splitlines()[-1]) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        # written by our own processes
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, folder: str, backend: str, device_name: str) -> None:
    device = torch.device(device_name)
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        answer["refused"] = str(error).splitlines()[0]
    if device.type == "cuda" and not answer:
        torch.cuda.set_device(device.index or 0)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    refused = torch.tensor([len(answer)])
    dist.all_reduce(refused)
    if not int(refused):
        bench = bench_on(rank, RANKS, device)
        for step, path in enumerate(("host", "direct")):
            answer |= _by(path, bench, step)
    torch.save(answer, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _by(path: Any, bench: Bench, step: int) -> dict[str, Any]:
    """A step whose replicas come by one path."""
    topology = Topology(RANKS, RANKS, 1, LINKS)
    options = TransferOptions(paths=path, timeout_s=TIMEOUT_S)
    with closing(TransferEngine(bench.placed.homes, topology, options, PeerGroup(timeout_s=TIMEOUT_S))) as engine:
        engine.publish()
        bench.placed.use(engine)
        outcome = step_under(bench, step)
        fetched = [record for record in engine.take_records() if record.kind == "fetch"]
        on_nccl = has_nccl(bench.placed.group) and torch.cuda.is_available()
        waits = launch_waits(partial(step_under, bench, step)) if on_nccl else []
    return {
        f"{path}_waits": waits,
        path: outcome,
        f"{path}_bytes": {
            "host": sum(record.host_bytes for record in fetched),
            "direct": sum(record.direct_bytes for record in fetched),
        },
    }
