"""Our own Hugging Face adapter, as an adapter author presents it to the kit. The first example to copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from foreroute.adapters import hf
from foreroute.conformance.adapter import AdapterUnderTest, Batch, Case, Fault, GroupLimit, Seen, Unsupported
from foreroute.conformance.torch_model import TorchModel, TorchStep, padded, raise_once
from foreroute.trace import IndexerSpec

Given = dict[str, tuple[NDArray[Any], NDArray[Any]]]
"""Expert ids [rows, K] and gate weights [rows, K], by the path of the experts module that was given them."""
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


KEEPING = partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default, torch.ops.aten.mm.default])
"""Contexts of a selective checkpoint: results of top-k and of products are kept."""


class HuggingFaceUnderTest(AdapterUnderTest):
    """A family of transformers, in a small configuration.

    Args:
        family: a model type of transformers.
        sizes: fields of its configuration.
    """

    adapter = "foreroute.adapters.hf"

    def __init__(self, family: str, sizes: Mapping[str, Any]) -> None:
        self.name = f"{self.adapter} on {family}"
        self.vocabulary = int(sizes["vocab_size"])
        self.group_limit = GroupLimit(sizes["n_group"], sizes["topk_group"]) if sizes.get("n_group", 1) > 1 else None
        self._family = family
        self._sizes = dict(sizes)
        self._built: dict[tuple[int | None, int | None], Any] = {}

    def build(self, case: Case) -> HuggingFaceModel:
        """A model from the configuration, changed as the case asks."""
        shape = (case.top_k, case.num_experts)
        # a copy of one that was built: some families take longer to build than to run
        if shape not in self._built:
            self._built[shape] = self._new(case)
        model = copy.deepcopy(self._built[shape])
        if case.checkpointing:
            model.train()
            # the older name warns where there is a newer one
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False} | ({"context_fn": KEEPING} if case.selective else {}))
        if case.compiled:
            for module in model.modules():
                # layer by layer, as trainers compile; "eager" traces without a compiler's minute
                if type(module).__name__.endswith("DecoderLayer"):
                    module.compile(backend="eager")
        return HuggingFaceModel(model)

    def _new(self, case: Case) -> Any:
        changes: dict[str, Any] = {}
        if case.top_k is not None:
            changes["num_experts_per_tok"] = case.top_k
        if case.num_experts is not None:
            changes |= {name: case.num_experts for name in EXPERT_FIELDS if name in self._sizes}
        sizes = {**self._sizes, **changes}
        return hf.build_model(self._family, seed=0, experts_implementation="eager", **sizes).eval()

    def indexers(self) -> IndexerSpec | None:
        """Those that choose tokens, which the probe can read."""
        model = HuggingFaceUnderTest.build(self, Case())
        spec = hf.attach(model.model).indexers if model.indexers else None
        return spec if spec is not None and spec.unit == 1 else None

    def attach(self, model: Any) -> hf.RoutedTransformer:
        """`hf.attach`, which also proves replay on the model."""
        return hf.attach(model.model)


class HuggingFaceModel(TorchModel):
    """A causal language model of transformers with a probe at its experts, and at `indexers`, by their paths."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # what they are given is what is executed; what a router returns need not be
        experts = [path for path, module in model.named_modules() if type(module).__name__.endswith("Experts")]
        if not experts:
            raise Unsupported(f"{type(model).__name__} has no module whose class name ends in Experts to look into")
        self._experts = tuple(experts)
        self.indexers = [path for path, module in model.named_modules() if type(module).__name__.endswith("Indexer")]
        self._trunk = model.get_submodule(experts[0].partition(".layers.")[0])

    @property
    def router_weights(self) -> tuple[str, ...]:
        """The weight of the module beside each experts module that has one row per expert."""
        names = [name for name, _ in self.model.named_parameters()]
        blocks = [path.rpartition(".")[0] for path in self._experts]
        return tuple(
            n for n in names if n.endswith((".gate.weight", ".router.weight")) and n.rsplit(".", 2)[0] in blocks
        )

    def forward(self, batch: Batch, *, grad: bool = True) -> TorchStep:
        """Run one forward over the padded batch."""
        input_ids, real_BT = padded(batch)
        mask = real_BT.long()
        with torch.set_grad_enabled(grad), self._probed(real_BT) as given:
            logprobs = self.next_logprobs(input_ids, mask, given)
            wanted = real_BT[:, 1:] & real_BT[:, :-1]
            loss = -logprobs[wanted].mean()
        kept = real_BT.reshape(-1).numpy()
        ids = np.stack([given[path][0] for path in self._experts], axis=1)
        gates = np.stack([given[path][1] for path in self._experts], axis=1)
        chosen = [given[path][0][kept] for path in self.indexers if path in given]
        seen = Seen(
            ids[kept],
            logprobs.detach()[wanted].numpy(),
            float(loss.detach()),
            gates[kept],
            ids[~kept] if not kept.all() else None,
            {path: given[path][0] for path in given if path not in (*self._experts, *self.indexers)},
            np.stack(chosen, axis=1) if chosen else None,
        )
        return TorchStep(seen, loss)

    def next_logprobs(self, input_ids: Tensor, mask: Tensor, given: Given) -> Tensor:
        """[B, T - 1], log-probability of each next token. `given` fills up meanwhile, in the order of the rows."""
        logits = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        logprobs: Tensor = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        return logprobs

    def inject(self, fault: Fault) -> None:
        """Build a trap in."""
        block = self.model.get_submodule(self._experts[-1].rpartition(".")[0])
        if fault is Fault.FORWARD_RAISES:
            raise_once(block)
        elif fault is Fault.FUSED_ROUTER:
            block.forward = _fused(block)
        elif fault is Fault.ORPHAN_ROUTERS:
            # registered first, so that whoever counts or names layers finds them before those that run
            orphans = copy.deepcopy(self._trunk.layers)
            live = self._trunk._modules.pop("layers")
            self._trunk.add_module("vision_layers", orphans)
            self._trunk.add_module("layers", live)
        else:
            # its layer is called 0 again, as released checkpoints number it
            self._trunk.mtp = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": copy.deepcopy(block)})])})
            self._trunk.norm.register_forward_hook(self._run_head)

    def _run_head(self, norm: nn.Module, args: Any, hidden: Tensor) -> None:
        self._trunk.mtp["layers"][0]["mlp"](hidden)

    @contextmanager
    def _probed(self, real_BT: Tensor | None = None) -> Iterator[Given]:
        """Note what every experts module is given; with a mask of tokens, also every attention by its indexer."""
        given: Given = {}

        def note_gates(path: str, args: tuple[Tensor, ...]) -> None:
            # copies: a later layer may write into the same tensors
            given[path] = (args[1].detach().numpy().copy(), args[2].detach().float().numpy().copy())

        handles = [
            module.register_forward_pre_hook(lambda _, args, path=path: note_gates(path, args))
            for path, module in self.model.named_modules()
            if type(module).__name__.endswith("Experts")
        ]
        if real_BT is not None:
            for path in self.indexers:
                note_chosen = partial(_note_attended, given, path, real_BT)
                handles.append(self.model.get_submodule(path).register_forward_hook(note_chosen))
        try:
            yield given
        finally:
            for handle in handles:
                handle.remove()


def _note_attended(given: Given, path: str, real_BT: Tensor, module: nn.Module, args: Any, keys_BTK: Tensor) -> None:
    """Note bool [B · T, U], the tokens of its sequence that each query attends to, where an indexer returns tokens."""
    if keys_BTK.ndim != 3 or keys_BTK.dtype == torch.bool:
        return
    # indexers count columns of the padded batch, the kit tokens of a sequence
    first_B = real_BT.int().argmax(1)
    tokens_BTK = keys_BTK.long() - first_B[:, None, None]
    position_BT = torch.arange(real_BT.shape[1]) - first_B[:, None]
    width = int(real_BT.sum(1).max())
    visible = (tokens_BTK >= 0) & (tokens_BTK <= position_BT[..., None]) & (tokens_BTK < width)
    marked = torch.zeros(*real_BT.shape, width + 1, dtype=torch.bool)
    attended = marked.scatter(-1, torch.where(visible, tokens_BTK, width), True)[..., :width]
    given[path] = (attended.flatten(0, 1).numpy(),) * 2  # in the order of the rows, as all that is given


def _fused(block: Any) -> Any:
    """The block with its selection computed beside the router module."""
    router = block.gate if hasattr(block, "gate") else block.router

    def forward(hidden: Tensor) -> Any:
        # the same mathematics, so that only a replay tells the difference
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, ids = torch.topk((flat @ router.weight.T).softmax(-1), router.top_k, dim=-1)
        output = block.experts(flat, ids, weights).reshape(hidden.shape)
        return (output, weights) if type(block).__name__.startswith("GptOss") else output

    return forward
