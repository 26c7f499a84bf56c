"""Batches in verl's layouts, with routes that say which token of which sequence they belong to. No verl needed."""

import numpy as np
import torch

from foreroute.trace import RoutedLayer, RoutingSpec

SPEC = RoutingSpec(64, 2, (RoutedLayer(1), RoutedLayer(2)), model="tiny")
PROMPT, RESPONSE = 6, 8
"""Widths that prompts are padded to on the left, and responses on the right."""


def telling_routes(tokens, *, rows=None):
    """int64 [R, 3, 2]: layer 0 is dense; elsewhere a function of token, position and layer. R is T - 1 by default."""
    position, layer = np.ogrid[: len(tokens), :3]
    first = (7 * np.asarray(tokens)[:, None] + 3 * position + 5 * layer) % 63 + 1
    routes = np.stack([first, (first + 1 + position % 5) % 64], axis=-1)
    routes[:, 0] = 0
    return routes[: len(tokens) - 1 if rows is None else rows]


def sequences(count, seed=0):
    """`count` pairs of a prompt and a response, int64, no token twice in all of them."""
    rng = np.random.default_rng(seed)
    ids = iter(rng.permutation(np.arange(1, 400)))
    lengths = [(int(rng.integers(2, PROMPT + 1)), int(rng.integers(2, RESPONSE + 1))) for _ in range(count)]
    return [tuple(np.array([next(ids) for _ in range(n)]) for n in pair) for pair in lengths]


def padded(pairs, routes=telling_routes):
    """A batch as verl's agent loop makes it: prompts padded on the left, responses on the right."""
    ids, mask, experts = [], [], []
    for prompt, response in pairs:
        tokens = np.concatenate([prompt, response])
        given, width = routes(tokens), (PROMPT - len(prompt), RESPONSE - len(response))
        ids.append(np.pad(tokens, width))
        mask.append(np.pad(np.ones_like(tokens), width))
        behind = PROMPT + RESPONSE - width[0] - len(given)
        experts.append(np.pad(given, ((width[0], behind), (0, 0), (0, 0))))
    ids, mask, experts = (torch.from_numpy(np.stack(rows)) for rows in (ids, mask, experts))
    response_mask = mask[:, PROMPT:].clone()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": response_mask,
        "loss_mask": response_mask,
        "routed_experts": experts.short(),
    }


def unpadded(pairs, routes=telling_routes):
    """The same without padding, in jagged nested tensors."""
    tokens = [np.concatenate(pair) for pair in pairs]
    given = [routes(t).astype(np.int16) for t in tokens]
    experts = [np.pad(rows, ((0, len(t) - len(rows)), (0, 0), (0, 0))) for t, rows in zip(tokens, given, strict=True)]
    responses = [response for _, response in pairs]
    return {
        "input_ids": nested(tokens),
        "routed_experts": nested(experts),
        "prompts": nested([prompt for prompt, _ in pairs]),
        "responses": nested(responses),
        "response_mask": nested([np.ones_like(r) for r in responses]),
    }


def nested(arrays):
    return torch.nested.as_nested_tensor([torch.from_numpy(np.asarray(a)) for a in arrays], layout=torch.jagged)
