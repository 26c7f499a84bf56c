"""Trainer and engine compared by arrays alone: figures, their errors, and what they mean. No model, no torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_array, as_mask
from foreroute.doctor.evidence import Evidence, TrainerPass, standard_error
from foreroute.doctor.findings import Diagnosis, diagnose
from foreroute.errors import InputError
from foreroute.mismatch import root_mismatch
from foreroute.mismatch.measures import TokenMismatch, as_traces, packed, routing_mismatch, token_mismatch
from foreroute.trace import RoutingSpec, RoutingTrace

Ratio = Callable[[Any], tuple[float, float]]
"""A sum, and the count of what was added up, of a mismatch."""
OF_TOKENS: Mapping[str, Ratio] = {
    "k3": lambda found: (found.k3_sum, found.count),
    "f1.5": lambda found: (found.above[0], found.count),
    "f2": lambda found: (found.above[1], found.count),
}
OF_ROUTES: Mapping[str, Ratio] = {
    "differing_share": lambda found: (found.differing_L.sum(), found.rows * len(found.differing_L)),
    "differing_tokens_share": lambda found: (found.by_differing_layers[1:].sum(), found.rows),
    "overlap": lambda found: (found.shared_L.sum(), found.rows * found.picks_L.sum()),
}
OF_ROOTS: Mapping[str, Ratio] = {
    "roots_share": lambda found: (found.roots_L.sum(), found.rows * len(found.roots_L)),
    "consequences_share": lambda found: (found.consequences_L.sum(), found.rows * len(found.roots_L)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Figures of how far trainer and engine are apart, and the diagnosis.

    Attributes:
        metrics: figures by name, as `metrics.jsonl` calls them: `response_tokens`, `k3` (nats), `f1.5`, `f2` (shares),
            `max_abs_log_ratio`; the same under replay as `replayed/k3` and so on, and `gain`, k3 without over k3 with
            it; of the two parts of k3, in nats, `k3/routing` and `k3/rest`; of routes `routed_rows`, `differing_share`,
            `differing_tokens_share` and `overlap`, and `roots_share` and `consequences_share` of the same decisions.
        errors: of those that are means over tokens, the standard errors, as if no sequence depended on another.
        diagnosis: what it means, and what to do.
    """

    metrics: dict[str, float]
    errors: dict[str, float]
    diagnosis: Diagnosis

    def __str__(self) -> str:
        """The headline, and the figures with their errors."""
        lines = [self.diagnosis.headline, ""]
        for name, value in self.metrics.items():
            error = f" ± {self.errors[name]:.2g}" if name in self.errors else ""
            lines.append(f"{name}  {value:.4g}{error}")
        return "\n".join(lines)


def compare(
    trainer_logprobs: ArrayLike,
    engine_logprobs: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    replayed_logprobs: ArrayLike | None = None,
    trainer_routes: RoutingTrace | ArrayLike | None = None,
    engine_routes: RoutingTrace | ArrayLike | None = None,
    replayed_routes: RoutingTrace | ArrayLike | None = None,
    deficits: ArrayLike | None = None,
    attention_mask: ArrayLike | None = None,
    spec: RoutingSpec | None = None,
) -> Comparison:
    """Compare a trainer with the engine that sampled, by arrays of numpy or tensors of torch, of any type and device.

    Args:
        trainer_logprobs: of the sampled tokens, by the trainer on its own routes: numbers [B, T], or [R] of tokens
            whose sequences are not known.
        engine_logprobs: by the engine, of the same shape.
        mask: [B, T] or [R], 1 for a sampled response token. The others are not looked at.
        replayed_logprobs: by the trainer on the engine's routes, where it replays them.
        trainer_routes: integers [B, W, L, K], the experts that the trainer takes by itself, -1 in all of a position
            that was not recorded, W the width of prompts and responses; or a trace, if both are.
        engine_routes: those that the engine took, in the same form.
        replayed_routes: those that the trainer's routers would choose by themselves where it replays the engine's, in
            the same form: a recording with `record(native=True)` inside of the replay.
        deficits: numbers [B, W, L], or [N, L] of a trace, `deficits_NL()` of that recording, which tell defects from
            near-ties.
        attention_mask: [B, W], of routes in arrays, 1 for a token; every position is one by default. Where it has the
            shape of `mask`, no response token may be padding.
        spec: the model of the routes, for its number of experts and the names of its layers: without it they are
            "routed layer 0" and so on. Traces have their own.

    Raises:
        InputError: when shapes or numbers cannot be, routes are given of one side alone, or those of the pass with
            replay without both sides.
    """
    kept = None if mask is None else as_array(mask, name="mask")
    _check_padding(kept, attention_mask, has_routes=trainer_routes is not None)
    _warn_of_halves(trainer=trainer_logprobs, engine=engine_logprobs, replayed=replayed_logprobs)
    trainer, engine = (as_array(each, name="log-probs") for each in (trainer_logprobs, engine_logprobs))
    replayed = None if replayed_logprobs is None else as_array(replayed_logprobs, name="log-probs")
    executed = routed = would = deficits_NL = None
    if trainer_routes is not None and engine_routes is not None:
        executed, routed = as_traces(trainer_routes, engine_routes, attention_mask, spec)
        if replayed_routes is not None:
            routed, would = as_traces(engine_routes, replayed_routes, attention_mask, spec)
            if executed.spec.num_experts != would.spec.num_experts:
                # of arrays, which say by their highest id alone how many experts there are
                spec = max(executed.spec, would.spec, key=lambda each: each.num_experts)
                executed, routed = as_traces(trainer_routes, engine_routes, attention_mask, spec)
                _, would = as_traces(engine_routes, replayed_routes, attention_mask, spec)
    elif not (trainer_routes is None and engine_routes is None and replayed_routes is None):
        raise InputError("routes are given of one side; expected trainer_routes and engine_routes, or neither")
    if deficits is not None:
        if would is None:
            raise InputError("deficits are given without replayed_routes; expected both, of one recording")
        of_rows = as_array(deficits, name="deficits")
        every = np.ones(of_rows.shape[:2], np.bool_) if of_rows.ndim == 3 and attention_mask is None else attention_mask
        deficits_NL = packed(of_rows, every, name="deficits", axes=1)
        if isinstance(replayed_routes, RoutingTrace) and deficits_NL.shape[1:] == (replayed_routes.spec.num_layers,):
            # layers that look experts up by tokens are compared only where both traces have them
            deficits_NL = deficits_NL[:, [replayed_routes.spec.layers.index(layer) for layer in would.spec.layers]]
    own_R = packed(trainer, kept, name="log-probs of the trainer")
    replayed_R = None if replayed is None else packed(replayed, kept, name="log-probs of the trainer under replay")
    diagnosis = diagnose(
        Evidence(
            engine=routed,
            engine_logprobs_R=packed(engine, kept, name="log-probs of the engine"),
            response_lengths_S=None if kept is None or kept.ndim < 2 else as_mask(kept, name="mask").sum(axis=1),
            native=TrainerPass(executed, own_R),
            replayed=TrainerPass(None, replayed_R, would, deficits_NL),
        )
    )
    # the diagnosis compares everything at once; errors need each sequence by itself
    figures = _Figures({}, {})
    measures = diagnosis.measures
    for prefix, found, logprobs in (("", measures.without, trainer), ("replayed/", measures.with_replay, replayed)):
        if found is not None and logprobs is not None:
            figures.values[f"{prefix}response_tokens"] = float(found.count)
            figures.add(prefix, OF_TOKENS, found, _by_sequence(logprobs, engine, kept))
            figures.values[f"{prefix}max_abs_log_ratio"] = found.max_abs_log
    if measures.gain is not None:
        figures.values["gain"] = measures.gain
    if measures.split is not None:
        figures.values.update({"k3/routing": measures.split.routing, "k3/rest": measures.split.rest})
    if measures.routes is not None and executed is not None and routed is not None:
        figures.values["routed_rows"] = float(measures.routes.rows)
        # row by row, which traces in another order cannot be compared
        alike = () if measures.reordered else range(len(routed))
        parts = [routing_mismatch(routed.select([s]), executed.select([s])) for s in alike]
        figures.add("", OF_ROUTES, measures.routes, parts)
        if measures.roots is not None and measures.roots.rows and would is not None:
            each = [root_mismatch(routed.select([s]), would.select([s]), executed.select([s])) for s in alike]
            figures.add("", OF_ROOTS, measures.roots, each)
    return Comparison(metrics=figures.values, errors=figures.errors, diagnosis=diagnosis)


def _check_padding(kept: NDArray[Any] | None, attention_mask: ArrayLike | None, *, has_routes: bool) -> None:
    """Refuse response tokens that are padding, and an attention mask that says nothing of anything."""
    if attention_mask is None:
        return
    tokens = as_mask(attention_mask, name="attention_mask", error=InputError)
    if kept is not None and kept.shape == tokens.shape:
        if padding := int((as_mask(kept, name="mask", error=InputError) & ~tokens).sum()):
            raise InputError(f"mask marks {padding} response tokens that are padding by attention_mask; leave them out")
    elif not has_routes:
        raise InputError(
            f"attention_mask is {list(tokens.shape)}, without routes that it is of; expected the shape of mask, or none"
        )


def _warn_of_halves(**logprobs: object) -> None:
    """Warn of log-probs in 16 bits, which differ by their own roundings."""
    halves = [name for name, each in logprobs.items() if str(getattr(each, "dtype", "")).endswith("float16")]
    if halves:
        warnings.warn(
            f"log-probs have 16 bits ({', '.join(halves)}), and figures their roundings; take log-softmax in float32",
            stacklevel=3,
        )


class _Figures(NamedTuple):
    """Figures by name, and the standard errors of those that are ratios."""

    values: dict[str, float]
    errors: dict[str, float]

    def add(self, prefix: str, ratios: Mapping[str, Ratio], found: Any, by_sequence: Sequence[Any]) -> None:
        """Take the ratios of what was found, and their errors from what was found of each sequence."""
        for name, ratio in ratios.items():
            above, below = ratio(found)
            parts = np.array([ratio(each) for each in by_sequence], np.float64).reshape(-1, 2)
            self.values[prefix + name] = float(above / below)
            self.errors[prefix + name] = standard_error(*parts.T)


def _by_sequence(trainer: NDArray[Any], engine: NDArray[Any], mask: NDArray[Any] | None) -> list[TokenMismatch]:
    """Compare each sequence by itself; tokens whose sequences are not known are one."""
    # one unit has no standard error, which is said as NaN
    if mask is None or mask.ndim < 2:
        return [token_mismatch(trainer, engine, mask=mask)]
    rows = zip(trainer, engine, mask, strict=True)
    return [token_mismatch(own, other, mask=kept) for own, other, kept in rows]
