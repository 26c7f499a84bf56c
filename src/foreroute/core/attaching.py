"""Attaching to a model: find its routers, learn from a small forward what they select, and prove replay on it.

Replay is proven by three small forwards: of the model as it is, on its own routes, and on other routes. So is what is
used next: a forward along a key-value cache, and one along a cache whose rows were reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import recompute
from .caches import named_cache
from .errors import AttachError, ReplayError
from .find import NEEDS_A_RULE, find_by, find_routers
from .hooks import SelectingRouter, is_hooked, overridden
from .output_check import holds_ids, tensors_of
from .probe import Probe, first_tensor
from .routed import Routed
from .trunk import TrunkHooks
from .untouched import untouched

SQUASHING = frozenset(
    {torch.softmax, Tensor.softmax, functional.softmax, torch.sigmoid, Tensor.sigmoid, functional.sigmoid}
)
NO_CACHES = (Tensor, tuple, list, dict, str, int, float, type(None))
"""Types that a model returns beside its cache: losses, states of layers, names."""


Hooks = TypeVar("Hooks", bound=TrunkHooks)
Finished = TypeVar("Finished")


def attach(model: nn.Module, example: Mapping[str, Any] | None = None) -> Routed:
    """Make the routing of a model recordable and replayable as tensors, and prove it by small forwards.

    The model is left as it was.

    Args:
        model: with routers that are modules of their own, such as those of transformers, or with blocks that make their
            top-k themselves; on any device, in any dtype.
        example: the arguments of a small call, for a model that does not run on `input_ids` alone. Its tokens, integers
            [B, T], are `input_ids`, `tokens` or else the first such tensor.

    Raises:
        AttachError: when it has no routers, is known not to be replayable, or does not pass the self-check. The message
            says which router and why.
        ReplayError: when this release of torch keeps what activation checkpoints run again in an unknown place.
    """
    return attach_by(model, TrunkHooks, Routed, example)


def attach_by(
    model: nn.Module,
    make_hooks: Callable[[nn.Module, nn.Module, list[SelectingRouter]], Hooks],
    finish: Callable[[Hooks], Finished],
    example: Mapping[str, Any] | None = None,
) -> Finished:
    """Find the routers of a model, prove replay on it, and hand its hooks to the framework that it is of. As `attach`.

    `make_hooks` is given the model, its trunk, and its routers in the order in which they run; `finish` makes what
    `attach` returns. Further checks may run the model there, which is then left as it was.
    """
    require_attachable(model)
    candidates = find_routers(model)
    with untouched(model) as in_training:
        probe = Probe.of(model, example)
        found = find_by(probe, candidates, in_training)
        hooks = make_hooks(model, found.trunk, found.routers)
        hooks.tokens = found.tokens
        self_check(hooks, probe)
        return finish(hooks)


def require_attachable(model: object) -> None:
    """Raise `AttachError` for what is no model, or has a session open, and `ReplayError` as `recompute.prove`."""
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach was given an object of the class {type(model).__name__}; expected a model, a torch.nn.Module"
        )
    if any(is_hooked(module) for module in model.modules()):
        raise AttachError("a session is open on this model; attach it before or after, or use the one that it has")
    recompute.prove()


def self_check(hooks: TrunkHooks, probe: Probe) -> None:
    """Run the model three times: as it is, on its native routes, and on other routes.

    Replay must be invisible on native routes and obeyed on others, or `AttachError` is raised. The check looks at what
    the routers return and at what the experts are given, not at what we put in. It sees a selection that is not obeyed,
    a gate weight taken from scores that were zeroed outside the native picks, and experts that are fed by a router
    which was not found. Which modules are handed ids is kept for sessions, which look at it too.
    """
    routed = Routed(hooks)
    try:
        native_BTLK = _check_native_routes(routed, probe)
        if any(router.top_k < router.num_experts for router in hooks.routers):
            _check_other_routes(routed, probe, _other_routes(hooks, native_BTLK))
    except ReplayError as error:
        raise AttachError(f"self-check failed: {error}") from error


def _check_native_routes(routed: Routed, probe: Probe) -> Tensor:
    output, native_BTLK, use_cache = _record_with_cache(routed, probe)
    if bool(routed.rows(native_BTLK).faults.any()):
        raise AttachError(
            f"the routers of {type(routed.hooks.trunk).__name__} do not make K different picks of E experts"
        )
    run = partial(probe.run, use_cache=use_cache)
    with routed.replay(native_BTLK), routed.record() as recording:
        replayed = first_tensor(run())
    same_routes = torch.equal(recording.ids()[0], native_BTLK)
    # an output that differs from itself (noise, atomics on a GPU) cannot be compared bit by bit; routes still can
    if not same_routes or not (torch.equal(output, replayed) or not torch.equal(output, first_tensor(run()))):
        raise AttachError(
            f"self-check failed: replaying the model's own routes changed its output by up to "
            f"{(output - replayed).abs().max().item():.3g}. {NEEDS_A_RULE}"
        )
    return native_BTLK


def _record_with_cache(routed: Routed, probe: Probe) -> tuple[Tensor, Tensor, bool]:
    """Record a forward and one along its cache; give the first output, its routes, and whether there is a cache."""
    try:
        return *_record_rollout(routed, probe, use_cache=True), True
    except (AttachError, ReplayError):
        raise
    except Exception as error:
        try:
            _roll_out(probe, use_cache=True)
        except Exception:  # it does not run along a cache at all, so that no rollout does
            return *_record_rollout(routed, probe, use_cache=False), False
        raise AttachError(
            f"self-check failed: {type(routed.model).__name__} runs along a key-value cache, and does not while it is "
            f"recorded ({type(error).__name__}: {error})"
        ) from error


def _record_rollout(routed: Routed, probe: Probe, *, use_cache: bool) -> tuple[Tensor, Tensor]:
    model = routed.model
    with routed.record() as recording:
        output, given = _roll_out(probe, use_cache=use_cache)
        recorded = recording.ids()
        if len(recorded) > 1:
            raise AttachError(
                f"self-check failed: a forward of {type(model).__name__} that continues the key-value cache of the one "
                "before was recorded as a sequence of its own; rollouts would not be recorded as sequences"
            )
        if given and not _refuses_beams(model, given):
            raise AttachError(
                f"self-check failed: a forward of {type(model).__name__} on a key-value cache whose rows were "
                "reordered, as those of beams are, was recorded; routes of beams would not be those of their tokens"
            )
    return first_tensor(output), recorded[0][:, : probe.shape[1]]


def _roll_out(probe: Probe, *, use_cache: bool) -> tuple[Any, dict[str, Any]]:
    """Run the probe, and one more token along its cache; give what the first returned, and what the other was given."""
    model, output = probe.model, probe.run(use_cache=use_cache)
    kept = dict(output) if isinstance(output, dict) and use_cache else {}
    caches = named_cache(kept)
    unknown = [name for name, value in kept.items() if not isinstance(value, NO_CACHES)]
    if not caches and unknown:
        raise AttachError(
            f"self-check failed: {type(model).__name__} returns {unknown[0]}, a {type(kept[unknown[0]]).__name__}, "
            "where a key-value cache is expected, which says by get_seq_length() how many positions it holds; "
            "rollouts along it would not be recorded as one sequence"
        )
    if not caches:
        return output, {}
    given = {probe.tokens: probe.given[probe.tokens][:, :1], "use_cache": True, **caches}
    model(**given)
    return output, given


def _refuses_beams(model: nn.Module, given: dict[str, Any]) -> bool:
    """Try whether a forward is refused when the rows of its cache were reordered since the one before."""
    try:
        tokens = next(value for value in given.values() if isinstance(value, Tensor))
        for cache in named_cache(given).values():
            cache.reorder_cache(torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device))
    except Exception:  # a cache that cannot be reordered has no beams
        return True
    try:
        model(**given)
    except ReplayError:
        return True
    return False


def _other_routes(hooks: TrunkHooks, native_BTLK: Tensor) -> Tensor:
    """Move each id to the next real expert; those of a lookup stay. Any K different experts must be a legal choice."""
    other = native_BTLK.clone()
    for layer, router in enumerate(hooks.routers):
        if not router.rule.is_lookup and router.top_k < router.num_experts:
            num_real = router.num_experts - router.rule.num_skip_classes
            # not in the narrow type of ids, which may lack E itself
            other[:, :, layer, : router.top_k] = (native_BTLK[:, :, layer, : router.top_k].long() + 1) % num_real
    return other


def _check_other_routes(routed: Routed, probe: Probe, other_BTLK: Tensor) -> None:
    hooks = routed.hooks
    forced = {
        router: other_BTLK[:, :, layer, : router.top_k].flatten(0, 1).long()
        for layer, router in enumerate(hooks.routers)
    }
    returned: dict[SelectingRouter, Any] = {}
    given: list[_Given] = []

    def keep_output(router: SelectingRouter, selecting: Any, *args: Any, **kwargs: Any) -> Any:
        returned[router] = None
        returned[router] = selecting(*args, **kwargs)
        if router.rule.is_block and not holds_ids(returned[router], router, forced[router], may_drop=False).all():
            router.returns_ids = False
            num_given = len(given)
            _check_block(router, forced[router], args, kwargs)
            del given[num_given:]
        return returned[router]

    with ExitStack() as stack:
        stack.enter_context(routed.replay(other_BTLK))
        for router in hooks.routers:
            stack.enter_context(overridden(*router.selecting, partial(keep_output, router)))
        stack.enter_context(_given_ids(routed.model, returned, given))
        probe.run()
    for router, forced_NK in forced.items():
        if not router.returns_ids:
            continue
        if not holds_ids(returned[router], router, forced_NK, may_drop=False).all():
            raise AttachError(
                f"self-check failed: {_named(router)} was told to pick other experts and its selection was not obeyed. "
                f"{NEEDS_A_RULE}"
            )
        if not _all_weighted(returned[router], forced_NK, router.num_experts):
            raise AttachError(
                f"self-check failed: {_named(router)} gave weight zero, or none that is finite, to an expert that it "
                f"was told to pick, as if its scores had been masked first. {NEEDS_A_RULE}"
            )
    for each in given:
        is_experts = type(each.module).__name__.endswith("Experts")
        if is_experts and each.ids.ndim == 2 and not any(map(each.has, forced.values())):
            raise AttachError(
                f"self-check failed: {each.path} was handed expert ids that are not those of any router found; "
                "something between routers and experts changes them, or a router has an unknown class name"
            )
        # the first with weights that was handed what its router picked
        if each.router is not None and each.has(forced[each.router]) and any(True for _ in each.module.parameters()):
            hooks.experts.setdefault(each.router, (each.path, each.module, each.argument))


class _LevelGates(TorchFunctionMode):
    """Brings the logits of a gate near one another, in their order: of peaked ones most experts have no weight."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self._sizes = sizes  # of all experts of all rows, and of their picks

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in SQUASHING:
            args = (kwargs.pop("input"), *args) if "input" in kwargs else args
            if args[0].numel() in self._sizes:
                args = (args[0] / (1 + args[0].abs().amax(-1, keepdim=True)), *args[1:])
        return func(*args, **kwargs)


def _check_block(router: SelectingRouter, forced_NK: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Move one pick of each row of a block, which runs its experts too: what it gives for every row must be another.

    Both runs have the same random numbers, and gates that give every expert weight.

    Raises:
        AttachError: when one is not. It picks otherwise, or gives that expert no weight.
    """
    rows = torch.arange(len(forced_NK), device=forced_NK.device)
    picked_NE = torch.zeros(len(forced_NK), router.num_experts, device=forced_NK.device).scatter(1, forced_NK, 1.0)
    moved_NK = forced_NK.clone()
    moved_NK[rows, rows % router.top_k] = picked_NE.argmin(1)
    assert router.now is not None  # it runs
    pair: list[Tensor] = []
    for ids_NK in (forced_NK, moved_NK):
        torch.manual_seed(0)
        with _LevelGates({picked_NE.numel(), forced_NK.numel()}):
            output = router.select(replace(router.now, ids_RK=ids_NK), router.original, *args, **kwargs)
        parts = tensors_of(list(output.values()) if isinstance(output, dict) else output)
        of_rows = [part for part in parts if part.ndim > 1 and part.numel() and not part.numel() % len(rows)]
        if not of_rows:
            raise AttachError(
                f"self-check failed: {_named(router)} makes a top-k itself in {router.selecting[1]}(), which gives "
                f"nothing for each of {len(rows)} tokens that could prove it. {NEEDS_A_RULE}"
            )
        pair.append(of_rows[0].detach().reshape(len(rows), -1))
    if router.top_k < router.num_experts and not (pair[0] != pair[1]).any(-1).all():
        raise AttachError(
            f"self-check failed: {_named(router)} makes a top-k itself, and another expert in it did not change what "
            f"it gives for each token: it selects otherwise, or gives such an expert no weight. {NEEDS_A_RULE}"
        )


def _named(router: SelectingRouter) -> str:
    return f"router {router.path} ({type(router.module).__name__})"


def _all_weighted(output: Any, forced_NK: Tensor, num_experts: int) -> bool:
    """Say whether no gate weight, where the router returns one per pick, is zero or infinite."""
    if forced_NK.shape[-1] == num_experts:
        return True
    weights = [part for part in tensors_of(output) if part.is_floating_point() and part.numel() == forced_NK.numel()]
    return all(bool(((part != 0) & part.isfinite()).all()) for part in weights)


class _Given(NamedTuple):
    """Integers that a module was handed."""

    path: str
    module: nn.Module
    argument: int | str  # which one it was
    ids: Tensor
    router: SelectingRouter | None  # the last that had selected; None while one, or a block around it, runs

    def has(self, ids_NK: Tensor) -> bool:
        """Say whether they are these, on whatever axes."""
        return self.ids.numel() == ids_NK.numel() and torch.equal(self.ids.reshape(ids_NK.shape), ids_NK.cpu())


@contextmanager
def _given_ids(model: nn.Module, returned: dict[SelectingRouter, Any], given: list[_Given]) -> Iterator[None]:
    """Collect the integers that modules are handed while the context is open."""

    def collect(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        router = next(reversed(returned), None)
        router = None if router is None or returned[router] is None else router
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for argument, value in arguments:
            if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64):
                given.append(_Given(path, module, argument, value.detach().cpu().long(), router))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(collect, path), with_kwargs=True).remove)
        yield
