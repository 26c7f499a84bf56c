"""Finding the routers of a model, by what they are and not by which family they belong to.

Class names say which modules may be routers. A small forward then shows which of them take part in it, and what they
select; and which blocks select by themselves, which are refused.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import AttachError
from .hooks import SelectingRouter, overridden
from .output_check import tensors_of
from .probe import Probe
from .selection import TOP_K, Selection
from .selection_rules import REFUSED, RULES, TOP_K_RULE

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


def _layer_path(path: str) -> str:
    """Name the numbered layer that a module is in."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _layer_name(module: SelectingRouter | str) -> tuple[str, bool]:
    """Name its layer, and say whether it is in the attention block, which counts as a layer of its own."""
    path = module if isinstance(module, str) else module.path
    return _layer_path(path), bool(ATTENTION.search(path))


def _may_be_another_gate(router: SelectingRouter) -> bool:
    """Say whether the class name alone does not tell that this is a router: forget gates and the like."""
    return bool(PERHAPS_A_ROUTER.search(type(router.module).__name__))


class FoundRouters(NamedTuple):
    """What a small forward showed."""

    trunk: nn.Module  # the innermost module that was handed the tokens and contains the routers
    tokens: str  # its argument that held them
    routers: list[SelectingRouter]  # in the order in which they selected


def find_by(probe: Probe, candidates: list[SelectingRouter]) -> FoundRouters:
    """Run the model on a few tokens and watch the candidates, each of which then knows E, K and its final top-k.

    Candidates that do not run on text alone (vision experts beside text experts, vision towers) are left out; so are
    gates that select nothing. Raises `AttachError` where a layer does not select once in its router, row by row.
    """
    model = probe.model
    watched = _watch(probe, candidates)
    routers = watched.routers()
    for router in routers:
        if watched.times[router] > 1:
            places = [path for path, each in model.named_modules(remove_duplicate=False) if each is router.module]
            raise AttachError(
                f"the router at {', '.join(places)} ({type(router.module).__name__}) cannot be replayed: it selects "
                f"{watched.times[router]} times for each token in one forward, shared by layers or in a loop, and a "
                "trace has one row of routes for each token and layer. Give each layer a router of its own and make "
                "one pass, or train without replay"
            )
    for router in candidates:
        is_router = router in watched.choosing or not _may_be_another_gate(router)
        if watched.seen.get(router) == [] and is_router:
            raise AttachError(
                f"router {router.path} ({type(router.module).__name__}) made no top-k selection; how it selects is not "
                f"known, so replay would have no effect. {NEEDS_A_RULE}"
            )
    _refuse_bypassed(candidates, routers, watched.entered)
    _refuse_selecting_blocks(model, watched)
    if not routers and not candidates:
        raise AttachError(
            f"{type(model).__name__} has no router: no module's class name ends in Router, Gating or Gate, and none "
            "makes a top-k for each token. Attach a Mixture-of-Experts model"
        )
    if not routers:
        first = next(iter(watched.seen), candidates[0])
        raise AttachError(
            f"none of the {len(candidates)} routers of {type(model).__name__} selected anything in a forward on text: "
            f"the first, {first.path} ({type(first.module).__name__}), "
            f"{'made no top-k' if watched.seen else 'did not run'}. {NEEDS_A_RULE}"
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
    """What a forward showed of candidates, and of blocks that select beside them."""

    def __init__(self) -> None:
        self.seen: dict[SelectingRouter, list[Selection]] = {}  # of the first call of each that ran
        self.times: Counter[SelectingRouter] = Counter()  # how often it selected
        self.given_tokens: list[tuple[nn.Module, str]] = []  # modules, and by which argument
        self.entered: set[str] = set()  # paths of the modules around candidates that ran
        self.choosing: set[SelectingRouter] = set()  # returned ids or a map, which no forget gate does
        self.elsewhere: dict[nn.Module, str] = {}  # blocks that made a top-k for each token themselves, and their paths

    def routers(self) -> list[SelectingRouter]:
        """Give those that selected, in order."""
        return [router for router, selections in self.seen.items() if selections]


def _watch(probe: Probe, candidates: list[SelectingRouter]) -> _Watched:
    """Run the probe. Raises as `find_by`."""
    watched = _Watched()
    others = _OtherSelections(probe, watched.elsewhere)

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
        watched.entered.add(path)
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
            probe.run()
        except Exception as error:
            raise probe.does_not_run(error) from error
    return watched


class _OtherSelections(TorchFunctionMode):
    """Finds the modules that make a top-k for each token, where no candidate runs."""

    def __init__(self, probe: Probe, found: dict[nn.Module, str]) -> None:
        super().__init__()
        self._num_rows, self._found = probe.shape[0] * probe.shape[1], found
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
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:  # to the innermost module that is running
                code = frame.f_code
                module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                if isinstance(module, nn.Module) and module in self._paths:
                    if not ATTENTION.search(self._paths[module]):
                        self._found[module] = self._paths[module]
                    break
                frame = frame.f_back
        return result


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


def _refuse_selecting_blocks(model: nn.Module, watched: _Watched) -> None:
    """Raise for a block that selects by itself: in a layer whose candidates did not, or of a class that has routers."""
    routers = watched.routers()
    routed = set(map(_layer_name, routers))
    silent = set(map(_layer_name, watched.seen)) - routed
    around = _modules_around(model, routers).values()
    classes = set(map(type, around)) | {type(_holder_of(model, router.path)) for router in routers}
    for block, path in watched.elsewhere.items():
        layer = _layer_name(path)
        if layer in routed or block in around or (routed and layer not in silent and type(block) not in classes):
            continue
        raise AttachError(
            f"{path} ({type(block).__name__}) makes a top-k for each token by itself, in no router. Let it select in a "
            "module of its own, whose class name ends in Router and which returns the ids"
        )


def _refuse_bypassed(candidates: list[SelectingRouter], routers: Sequence[SelectingRouter], entered: set[str]) -> None:
    routed_layers = set(map(_layer_name, routers))
    router_classes = {type(router.module) for router in routers}
    for router in candidates:
        bypassed = _layer_path(router.path) in entered and _layer_name(router) not in routed_layers
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
        for path in [*(".".join(parts[:depth]) for depth in range(1, len(parts))), _layer_path(router.path)]:
            paths[path] = model.get_submodule(path)
    return paths
