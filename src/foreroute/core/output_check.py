"""Check that a router's output still holds the experts it selected after forward hooks and replaced methods have run.

Where there is no hook on a router, and nobody replaced its method since the model was attached, nothing is done. Where
there is one, the very tensors that the router returned are right if nobody wrote to them. Others are compared by value
on their device, which is not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .deferred_checks import DeferredChecks, raise_where
from .recompute import run_unnumbered
from .selection import LayerPass
from .tensor_ids import TensorIds

if TYPE_CHECKING:
    from .hooks import RouterHook


class OutputCheck:
    """Looks at what the routers of a model return in a session, or in several that overlap."""

    def __init__(self) -> None:
        self._handles: dict[RouterHook, Any] = {}
        self._returned: dict[RouterHook, tuple[LayerPass, TensorIds, DeferredChecks]] = {}

    def remove(self) -> None:
        """Take its hooks off modules."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._returned.clear()

    def follow(self, router: RouterHook, now: LayerPass, result: Any, checks: DeferredChecks) -> None:
        """Compare what a router has returned, and what it returns when the hooks on it have run.

        Raises `ReplayError` when that holds other experts than it selected; on a GPU, as `DeferredChecks.add`.
        """
        module, name = router.selecting
        if router.is_replaced:
            who = f"a function that took the place of its {name}() after attach()"
            run_unnumbered(_ask_of_output, router, now, result, who, checks)
        if name != "forward":  # of a method of the block around a router no hook sees what is returned
            return
        if router not in self._handles:
            self._handles[router] = module.register_forward_hook(partial(self._check_hooks, router))
        # hooks that others have registered since run behind ours, which must be the last
        in_order: Any = module._forward_hooks  # says that it is a dict, and is an OrderedDict
        in_order.move_to_end(self._handles[router].id)
        self._returned[router] = now, TensorIds(tensors_of(result)), checks

    def _check_hooks(self, router: RouterHook, module: nn.Module, _: Any, output: Any) -> None:
        if router not in self._returned:  # it is recomputed
            return
        now, returned, checks = self._returned.pop(router)
        parts = tensors_of(output)
        if returned.fit(parts) and not any(part.is_inference() for part in parts):
            return
        hooks = [hook for number, hook in module._forward_hooks.items() if number != self._handles[router].id]
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
        who = f"a forward hook ({names or 'one on all modules'})"
        run_unnumbered(_ask_of_output, router, now, output, who, checks)


class ExpertsCheck:
    """Looks once for each router and session at the ids that experts are handed: a block may swap them behind it."""

    def __init__(self, experts: Mapping[RouterHook, tuple[str, nn.Module, int | str]]) -> None:
        self._experts = experts
        self.waiting: set[RouterHook] = set()  # whose experts have not been looked at
        self._handles: dict[RouterHook, Any] = {}

    def begin(self) -> None:
        """Look at all of them once more."""
        self.waiting = set(self._experts)

    def expect_uncalled(self) -> None:
        """Take its hooks off modules that were not called, as when a forward failed, and wait for these once more."""
        self.waiting.update(self._handles)
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def follow(self, router: RouterHook, now: LayerPass, result: Any, checks: DeferredChecks) -> None:
        """Compare what a router has picked, outside of graphs, with what its experts are handed next."""
        self.waiting.discard(router)
        module = self._experts[router][1]
        if module._compiled_call_impl is None and router not in self._handles:
            compare = partial(self._compare, router, now, TensorIds(tensors_of(result)), checks)
            self._handles[router] = module.register_forward_pre_hook(compare, with_kwargs=True)

    def _compare(
        self,
        router: RouterHook,
        now: LayerPass,
        returned: TensorIds,
        checks: DeferredChecks,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if torch.compiler.is_compiling():
            return
        self._handles.pop(router).remove()
        path, _, name = self._experts[router]
        handed = kwargs.get(name) if isinstance(name, str) else args[name] if name < len(args) else None
        # the very tensor that the router returned is right, and costs the device nothing
        if not isinstance(handed, Tensor) or returned.has(handed):
            return
        # rows may have been dropped or spread on the way; and a forward may have ended before it called them
        if router.now is now and handed.numel() == now.into_RK.numel():
            run_unnumbered(_ask_of_experts, router, now, handed.detach(), f"{path} ({type(module).__name__})", checks)


def _ran(now: LayerPass) -> Tensor:
    """Give the ids [R, K] that a router has picked, or was given."""
    return now.into_RK if now.ids_RK is None else torch.where(now.ids_RK < 0, now.into_RK, now.ids_RK)


def ids_or_obeyed(output: Any, router: RouterHook, ids_RK: Tensor) -> Tensor:
    """Give the ids [R, K] that a router returned, untouched; else bool [R] as `holds_ids`, for rows with a route."""
    listed = [] if router.rule.num_skip_classes else _listed_ids(output, router, ids_RK)
    if len(listed) == 1 and listed[0].shape == ids_RK.shape and listed[0].device == ids_RK.device:
        return listed[0]  # compared at the end of the pass, for all layers at once
    return run_unnumbered(partial(holds_ids, output, router, may_drop=True), ids_RK.long().clamp_min(0))


def holds_ids(output: Any, router: RouterHook, ids_RK: Tensor, *, may_drop: bool) -> Tensor:
    """Bool [R], whether what a router returned holds these ids: as they are, or as a row [E] that is not 0 at them.

    With `may_drop` a row may lack some of its experts, as over a capacity, but not all rows all. `ids_RK` is int64.
    """
    device, num_rows = ids_RK.device, len(ids_RK)
    if router.rule.read_back is not None:
        return (router.rule.read_back(output).to(device) == ids_RK.sort(-1).values).all(-1)
    found_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
    if listed := _listed_ids(output, router, ids_RK):
        is_skipped_RK = ids_RK >= router.num_experts - router.rule.num_skip_classes  # which a router returns as any id
        for part in listed:
            found_R |= ((part.reshape(ids_RK.shape).to(device) == ids_RK) | is_skipped_RK).all(-1)
        return found_R
    selected_RE = torch.zeros(num_rows, router.num_experts, dtype=torch.bool, device=device).scatter_(-1, ids_RK, True)
    dense = [part for part in tensors_of(output) if part.numel() == selected_RE.numel()]
    # where a router returns a map, zeros among its gate weights tell nothing
    for part in [part for part in dense if part.dtype == torch.bool] or dense:
        is_on_RE = part.reshape(selected_RE.shape).to(device) != 0
        wrong_RE = is_on_RE & ~selected_RE if may_drop else is_on_RE != selected_RE
        found_R |= is_on_RE.any() & ~wrong_RE.any(-1)
    return found_R


def _listed_ids(output: Any, router: RouterHook, ids_RK: Tensor) -> list[Tensor]:
    """Find the integers of a router's output that may be its K ids of each row."""
    if router.rule.read_back is not None:
        return []
    return [
        part
        for part in tensors_of(output)
        if part.numel() == ids_RK.numel() and not part.is_floating_point() and part.dtype != torch.bool
    ]


def _ask_of_output(router: RouterHook, now: LayerPass, output: Any, who: str, checks: DeferredChecks) -> None:
    wrong = ~holds_ids(output, router, _ran(now).long(), may_drop=True).all()
    said = (
        f"router {router.path} selected its experts, and {who} handed on other ones: what is recorded or replayed is "
        "what a router selects, and not what ran. Take it off while a session is open, or have it only look on"
    )
    checks.add(wrong, partial(raise_where, wrong, said))


def _ask_of_experts(router: RouterHook, now: LayerPass, handed: Tensor, experts: str, checks: DeferredChecks) -> None:
    ran_RK = _ran(now)
    handed = handed.reshape(ran_RK.shape).to(ran_RK.device)
    differs_RK = handed != ran_RK
    # rows that nothing is trained on may go to no expert, or to any
    differs_RK &= (handed >= 0) & (handed < router.num_experts)
    if now.ids_RK is not None:
        differs_RK &= now.ids_RK >= 0
    if now.rows is not None and now.rows.real_R is not None:
        differs_RK &= now.rows.real_R.to(ran_RK.device)[:, None]
    if router.rule.num_skip_classes:  # which a router returns as any id
        differs_RK &= ran_RK < router.num_experts - router.rule.num_skip_classes
    wrong = differs_RK.any()
    said = (
        f"router {router.path} selected its experts, and {experts} was handed other ids: something between them swaps "
        "them, such as a replay of the framework's own. What is recorded or replayed would not be what ran; switch "
        "that off while a session is open"
    )
    checks.add(wrong, partial(raise_where, wrong, said))


def tensors_of(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple | list) else [output]
    return [part for part in parts if isinstance(part, Tensor)]
