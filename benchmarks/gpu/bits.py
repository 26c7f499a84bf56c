"""Own routes replayed are the unpatched model bit for bit, and foreign ones are what its experts run.

Checks are named `family/dtype/experts/what`. The most important run first: every family with the experts that
transformers takes by default, then a compiled model, the other experts, and activation checkpointing.

Where the unpatched model does not repeat its own bits, replay cannot be held against them: such a check is skipped by
name, and made again with PyTorch's deterministic algorithms.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.driving import (
    Batch,
    Bits,
    deterministic,
    differing,
    distance,
    foreign_routes,
    forward,
    gradients_of,
    logits_of,
    require_obeyed,
    step,
    watching,
    with_ids,
)
from benchmarks.gpu.families import FAMILIES, build, twin_of, use_experts
from benchmarks.gpu.part import Part, Skipped
from foreroute.adapters import hf
from foreroute.trace import LayerKind, RoutingTrace

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXPERTS = ("grouped_mm", "eager", "batched_mm")
COMPILED = ("qwen3_moe", "deepseek_v3")
COMPILE_NEEDS_S = 35
"""A compilation that has less left on a GPU is not begun."""
REPEATS = 4
"""How often an unpatched model runs again before a difference is not put down to it."""
Run = Callable[[Any, Batch], Bits]


@dataclass
class Case:
    """One family in one dtype.

    Attributes:
        name: family/dtype.
        routed: the attached model.
        untouched: the same model, which nobody attached.
        batch: for both.
        foreign: routes that it would not take.
    """

    name: str
    routed: hf.RoutedTransformer
    untouched: Any
    batch: Batch
    foreign: RoutingTrace

    @classmethod
    def made(cls, part: Part, family: str, dtype: str) -> Case:
        """On the device."""
        model = build(family, part.device, DTYPES[dtype], full=part.full, experts=EXPERTS[0])
        untouched, routed = twin_of(model), hf.attach(model)
        batch = Batch.of(model.config.vocab_size, part.device, full=part.full)
        return cls(f"{family}/{dtype}", routed, untouched, batch, foreign_routes(routed, batch))

    def use(self, experts: str) -> None:
        """This implementation, in both."""
        for model in (self.routed.model, self.untouched):
            use_experts(model, experts)


def run(part: Part) -> None:
    """Every family, then what is less important."""
    torch.set_float32_matmul_precision("highest")
    cases: dict[str, Case] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            with part.check(f"{family}/{dtype}/attach"):
                cases[f"{family}/{dtype}"] = Case.made(part, family, dtype)
    part.record(families=sorted({name.split("/")[0] for name in cases}))
    for case in cases.values():
        check_experts(part, case, EXPERTS[0])
    check_compiled(part, COMPILED[0])
    for case in cases.values():  # family by family, so that time that runs out costs the last families and no kind
        for use_reentrant in (True, False):
            check_checkpointing(part, case, use_reentrant=use_reentrant)
        for experts in EXPERTS[1:]:
            check_experts(part, case, experts)
    if part.full:
        for family in COMPILED[1:]:
            check_compiled(part, family)


def check_experts(part: Part, case: Case, experts: str) -> None:
    """Own and foreign routes with this implementation of the experts; what comes later has the default again."""
    case.use(experts)
    try:
        untouched: Bits = {}
        with part.check(f"{case.name}/{experts}/unpatched"):
            try:
                untouched = step(case.untouched, case.batch)
            except Exception as error:  # kernels may lack for any reason
                raise Skipped(f"the unpatched model does not run here: {error}") from None
        if untouched:
            check_own(part, case, experts, untouched)
            check_foreign(part, case, experts)
    finally:
        case.use(EXPERTS[0])
    if part.device.type == "cuda":
        torch.cuda.empty_cache()


def check_own(part: Part, case: Case, experts: str, untouched: Bits) -> None:
    """Replaying its own routes, and recording them, changes no bit of logits and gradients."""
    name, look = f"{case.name}/{experts}/own routes", Look(case, untouched)
    with part.check(f"{name}, logits"):
        look.take()
        look.require_same({"logits"})
    with part.check(f"{name}, gradients"):
        look.require_same(look.names)
    if look.noise:
        with part.check(f"{name}, deterministic algorithms"), deterministic():
            again = Look(case, step(case.untouched, case.batch))
            again.take()
            again.require_same(again.names)


class Look:
    """The bits of a model untouched, recorded, and replayed on what was recorded.

    Args:
        case: the models.
        untouched: bits of the untouched one.
        run: runs one of them.

    Attributes:
        noise: what the untouched model does not repeat.
    """

    def __init__(self, case: Case, untouched: Bits, run: Run = step) -> None:
        self._case = case
        self._untouched = untouched
        self._run = run
        self._seen: dict[str, Bits] = {}
        self.noise: set[str] = set()

    def take(self) -> None:
        """Run them all."""
        case = self._case
        self.noise = differing(self._untouched, self._run(case.untouched, case.batch))
        with case.routed.record() as recording:
            self._seen["recorded"] = self._run(case.routed.model, case.batch)
        with case.routed.replay(recording.trace()):
            self._seen["replayed"] = self._run(case.routed.model, case.batch)

    @property
    def names(self) -> set[str]:
        """Of all bits."""
        return set(self._untouched)

    def require_same(self, names: set[str]) -> None:
        """Raise `AssertionError` if replay or recording changed any of them, `Skipped` if nobody can say."""
        assert self._seen, "nothing was replayed"
        for what, bits in self._seen.items():
            changed = differing(self._untouched, bits) & names
            for _ in range(REPEATS):
                if not changed - self.noise:
                    break
                self.noise |= differing(self._untouched, self._run(self._case.untouched, self._case.batch))
            changed -= self.noise
            assert not changed, f"{what}, {_listed(changed)} differ from the untouched model, which repeats them"
        unknown = self.noise & names
        if unknown:
            raise Skipped(f"the unpatched model does not repeat its own bits here: {_listed(unknown)}")


def check_foreign(part: Part, case: Case, experts: str) -> None:
    """Other routes are what the experts run, weighed by live logits; and they make a difference."""
    name, routed, trace = f"{case.name}/{experts}", case.routed, case.foreign
    family = FAMILIES[case.name.partition("/")[0]]
    with part.check(f"{name}/foreign routes obeyed"):
        with routed.replay(trace), watching(routed) as calls:
            bits = step(routed.model, case.batch)
        require_obeyed(trace, calls, case.batch, family)
        still = [p for p in routed.router_paths if not _learns(routed.model, p, bits)]
        looked_up = [layer.kind is LayerKind.HASH for layer in routed.spec.layers]
        assert len(still) <= sum(looked_up), f"no gradient reaches the routers {', '.join(still)}"
        assert all(bool(value.isfinite().all()) for value in bits.values()), "there are infinities or NaN"
    with part.check(f"{name}/foreign routes are not native ones"):
        native = logits_of(routed.model, case.batch)
        apart = distance(_replayed(case, trace), native)
        assert apart > 1e-2, f"replayed and native logits are only {apart:.2g} apart"
    with part.check(f"{name}/one id makes a difference"):
        before, after = bits["logits"], _replayed(case, _with_one_id_changed(case))
        moved = [distance(after[row], before[row]) for row in range(len(before))]
        assert moved[0] > max(1e-6, *moved[1:]), f"an id of sequence 0 was changed; sequences changed by {moved}"


def _replayed(case: Case, trace: RoutingTrace) -> torch.Tensor:
    with case.routed.replay(trace):
        return logits_of(case.routed.model, case.batch)


def _with_one_id_changed(case: Case) -> RoutingTrace:
    """Of the first token in the last layer."""
    ids_NLK = case.foreign.expert_ids_NLK.copy()
    picked = ids_NLK[0, -1]
    picked[-1] = next(expert for expert in range(case.routed.spec.num_experts) if expert not in picked)
    return with_ids(case.routed, case.batch, ids_NLK)


def _learns(model: Any, path: str, bits: Bits) -> bool:
    return any(f"{path}.{name}" in bits and bool(bits[f"{path}.{name}"].any()) for name, _ in _parameters(model, path))


def _parameters(model: Any, path: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    yield from model.get_submodule(path).named_parameters()


def check_checkpointing(part: Part, case: Case, *, use_reentrant: bool) -> None:
    """Foreign routes under activation checkpointing, with the backward outside of the session."""
    kind = "reentrant" if use_reentrant else "not reentrant"
    routed, batch = case.routed, case.batch
    case.use(EXPERTS[0])
    with part.check(f"{case.name}/{EXPERTS[0]}/checkpointing, {kind}"):
        trace = case.foreign
        with routed.replay(trace):
            plain = step(routed.model.train(), batch)
        with _checkpointed(routed.model, use_reentrant=use_reentrant), watching(routed) as calls:
            with routed.replay(trace):
                done = forward(routed.model, batch)
            ours = gradients_of(routed.model, done)
        assert len(calls) == 2 * routed.spec.num_layers, f"{len(calls)} calls of experts, expected each layer twice"
        family = FAMILIES[case.name.partition("/")[0]]
        recomputed = calls[: routed.spec.num_layers - 1 : -1]
        require_obeyed(trace, calls[: routed.spec.num_layers], batch, family)
        require_obeyed(trace, recomputed, batch, family)
        changed = differing(plain, ours)
        if changed:  # sums may be taken in another order, as they are without replay
            untouched = step(case.untouched.train(), batch)
            noise = differing(untouched, step(case.untouched, batch))
            with _checkpointed(case.untouched, use_reentrant=use_reentrant):
                noise |= differing(untouched, step(case.untouched, batch))
            assert changed <= noise, f"{_listed(changed - noise)} differ from those without checkpointing"
            far = [name for name in changed if distance(ours[name], plain[name]) > 2e-2]
            assert not far, f"{_listed(set(far))} differ by more than the order of sums"


@contextmanager
def _checkpointed(model: Any, *, use_reentrant: bool) -> Iterator[None]:
    """In train mode, which checkpointing takes."""
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    except ValueError as error:
        raise Skipped(f"transformers does not checkpoint it: {error}") from None
    model.train()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


def check_compiled(part: Part, family: str) -> None:
    """A model in one graph: what the eager one computes, whatever the trace."""
    has_inductor = part.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    backend = "inductor" if has_inductor else "aot_eager"
    name = f"{family}/bfloat16/compiled by {backend}"
    found: dict[str, Any] = {}

    def begin() -> None:
        if part.full and part.seconds_left < COMPILE_NEEDS_S:
            raise Skipped(f"{part.seconds_left:.0f} s were left; it takes {COMPILE_NEEDS_S} s")
        torch._dynamo.reset()
        counters.clear()
        model = build(family, part.device, torch.bfloat16, full=part.full, experts=EXPERTS[0], num_hidden_layers=2)
        batch = Batch.of(model.config.vocab_size, part.device, full=part.full)
        found.update(eager=hf.attach(twin_of(model)), routed=hf.attach(model), batch=batch)
        found.update(call=torch.compile(model, backend=backend, fullgraph=True))

    def compare(seed: int) -> None:
        trace = foreign_routes(found["eager"], found["batch"], seed)
        with found["eager"].replay(trace):
            expected = step(found["eager"].model, found["batch"])
        with found["routed"].replay(trace), found["routed"].record() as recording:
            seen = step(found["call"], found["batch"])
        assert recording.trace().equals(trace), "what was executed is not the trace"
        apart = distance(seen["logits"], expected["logits"])
        assert apart < 5e-2, f"logits are {apart:.2g} from the eager model's"
        in_gradients = distance(_joined(seen), _joined(expected))
        assert in_gradients < 0.1, f"gradients are {in_gradients:.2g} from the eager model's"
        native = distance(logits_of(found["eager"].model, found["batch"]), expected["logits"])
        assert native > 4 * apart, f"logits are {apart:.2g} from the eager model's, whose native ones are as near"

    with part.check(f"{name}/foreign routes obeyed"):
        begin()
        compare(1)
    if "call" not in found:
        return
    before = counters["stats"]["unique_graphs"]
    with part.check(f"{name}/another trace takes no graph more"):
        compare(2)
        assert counters["stats"]["unique_graphs"] == before, "it was compiled again"
    with part.check(f"{name}/own routes"):
        with found["eager"].record() as recording:
            native = step(found["eager"].model, found["batch"])
        with found["routed"].replay(recording.trace()), found["routed"].record() as executed:
            replayed = step(found["call"], found["batch"])
        assert executed.trace().equals(recording.trace()), "what was executed is not the trace"
        apart = distance(replayed["logits"], native["logits"])
        assert apart < 5e-2, f"logits are {apart:.2g} from the eager model's"
        assert counters["stats"]["unique_graphs"] == before, "it was compiled again"
    torch._dynamo.reset()


def _joined(bits: Bits) -> torch.Tensor:
    """All gradients, one after the other."""
    return torch.cat([bits[name].flatten() for name in sorted(bits) if name != "logits"])


def _listed(names: set[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")
