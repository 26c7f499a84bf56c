"""A session that replayed nothing, or whose loss mask nobody read, is an error."""

from __future__ import annotations

from foreroute.errors import ReplayError


def require_effect(num_forwards: int, *, owes_mask: bool) -> None:
    """Called when a session ends without an error.

    Args:
        num_forwards: of the attached model in the session.
        owes_mask: rows were dropped, and the mask that says which was not read.

    Raises:
        ReplayError: when it was a session in name only.
    """
    if not num_forwards:
        raise ReplayError("nothing was replayed: no forward of the attached model ran in the replay() session")
    if owes_mask:
        raise ReplayError(
            'rows were missing and missing="drop" was asked for, but nobody read the loss mask: multiply the '
            'loss of each token by session.loss_mask_BT, or let the model route such rows with missing="native"'
        )
