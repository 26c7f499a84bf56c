"""Finding the routers of a model, by what they are and not by which family they belong to.

Class names say which modules may be routers. A small forward then shows which of them take part in it, and what they
select; and which blocks select by themselves.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import AttachError
from .hooks import SelectingRouter, overridden
from .output_check import tensors_of
from .probe import Probe
from .selection import TOP_K, Selection
from .selection_rules import BLOCK_RULE, REFUSED, RULES, TOP_K_RULE

ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")
NOT_A_ROUTER = re.compile(r"Density")
PERHAPS_A_ROUTER = re.compile(r"Gate$")
IN_PARENT = "route_tokens_to_experts"
"""The method of the block around a router that selects for it: in DBRX, and up to transformers 5.13 in DeepSeek's."""
ATTENTION = re.compile(r"attn|attention")
STACKS = ("encoder", "decoder")
NEEDS_A_RULE = (
    "Let a router of yours select by one torch.topk in its own forward; another kind needs a rule in "
    "foreroute/core/selection_rules.py (CONTRIBUTING.md, Adding a Hugging Face family)"
)
"""Ends the messages about routers that the rule of a top-k does not fit."""


def find_routers(model: nn.Module) -> list[SelectingRouter]:
    """Find every module that may be a router by its class name. Raises `AttachError` for one that `REFUSED` has."""
    for path, module in model.named_modules():
        reason = REFUSED.get(type(module).__name__)
        if reason:
            raise AttachError(f"{path} ({type(module).__name__}) cannot be replayed: {reason}")
    candidates = [
        _candidate(model, path, module)
        for path, module in model.named_modules()
        if ROUTER_CLASS.search(type(module).__name__) and not NOT_A_ROUTER.search(type(module).__name__)
    ]
    stacks = {next((part for part in router.path.split(".") if part in STACKS), "") for router in candidates}
    if stacks.issuperset(STACKS):
        raise AttachError(
            f"{type(model).__name__} routes in an encoder and in a decoder, which are given different tokens; one "
            "trace has one sequence of tokens. Encoder-decoders cannot be replayed; attach a decoder-only model"
        )
    return candidates


def _candidate(model: nn.Module, path: str, module: nn.Module) -> SelectingRouter:
    holder = _holder_of(model, path)
    selecting = (holder, IN_PARENT) if hasattr(holder, IN_PARENT) else (module, "forward")
    return SelectingRouter(path, module, selecting, RULES.get(type(module).__name__, TOP_K_RULE))


def _holder_of(model: nn.Module, path: str) -> nn.Module:
    """Give the module that another is an attribute of."""
    return model.get_submodule(path.rpartition(".")[0])


def _layer_path(router: SelectingRouter) -> str:
    """Name the numbered layer that a router is in."""
    parts = router.path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _layer_name(router: SelectingRouter) -> tuple[str, bool]:
    """Name its layer, and say whether it is in the attention block, which counts as a layer of its own."""
    return _layer_path(router), bool(ATTENTION.search(router.path))


def _may_be_another_gate(router: SelectingRouter) -> bool:
    """Say whether the class name alone does not tell that this is a router: forget gates and the like."""
    return bool(PERHAPS_A_ROUTER.search(type(router.module).__name__))


class FoundRouters(NamedTuple):
    """Routers that a small forward showed."""

    trunk: nn.Module  # the innermost module that was handed the tokens and contains the routers
    tokens: str  # its argument that held them
    routers: list[SelectingRouter]  # in the order in which they selected


def find_by(
    probe: Probe, candidates: list[SelectingRouter], in_training: Callable[[], bool] = lambda: False
) -> FoundRouters:
    """Run the model on a few tokens and watch the candidates, each of which then knows E, K and its final top-k.

    Candidates that do not run on text alone (vision experts beside text experts, vision towers) are left out; so are
    gates that select nothing. In a layer where none selects, a block that makes a top-k for each token is the router;
    where some select elsewhere, only if one ran here, or the block is of a class that is around one there.

    `in_training` has the model run as it trains, and says whether that is another mode; for one that runs in no other.

    Raises:
        AttachError: when the forward fails, no router runs, a router runs without selecting, for several layers or not
            row by row, a layer runs past its router, or no module around the routers is handed tokens.
    """
    model = probe.model
    watched = by_name = _watch(probe, candidates, in_training)
    routed = set(map(_layer_name, by_name.routers()))
    around = _modules_around(model, by_name.routers()).values()
    blocks = [each for each in by_name.elsewhere if _layer_name(each) not in routed and each.module not in around]
    if routed:
        silent, classes = set(map(_layer_name, by_name.seen)) - routed, set(map(type, around))
        holders = {type(_holder_of(model, each.path)) for each in by_name.routers()}
        blocks = [
            each
            for each in blocks
            if _layer_name(each) in silent
            or type(each.module) in classes
            or type(_holder_of(model, each.path)) in holders
        ]
    if blocks:
        watched = _watch(probe, [*by_name.routers(), *blocks], in_training)
    routers, in_blocks = watched.routers(), set(map(_layer_name, blocks))
    for router in routers:
        if watched.times[router] > 1:
            raise AttachError(_selected_often(model, router, watched))
    for router in candidates:
        is_router = router in by_name.choosing or not _may_be_another_gate(router)
        if by_name.seen.get(router) == [] and is_router and _layer_name(router) not in in_blocks:
            raise AttachError(
                f"router {router.path} ({type(router.module).__name__}) made no top-k selection; how it selects is not "
                f"known, so replay would have no effect. {NEEDS_A_RULE}"
            )
    _refuse_bypassed(candidates, routers, set(by_name.entered))
    if not routers and not candidates:
        raise AttachError(
            f"{type(model).__name__} has no router: no module's class name ends in Router, Gating or Gate, and none "
            "makes a top-k for each token. Attach a Mixture-of-Experts model"
        )
    if not routers:
        first = next(iter(by_name.seen), candidates[0])
        raise AttachError(
            f"none of the {len(candidates)} routers of {type(model).__name__} selected anything in a forward on text: "
            f"the first, {first.path} ({type(first.module).__name__}), "
            f"{'made no top-k' if by_name.seen else 'did not run'}. {NEEDS_A_RULE}"
        )
    num_rows = probe.shape[0] * probe.shape[1]
    for router in routers:
        final = watched.seen[router][-1]
        if len(final.ids_RK) != num_rows or final.ids_RK.ndim != 2:
            raise AttachError(
                f"router {router.path} selects on scores of shape {tuple(final.scores_RE.shape)}; expected a row for "
                f"each of {num_rows} tokens"
            )
        router.num_experts, router.top_k = final.scores_RE.shape[-1], final.ids_RK.shape[-1]
        router.final = len(watched.seen[router]) - 1
        router.by_softmax = _adds_up_to_1(final)
    return FoundRouters(*_trunk_of(watched.given_tokens, routers, probe.tokens), routers)


class _Watched:
    """Observations of candidates in a forward, and of blocks that select beside them."""

    def __init__(self) -> None:
        self.seen: dict[SelectingRouter, list[Selection]] = {}  # of the first call of each that ran
        self.times: Counter[SelectingRouter] = Counter()  # how often it selected
        self.given_tokens: list[tuple[nn.Module, str]] = []  # modules, and by which argument
        self.entered: Counter[str] = Counter()  # calls of the modules around candidates, by their paths
        self.choosing: set[SelectingRouter] = set()  # returned ids or a map, which no forget gate does
        self.elsewhere: list[SelectingRouter] = []  # blocks that made a top-k for each token themselves

    def routers(self) -> list[SelectingRouter]:
        """Give those that selected, in order."""
        return [router for router, selections in self.seen.items() if selections]


def _watch(probe: Probe, candidates: list[SelectingRouter], in_training: Callable[[], bool]) -> _Watched:
    """Run the probe, in the mode that the model trains in if it fails in the other. Raises as `find_by`."""
    try:
        return _watch_once(probe, candidates)
    except AttachError:
        if not in_training():
            raise
    return _watch_once(probe, candidates)


def _watch_once(probe: Probe, candidates: list[SelectingRouter]) -> _Watched:
    watched = _Watched()
    others = _OtherSelections(probe, watched)

    def watch(router: SelectingRouter, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with others.paused(), router.rule.mode(final=None) as mode:
            result = forward(*args, **kwargs)
        watched.times[router] += bool(mode.seen)
        if not watched.seen.get(router):
            watched.seen[router] = mode.seen
        if any(not part.is_floating_point() for part in tensors_of(result)):
            watched.choosing.add(router)
        return result

    def enter(path: str, names: inspect.Signature, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        watched.entered[path] += 1
        given = names.bind_partial(*args, **kwargs).arguments
        for each in names.parameters.values():
            given |= given.get(each.name, {}) if each.kind is each.VAR_KEYWORD else {}
        held = [name for name in (probe.tokens, "input_ids") if isinstance(given.get(name), Tensor)]
        if held:
            watched.given_tokens.append((module, held[0]))

    with ExitStack() as stack:
        for router in candidates:
            stack.enter_context(overridden(*router.selecting, partial(watch, router)))
        for path, module in _modules_around(probe.model, candidates).items():
            note = partial(enter, path, inspect.signature(module.forward))
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.enter_context(others)
        try:
            probe.hidden()
        except Exception as error:
            raise probe.does_not_run(error) from error
    return watched


class _OtherSelections(TorchFunctionMode):
    """Finds the methods that make a top-k for each token, where no candidate runs."""

    def __init__(self, probe: Probe, watched: _Watched) -> None:
        super().__init__()
        self._num_rows, self._watched = probe.shape[0] * probe.shape[1], watched
        self._paths = {module: path for path, module in probe.model.named_modules() if path}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in TOP_K and not self._is_paused and result.indices.shape[:-1].numel() == self._num_rows:
            self._keep(sys._getframe(1))
        return result

    def _keep(self, frame: FrameType | None) -> None:
        """Keep the innermost method of a module that is running, as the router of its layer."""
        while frame is not None:
            code = frame.f_code
            module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(module, nn.Module) and module in self._paths and (method := _method_of(module, code)):
                path, is_known = self._paths[module], any(each.module is module for each in self._watched.elsewhere)
                if not is_known and not ATTENTION.search(path):
                    block = SelectingRouter(path, module, (module, method), BLOCK_RULE)
                    self._watched.elsewhere.append(block)
                return
            frame = frame.f_back


def _method_of(module: nn.Module, code: CodeType) -> str:
    """Name the attribute of a module that runs this code, which may be a patch of another name; "" if there is none."""
    for own in (module, *(each for each in type(module).__mro__ if each is not nn.Module)):
        for name, each in vars(own).items():
            if isinstance(each, FunctionType | MethodType) and each.__code__ is code:
                return name
    # inside a decorator
    is_its_own = getattr(type(module), code.co_name, None) is not getattr(nn.Module, code.co_name, None)
    return code.co_name if is_its_own else ""


def _adds_up_to_1(selection: Selection) -> bool:
    """Say whether what experts were selected by is a softmax over all of them, without a bias."""
    scores = selection.scores if selection.live is None else selection.live
    return bool((scores >= 0).all() and ((scores.float().sum(-1) - 1).abs() < 1e-2).all())


def _trunk_of(
    given_tokens: Sequence[tuple[nn.Module, str]], routers: Sequence[SelectingRouter], tokens: str
) -> tuple[nn.Module, str]:
    for module, name in reversed(given_tokens):  # outermost first
        inside = set(module.modules())
        if all(router.selecting[0] in inside for router in routers):
            return module, name
    raise AttachError(
        f"no module that contains the routers ({routers[0].path}, ...) takes {tokens}; attach the part of the "
        "model that is given the tokens"
    )


def _selected_often(model: nn.Module, router: SelectingRouter, watched: _Watched) -> str:
    times, name = watched.times[router], type(router.module).__name__
    places = [path for path, module in model.named_modules(remove_duplicate=False) if module is router.module]
    if len(places) > 1:
        return (
            f"the router at {', '.join(places)} ({name}) selected {times} times in one forward, as if layers shared "
            "it; a trace has one row of routes for each layer. Give each layer a router of its own"
        )
    parts = router.path.split(".")
    around = [".".join(parts[:depth]) for depth in reversed(range(len(parts)))]
    looping = model.get_submodule(next((path for path in around if watched.entered[path] == 1), ""))
    return (
        f"{router.path} ({name}) cannot be replayed: it selects {times} times for each token, in the loop of "
        f"{type(looping).__name__}, and a trace has one row of routes for each token and layer; make one pass, or "
        "train without replay"
    )


def _refuse_bypassed(candidates: list[SelectingRouter], routers: Sequence[SelectingRouter], entered: set[str]) -> None:
    routed_layers = set(map(_layer_name, routers))
    router_classes = {type(router.module) for router in routers}
    for router in candidates:
        bypassed = _layer_path(router) in entered and _layer_name(router) not in routed_layers
        if bypassed and (not _may_be_another_gate(router) or type(router.module) in router_classes):
            raise AttachError(
                f"router {router.path} ({type(router.module).__name__}) did not run, but its layer did: a fused kernel "
                "or another branch bypassed it, and replay would have no effect there"
            )


def _modules_around(model: nn.Module, routers: list[SelectingRouter]) -> dict[str, nn.Module]:
    """Give the modules around at least one router, outermost first: which of them run is not known yet."""
    paths = {"": model}
    for router in routers:
        parts = router.path.split(".")
        for path in [*(".".join(parts[:depth]) for depth in range(1, len(parts))), _layer_path(router)]:
            paths[path] = model.get_submodule(path)
    return paths
