"""One trajectory from the captures of its turns: tool outputs, prefix-cache hits, aborted and resumed rollouts."""

from __future__ import annotations

from typing import Self

from foreroute.errors import CaptureError, shown
from foreroute.trace import RoutingSpec, RoutingTrace, extended


class Trajectory:
    """Collects the captures of one growing sequence.

    Every capture brings *all* tokens so far. A row that an earlier capture routed keeps its routes and weight version,
    because an engine that resumes a request routes its prefix again, maybe under new weights, while the sampled
    log-probabilities come from the first time. Rows that no capture brings stay absent.

        trajectory = Trajectory(spec)
        trajectory.add(decode(first_response, model=spec, token_ids=tokens, weight_version=3))
        trajectory.add(decode(second, model=spec, token_ids=tokens_with_tool_output, start=41, weight_version=4))
        trace = trajectory.trace()
    """

    def __init__(self, spec: RoutingSpec) -> None:
        self._trace = RoutingTrace.unrouted(spec, [[]])

    def add(self, capture: RoutingTrace) -> Self:
        """Extend the trajectory by a decoded capture of one sequence.

        Args:
            capture: the whole sequence so far, as `decode` or `RoutingTrace.from_rows` makes it; its absent rows leave
                what is known alone.

        Returns:
            The trajectory itself.

        Raises:
            CaptureError: when the capture is no trace of one sequence.
            BatchMismatchError: when it does not begin with the tokens so far (text that was tokenised again).
            SpecMismatchError: when it is of another model.
        """
        if not isinstance(capture, RoutingTrace) or len(capture) != 1:
            raise CaptureError(f"the capture is {shown(capture)}; expected a RoutingTrace of one sequence")
        self._trace = extended(self._trace, capture)
        return self

    def trace(self) -> RoutingTrace:
        """Return the trajectory so far: one sequence, absent where no capture had a row."""
        return self._trace
