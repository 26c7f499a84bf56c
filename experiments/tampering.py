"""Routes that the product refuses, made on purpose: shifted by one token.

The guards compare tokens, weight versions and models; a wiring that is off by one in its own indices has all of these
right. This is what such a defect does when nothing stops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from foreroute.capture import Generation
from foreroute.engines.base import Engine
from foreroute.trace import RoutingTrace
from foreroute.train import run
from foreroute.train.policy import make_engine


def shifted(trace: RoutingTrace) -> RoutingTrace:
    """Give each token the route of the token before it in its sequence, the first that of the last that has one.

    Tokens, versions and validity stay as they are.
    """
    ids_NLK = trace.expert_ids_NLK.copy()
    for start, stop in zip(trace.offsets[:-1], trace.offsets[1:], strict=True):
        rows = start + np.flatnonzero(trace.valid_N[start:stop])
        ids_NLK[rows] = trace.expert_ids_NLK[np.roll(rows, 1)]
    return replace(trace, expert_ids_NLK=ids_NLK)


@contextmanager
def shifting_engine() -> Iterator[None]:
    """While this is open, engines of `foreroute.train.train` hand out shifted routes."""

    def make_shifting(*arguments: Any) -> Engine:
        engine = make_engine(*arguments)
        generate = engine.generate

        def generate_shifted(*asked: Any) -> Generation:
            generation = generate(*asked)
            return replace(generation, trace=shifted(generation.trace))

        engine.generate = generate_shifted  # type: ignore[method-assign]
        return engine

    # the product offers no such door, on purpose
    with patch.object(run, "make_engine", make_shifting):
        yield
