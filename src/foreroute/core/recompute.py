"""Activation checkpoints, each bound to the pass that it will repeat.

A checkpoint runs its function in the forward and once more in backward, when its session may be closed and other
micro-batches may have run since. While a router runs in the forward, the checkpoints that will run it again have not
returned: they are on the call stack. Each is handed a function that opens the pass of the first run before it repeats
it. So a recomputation finds its own pass whoever called the checkpoint, around a layer or around the whole model.

Two kinds of checkpoint are known by how they are written, in torch and in what was modelled on it. A reentrant one is
an autograd function, `forward(ctx, run_function, ...)`, which runs `ctx.run_function` in backward. The other one has a
frame object, whose `recompute_fn` it calls: `torch.utils.checkpoint.checkpoint` holds it in its generator, and the hook
on saved tensors that is in force holds it too. These names are private to torch; `prove` tries them on the release that
is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.utils import _python_dispatch, checkpoint

from .errors import ReplayError

REENTRANT = ("ctx", "run_function")
"""The first parameters of the forward of a reentrant checkpoint."""
NON_REENTRANT: CodeType = getattr(
    checkpoint, "_checkpoint_impl", getattr(checkpoint.checkpoint, "__wrapped__", checkpoint.checkpoint)
).__code__
"""The function that holds the generator of the other kind; torch from 2.14 on has it beside `checkpoint`."""
_MODES = "_CachingTorchDispatchMode", "_CachedTorchDispatchMode"
SELECTIVE = tuple(getattr(checkpoint, name) for name in _MODES if hasattr(checkpoint, name))
"""Under which a selective checkpoint runs its function, and runs it again."""

Returned = TypeVar("Returned")
Reopen = Callable[[Any, list[Any]], AbstractContextManager[Any]]
"""Opens a pass for its recomputation, given what ran in the part that is repeated."""


def bind(current: object, ran: Iterable[Any], reopen: Reopen, *, until: CodeType | None = None) -> None:
    """Have every checkpoint around the caller run its function again inside of `reopen(current, ran)`.

    Called as often as something runs in the checkpoint, by any number of owners; `reopen` distinguishes them.
    Checkpoints around the caller whose code is `until` are left alone. Raises `ReplayError` for a checkpoint around two
    passes of one owner, or one that keeps its function elsewhere than torch's.
    """
    for holder, name in _checkpoints_around(sys._getframe(1), until):
        _bind_one(holder, name, current, ran, reopen)


class _Recompute:
    """Recomputation of a checkpoint in backward: its function, in the pass of one owner's first run."""

    def __init__(self, function: Callable[..., Any], current: object, reopen: Reopen) -> None:
        self.function, self.current, self.reopen = function, current, reopen
        self.ran: dict[Any, None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.reopen(self.current, list(self.ran)):
            return self.function(*args, **kwargs)


def run_unnumbered(function: Callable[..., Returned], *args: Any) -> Returned:
    """Call a function outside of the selective checkpoints that are in force.

    Such a checkpoint numbers every call of every operator in the forward, and answers the n-th call in its
    recomputation by what it kept of the n-th. So what the two run differently must not be counted.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return function(*args)
    # popped from the top, so that the order is turned round; what is no selective checkpoint stays in force
    modes = [_python_dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, SELECTIVE)]
    try:
        for mode in others:
            _python_dispatch._push_mode(mode)
        return function(*args)
    finally:
        for _ in others:
            _python_dispatch._pop_mode()
        for mode in modes:
            _python_dispatch._push_mode(mode)


def _bind_one(holder: Any, name: str, current: object, ran: Iterable[Any], reopen: Reopen) -> None:
    # every owner, such as two models in one checkpoint, wraps what it finds: look for its own below the others
    outermost = bound = getattr(holder, name)
    while isinstance(bound, _Recompute) and bound.reopen != reopen:
        bound = bound.function
    if not isinstance(bound, _Recompute):
        bound = _Recompute(outermost, current, reopen)
        setattr(holder, name, bound)
    if bound.current is not current:
        raise ReplayError(
            "one activation checkpoint holds two forwards of a model, which its recomputation could not tell apart; "
            "checkpoint each of them on its own"
        )
    bound.ran.update(dict.fromkeys(ran))


def _checkpoints_around(frame: FrameType | None, until: CodeType | None) -> list[tuple[Any, str]]:
    """Find what keeps the function of each checkpoint whose function is running now, and under which name."""
    found: list[tuple[Any, str]] = []
    # the walk ends where a recomputation began: checkpoints around that one were bound in the forward
    while frame is not None and frame.f_code is not until and frame.f_code is not _Recompute.__call__.__code__:
        code = frame.f_code
        if code.co_varnames[:2] == REENTRANT and code.co_argcount >= 2:
            ctx = frame.f_locals["ctx"]
            if not hasattr(ctx, "run_function"):
                raise ReplayError(
                    f"{code.co_qualname} ({code.co_filename}) is an activation checkpoint that keeps what it runs "
                    "again in a place that is not known, so that a recomputation would not find its routes; use one "
                    "of torch.utils.checkpoint"
                )
            found.append((ctx, "run_function"))
        elif code is NON_REENTRANT and frame.f_locals.get("gen") is not None:
            # the frame of `checkpoint` holds a generator, paused in the forward; its own frame holds the object whose
            # `recompute_fn` backward calls
            found.append((frame.f_locals["gen"].gi_frame.f_locals["new_frame"], "recompute_fn"))
        frame = frame.f_back
    # a checkpoint that began elsewhere is seen by the hook that saves tensors
    saving = _saving_now(), "recompute_fn"
    if saving[0] is not None and saving not in found:
        found.append(saving)
    return found


def _saving_now() -> Any:
    """Find the frame object of the innermost checkpoint that saves tensors now; None where none does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else hooks[0]
    if "_checkpoint_hook" not in getattr(pack, "__qualname__", ""):
        return None
    held = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    return held["frame"].cell_contents if "frame" in held else None


@cache
def prove() -> None:
    """Try both kinds of checkpoint in one another, and a selective one, once.

    Raises `ReplayError` when this release of torch keeps their functions elsewhere, or numbers operators otherwise.
    """
    forms, nested, is_unnumbered = (True, False), [], False
    with torch.enable_grad(), suppress(AttributeError, KeyError):  # names that are private to torch
        nested = [_reopened([outer, inner]) for outer in forms for inner in forms]
        is_unnumbered = _may_leave_out_a_top_k()
    if nested != [2] * 4:
        raise ReplayError(
            f"torch {torch.__version__} keeps what its checkpoints run again in a place that is not known, so that a "
            f"recomputation would not find its routes; found of reentrant and other ones in one another {nested}. Use "
            "a release of torch from 2.10 on that foreroute was tested with"
        )
    if not is_unnumbered:
        raise ReplayError(
            f"selective checkpoints of torch {torch.__version__} number operators in a way that is not known, so that "
            "a recomputation would be given the choices of another router. Use a release of torch from 2.10 on that "
            "foreroute was tested with"
        )


def _reopened(reentrant: list[bool]) -> int:
    """Count how often backward opens a pass again, of checkpoints in one another, outermost first."""
    passes: list[object] = []

    @contextmanager
    def reopen(current: object, ran: list[Any]) -> Iterator[None]:
        passes.append(current)
        yield

    def function(x: torch.Tensor) -> torch.Tensor:
        bind(reentrant, ["ran"], reopen)
        return x.sin()

    for each in reversed(reentrant):
        function = partial(checkpoint.checkpoint, function, use_reentrant=each)
    function(torch.ones(1, requires_grad=True)).backward()
    return passes.count(reentrant)


def _may_leave_out_a_top_k() -> bool:
    """Try whether a recomputation without a selection that the forward made is given what is its own."""
    context_fn = partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.topk.default])
    runs: list[None] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if not runs:
            run_unnumbered((-x.detach()).topk, 1)
        runs.append(None)
        return x.gather(0, x.topk(1).indices)

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    try:
        checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=context_fn).backward()
    except RuntimeError:
        return False
    return x.grad is not None and x.grad.tolist() == [0.0, 0.0, 1.0]
