"""A Hugging Face model whose routing can be recorded and replayed, and the hooks on it while a session is open.

Hooks are put on instances, never on classes, and taken off when the last session closes: on the forward of the trunk
(to know where one pass over a batch begins and ends), and on the forward of each router (to watch or force its
selection).

Compiled by `torch.compile`, the same code is traced: routes and observations are tensors of the graph, the host is
called at both ends of a pass (`graph_ops`), and a recomputation inside the graph needs nothing, since the graph kept
the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters.hf import graph_ops
from foreroute.adapters.hf.forward_tokens import ForwardTokens, rows_of_passes
from foreroute.adapters.hf.pixels import ImageTokens
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.adapters.planned_model import PlannedModel
from foreroute.core.hooks import SelectingRouter, SelectionHook, overridden
from foreroute.core.passes import Pass, Rows
from foreroute.core.trunk import TrunkHooks
from foreroute.core.untouched import reshard
from foreroute.errors import AttachError, BatchMismatchError, LayoutError, ReplayError
from foreroute.layout import Layout
from foreroute.replay import Policy, ReplayRows, Routes
from foreroute.replay.arguments import not_of_class
from foreroute.replay.aux_loss_counts import ExecutedCounts
from foreroute.trace import INDEXER, PIXELS, IndexerSpec, RoutingSpec, RoutingTrace
from foreroute.trace.operations import same_sets, with_lookups

if TYPE_CHECKING:
    from foreroute.adapters.hf.expert_parallel import SpreadExperts
    from foreroute.adapters.hf.indexers import FoundIndexers
    from foreroute.ep import PlanExecution
    from foreroute.ep.execution import MicroBatch
    from foreroute.replay import ForwardRows, RecordedPass


BATCHES = "init_continuous_batching"
"""The method of a model by which each way of continuous batching begins."""


class RoutedTransformer(PlannedModel):
    """Recording and replaying sessions for one Hugging Face model. Made by `attach`.

    Attributes:
        model: the model that was attached.
        spread: its experts, where transformers has spread them over ranks by our implementation; else None.
    """

    spread: SpreadExperts | None

    def __init__(self, hooks: TransformerHooks, spread: SpreadExperts | None = None) -> None:
        made_by = {"engine": "transformers", "engine_version": transformers.__version__}
        super().__init__(hooks.spec, [hooks], [hooks.spec], made_by)
        self.model = hooks.model
        self.spread = spread
        self._of_trunk = hooks

    @property
    def indexers(self) -> IndexerSpec | None:
        """Choices of the indexers of its sparse attention; None where it has none that is known."""
        found = self._of_trunk.found_indexers
        return None if found is None else found.spec

    @property
    def routers(self) -> Sequence[SelectingRouter]:
        """Selecting modules, in layer order: `router.path` in the model, and `router.module`."""
        return self._of_trunk.routers

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of all routers, in layer order: those that decide which experts a token is sent to."""
        return [parameter for router in self.routers for parameter in router.module.parameters()]

    @property
    def lookup_tables(self) -> dict[int, Tensor]:
        """Integers [vocabulary, K], by its position among layers, of each router that looks experts up by token."""
        modules: list[Any] = [router.module for router in self.routers]
        return {number: modules[number].tid2eid for number, router in enumerate(self.routers) if router.rule.is_lookup}

    def rows(self, trace: RoutingTrace, layout: Layout | None = None) -> TraceRows:
        """Make the routes of a micro-batch ready once, to be replayed in recompute, update and every epoch.

        `replay(rows)` takes the result in the place of the trace. What batches take of it stays on their device as long
        as the result lives: L · K ids of one byte, two above 128 experts, for each token, and as many for the rows of
        the last batch. That is compared with one that is given by the same tensors, which replays the same rows.

        Args:
            trace: of the sequences of the micro-batch. Nobody may write to its arrays from now on.
            layout: as in `replay`.

        Raises:
            ForerouteError: for trace and layout, as `replay`.
        """
        if not isinstance(trace, RoutingTrace):
            raise not_of_class("what is to be replayed", trace, "a RoutingTrace, from a recording, `load` or `decode`")
        if trace.spec != self.spec:
            trace = self.with_lookups(trace)
        for position, table_VK in self.lookup_tables.items():
            require_looked_up(trace, position, table_VK)
        if INDEXER in trace.streams:
            from foreroute.replay.indexers import require_choices

            require_choices(trace, self.indexers)
        if PIXELS in trace.streams and self._of_trunk.images is None:
            raise BatchMismatchError(
                f"the trace has digests of pixels, and {type(self._of_trunk.trunk).__name__} takes none by a grid; "
                f'attach the whole model, or replay trace.without_streams("{PIXELS}")'
            )
        return TraceRows(trace, layout, self._of_trunk)

    def with_lookups(self, trace: RoutingTrace) -> RoutingTrace:
        """Return a trace of all layers of the model, where engines left out those that look experts up by token.

        Raises:
            SpecMismatchError: when the trace lacks another layer, or is of another model.
            BatchMismatchError: when it has a token that the model does not know.
        """
        tables = self.lookup_tables.items()
        lookups = {self.spec.layers[number]: partial(looked_up, table_VK) for number, table_VK in tables}
        return with_lookups(trace, self.spec, lookups)

    @property
    def _experts(self) -> SpreadExperts:
        if self.spread is None:
            raise AttachError(
                f"no experts of this {type(self.model).__name__} are spread over ranks by foreroute; load it by "
                "from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=G, ep_size=G, "
                'ep_implementation="foreroute"))'
            )
        if self.spec.num_experts != self.spread.home_LE.shape[1]:
            raise AttachError(
                f"routers of this {type(self.model).__name__} choose among {self.spec.num_experts}, and layers have "
                f"{self.spread.home_LE.shape[1]} experts; plans know no choice that is computed nowhere"
            )
        distributed = getattr(getattr(self.model, "config", None), "distributed_config", None)
        if getattr(distributed, "fsdp_cpu_offload", False):
            raise AttachError(
                "the model was loaded with fsdp_cpu_offload=True, which keeps experts on the host, from where replicas "
                "cannot be fetched; load it without"
            )
        return self.spread

    @property
    def _execution_holder(self) -> TransformerHooks:
        return self._of_trunk

    def _planned_batches(self, given: Sequence[TraceRows | RoutingTrace]) -> list[MicroBatch]:
        from foreroute.ep.execution import MicroBatch

        batches = given if isinstance(given, Sequence) else [given]
        rows_M = [each if isinstance(each, TraceRows) else self.rows(each) for each in batches]
        part, num_parts = self._experts.layers[0].slices
        return [
            MicroBatch(
                rows.trace,
                rows.counts_of(part, num_parts),
                rows.is_whole,
                int(rows.trace.valid_N.sum()),
                is_shared=num_parts > 1,
            )
            for rows in rows_M
        ]

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Give every weight and buffer that is saved, whole, as engines take them. A collective call.

        One tensor is whole at a time, on every rank. Experts are in order of their ids, wherever they live.

        Yields:
            Names, as in `named_parameters` of the model, and tensors.
        """
        reshard(self.model)
        layers = [] if self.spread is None else self.spread.layers
        row_E = {id(each): layer.row_E for layer in layers for each in layer.parameters().values()}
        for name, tensor in saved_tensors(self.model):
            whole = tensor.detach()
            if hasattr(whole, "full_tensor"):
                whole = whole.full_tensor()
            rows = row_E.get(id(tensor))
            yield name, whole if rows is None else whole[rows]

    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> Routes:
        """Find the rows of a trace for each batch, unless these are routes that do so."""
        if isinstance(routes, TraceRows) and layout is not None:
            raise LayoutError("the rows were made for a layout already; give none with them")
        # a session replays whatever finds rows by `of_pass`; `isinstance` with the protocol `Routes` would also read
        # `versions`, which looks at every row
        return routes if hasattr(routes, "of_pass") else self.rows(routes, layout)

    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """Give the rows of one chunk and one rank."""
        return rows_of_passes(passes[0], self._of_trunk.found_indexers)

    def _counting(self) -> AbstractContextManager[None]:
        """The forward of the whole model, which may be the trunk itself: above the hooks of the session."""
        return overridden(self.model, "forward", self._of_trunk.run_model)


class TransformerHooks(TrunkHooks):
    """The hooks of one model, of which the trunk is a part, and what compiled passes need of it."""

    def __init__(
        self,
        model: nn.Module,
        trunk: nn.Module,
        routers: Sequence[SelectingRouter],
        spec: RoutingSpec,
        indexers: FoundIndexers | None,
    ) -> None:
        self.found_indexers = indexers
        super().__init__(model, trunk, routers, [] if indexers is None else indexers.hooks)
        self.spec = spec
        self.images = ImageTokens.of_trunk(trunk, self.names)
        self.executed: Tensor | None = None  # ids [L, R, K] of the last pass, where losses behind it count them
        self.execution: PlanExecution | None = None  # of the plan that is executed now
        self.stand_ins += [(each, BATCHES, _refuse_batches) for each in model.modules() if hasattr(type(each), BATCHES)]
        if self.images is not None:
            encoders = ("get_image_features", "get_video_features")
            self.stand_ins += [(trunk, name, self._encode) for name in encoders if hasattr(trunk, name)]
        self._name_in_graphs = graph_ops.register(self)
        # Both operators of a compiled pass write to it, which keeps them in order (`graph_ops`).
        self._ledger = torch.zeros(1, dtype=torch.int64)
        self._begun_in_graph: tuple[ForwardTokens, Pass] | None = None
        self._counts_executed = False

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, which has a name of its own in graphs
        self.__dict__ |= state
        self._name_in_graphs = graph_ops.register(self)

    def read_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardTokens:
        return ForwardTokens.of_call(self.trunk, self.names, self.images, args, kwargs)

    def _encode(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = encode(*args, **kwargs)
        if self.images is not None and not self.passes and not torch.compiler.is_compiling():
            self.images.attach_digests(result, kwargs)
        return result

    def open_others(self, current: Pass) -> Sequence[tuple[Any, Any]]:
        """Open the indexers, which must choose if their choices are kept or forced."""
        assert self.found_indexers is not None, "they are the others"
        if uses_indexers(current):
            current.num_expected += len(self.others)
        return self.found_indexers.passes(current, len(self.routers))

    def run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the whole model, of which the trunk is a part, and show its losses the executed selection."""
        spec = self.spec
        counts = ExecutedCounts(lambda: self.executed, None if spec.sizes else (spec.num_experts, spec.top_k))
        self.executed, self._counts_executed = None, True
        try:
            with counts:
                result = forward(*args, **kwargs)
            counts.require_counted(has_loss=isinstance(getattr(result, "aux_loss", None), Tensor))
        finally:
            self.executed, self._counts_executed = None, False
        return result

    def run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trunk as one pass; where it is traced into a graph, its pass is made of operators of that."""
        if torch.compiler.is_compiling():
            return self._run_in_graph(self.read_args(args, kwargs), forward, args, kwargs)
        if self._counts_executed:
            forward = partial(self._keep_executed, forward)
        return super().run_trunk(forward, *args, **kwargs)

    def _keep_executed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trunk in its pass, and keep what that executed for `run_model`."""
        result = forward(*args, **kwargs)
        self.executed = self.passes.current.executed_LRK
        return result

    def run_compiled(
        self, path: str, hooks: Sequence[SelectionHook], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.passes and not torch.compiler.is_compiling() and uses_indexers(self.passes.current):
            raise _indexers_in_graph(path)
        return super().run_compiled(path, hooks, call, *args, **kwargs)

    def _run_in_graph(
        self, batch: ForwardTokens, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        past: Any = batch.past  # of a static cache a tensor, whose value as an int would be a part of the graph
        counted = past if isinstance(past, Tensor) else None
        ids_LRK = graph_ops.begin_pass(
            self._name_in_graphs,
            self._ledger,
            batch.input_ids,
            batch.mask,
            batch.position_ids,
            batch.cumulative,
            None if self.images is None else self.images.digests(batch.input_ids, batch.pixels),
            past if counted is None else 0,
            counted,
            batch.begins,
            batch.is_masked,
            batch.keeps_cache,
        )
        rows = Rows(ids_LRK) if self.options.routes else None
        current = self.open_pass(rows, batch.num_router_rows, batch.device)
        with self.passes.running(current):
            result = forward(*args, **kwargs)
        self.executed = current.executed_LRK if self._counts_executed else None
        kept = [each for each in (current.native_LRK, current.margin_LR, current.deficit_LR) if each is not None]
        graph_ops.end_pass(self._name_in_graphs, self._ledger, current.calls_L, kept)
        return result

    def begin_from_graph(self, batch: ForwardTokens) -> Tensor:
        """Begin a compiled pass, and return `Rows.ids_LRK`, empty without replay."""
        self.sessions.require_mine("runs a model")
        rows = self.begin_pass(batch)
        current = self.open_pass(rows, batch.num_router_rows, batch.device)
        if uses_indexers(current):
            raise _indexers_in_graph("the model")
        self._begun_in_graph = batch, current
        if rows is not None:
            return rows.ids_LRK
        shape, dtype = self.shapes_for_graph(batch.num_router_rows)
        return torch.empty(shape, dtype=dtype, device=batch.device)

    def end_from_graph(self, calls_L: Tensor, kept: list[Tensor]) -> None:
        """End it, with what routers observed."""
        assert self._begun_in_graph is not None, "a compiled pass ends after it has begun"
        (batch, current), self._begun_in_graph = self._begun_in_graph, None
        current.calls_L = calls_L
        self.require_each_once(current)
        # a CUDA graph writes what is kept of the next pass to the same addresses
        current.native_LRK, *kept = (tensor.clone() for tensor in kept)
        if current.margin_LR is not None:
            current.margin_LR, *kept = kept
        if current.deficit_LR is not None:
            [current.deficit_LR] = kept
        for each in list(self.interceptors):
            each.end_pass(self.chunk, batch, current)

    def shapes_for_graph(self, num_router_rows: int) -> tuple[list[int], torch.dtype]:
        """Say shape and dtype of the ids that `begin_from_graph` returns."""
        return [self.spec.num_layers, num_router_rows if self.options.routes else 0, self.spec.top_k], self.id_dtype


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each once, and the buffers that are saved with them."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _refuse_batches(*_: object, **__: object) -> Any:
    raise ReplayError(
        "continuous batching (generate_batch) runs the model in a thread of its own, on parts of sequences in an order "
        "of its own, which can neither be recorded nor replayed; call generate() in the session"
    )


def uses_indexers(current: Pass) -> bool:
    """Say whether choices of indexers are kept or forced in a pass."""
    return current.options.others or (isinstance(current.rows, ReplayRows) and current.rows.indexers is not None)


def _indexers_in_graph(path: str) -> ReplayError:
    return ReplayError(
        f"choices of indexers are recorded and replayed in eager mode alone, and {path} is compiled; take "
        "torch.compile off it, or leave them out of the session"
    )


def looked_up(table_VK: Tensor, tokens_N: NDArray[np.int32]) -> NDArray[Any]:
    """Look up the experts of tokens, integers [N, K], in a router's table [vocabulary, K]."""
    if len(tokens_N) and int(tokens_N.max()) >= len(table_VK):
        raise BatchMismatchError(
            f"the trace holds token {int(tokens_N.max())}, and the model's table of experts has {len(table_VK)}; it is "
            "of another model"
        )
    tokens = torch.from_numpy(tokens_N.astype(np.int64)).to(table_VK.device)
    return np.asarray(table_VK[tokens].cpu().numpy())


def require_looked_up(trace: RoutingTrace, position: int, table_VK: Tensor) -> None:
    """Raise `BatchMismatchError` unless the hash layer at `position` holds what its table says for each token."""
    routed = trace.valid_N
    expected_NK = looked_up(table_VK, trace.token_ids_N[routed])
    given_NK = trace.expert_ids_NLK[routed, position, : trace.spec.picks_L[position]]
    wrong = np.flatnonzero(~same_sets(given_NK, expected_NK))
    if len(wrong):
        row = int(np.flatnonzero(routed)[wrong[0]])
        raise BatchMismatchError(
            f"{trace.spec.layers[position]} routes by a table of tokens, and {len(wrong)} of {len(expected_NK)} rows "
            f"of the trace disagree with it; the first is row {row}, token {int(trace.token_ids_N[row])}: experts "
            f"{given_NK[wrong[0]].tolist()} instead of {expected_NK[wrong[0]].tolist()}. Routes and tokens are shifted "
            "against each other, or the trace is of another model"
        )
