"""The checks that every kind of model of a peer passes, each against something that the core has no part in.

Letters: B, T rows and positions of a batch, N = B T, L routers, K picks, E experts.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from foreroute.core import attach
from foreroute.core.passes import Rows
from foreroute.core.routed import TensorRows

VOCAB, DIM, EXPERTS, TOP_K = 50, 32, 8, 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": None,
}
"""Of configurations of transformers."""
QWEN = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
QWEN3 = QWEN | {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True}
DEEPSEEK = SIZES | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "norm_topk_prob": True,
}
"""Three layers have experts."""
B, T = 2, 10
# the first tokens differ: two sequences that begin alike give experts equal rows
TOKENS, OTHER_TOKENS = (
    torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:T] for seed in seeds])
    for seeds in ((5, 6), (7, 8))
)
MASK = torch.ones(B, T, dtype=torch.int64)
MASK[1, -2:] = 0
COMPILED = 1e-4  # largest difference of a gradient, relative to its largest entry, where a graph rounds otherwise


def require(peer: str) -> None:
    """Skip the file that asks, but in the run for that peer."""
    if os.environ.get("FOREROUTE_PEERS") != peer:
        pytest.skip(f"for make night PART=peers PEERS={peer}", allow_module_level=True)


@dataclass(frozen=True)
class Case:
    """One kind of model of a peer.

    Attributes:
        build: makes it anew, in training mode, with the same weights.
        handed: gives a context in which a list collects int64 [N, K], each row ascending, of every call of experts.
        forced: gives a context in which routers run ids [L, N, K] by other means than the core's; -1 is native.
        variants: what checkpoints or compiles a model in place.
    """

    name: str
    build: Callable[[], nn.Module]
    handed: Callable[[nn.Module], Any]
    forced: Callable[[nn.Module, Tensor], Any]
    variants: Mapping[str, Callable[[nn.Module], object]]
    layers: int = 3
    tokens: str = "input_ids"
    more: Callable[[Tensor], dict[str, Any]] = field(default=lambda tokens: {})

    def arguments(self, tokens: Tensor) -> dict[str, Any]:
        return {self.tokens: tokens, **self.more(tokens)}

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        output = model(**self.arguments(tokens))
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        logits = output[0] if logits is None else logits
        return -logits.float().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()


def cells(cases: list[Case]) -> list[Any]:
    """Every case as it is, and in each of its variants."""
    return [
        pytest.param(case, variant, id=f"{case.name}-{variant}")
        for case in cases
        for variant in ("plain", *case.variants)
    ]


def routes(case: Case, seed: int) -> Tensor:
    """[B, T, L, K]"""
    drawn = torch.rand(B, T, case.layers, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(-1)[..., :TOP_K].contiguous()


def by_layer(ids: Tensor) -> Tensor:
    """[L, N, K]"""
    return ids.permute(2, 0, 1, 3).flatten(1, 2)


class Subject:
    """A model under the checks, which are methods; each fails by itself; `require_control` has one of them fail."""

    def __init__(self, case: Case, variant: str = "plain") -> None:
        self.case, self.is_compiled = case, "compile" in variant
        torch.compiler.reset()
        self.model = case.build()
        if variant != "plain":
            case.variants[variant](self.model)
        self.native = case.loss(self.model, TOKENS)
        self.native_gradients = self._backward(self.native)

    def check_found(self) -> None:
        self.routed = attach(self.model, self.case.arguments(TOKENS))
        routers = self.routed.hooks.routers
        assert [(each.num_experts, each.top_k) for each in routers] == [(EXPERTS, TOP_K)] * self.case.layers

    def check_recorded(self) -> None:
        """What is recorded is what experts were handed."""
        with torch.no_grad(), self._watched() as seen, self.routed.record() as recording:
            self.case.loss(self.model, TOKENS)
        [self.own] = recording.ids()
        assert seen is None or same_sets(seen, by_layer(self.own))

    def check_own(self) -> None:
        """Neither recording nor own routes change a bit of the loss or of a gradient."""
        for session in (self.routed.record(), self.routed.replay(self.own)):
            with session:
                loss = self.case.loss(self.model, TOKENS)
            self._compare([loss], self._backward(loss), [self.native], self.native_gradients)

    def check_obeyed(self) -> None:
        """Other routes are obeyed row by row; rows of -1 and padding stay native."""
        forced = self._forced()
        for ids in (forced, torch.where(forced < 0, forced, (forced + 1) % EXPERTS)):
            session = self.routed.replay(ids, MASK)
            with torch.no_grad(), self._watched() as seen, session, self.routed.record() as recording:
                self.case.loss(self.model, TOKENS)
            judge = self.case.build()
            with torch.no_grad(), self.case.handed(judge) as judged, self.case.forced(judge, by_layer(ids)):
                self.case.loss(judge, TOKENS)
            assert same_sets(judged, by_layer(recording.ids()[0]))
            assert seen is None or same_sets(seen, torch.stack(judged))

    def check_gradients(self) -> None:
        """Two micro-batches, both backwards after both sessions, equal the same routes forced by other means."""
        batches = [(TOKENS, self._forced(), MASK), (OTHER_TOKENS, routes(self.case, 2), None)]
        losses, judge, judged = [], self.case.build(), []
        for tokens, ids, mask in batches:
            with self.routed.replay(ids, mask):
                losses.append(self.case.loss(self.model, tokens))
        found = self._backward(*losses)
        for tokens, ids, _ in batches:
            with self.case.forced(judge, by_layer(ids)):
                judged.append(self.case.loss(judge, tokens))
        sum(judged).backward()
        self._compare(losses, found, judged, gradients(judge))
        assert abs(losses[0] - self.native) > 1e-3  # routes matter
        routers = {name: grad for name, grad in found.items() if any(word in name for word in ("gate.", "router."))}
        routers = {name: grad for name, grad in routers.items() if "shared" not in name}
        assert len(routers) >= self.case.layers
        assert all(grad.abs().sum() > 0 for grad in routers.values())

    def _forced(self) -> Tensor:
        forced = routes(self.case, 1)
        forced[0, 3] = forced[1, 6] = -1
        return torch.where(MASK[..., None, None] == 0, -1, forced)

    @contextmanager
    def _watched(self):
        """What experts were handed; None where a graph runs them."""
        if self.is_compiled:
            yield None
            return
        with self.case.handed(self.model) as seen:
            yield seen

    def _backward(self, *losses: Tensor) -> dict[str, Tensor]:
        for parameter in self.model.parameters():
            parameter.grad = None
        for loss in losses:
            loss.backward()
        return gradients(self.model)

    def _compare(self, losses, found, wanted_losses, wanted) -> None:
        assert found.keys() == wanted.keys()
        if not self.is_compiled:
            assert torch.equal(torch.stack(losses), torch.stack(wanted_losses))
            assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
            return
        assert torch.allclose(torch.stack(losses), torch.stack(wanted_losses), atol=COMPILED, rtol=0)
        assert all((found[name] - each).abs().max() <= COMPILED * each.abs().max() for name, each in wanted.items())


CHECKS = ("found", "recorded", "own", "obeyed", "gradients")


def run(case: Case, variant: str) -> None:
    """Run every check."""
    subject = Subject(case, variant)
    for check in CHECKS:
        getattr(subject, f"check_{check}")()


def require_control(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of the token before, and `check_obeyed` fails."""
    subject = Subject(case)
    subject.check_found()
    subject.check_recorded()
    subject.routed.hooks.experts.clear()  # a session looks at what experts are handed, too
    of = TensorRows.of
    monkeypatch.setattr(TensorRows, "of", lambda *args: Rows(of(*args).ids_LRK.roll(1, 1)))
    with pytest.raises(AssertionError):
        subject.check_obeyed()


def same_sets(listed, ids_LNK: Tensor) -> bool:
    """Whether these ids [N, K] of L calls are those, order within a row aside."""
    return len(listed) == len(ids_LNK) and all(
        torch.equal(each.long().sort(-1).values, ids_NK.long().sort(-1).values)
        for each, ids_NK in zip(listed, ids_LNK, strict=True)
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, without what checkpoints and compilers put into names."""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
            name = name.replace(wrapper, "")
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


def seeded(model: nn.Module, std: float = 0.12) -> nn.Module:
    """Weights by which routes matter for the output, and scores of experts are apart."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                scale = 5 * std if parameter.ndim == 3 or ".experts." in name else std
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias_E", "e_score_correction_bias")):
                buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
    return model.train()


@contextmanager
def ids_handed_to(model: nn.Module, class_name: str, argument: int):
    """Collect an argument of every call of the modules of a class."""
    seen: list[Tensor] = []

    def collect(_: nn.Module, args: Any) -> None:
        seen.append(args[argument].detach().reshape(B * T, TOP_K).clone())

    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__ == class_name:
                stack.callback(module.register_forward_pre_hook(collect).remove)
        yield seen


@contextmanager
def rows_handed_to_each(model: nn.Module, class_name: str):
    """Find by the rows that each module in `experts` of a block is called with which tokens it was handed."""
    seen: list[Tensor] = []

    def begin(_: nn.Module, args: Any) -> None:
        seen.append(args[0].detach().reshape(B * T, -1).clone())

    def collect(expert: int, picked: list, _: nn.Module, args: Any) -> None:
        picked.append((expert, args[0].detach().clone()))

    def end(picked: list, *_: Any) -> None:
        rows, chosen = seen.pop(), torch.zeros(B * T, EXPERTS, dtype=torch.bool)
        for expert, given in picked:
            chosen[(given[:, None] == rows).all(-1).nonzero()[:, 1], expert] = True
        seen.append(chosen.nonzero()[:, 1].view(B * T, TOP_K))
        picked.clear()

    with ExitStack() as stack:
        for block in model.modules():
            if type(block).__name__ != class_name:
                continue
            picked: list = []
            stack.callback(block.register_forward_pre_hook(begin).remove)
            stack.callback(block.register_forward_hook(partial(end, picked)).remove)
            for expert, module in enumerate(block.experts):
                stack.callback(module.register_forward_pre_hook(partial(collect, expert, picked)).remove)
        yield seen


@contextmanager
def another_top_k(_: nn.Module, ids_LNK: Tensor):
    """The n-th `torch.topk` of a forward gives the n-th layer's ids."""
    native, waiting = torch.topk, list(ids_LNK)

    def forced(scores, k, dim=-1, **given):
        own = native(scores, k, dim, **given)
        ids = waiting.pop(0).view(own.indices.shape)
        ids = torch.where(ids < 0, own.indices, ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    torch.topk = forced
    try:
        yield
    finally:
        torch.topk = native


@contextmanager
def replaced(model: nn.Module, class_name: str, ids_LNK: Tensor, formula: Callable[..., Any], method: str = "forward"):
    """`formula(router, ids [N, K], native method, ...)` is called in the place of the method of each router."""
    routers = [module for module in model.modules() if type(module).__name__ == class_name]
    for router, ids_NK in zip(routers, ids_LNK, strict=True):
        setattr(router, method, partial(formula, router, ids_NK, getattr(router, method)))
    try:
        yield
    finally:
        for router in routers:
            delattr(router, method)


class Stack(nn.Module):
    """Blocks of a peer in a decoder of ours, each as the attribute `name` of its layer."""

    def __init__(self, name: str, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(number): Layer(name, block) for number, block in enumerate(blocks)})
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, **given: Tensor) -> Tensor:
        [tokens] = given.values()
        h = self.embed_tokens(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.lm_head(h)


class Layer(nn.Module):
    def __init__(self, name: str, block: nn.Module) -> None:
        super().__init__()
        self.name, self.norm = name, nn.RMSNorm(DIM)
        self.add_module(name, block)

    def forward(self, h: Tensor) -> Tensor:
        h = h + (h.float().cumsum(1) / (1 + torch.arange(h.shape[1]))[:, None]).to(h.dtype)
        return h + getattr(self, self.name)(self.norm(h))


def compiled(model: nn.Module) -> None:
    for layer in getattr(model, "model", model).layers.children():
        layer.compile(backend="aot_eager")


def checkpointed(use_reentrant: bool, model: nn.Module, **how: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, **how})


def selective(model: nn.Module) -> None:
    """Saves products, and not what a top-k gave: routers of Qwen and Mixtral normalise it in place."""
    saved = [torch.ops.aten.mm.default]
    checkpointed(False, model, context_fn=partial(create_selective_checkpoint_contexts, saved))


full, reentrant = partial(checkpointed, False), partial(checkpointed, True)
