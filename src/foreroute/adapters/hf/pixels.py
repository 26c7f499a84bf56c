"""Pixels behind each token of an image: a digest of them for each, recorded and compared in replay.

Families whose forward takes `image_grid_thw` are given the patches of all images of a batch in one tensor, in the order
of the tokens that stand for them: a fixed number of patches for a token, whatever image and sequence it is in.
`generate` encodes images before the first forward; what it hands on takes the digests along.

Digests are made and compared on the device. They find mistakes, and do not protect from malice: 58 bits, of pixels
rounded to bfloat16, the width in which one side of a rollout may have them.

Letters: B rows of a batch of T positions, R = B · T, N rows of a trace, P patches of W numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from foreroute.errors import BatchMismatchError, TraceContentError
from foreroute.trace import PIXELS, DecisionStream, RoutingTrace
from foreroute.trace.checks import as_offsets, place_of

BITS = 29
"""Width of each of the two ids that hold a digest in a trace."""
INPUTS = {
    "image": ("pixel_values", "image_grid_thw", "image_digests"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_digests"),
}
"""Patches and grids that a forward takes; and digests of what was encoded before."""
ENCODED = "mm_encoder_outputs"
OTHERS = ("pixel_values_local", "input_features", ENCODED)
"""Arguments of forwards beside tokens where nothing says to which tokens it belongs."""
ARGUMENTS = frozenset((*INPUTS["image"], *INPUTS["video"], *OTHERS))
MIXING = (0x1C69B3F74AC4AE35, 0x3C79AC492BA7B653, 0x1D8E4E27C47D124F)
"""Odd numbers, by which bits are multiplied modulo 2^64. Files hold what comes of them: they stay."""
NO_PIXELS, UNKNOWN = 0, -1
DIGESTS = "foreroute_digests"
"""Attribute of what became of an image: the digests of its tokens."""


class ImageTokens(NamedTuple):
    """Layout of a family's images among its tokens."""

    image: int  # the token that stands for a piece of an image
    video: int  # that for a piece of a video; `image`, where a family has videos stand behind tokens of images
    patches: int  # how many become a token

    @classmethod
    def of_trunk(cls, trunk: nn.Module, names: list[str]) -> ImageTokens | None:
        """Read those of a trunk whose forward has parameters of these names; None where it does not say by a grid."""
        config: Any = getattr(trunk, "config", None)
        image, merge = getattr(config, "image_token_id", None), None
        if "image_grid_thw" in names:
            merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        if image is None or merge is None:
            return None
        return cls(image, getattr(config, "video_token_id", None) or image, merge**2)

    def digests(self, input_ids: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Digest what stands behind each token, int64 [B, T] on its device, from the arguments of `given_images`."""
        # above 0; NO_PIXELS where a token of an image was given none, UNKNOWN where none belong or who knows which do
        is_image, is_video = input_ids == self.image, input_ids == self.video
        is_video = torch.where(is_video.any(), is_video, is_image)
        found = torch.where(is_image | is_video, NO_PIXELS, UNKNOWN)
        for names, is_piece in zip(INPUTS.values(), (is_image, is_video), strict=True):
            patches, grid_thw, of_token = map(given.get, names)
            if patches is None and of_token is None:
                continue
            of_piece: Tensor | int = UNKNOWN
            if of_token is None:
                of_token = self.of_patches(patches, grid_thw)
            if of_token is not None:
                of_token = of_token.to(input_ids.device)
                # the n-th token of images has the n-th digest, if there are as many
                number = (is_piece.view(-1).cumsum(0) - 1).clamp(0, len(of_token) - 1).view_as(is_piece)
                of_piece = torch.where(is_piece.sum() == len(of_token), of_token[number], UNKNOWN)
            found = torch.where(is_piece, of_piece, found)
        return found

    def of_patches(self, patches_PW: Tensor | None, grid_thw: Tensor | None) -> Tensor | None:
        """Digest each token that these patches become, int64; None where they are laid out in no known way."""
        if patches_PW is None or grid_thw is None or not len(patches_PW) or len(patches_PW) % self.patches:
            return None
        first, second, third = MIXING
        bits = patches_PW.detach().to(torch.bfloat16).reshape(len(patches_PW) // self.patches, -1)
        words = functional.pad(bits, (0, -bits.shape[1] % 4)).view(torch.int64)
        mixed = (words + third * torch.arange(words.shape[1], device=words.device)) * first
        total = ((mixed ^ (mixed >> 32)) * second).sum(1)
        # with the grid of the image that they are in
        grid = grid_thw.to(words.device).long()
        ends = (grid.prod(1) // self.patches).cumsum(0)
        image = torch.searchsorted(ends, torch.arange(len(words), device=words.device), right=True)
        of_image = grid[:, 0] * first + grid[:, 1] * second + grid[:, 2] * third
        total = (total ^ of_image[image.clamp(max=len(grid) - 1)]) * first
        return ((total ^ (total >> 32)) & ((1 << 2 * BITS) - 1)).clamp(min=1)

    def attach_digests(self, encoded: Any, given: dict[str, Any]) -> None:
        """Have what `get_image_features` or `get_video_features` made of these arguments take their digests along."""
        for pixels, grid, _ in INPUTS.values():
            digests = self.of_patches(given.get(pixels), given.get(grid))
            pieces = _pieces(encoded)
            if digests is not None and sum(map(len, pieces)) == len(digests):
                for piece, of_piece in zip(pieces, digests.split([len(piece) for piece in pieces]), strict=True):
                    setattr(piece, DIGESTS, of_piece)


def given_images(given: dict[str, Any]) -> dict[str, Tensor]:
    """Find the arguments of a forward that hold pixels or sounds, their grids, and digests of what was encoded."""
    found = {}
    for media, (pixels, grid, digests) in INPUTS.items():
        pieces = _pieces((given.get(ENCODED) or {}).get(media))
        of_pieces: list[Any] = [getattr(piece, DIGESTS, None) for piece in pieces]
        if any(each is None for each in of_pieces):
            found[ENCODED] = pieces[0]
        elif pieces:
            found[digests] = torch.cat(of_pieces)
        found |= {name: given[name] for name in (pixels, grid) if isinstance(given.get(name), Tensor)}
    return found | {name: given[name] for name in OTHERS if isinstance(given.get(name), Tensor)}


def pixel_stream(digest_N: NDArray[np.int64]) -> DecisionStream:
    """Make the stream of digests, int64 [N]: two ids for each, none where no pixels were given."""
    given = digest_N > 0
    # A set has different ids below 2^31: bit 29 tells the upper half of a digest from the lower.
    ids = np.stack([digest_N & ((1 << BITS) - 1), (digest_N >> BITS) | 1 << BITS], axis=1)[given]
    offsets = as_offsets(2 * given.astype(np.int64))
    return DecisionStream(2 << BITS, digest_N >= 0, offsets, ids.reshape(-1).astype(np.int32))


def digests_of(trace: RoutingTrace) -> NDArray[np.int64]:
    """Read what `pixel_stream` was made of, int64 [N]."""
    stream = trace.streams[PIXELS]
    counts = np.diff(stream.offsets)
    if stream.num_choices != 2 << BITS or stream.layers or not np.isin(counts, (0, 2)).all():
        raise TraceContentError(f"the stream {PIXELS} has {stream}; expected digests, of two ids below {2 << BITS}")
    low, high = stream.ids.astype(np.int64).reshape(-1, 2).T
    digest_N = np.where(stream.valid_N, NO_PIXELS, UNKNOWN)
    digest_N[counts == 2] = low | (high & ((1 << BITS) - 1)) << BITS
    return digest_N


def refuse_other_pixels(trace: RoutingTrace, row_R: NDArray[np.int64], digest_R: NDArray[np.int64]) -> None:
    """Raise `BatchMismatchError` where a batch has other pixels behind a token than the trace, at rows `row_R`."""
    expected_R = np.where(row_R >= 0, digests_of(trace)[row_R], UNKNOWN)
    wrong = np.flatnonzero((expected_R >= 0) & (expected_R != digest_R))
    if not len(wrong):
        return
    s, position = place_of(int(row_R[wrong[0]]), trace.offsets)
    seen, known = digest_R[wrong[0]], expected_R[wrong[0]]
    what = "no pixels" if seen <= 0 else "pixels" if known == NO_PIXELS else "the pixels of another image"
    raise BatchMismatchError(
        f"sequence {s}, position {position}: the batch has {what} behind the token of an image, and the trace was "
        f"recorded with {'none' if known == NO_PIXELS else 'others'}. Give the images of the rollout, in the order of "
        f'the sequences; trace.without_streams("{PIXELS}") replays without comparing them'
    )


def warn_of_unbound(names: tuple[str, ...], digests_BT: NDArray[np.int64] | None) -> None:
    """Warn of arguments of a forward, of `given_images`, to whose values a trace with these digests is not bound."""
    is_bound = digests_BT is not None and bool((digests_BT > 0).any())
    if loose := [name for name in names if name in OTHERS or not is_bound]:
        warnings.warn(
            f"{', '.join(loose)}: it is not known which of them belong to which tokens, so that the trace has no "
            "digest of them, and replay with others is not noticed",
            stacklevel=2,
        )


def _pieces(encoded: Any) -> Sequence[Tensor]:
    """Give a tensor [tokens, D] for each image that was encoded."""
    pieces = getattr(encoded, "pooler_output", None)
    return pieces if isinstance(pieces, list | tuple) else () if pieces is None else [pieces]
