"""What real jobs turn on: each thing works, with own routes as without replay and foreign ones obeyed, or is refused.

A refusal is an error of foreroute that names what it will not do. What runs past replay without a word fails its check.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bits import Case, Look, check_experts
from benchmarks.gpu.driving import (
    Batch,
    Bits,
    distance,
    forward,
    gradients_of,
    ids_of,
    logits_of,
    refused,
    require_obeyed,
    step,
    watching,
)
from benchmarks.gpu.families import FAMILIES, twin_of
from benchmarks.gpu.jobs_compiled import (
    check_reduced_overhead,
    check_reduced_overhead_in_training,
)
from benchmarks.gpu.jobs_graphs import check_captures, check_graphs
from benchmarks.gpu.part import Part, Skipped
from foreroute.adapters import hf
from foreroute.adapters.hf import RoutedTransformer
from foreroute.errors import ForerouteError
from foreroute.trace import RoutingTrace

FAMILY = "qwen3_moe"


def run(part: Part) -> None:
    """Captures first: they could replay stale routes without a word. Compilation takes long, and comes last."""
    case = Case.made(part, FAMILY, "float32")
    low = Case.made(part, FAMILY, "bfloat16")
    check_captures(part, low)
    check_fused_block(part, case)
    check_own_and_foreign(part, case, "autocast to bfloat16", _autocast, torch.bfloat16)
    check_own_and_foreign(part, case, "float16 with a gradient scaler", _scaled, torch.float16)
    check_inference_mode(part, low)
    check_static_cache(part, low)
    check_attention(part, low)
    check_fsdp(part, case)
    check_offloaded(part, case)
    check_hub_kernels(part, low)
    check_liger(part)
    for experts in ("sonicmoe", "deepgemm"):
        check_experts(part, low, experts)
    check_graphs(part, low)
    for check in (check_reduced_overhead, check_reduced_overhead_in_training):
        check(part, low)


def check_own_and_foreign(
    part: Part, case: Case, name: str, run: Callable[[Any, Batch], Bits], precision: torch.dtype | None = None
) -> None:
    """Own routes change no bit of what the unpatched model computes this way, and foreign ones are obeyed."""
    with part.check(f"{name}/own routes"):
        look = Look(case, run(case.untouched, case.batch), run)
        look.take()
        look.require_same({"logits"})
        look.require_same(look.names)
    with part.check(f"{name}/foreign routes obeyed"):
        with case.routed.replay(case.foreign), watching(case.routed) as calls:
            run(case.routed.model, case.batch)
        require_obeyed(case.foreign, calls, case.batch, FAMILIES[FAMILY], precision)


def _autocast(model: Any, batch: Batch) -> Bits:
    with torch.autocast(batch.direction_BTV.device.type, torch.bfloat16):
        done = forward(model, batch)
    return gradients_of(model, done)


def _scaled(model: Any, batch: Batch) -> Bits:
    """A step of an optimizer that a scaler guards, with its weights put back."""
    device = batch.direction_BTV.device.type
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast(device, torch.float16):
        logits, loss = forward(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    bits = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert any(not torch.equal(bits[name], before[name]) for name in bits), "the scaler skipped the step"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return bits | {"logits": logits}


def _inferred(model: Any, batch: Batch) -> Bits:
    with torch.inference_mode():
        return {"logits": logits_of(model, batch)}


def check_inference_mode(part: Part, case: Case) -> None:
    """Alone, and before a training step in one session with telemetry."""
    check_own_and_foreign(part, case, "inference mode", _inferred)
    with part.check("inference mode/then a training step, with telemetry"):
        with case.routed.replay(case.foreign):
            expected = step(case.routed.model, case.batch)
        with case.routed.replay(case.foreign, telemetry=True) as session:
            _inferred(case.routed.model, case.batch)
            seen = step(case.routed.model, case.batch)
        agreement = session.agreement()
        assert torch.equal(seen["logits"], expected["logits"]), "logits differ"
        assert session.num_forwards == 2
        assert agreement.routing.differing_tokens_share > 0, "telemetry is lost"


def check_fused_block(part: Part, case: Case) -> None:
    """A kernel that does all of a MoE block, its router included, as fused ones from a hub do."""
    with part.check("fused MoE block/attach refuses it"):
        model = twin_of(case.untouched)
        _fuse(model.model.layers[1].mlp)
        with refused("did not run, but its layer did"):
            hf.attach(model)
    with part.check("fused MoE block/put in later is refused in replay and record"):
        model = twin_of(case.untouched)
        routed = hf.attach(model)
        _fuse(model.model.layers[1].mlp)
        for session in (routed.replay(case.foreign), routed.record()):
            with refused("model.layers.1.mlp.gate selected 0 times"), session:
                logits_of(model, case.batch)


def _fuse(block: nn.Module) -> None:
    gate: Any = block.gate
    experts: Any = block.experts

    def fused(hidden_BTH: torch.Tensor) -> torch.Tensor:
        hidden_RH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])
        picked = nn.functional.linear(hidden_RH, gate.weight).softmax(-1).topk(gate.top_k)
        output: torch.Tensor = experts(hidden_RH, picked.indices, picked.values)
        return output.view_as(hidden_BTH)

    block.forward = fused


def check_hub_kernels(part: Part, case: Case) -> None:
    """`use_kernels`, which transformers fetches from a hub."""
    with part.check("kernels of the hub"):
        if importlib.util.find_spec("kernels") is None:
            raise Skipped("the package kernels is not installed")
        model = twin_of(case.untouched)
        try:
            model.use_kernels = True
            logits_of(model, case.batch)
        except Exception as error:  # there is no network, or no kernel for this device
            raise Skipped(f"transformers cannot use them here: {type(error).__name__}: {error}") from None
        with _works_or_bypassed():
            _require_as_plain(case, hf.attach(model), model)


def check_liger(part: Part) -> None:
    """Liger's kernels for this family."""
    with part.check("liger"):
        if importlib.util.find_spec("liger_kernel") is None:
            raise Skipped("the package liger_kernel is not installed")
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe  # type: ignore[import-not-found]

        apply_liger_kernel_to_qwen3_moe()
        with _works_or_bypassed():
            case = Case.made(part, FAMILY, "bfloat16")
            with case.routed.replay(case.foreign), watching(case.routed) as calls:
                step(case.routed.model, case.batch)
            require_obeyed(case.foreign, calls, case.batch, FAMILIES[FAMILY])


@contextmanager
def _works_or_bypassed() -> Iterator[None]:
    try:
        yield
    except ForerouteError as error:
        if "bypassed" not in str(error):
            raise


def check_attention(part: Part, case: Case) -> None:
    """Fused attention. Its gradients need not repeat their bits; routing is the same affair in all."""
    for attention in ("sdpa", "flash_attention_2", "flash_attention_3"):
        with part.check(f"{attention}/own and foreign routes"):
            models: tuple[Any, Any] = (case.routed.model, case.untouched)
            try:
                for model in models:
                    model.set_attn_implementation(attention)
                logits_of(case.untouched, case.batch)
            except (ImportError, ValueError, RuntimeError) as error:
                raise Skipped(f"the unpatched model does not run with it here: {error}") from None
            finally:
                used = {model.config._attn_implementation for model in models}
            try:
                _require_as_plain(case, case.routed, case.routed.model)
            finally:
                for model in models:
                    model.set_attn_implementation("eager")
            assert used == {attention}, f"transformers used {used}"


def check_static_cache(part: Part, case: Case) -> None:
    """`generate`: with the dynamic cache it is recorded, with a static one refused."""
    prompts = case.batch.inputs["input_ids"][:2, :6]
    model: Any = case.routed.model
    routed = case.routed

    def generate(**kwargs: Any) -> torch.Tensor:
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens: torch.Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings, **kwargs)
        return tokens

    with part.check("generate/recorded"):
        with routed.record() as recording:
            sampled = generate()
        with routed.replay(recording.rollout(sampled)) as session, torch.no_grad():
            model(input_ids=sampled, use_cache=False)
        assert session.num_forwards == 1
    with part.check("generate/a static cache is refused"), refused("static"), routed.record():
        generate(cache_implementation="static")


def check_fsdp(part: Part, case: Case) -> None:
    """FSDP2 on one rank."""
    with part.check("FSDP2 on one rank/own and foreign routes"), _one_rank(part):
        from torch.distributed.fsdp import fully_shard

        model = twin_of(case.untouched)
        routed = hf.attach(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        _require_as_plain(case, routed, model)
        _require_as_plain(case, hf.attach(model), model)
        with case.routed.replay(case.foreign):
            expected = step(case.routed.model, case.batch)
        with routed.replay(case.foreign):
            seen = step(model, case.batch)
        for name, gradient in expected.items():
            shard: Any = seen[name]
            apart = distance(shard.full_tensor() if hasattr(shard, "full_tensor") else shard, gradient)
            assert apart < 1e-4, f"{name} is {apart:.2g} from that without FSDP2"


@contextmanager
def _one_rank(part: Part) -> Iterator[None]:
    dist: Any = torch.distributed

    if not dist.is_available():
        raise Skipped("this torch has no torch.distributed")
    backend = "nccl" if part.device.type == "cuda" else "gloo"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # there may be no other
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        raise Skipped(f"{backend} does not start here: {error}") from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_offloaded(part: Part, case: Case) -> None:
    """Weights that accelerate keeps on the host and brings to the device module by module."""
    for when in ("before", "after"):
        with part.check(f"weights offloaded by accelerate, attached {when}"):
            if importlib.util.find_spec("accelerate") is None:
                raise Skipped("the package accelerate is not installed")
            from accelerate import cpu_offload

            model = twin_of(case.untouched)
            routed = hf.attach(model) if when == "before" else None
            cpu_offload(model, execution_device=part.device)
            _require_as_plain(case, routed or hf.attach(model), model)


def _require_as_plain(case: Case, routed: RoutedTransformer, call: Any) -> None:
    """The model under own and foreign routes is the attached plain one, to which it is equal but for where it runs."""
    with routed.record() as recording:
        native = logits_of(call, case.batch)
    own = recording.trace()
    _require_same_forward(routed, call, case.batch, own, native)
    with case.routed.replay(case.foreign):
        expected = logits_of(case.routed.model, case.batch)
    _require_same_forward(routed, call, case.batch, case.foreign, expected)
    assert not torch.equal(native, expected), "native and foreign routes give the same logits"


def _require_same_forward(
    routed: RoutedTransformer, call: Any, batch: Batch, trace: RoutingTrace, expected: torch.Tensor
) -> None:
    with watching(routed) as calls, routed.replay(trace):
        logits = logits_of(call, batch)
    given = [ran.ids_RK.cpu().long()[batch.kept_R] for ran in calls]
    assert len(given) == trace.spec.num_layers
    for layer, ids_NK in enumerate(given):
        assert torch.equal(ids_NK, ids_of(trace, layer)), f"layer {layer} ran other experts than the trace has"
    assert torch.equal(logits, expected), "logits differ"
