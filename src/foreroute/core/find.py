"""Finding the routers of a model, by what they are and not by which family they belong to.

Class names say which modules may be routers. A small forward then shows which of them take part in it, and what they
select.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AttachError
from .hooks import SelectingRouter, overridden
from .selection import Selection
from .selection_rules import REFUSED, RULES, TOP_K_RULE

ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")
NOT_A_ROUTER = re.compile(r"Density")
PERHAPS_A_ROUTER = re.compile(r"Gate$")
IN_PARENT = "route_tokens_to_experts"
"""The method of the block around a router that selects for it: in DBRX, and up to transformers 5.13 in DeepSeek's."""
ATTENTION = re.compile(r"attn|attention")
STACKS = ("encoder", "decoder")
NEEDS_A_RULE = (
    "Such a router needs a rule in foreroute/core/selection_rules.py (CONTRIBUTING.md, Adding a Hugging Face family)"
)
"""Ends the messages about routers that the rule of a top-k does not fit."""
PROBE_TOKENS = 8


def find_routers(model: nn.Module) -> list[SelectingRouter]:
    """Find every module that may be a router, in the order of the modules.

    Raises:
        AttachError: when there is none, or one that is known not to be replayable, with the reason.
    """
    for path, module in model.named_modules():
        reason = REFUSED.get(type(module).__name__)
        if reason:
            raise AttachError(f"{path} ({type(module).__name__}) cannot be replayed: {reason}")
    candidates = [
        _candidate(model, path, module)
        for path, module in model.named_modules()
        if ROUTER_CLASS.search(type(module).__name__) and not NOT_A_ROUTER.search(type(module).__name__)
    ]
    if not candidates:
        raise AttachError(
            f"{type(model).__name__} has no router: no module's class name ends in Router, Gating or Gate. "
            "Attach a Mixture-of-Experts model whose routers are modules of their own"
        )
    stacks = {next((part for part in router.path.split(".") if part in STACKS), "") for router in candidates}
    if stacks.issuperset(STACKS):
        raise AttachError(
            f"{type(model).__name__} routes in an encoder and in a decoder, which are given different tokens; one "
            "trace has one sequence of tokens. Encoder-decoders cannot be replayed; attach a decoder-only model"
        )
    return candidates


def _candidate(model: nn.Module, path: str, module: nn.Module) -> SelectingRouter:
    parent = model.get_submodule(path.rpartition(".")[0])
    selecting = (parent, IN_PARENT) if hasattr(parent, IN_PARENT) else (module, "forward")
    return SelectingRouter(path, module, selecting, RULES.get(type(module).__name__, TOP_K_RULE))


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


def probe(model: nn.Module, candidates: list[SelectingRouter]) -> tuple[nn.Module, list[SelectingRouter]]:
    """Run the model on a few tokens and watch the candidates, each of which then knows E, K and its final top-k.

    Returns the trunk, which is the innermost module that was handed the tokens and contains the routers, and the
    routers that selected, in the order in which they did.

    Candidates that do not run on text alone (vision experts beside text experts, vision towers) are left out; so are
    gates that select nothing.

    Raises:
        AttachError: when the forward fails, no router runs, a router runs without selecting, for several layers or not
            row by row, a layer runs past its router, or no module around the routers is handed tokens.
    """
    seen: dict[SelectingRouter, list[Selection]] = {}
    given_tokens: list[nn.Module] = []
    entered: set[str] = set()

    def watch(router: SelectingRouter, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with router.rule.mode(final=None) as mode:
            result = forward(*args, **kwargs)
        if mode.seen and seen.get(router):
            raise AttachError(_selected_twice(model, router))
        seen.setdefault(router, []).extend(mode.seen)
        return result

    with ExitStack() as stack:
        for router in candidates:
            stack.enter_context(overridden(*router.selecting, partial(watch, router)))
        for module in _common_ancestors(model, candidates):
            stack.enter_context(_noting_tokens(module, given_tokens))
        for path in set(map(_layer_path, candidates)):
            handle = model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: entered.add(path))
            stack.callback(handle.remove)
        _forward_once(model)
    for router in candidates:
        if seen.get(router) == [] and not _may_be_another_gate(router):
            raise AttachError(
                f"router {router.path} ({type(router.module).__name__}) made no top-k selection; how it selects is not "
                f"known, so replay would have no effect. {NEEDS_A_RULE}"
            )
    routers = [router for router, selections in seen.items() if selections]
    _refuse_bypassed(candidates, routers, entered)
    if not routers:
        raise AttachError(f"no router of {type(model).__name__} selected anything in a forward on text")
    for router in routers:
        final = seen[router][-1]
        if len(final.ids_RK) != PROBE_TOKENS or final.ids_RK.ndim != 2:
            raise AttachError(
                f"router {router.path} selects on scores of shape {tuple(final.scores_RE.shape)}; expected a row for "
                f"each of {PROBE_TOKENS} tokens"
            )
        router.num_experts, router.top_k = final.scores_RE.shape[-1], final.ids_RK.shape[-1]
        router.final, router.by_probability = len(seen[router]) - 1, final.by_probability
        router.by_softmax = final.by_probability and _adds_up_to_1(final)
    return _trunk_of(given_tokens, routers), routers


def _adds_up_to_1(selection: Selection) -> bool:
    """Say whether what experts were selected by is a softmax over all of them, without a bias."""
    scores = selection.scores if selection.live is None else selection.live
    return bool((scores >= 0).all() and ((scores.float().sum(-1) - 1).abs() < 1e-2).all())


def _trunk_of(given_tokens: Sequence[nn.Module], routers: Sequence[SelectingRouter]) -> nn.Module:
    for module in reversed(given_tokens):  # outermost first
        inside = set(module.modules())
        if all(router.selecting[0] in inside for router in routers):
            return module
    raise AttachError(
        f"no module that contains the routers ({routers[0].path}, ...) takes input_ids; attach the part of the "
        "model that is given the tokens"
    )


def _selected_twice(model: nn.Module, router: SelectingRouter) -> str:
    places = [path for path, module in model.named_modules(remove_duplicate=False) if module is router.module]
    if len(places) == 1:
        return (
            f"{router.path} ({type(router.module).__name__}) cannot be replayed: it selects several times for each "
            "token, as looped layers do, and a trace has one row of routes for each token and layer; make one pass, or "
            "train without replay"
        )
    return (
        f"the router at {', '.join(places)} ({type(router.module).__name__}) selected twice in one forward, as if "
        "layers shared it; a trace has one row of routes for each layer. Give each layer a router of its own"
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


def hidden(model: nn.Module, num_tokens: int = PROBE_TOKENS) -> Tensor:
    """Give the first output of a forward on the probe's tokens, with the same random numbers every time."""
    return first_tensor(run_probe(model, num_tokens))


def first_tensor(output: Any) -> Tensor:
    """Give logits or hidden states of what a model returned, and no cache."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    found: Tensor = next(value for value in values if isinstance(value, Tensor))
    return found


def run_probe(model: nn.Module, num_tokens: int = PROBE_TOKENS, *, use_cache: bool = False) -> Any:
    """Run a forward on the probe's tokens, with the same random numbers every time."""
    torch.manual_seed(0)
    takes = inspect.signature(model.forward).parameters
    may_cache = "use_cache" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    given: dict[str, Any] = {"input_ids": probe_tokens(model, num_tokens)}
    given |= {"use_cache": use_cache} if may_cache else {}
    return model(**given)


def probe_tokens(model: nn.Module, num_tokens: int = PROBE_TOKENS) -> Tensor:
    """Make int64 [1, `num_tokens`] on the device of the embedding; on the host where accelerate offloaded that."""
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    offloaded = weight.is_meta and hasattr(embedding, "_hf_hook")  # which takes tokens from anywhere
    device = torch.device("cpu") if offloaded else weight.device
    # a weight that ranks share out may have no row here
    return torch.arange(num_tokens, device=device)[None] % getattr(embedding, "num_embeddings", weight.shape[0])


def _forward_once(model: nn.Module) -> None:
    try:
        hidden(model)
    except AttachError:
        raise
    except Exception as error:
        if any(parameter.numel() == 0 for parameter in model.parameters()):
            raise AttachError(
                f"{type(model).__name__} has parameters without elements, as models have that were made partitioned, "
                "for DeepSpeed's ZeRO stage 3, and nothing gathers them yet; call deepspeed.initialize first"
            ) from error
        raise AttachError(
            f"{type(model).__name__} does not run on input_ids alone ({type(error).__name__}: {error}); attach to the "
            "part of it that does, such as the decoder of a speech model"
        ) from error


def _common_ancestors(model: nn.Module, routers: list[SelectingRouter]) -> list[nn.Module]:
    """Give the modules around at least one router, outermost first: which of them run is not known yet."""
    paths = {"": model}
    for router in routers:
        parts = router.path.split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            paths[path] = model.get_submodule(path)
    return list(paths.values())


@contextmanager
def _noting_tokens(module: nn.Module, into: list[nn.Module]) -> Iterator[None]:
    signature = inspect.signature(module.forward)

    def note_trunk(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.get("kwargs", {})
        if isinstance(given.get("input_ids"), Tensor):
            into.append(module)

    handle = module.register_forward_pre_hook(note_trunk, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
