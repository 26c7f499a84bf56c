"""What a router hands on, behind whoever may change it on the way to its layer.

A forward hook on a router may return another selection, and so may a function that took the place of its method since
the model was attached. Where neither is there, nothing is done. Where one is, the very tensors that the router returned
are right, if nobody wrote to them; others are compared by value on their device, which is not waited for.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import ReplayError
from .marks import Marks
from .passes import LateChecks
from .recompute import run_unnumbered
from .selection import LayerPass

if TYPE_CHECKING:
    from .hooks import RouterHook


class HandedOn:
    """What the routers of a model hand on in a session, or in several that overlap.

    Attributes:
        checks: what the device is asked.
    """

    def __init__(self) -> None:
        self.checks = LateChecks()
        self._looks: dict[RouterHook, Any] = {}
        self._returned: dict[RouterHook, tuple[LayerPass, Marks]] = {}

    def remove(self) -> None:
        """Take off what looks at modules."""
        for look in self._looks.values():
            look.remove()

    def follow(self, router: RouterHook, now: LayerPass, result: Any) -> None:
        """Compare what a router returns now, and what it returns when the hooks on it have run.

        Args:
            router: that has run.
            now: what it did.
            result: what it returned.

        Raises:
            ReplayError: when it hands on experts that it did not select; on a GPU, as `LateChecks.add`.
        """
        module, name = router.selecting
        if router.is_replaced:
            self._compare(router, now, result, f"a function that took the place of its {name}() after attach()")
        if name != "forward":  # of a method of the block around a router no hook sees what is returned
            return
        if router not in self._looks:
            self._looks[router] = module.register_forward_hook(partial(self._look, router))
        in_order: Any = module._forward_hooks  # says that it is a dict, and is an OrderedDict
        in_order.move_to_end(self._looks[router].id)
        self._returned[router] = now, Marks(tensors_of(result))

    def _look(self, router: RouterHook, module: nn.Module, _: Any, output: Any) -> None:
        """The last hook on a router."""
        now, returned = self._returned.pop(router, (None, None))
        if now is None or returned is None:  # it runs again
            return
        parts = tensors_of(output)
        if returned.fit(parts) and not any(part.is_inference() for part in parts):
            return
        hooks = [hook for number, hook in module._forward_hooks.items() if number != self._looks[router].id]
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
        self._compare(router, now, output, f"a forward hook ({names or 'one on all modules'})")

    def _compare(self, router: RouterHook, now: LayerPass, output: Any, who: str) -> None:
        run_unnumbered(self._compare_there, router, now, output, who)

    def _compare_there(self, router: RouterHook, now: LayerPass, output: Any, who: str) -> None:
        own_RK, forced_RK = now.own_RK, now.ids_RK
        ids_RK = own_RK if forced_RK is None else torch.where(forced_RK < 0, own_RK, forced_RK)
        wrong = ~hands_on(output, router, ids_RK.long(), may_drop=True)
        self.checks.add(wrong, partial(_tell, wrong, router.path, who))


def hands_on(output: Any, router: RouterHook, ids_RK: Tensor, *, may_drop: bool) -> Tensor:
    """Bool [], whether what a router returned says these ids: as they are, or as rows [E] that are not 0 at them.

    Args:
        output: what it returned.
        router: which.
        ids_RK: int64 [R, K].
        may_drop: whether rows may lack some of the experts, as they do over a capacity, but not all.
    """
    if router.read_back is not None:
        read_RK = router.read_back(output).to(ids_RK.device)
        return (read_RK == ids_RK.sort(-1).values).all()
    selected_RE = torch.zeros(len(ids_RK), router.num_experts, dtype=torch.bool, device=ids_RK.device)
    selected_RE.scatter_(-1, ids_RK, True)
    found = torch.zeros((), dtype=torch.bool, device=ids_RK.device)
    for part in tensors_of(output):
        if not part.is_floating_point() and part.numel() == ids_RK.numel():
            found |= (part.reshape(ids_RK.shape).to(ids_RK.device) == ids_RK).all()
        elif part.numel() == selected_RE.numel():
            is_on_RE = part.reshape(selected_RE.shape).to(ids_RK.device) != 0
            wrong_RE = is_on_RE & ~selected_RE if may_drop else is_on_RE != selected_RE
            found |= is_on_RE.any() & ~wrong_RE.any()
    return found


def _tell(wrong: Tensor, path: str, who: str) -> None:
    if wrong.item():
        raise ReplayError(
            f"router {path} selected its experts, and {who} handed on other ones: what is recorded or replayed is what "
            "a router selects, and not what ran. Take it off while a session is open, or have it only look on"
        )


def tensors_of(output: Any) -> list[Tensor]:
    """Those that a router returned."""
    parts = output if isinstance(output, tuple | list) else [output]
    return [part for part in parts if isinstance(part, Tensor)]
