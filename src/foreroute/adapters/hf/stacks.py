"""Both stacks of an encoder-decoder. Each is given tokens of its own, so that each has a trace of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import nn

from foreroute.adapters.hf.attaching import attached, num_stacks
from foreroute.adapters.hf.model import RoutedTransformer
from foreroute.core.attaching import attach as prove_whole
from foreroute.core.attaching import require_attachable
from foreroute.core.find import find_routers
from foreroute.errors import AttachError, BatchMismatchError, ConfigError
from foreroute.replay.session import ReplaySession
from foreroute.trace import LayerKind, RoutingTrace

if TYPE_CHECKING:
    from foreroute.replay.recording import Recording

Each = TypeVar("Each")


class OfStacks(NamedTuple, Generic[Each]):
    """One for each stack.

    Attributes:
        encoder: of `input_ids`.
        decoder: of `decoder_input_ids`.
    """

    encoder: Each
    decoder: Each


def attach_stacks(model: nn.Module) -> RoutedStacks:
    """Make the routing of both stacks of an encoder-decoder recordable and replayable, as `attach`.

    The whole model is proven first, both stacks in one forward, and then each stack.

    Args:
        model: a transformers model with routers in its encoder and in its decoder.

    Raises:
        AttachError: as `attach`, and for a model without routers in two stacks.
        ReplayError: as `attach`.
    """
    require_attachable(model)
    if num_stacks(find_routers(model)) != len(OfStacks._fields) or not hasattr(model, "get_encoder"):
        raise AttachError(f"{type(model).__name__} does not route in an encoder and in a decoder; use attach(model)")
    prove_whole(model)
    parts: list[tuple[nn.Module, LayerKind]] = [
        (model.get_encoder(), LayerKind.ENCODER),  # type: ignore[operator]
        (model.get_decoder(), LayerKind.DECODER),  # type: ignore[operator]
    ]
    return RoutedStacks(model, OfStacks(*[attached(part, find_routers(part), kind) for part, kind in parts]))


class RoutedStacks:
    """Recording and replaying sessions of both stacks of one encoder-decoder. Made by `attach_stacks`.

    Attributes:
        model: the model that was attached.
        stacks: each as a model of its own: `stacks.encoder.spec` has its layers, of the kind "encoder".
    """

    def __init__(self, model: nn.Module, stacks: OfStacks[RoutedTransformer]) -> None:
        self.model = model
        self.stacks = stacks

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of all routers, those of the encoder first."""
        return [parameter for stack in self.stacks for parameter in stack.router_parameters()]

    @contextmanager
    def record(self, **options: Any) -> Iterator[OfStacks[Recording]]:
        """Record both stacks in every forward of the model while the context is open.

        Args:
            options: those of `RoutedTransformer.record`, for both.

        Yields:
            A recording of each. Under `generate` the encoder runs once, and `decoder.rollout(sampled)` is the trace of
            what was sampled, start token included.
        """
        with ExitStack() as opened:
            yield OfStacks(*[opened.enter_context(stack.record(**options)) for stack in self.stacks])

    @contextmanager
    def replay(self, traces: Sequence[RoutingTrace], **options: Any) -> Iterator[OfStacks[ReplaySession]]:
        """Force routes in both stacks in every forward of the model while the context is open.

        Args:
            traces: of the encoder's tokens, and of the decoder's.
            options: those of `RoutedTransformer.replay`, for both, without a layout. `counts` must be "native".

        Yields:
            A session of each.

        Raises:
            ConfigError: when there are not two traces, and for `counts="replayed"`.
            BatchMismatchError: when a row of the encoder has no route, and `missing` is not "native".
        """
        if not isinstance(traces, list | tuple) or len(traces) != len(self.stacks):
            raise ConfigError(
                f"what is to be replayed is a {type(traces).__name__}; expected two: a trace of the encoder's "
                "tokens and one of the decoder's, such as [recording.trace() for recording in recordings]"
            )
        if options.get("counts", "native") != "native":
            raise ConfigError(
                f"counts is {options['counts']!r}; auxiliary losses of an encoder-decoder are computed behind both "
                'stacks, of what its routers select by themselves. Replay with counts="native"'
            )
        lacking = isinstance(traces[0], RoutingTrace) and not traces[0].valid_N.all()
        if lacking and options.get("missing", "error") != "native":
            raise BatchMismatchError(
                f"{int((~traces[0].valid_N).sum())} rows of the encoder have no route, on which every token of their "
                'sequence depends. Record them, or let the model route them with missing="native"'
            )
        with ExitStack() as opened:
            sessions = [
                opened.enter_context(stack.replay(trace, **options))
                for stack, trace in zip(self.stacks, traces, strict=True)
            ]
            yield OfStacks(*sessions)
