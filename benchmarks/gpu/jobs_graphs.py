"""CUDA graphs and sessions. A graph keeps addresses: one captured in a session would repeat its routes for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.bits import Case
from benchmarks.gpu.driving import distance, logits_of, refused
from benchmarks.gpu.families import twin_of
from benchmarks.gpu.part import Part, Skipped
from foreroute.adapters import hf

WARM_UPS = 3
REFUSED = "while a CUDA graph is captured"


def check_captures(part: Part, case: Case) -> None:
    """Captures in a session are refused, before they hold anything of it."""
    capturing = _captured if part.device.type == "cuda" else _made_up
    routed, model, batch = case.routed, case.routed.model, case.batch
    before = logits_of(model, batch)
    sessions: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "replay": lambda: routed.replay(case.foreign),
        "replay with telemetry": lambda: routed.replay(case.foreign, telemetry=True),
        "record": routed.record,
    }
    for name, session in sessions.items():
        with part.check(f"CUDA graph/a capture in {name} is refused"):
            with session():
                logits_of(model, batch)  # kernels are loaded, as a capture wants it
                with refused(REFUSED), capturing():
                    logits_of(model, batch)
                logits_of(model, batch)
            assert torch.equal(logits_of(model, batch), before), "the refusal left something behind"


def check_graphs(part: Part, case: Case) -> None:
    """A graph that was captured outside of sessions does not pass for a replay or a recording."""
    model, batch = case.routed.model, case.batch
    with part.check("CUDA graph/captured before, it does not pass for a replay or a recording"):
        _need_cuda(part)
        graph, logits, ids = _graph_of(model, batch.inputs["input_ids"])
        with torch.no_grad():
            native = model(input_ids=ids, use_cache=False).logits
        with refused("nothing was replayed"), case.routed.replay(case.foreign):
            graph.replay()
        with refused("nothing was recorded"), case.routed.record() as recording:
            graph.replay()
            recording.trace()
        torch.cuda.synchronize()
        assert distance(logits, native) < 5e-2, "the graph is not the model's"
    with part.check("CUDA graph/of a MoE block alone, by make_graphed_callables, is refused"):
        _need_cuda(part)
        _check_graphed_block(case)
    with part.check("CUDA graph/make_graphed_callables in a session is refused"):
        _need_cuda(part)
        graphed = hf.attach(twin_of(case.untouched))
        tokens = batch.inputs["input_ids"][:1].clone()  # the first sequence, which has no padding
        with refused(REFUSED), graphed.replay(case.foreign.select([0])):
            torch.cuda.make_graphed_callables(_Logits(graphed.model), (tokens,), allow_unused_input=True)


class _Logits(torch.nn.Module):
    """A model as a function of its tokens alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, V]."""
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def _need_cuda(part: Part) -> None:
    if part.device.type != "cuda":
        raise Skipped("it takes a GPU")


@contextmanager
def _captured() -> Iterator[None]:
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        yield


@contextmanager
def _made_up() -> Iterator[None]:
    """What torch says while a graph is captured."""
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


def _graph_of(model: Any, tokens: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """A graph of the whole model outside of any session, its logits, and the tokens that it reads."""
    ids = tokens.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream()):  # which a failed capture would leave
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    model(input_ids=ids, use_cache=False)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                logits = model(input_ids=ids, use_cache=False).logits
    except RuntimeError as error:
        raise Skipped(f"the unpatched model cannot be captured: {error}") from None
    graph.replay()
    return graph, logits, ids


def _check_graphed_block(case: Case) -> None:
    model = twin_of(case.untouched)
    routed = hf.attach(model)
    batch = case.batch
    shape = (*batch.inputs["input_ids"].shape, model.config.hidden_size)
    sample = torch.randn(shape, device=batch.direction_BTV.device, dtype=torch.bfloat16, requires_grad=True)
    block = model.model.layers[1].mlp
    try:
        torch.cuda.make_graphed_callables(block, (sample,), allow_unused_input=True)
    except RuntimeError as error:
        raise Skipped(f"the unpatched block cannot be captured: {error}") from None
    for session in (routed.replay(case.foreign), routed.record()):
        with refused("model.layers.1.mlp.gate selected 0 times"), session:
            logits_of(model, batch)
