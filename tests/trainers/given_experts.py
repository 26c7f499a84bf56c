"""The oracle of passes: what experts were really given, seen by plain hooks. Nothing here asks foreroute.

Routes are by tokens: {tokens of a sequence: [R, L, K]}, in the order of picks.
"""

from contextlib import contextmanager

import numpy as np
import torch

TRUNKS = ("Qwen3MoeModel", "Qwen3VLMoeModel")


class Forward:
    """One forward of a trunk over padded or packed sequences, ids [B, T], and every call of its experts.

    Attributes:
        is_real: bool [B * T], what the mask says.
        calls: (layer, ids [B * T, K]) of each call, also in recomputations.
        grad: whether it is an update.
        adapters: whether PEFT's adapters were on.
        is_alone: whether there was no mask.
    """

    def __init__(self, ids, mask, *, adapters=True):
        self.ids, self.calls, self.adapters = ids.clone(), [], adapters
        self.grad, self.is_alone = torch.is_grad_enabled(), mask is None
        self.is_real = np.ones(ids.numel(), np.bool_) if mask is None else mask.reshape(-1).bool().numpy().copy()

    def ids_LRK(self):
        """Of the first call of each layer."""
        return np.stack([ids for _, ids in self.calls[: max(layer for layer, _ in self.calls) + 1]])

    def find(self, sequences):
        """(tokens, their rows that are real) wherever one of these sequences stands; of several the longest."""
        flat, longest_first = self.ids.reshape(-1).tolist(), sorted(sequences, key=len, reverse=True)
        for start in range(len(flat)):
            for tokens in longest_first:
                if flat[start] == tokens[0] and tuple(flat[start : start + len(tokens)]) == tokens:
                    rows = np.arange(start, start + len(tokens))
                    yield tokens, rows[self.is_real[rows]]
                    break


@contextmanager
def watched(model):
    """Every forward that runs through the trunk while the context is open."""
    forwards, handles = [], []

    def begin(_, args, kwargs):
        adapters = not any(getattr(module, "disable_adapters", False) is True for module in model.modules())
        ids = args[0] if args else kwargs["input_ids"]
        forwards.append(Forward(ids, kwargs.get("attention_mask"), adapters=adapters))

    handles.append(trunk_of(model).register_forward_pre_hook(begin, with_kwargs=True))
    # wrappers put names before those of classes
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    for layer, module in enumerate(experts):

        def note(_, args, layer=layer):
            forwards[-1].calls.append((layer, args[1].detach().numpy().copy()))

        handles.append(module.register_forward_pre_hook(note))
    yield forwards
    for handle in handles:
        handle.remove()


def trunk_of(model):
    return next(module for module in model.modules() if type(module).__name__.endswith(TRUNKS))


@torch.no_grad()
def native(model, tokens, **given):
    """int64 [T, L, K] and float32 [T - 1]: what a model picks and expects on a sequence, alone and unpadded."""
    ids = torch.tensor([list(tokens)])
    with watched(model) as forwards:
        hidden = trunk_of(model)(input_ids=ids, use_cache=False, **given).last_hidden_state
    logprobs = model.get_output_embeddings()(hidden)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return forwards[-1].ids_LRK().transpose(1, 0, 2), logprobs[0, :, 0].numpy()


def drawn_anew(ids_TLK, share, rng):
    """Routes of which a share of the cells (token, layer) is drawn at random, so that no model would take them."""
    drawn, shape = ids_TLK.copy(), ids_TLK.shape
    cells = rng.random(shape[:2]) < share
    drawn[cells] = np.argsort(rng.random((*shape[:2], 8)), axis=-1)[cells][:, : shape[2]]
    return drawn


def differing(forwards, routes):
    """How many rows with a route experts were given in all of their calls, and how many of these went to others."""
    rows = others = 0
    for forward in forwards:
        for tokens, places in forward.find(routes):
            wanted = routes[tokens][: len(places)]
            for layer, ids in forward.calls:
                rows += len(wanted)
                others += int((ids[places[: len(wanted)]] != wanted[:, layer]).any(-1).sum())
    return rows, others


def follows(forward, routes):
    """Whether every call of experts was given these routes."""
    rows, others = differing([forward], routes)
    assert rows
    return others == 0
