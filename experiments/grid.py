"""The grid: which cells there are, in the order that they run.

Seeds are outermost in each of its parts, so that half of a part is already of use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.cells import Cell

SEEDS = range(5)
FRESH = range(5, 21)
"""Of part G, which asks again what parts A to F left open: no run that raised the question answers it."""

PRECISIONS = ("bfloat16", "fp8", "float32")
ROUTINGS = ("none", "R2", "R3")
MINI_STEPS = (1, 2, 4, 8)
FEW = range(3)
"""Of what takes long, runs of 400 steps and vLLM: as few as a verdict needs."""
LONG_STEPS = 400
TIS = {"correction": {"method": "tis", "high": 2.0}}
GSPO = {"method": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
NO_CLIP = 1e9

REGIMES: dict[str, tuple[str, dict[str, Any]]] = {
    "no gradient clip": ("moe", {"max_grad_norm": NO_CLIP}),
    "learning rate 8e-4": ("moe", {"learning_rate": 8e-4}),
    "learning rate 8e-4, no gradient clip": ("moe", {"learning_rate": 8e-4, "max_grad_norm": NO_CLIP}),
    "12 operands": ("long", {}),
    "12 operands, learning rate 8e-4": ("long", {"learning_rate": 8e-4}),
}
"""Where mismatch may matter more than in part B at 8 mini-batches: the start, and what differs."""

EXACT = {"rollout": {"precision": "float32"}}
"""An engine of the trainer's precision: nothing is left to be corrected."""
ARMS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "none": ("none", {}),
    "R3": ("R3", {}),
    "exact": ("none", EXACT),
}
"""Routing, and what else differs, of the three arms whose rewards say whether mismatch costs any."""


def grid() -> list[Cell]:
    """List all cells."""
    parts = (_mismatch, _core, _control, _second, _boundary)
    # a part goes through all seeds before the next begins
    explored = [cell for part in parts for seed in SEEDS for cell in part(seed)]
    confirming = [cell for seed in FRESH for cell in _confirm(seed)]
    routes = [Cell("H/routes", "routes", seed, "routes") for seed in SEEDS]
    later = [cell for part, seeds in ((_noise, SEEDS), (_long, FEW), (_weak, SEEDS)) for s in seeds for cell in part(s)]
    return explored + confirming + routes + later


def _mismatch(seed: int) -> Iterator[Cell]:
    yield from _a(seed, "moe")


def _core(seed: int) -> Iterator[Cell]:
    """Train on policy, and far from it: what says most."""
    for mini_steps in (8, 1):
        yield from _b(seed, mini_steps, "plain", {})


def _control(seed: int) -> Iterator[Cell]:
    yield from _a(seed, "dense")


def _second(seed: int) -> Iterator[Cell]:
    yield from _c_d_e(seed)
    for mini_steps in (8, 1):
        yield from _b(seed, mini_steps, "tis", TIS)
    for mini_steps in (4, 2):
        yield from _b(seed, mini_steps, "plain", {})
        yield from _b(seed, mini_steps, "tis", TIS)


def _a(seed: int, start: str) -> Iterator[Cell]:
    for precision in PRECISIONS:
        yield Cell(f"A/{start}/{precision}", "static", seed, start, _fixed_weights(precision, 192))


def _fixed_weights(precision: str, prompts: int) -> dict[str, dict[str, Any]]:
    return {"rollout": {"precision": precision, "prompts": prompts}, "rl": {"micro_step_tokens": 49152}}


def _b(seed: int, mini_steps: int, correction: str, settings: dict[str, Any]) -> Iterator[Cell]:
    for routing in ROUTINGS:
        if routing == "R2" and mini_steps == 1 and seed != SEEDS[0]:
            continue  # R2 repeats routes of the same weights: seed 0 shows that it is no replay at all
        yield _trained(f"B/{routing}/{correction}/{mini_steps}", seed, routing, mini_steps, settings)


def _c_d_e(seed: int) -> Iterator[Cell]:
    for routing in ("none", "R3"):
        yield _trained(f"C/gspo/{routing}", seed, routing, 8, GSPO)
        yield _trained(f"D/frozen/{routing}", seed, routing, 8, {"router": "frozen"})
    for mini_steps in (1, 8):
        yield _trained(f"E/shifted/{mini_steps}", seed, "R3", mini_steps, {}, shifted=True)


def _boundary(seed: int) -> Iterator[Cell]:
    yield _trained("F/part B/exact", seed, "none", 8, {}, other=EXACT)
    for regime, (start, settings) in REGIMES.items():
        for arm, (routing, other) in ARMS.items():
            yield _trained(f"F/{regime}/{arm}", seed, routing, 8, settings, start=start, other=other)


def _confirm(seed: int) -> Iterator[Cell]:
    for routing in ("none", "R3"):
        yield _trained(f"G/{routing}", seed, routing, 8, {})
        yield _trained(f"G/gspo/{routing}", seed, routing, 8, GSPO)
    yield _trained("G/exact", seed, "none", 8, {}, other=EXACT)


def _noise(seed: int) -> Iterator[Cell]:
    for precision in PRECISIONS:
        yield Cell(f"I/{precision}", "noise", seed, "moe", _fixed_weights(precision, 96))
    if seed in FEW:
        yield Cell("I/vllm", "served", seed, "served", {"rollout": {"prompts": 24}})


def _long(seed: int) -> Iterator[Cell]:
    for arm, (routing, other) in ARMS.items():
        yield _trained(f"J/{arm}", seed, routing, 8, {"steps": LONG_STEPS}, other=other)


def _weak(seed: int) -> Iterator[Cell]:
    yield Cell("K/static", "static", seed, "weak", _fixed_weights("fp8", 192))
    for arm, (routing, other) in ARMS.items():
        yield _trained(f"K/{arm}", seed, routing, 8, {}, start="weak", other=other)


def _trained(
    arm: str,
    seed: int,
    routing: str,
    mini_steps: int,
    settings: dict[str, Any],
    *,
    start: str = "moe",
    other: dict[str, dict[str, Any]] | None = None,
    shifted: bool = False,
) -> Cell:
    rl = {"routing": routing, "mini_steps": mini_steps} | settings
    return Cell(arm, "train", seed, start, {"rl": rl, **(other or {})}, shifted)
