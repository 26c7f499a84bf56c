"""A family's model on the device: its bits without and with replay, and what its experts were really given."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foreroute.adapters import hf
from foreroute.trace import RoutingTrace
from tests.adapters.hf.families import SIZES, build
from tests.adapters.hf.family_checks import foreign_routes, ids_of, watching
from tests.adapters.hf.model_runs import batch_of, gradients

FAMILIES = (
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "deepseek_v2", "glm4_moe", "deepseek_v4"),
    *("qwen2_moe", "minimax_m2", "ernie4_5_moe", "phimoe"),
)
"""They differ in how they select."""
NAMES_OF = {
    16: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    4: ("num_experts_per_tok", "moe_k", "moe_topk"),
    8: ("num_attention_heads", "num_key_value_heads"),
    64: ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    128: ("index_head_dim",),
    256: ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank"),
    512: ("hidden_size", "max_position_embeddings"),
}
WIDE = SIZES | {"vocab_size": 2048, "initializer_range": 0.1, "q_lora_rank": 256}
WIDE |= {name: size for size, names in NAMES_OF.items() for name in names}
"""For a GPU, whose kernels are chosen by sizes."""
GATE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Of gate weights, relative: weights are rounded to the model's dtype, renormalised in it in some families."""
EXPERT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Of the experts' outputs against float64, relative to the greatest."""
REPEATS = 4
"""How often an unpatched model runs again before a difference is not put down to it."""


@dataclass
class Case:
    """One family in one dtype: a model attached and the same that is not, a padded batch, routes of another model."""

    family: str
    dtype: torch.dtype
    routed: hf.RoutedTransformer
    untouched: Any
    on_host: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    foreign: RoutingTrace

    @classmethod
    def of(cls, family, device, dtype, **overrides):
        model = model_of(family, device, dtype, **overrides)
        untouched, routed = copy.deepcopy(model), hf.attach(model)
        on_host = batch_of(*((64, 48, 33, 64) if device.type == "cuda" else (9, 6)))
        batch = {name: each.to(device) for name, each in on_host.items()}
        return cls(family, dtype, routed, untouched, on_host, batch, foreign_routes(routed, on_host))

    @property
    def kept_R(self):
        return self.on_host["attention_mask"].bool().flatten()

    def use(self, experts):
        """This implementation of the experts, in both models."""
        for model in (self.routed.model, self.untouched):
            model.config._experts_implementation = experts


def model_of(family, device, dtype, *, experts="grouped_mm", **overrides):
    """In eval mode, wide on a GPU. Gradients of its attention repeat their bits, as those of fused kernels may not."""
    sizes = WIDE if device.type == "cuda" else SIZES
    model = build(family, experts=experts, sizes=sizes, **overrides)
    model.set_attn_implementation("eager")
    return model.to(device, dtype)


def logits_of(model, batch):
    """[B, T, V], without gradients and without padding."""
    with torch.no_grad():
        return model(**batch, use_cache=False).logits * batch["attention_mask"][..., None]


def forward(model, batch):
    """The logits without padding, and a loss in which each of them counts."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    logits = model(**batch, use_cache=False).logits * batch["attention_mask"][..., None]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.device)
    return logits.detach(), (logits.float() * direction).sum() / direction[..., 0].numel()


def backward(model, done):
    """The bits of a forward: its logits, and the gradients of its parameters by their names."""
    logits, loss = done
    loss.backward()
    return {"logits": logits} | {name.replace("_orig_mod.", ""): each for name, each in gradients(model).items()}


def step(model, batch):
    """Forward and backward; the same random numbers every time."""
    return backward(model, forward(model, batch))


def differing(one, other):
    both = one.keys() & other.keys()
    return (one.keys() ^ other.keys()) | {name for name in both if not torch.equal(one[name], other[name])}


def distance(one, other):
    """The norm of the difference over that of the second."""
    one, other = one.double().cpu(), other.double().cpu()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


@contextmanager
def deterministic():
    """Kernels that add in a fixed order, where PyTorch has them: a model then repeats its bits on a GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def require_native_bits(case, run=step):
    """Replaying its own routes, and recording them, changes no bit that the unpatched model repeats.

    Where it repeats only some, all are compared with deterministic algorithms; the test is skipped if some are left.
    """
    if not _unsteady(case, run):
        return
    with deterministic():
        unsteady = _unsteady(case, run)
    if unsteady:
        pytest.skip(f"the unpatched model does not repeat its own bits here: {', '.join(sorted(unsteady))}")


def _unsteady(case, run):
    """What the unpatched model does not repeat; all else must be equal."""
    model, batch = case.routed.model, case.batch
    expected = run(case.untouched, batch)
    unsteady = differing(expected, run(case.untouched, batch))
    with case.routed.record() as recording:
        recorded = run(model, batch)
    with case.routed.replay(recording.trace()):
        replayed = run(model, batch)
    for what, bits in (("recorded", recorded), ("replayed", replayed)):
        changed = differing(expected, bits)
        for _ in range(REPEATS):
            if changed <= unsteady:
                break
            unsteady |= differing(expected, run(case.untouched, batch))
        assert changed <= unsteady, f"{what}, {sorted(changed - unsteady)} differ from the untouched model's"
    return unsteady


def require_obeyed(case, run=step, precision=None):
    """Foreign routes are what the experts run, weighed by live logits. Autocast may change the precision."""
    with case.routed.replay(case.foreign), given_to_experts(case) as given:
        run(case.routed.model, case.batch)
    require_given(case, *given, precision=precision)


@contextmanager
def given_to_experts(case):
    """Calls of all routers, and of the last layer's experts: what they were given and what they returned."""
    experts = [each for each in case.routed.model.modules() if type(each).__name__.endswith("Experts")][-1]
    of_experts = []

    def note(module, args, kwargs, output):
        of_experts.append((module, [each.detach() for each in (*args, *kwargs.values())][:3], output.detach()))

    handle = experts.register_forward_hook(note, with_kwargs=True)
    with watching(case.family, case.routed) as calls:
        yield calls, of_experts
    handle.remove()


def require_given(case, calls, of_experts, *, precision=None):
    """What `given_to_experts` noted: the trace's ids, weights by the family's formula, and outputs as in float64."""
    trace, kept_R, precision = case.foreign, case.kept_R, precision or case.dtype
    assert len(calls) == trace.spec.num_layers
    for layer, call in enumerate(calls):
        ids_NK = ids_of(trace, layer)
        given_RK = call.ids if call.to_experts is None else call.to_experts
        assert torch.equal(given_RK.cpu().long()[kept_R], ids_NK), f"layer {layer} ran other experts than the trace has"
        if call.gate.weights is not None and (precision is not torch.float32 or case.routed.model.training):
            continue  # sparsemixer's bands have edges, on which roundings decide, and it draws numbers in training
        ids_RK = call.ids.detach().clone()
        ids_RK[kept_R.to(ids_RK.device)] = ids_NK.to(ids_RK)
        with torch.no_grad():
            expected_RK = call.expected(ids_RK).cpu()[kept_R]
        apart = (call.weights.detach().cpu().double()[kept_R] - expected_RK).abs() / (expected_RK + 0.1)
        assert apart.max() < GATE_TOLERANCE[precision], f"layer {layer}: gate weights are {apart.max():.2g} off"
    for experts, (hidden_RH, _, weights_RK), output_RH in of_experts[:1]:
        host = copy.deepcopy(experts).double().cpu()
        host.config._experts_implementation = "eager"
        with torch.no_grad():
            expected = host(hidden_RH.cpu().double()[kept_R], ids_NK, weights_RK.cpu().double()[kept_R])
        apart = float((output_RH.cpu().double()[kept_R] - expected).abs().max() / expected.abs().max())
        assert apart < EXPERT_TOLERANCE[precision], f"what the last layer's experts returned is {apart:.2g} off"
