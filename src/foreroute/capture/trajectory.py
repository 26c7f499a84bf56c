"""One trajectory from the captures of its turns: tool outputs, prefix-cache hits, aborted and resumed rollouts."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from foreroute.errors import CaptureError, shown
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace, extended
from foreroute.trace.checks import as_array
from foreroute.trace.spec import whole_number


class Trajectory:
    """Collects the captures of one growing sequence.

    Every capture brings *all* tokens so far. A row that an earlier capture routed keeps its routes and weight version,
    because an engine that resumes a request routes its prefix again, maybe under new weights, while the sampled
    log-probabilities come from the first time. Rows that no capture brings stay absent.

        trajectory = Trajectory(spec)
        trajectory.add(decode(first_response, model=spec, token_ids=tokens, weight_version=3))
        trajectory.add_turn(tokens_with_tool_output_and_answer, new_rows, start=41, weight_version=4)
        trace = trajectory.trace()
    """

    def __init__(self, spec: RoutingSpec) -> None:
        self._trace = RoutingTrace.unrouted(spec, [[]])

    def add(self, capture: RoutingTrace, *, replace_routed: bool = False) -> Self:
        """Extend the trajectory by a decoded capture of one sequence.

        Args:
            capture: the whole sequence so far; its absent rows leave what is known alone.
            replace_routed: take rows that were routed before from `capture`.

        Raises:
            CaptureError: when the capture is no trace of one sequence.
            BatchMismatchError: when it does not begin with the tokens so far (text that was tokenised again).
            SpecMismatchError: when it is of another model.
        """
        if not isinstance(capture, RoutingTrace):
            raise CaptureError(f"the capture is {shown(capture)}; expected a RoutingTrace, such as decode returns")
        if len(capture) != 1:
            raise CaptureError(f"a trajectory is one sequence, the capture has {len(capture)}; select one of them")
        self._trace = extended(self._trace, capture, replace_routed=replace_routed)
        return self

    def add_turn(
        self,
        token_ids_so_far: ArrayLike,
        rows: ArrayLike,
        *,
        start: int = 0,
        weight_version: ArrayLike = NO_VERSION,
        replace_routed: bool = False,
    ) -> Self:
        """Extend the trajectory by rows [R, L, K] for the positions from `start`.

        Args:
            token_ids_so_far: integers [T], the whole sequence so far.
            rows: integers [R, L, K] with start + R <= T, every one routed.
            start: the position of the first row; what lies before it is not in `rows` (a prefix-cache hit, a skipped
                prefix).
            weight_version: the weights of the rows, one integer, or [R] where they differ.
            replace_routed: as in `add`.

        Raises:
            CaptureError: when rows and tokens do not fit each other.
            TraceContentError: for rows that cannot be true.
        """
        tokens, routed = as_array(token_ids_so_far, name="token_ids").reshape(-1), as_array(rows, name="rows")
        versions = as_array(weight_version, name="weight_version")
        spec = self._trace.spec
        start = whole_number(start, name="start", least=0, most=len(tokens), kind=CaptureError)
        if routed.ndim != 3 or start + len(routed) > len(tokens):
            raise CaptureError(
                f"rows of shape {routed.shape} from position {start} do not fit {len(tokens)} tokens; expected [R, "
                f"{spec.num_layers}, {spec.top_k}] with start + R of at most {len(tokens)}"
            )
        if versions.dtype.kind not in "iu" or versions.shape not in ((), (len(routed),)):
            raise CaptureError(
                f"weight_version is {versions.dtype} of shape {versions.shape}; expected one whole number, or one for "
                f"each of {len(routed)} rows"
            )
        whole = np.zeros((len(tokens), *routed.shape[1:]), routed.dtype)
        valid, versions_T = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), versions.dtype)
        here = slice(start, start + len(routed))
        whole[here], valid[here], versions_T[here] = routed, True, versions
        turn = RoutingTrace.from_rows(spec, [tokens], [whole], valid=[valid], weight_versions=[versions_T])
        return self.add(turn, replace_routed=replace_routed)

    def trace(self) -> RoutingTrace:
        """Return the trajectory so far: one sequence, absent where no capture had a row."""
        return self._trace
