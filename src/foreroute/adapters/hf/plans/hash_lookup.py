"""Hash layers of DeepSeek V4: the experts of a token are looked up in a fixed table.

There is nothing to replay: the model's own selection is a function of the token. It stays native, and the trace is
compared with the table instead, which tells at no cost whether routes and tokens belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foreroute.adapters.hf.selection_mode import Selection, SelectionMode
from foreroute.errors import BatchMismatchError
from foreroute.trace import RoutingTrace

GATHER = frozenset({torch.gather, Tensor.gather})


class HashLookupMode(SelectionMode):
    """Notes the looked-up ids where the router gathers its scores at them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs every torch function of the router."""
        result = func(*args, **(kwargs or {}))
        if func in GATHER:
            self.seen.append(Selection(args[0], args[2], args[2]))
        return result


def require_looked_up(trace: RoutingTrace, position: int, router: nn.Module) -> None:
    """Raise `BatchMismatchError` unless a hash layer of the trace holds what its table says for each token.

    Args:
        trace: the routes to check.
        position: of the layer on the layer axis.
        router: with its table `tid2eid`, integers [vocabulary, K].
    """
    table_VK: Any = router.tid2eid
    routed = trace.valid_N
    tokens = torch.from_numpy(trace.token_ids_N[routed].astype(np.int64)).to(table_VK.device)
    expected_NK = table_VK[tokens].cpu().numpy()
    given_NK = trace.expert_ids_NLK[routed, position]
    wrong = np.flatnonzero((np.sort(given_NK, axis=-1) != np.sort(expected_NK, axis=-1)).any(axis=-1))
    if len(wrong):
        row = int(np.flatnonzero(routed)[wrong[0]])
        raise BatchMismatchError(
            f"{trace.spec.layers[position]} routes by a table of tokens, and {len(wrong)} of {len(expected_NK)} rows "
            f"of the trace disagree with it; the first is row {row}, token {int(trace.token_ids_N[row])}: experts "
            f"{given_NK[wrong[0]].tolist()} instead of {expected_NK[wrong[0]].tolist()}. Routes and tokens are shifted "
            "against each other, or the trace is of another model"
        )
