"""Our own Megatron-Core adapter, as an adapter author presents it to the kit, on models that the user builds.

On one rank, of any device. What more ranks add is the cut of rows, which tests of the adapter hold against Megatron's
own functions.
"""

from contextlib import contextmanager

import numpy as np
import torch

from foreroute.adapters import megatron
from foreroute.conformance.adapter import AdapterUnderTest, Fault, Seen, Unsupported
from foreroute.conformance.torch_model import TorchModel, TorchStep, padded, raise_once
from tests.adapters.megatron.training_step import watching

HEAD = "mtp_head"


class MegatronUnderTest(AdapterUnderTest):
    """A small GPTModel of Megatron-Core, as `build_model` builds it for a case, or raises `Unsupported`."""

    # a dispatcher is given a map of experts, without order
    picks_in_order = False

    def __init__(self, name, build_model, *, vocabulary, group_limit=None):
        self.name = f"foreroute.adapters.megatron on {name}"
        self.vocabulary, self.group_limit, self._build_model = vocabulary, group_limit, build_model

    def build(self, case):
        """A new model of the case; in training mode where it recomputes, as Megatron does in no other."""
        return MegatronModel(lambda: self._build_model(case).train(case.checkpointing))

    def attach(self, model):
        return megatron.attach(model.model)


class MegatronModel(TorchModel):
    """A model of Megatron-Core with a probe at its token dispatchers; built again for parts that traps are made of."""

    def __init__(self, build):
        super().__init__(build())
        self._build = build

    @property
    def router_weights(self):
        return tuple(f"{path}.router.weight" for path in _blocks(self.model) if path != HEAD)

    def forward(self, batch, *, grad=True):
        if batch.padding == "left":
            raise Unsupported("padding on the left is told by a layout")
        input_ids, real_BT = padded(batch, next(self.model.parameters()).device)
        positions = torch.arange(batch.width, device=input_ids.device).expand_as(input_ids)
        ahead = torch.ones(batch.width, batch.width, dtype=torch.bool, device=input_ids.device).triu(1)
        unseen = (ahead | ~real_BT[:, None, :])[:, None]  # [B, 1, T, T], where a query must not look
        with torch.set_grad_enabled(grad), self._probed() as given:
            losses_BT = self.model(input_ids, positions, unseen, labels=input_ids.roll(-1, 1))
            losses_R = losses_BT[:, :-1][real_BT[:, 1:] & real_BT[:, :-1]]
            loss = losses_R.mean()
        of_decoder = [picked for path, picked in given.items() if path != HEAD]
        ids, gates = (np.stack(parts, axis=2) for parts in zip(*of_decoder, strict=True))
        kept = real_BT.cpu().numpy()
        seen = Seen(
            ids[kept],
            -losses_R.detach().float().cpu().numpy(),
            float(loss.detach()),
            gates[kept],
            ids[~kept] if not kept.all() else None,
            {HEAD: given[HEAD][0].reshape(-1, ids.shape[-1])} if HEAD in given else {},
        )
        return TorchStep(seen, loss)

    def inject(self, fault):
        *_, block = _blocks(self.model).values()
        if fault is Fault.FORWARD_RAISES:
            raise_once(block)
        elif fault is Fault.FUSED_ROUTER:
            block.route = _fused(block.router)
        elif fault is Fault.ORPHAN_ROUTERS:
            live = self.model._modules.pop("decoder")
            self.model.add_module("vision_layers", self._build().decoder.layers)
            self.model.add_module("decoder", live)
        else:
            *_, spare = _blocks(self._build()).values()
            spare.set_layer_number(1)
            self.model.add_module(HEAD, spare)
            self.model.decoder.register_forward_hook(self._run_head)

    def _run_head(self, decoder, args, hidden):
        getattr(self.model, HEAD)(hidden)

    @contextmanager
    def _probed(self):
        """What every dispatcher is given: ids [B, T, K] and gate weights [B, T, K], by falling weight."""
        given, blocks = {}, _blocks(self.model)

        def note(path, hidden, routing_map, probs):
            given[path] = _picks(hidden, routing_map, probs, blocks[path].router.topk)

        with watching(blocks, note):
            yield given


def _blocks(model):
    named = model.named_modules()
    return {n: part for n, part in named if hasattr(part, "token_dispatcher") and n.startswith(("decoder.", HEAD))}


def _picks(hidden, routing_map, probs, top_k):
    """Of a dispatcher's input [T, B, ...]; where a token goes to fewer experts, the first of them again."""
    map_RE, probs_RE = routing_map.detach().cpu().numpy().astype(bool), probs.detach().float().cpu().numpy()
    order_RK = np.argsort(-np.where(map_RE, probs_RE, -np.inf), axis=1, kind="stable")[:, :top_k]
    ids_RK = np.where(np.take_along_axis(map_RE, order_RK, 1), order_RK, order_RK[:, :1])
    shape = (*hidden.shape[:2], top_k)
    weights_RK = np.take_along_axis(probs_RE, order_RK, 1)
    return ids_RK.reshape(shape).swapaxes(0, 1), weights_RK.reshape(shape).swapaxes(0, 1)


def _fused(router):
    """The selection computed beside the router module."""

    def route(hidden, *_):
        flat = hidden.reshape(-1, hidden.shape[-1])
        scores = (flat @ router.weight.T.to(flat)).softmax(-1)
        values, ids = scores.topk(router.topk, dim=-1)
        empty = torch.zeros_like(scores)
        return empty.scatter(1, ids, values), empty.bool().scatter(1, ids, True)

    return route
