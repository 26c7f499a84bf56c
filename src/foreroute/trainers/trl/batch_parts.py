"""Batches of TRL, cut into the parts that it gives to a model one after the other, images included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreroute.errors import ConfigError

OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""What TRL's batches say of each token beside images, [B, T]."""


class BatchPart(NamedTuple):
    """The arguments of one forward."""

    rows: slice  # of the batch
    input_ids: Tensor
    attention_mask: Tensor
    options: dict[str, Any]  # TRL's further arguments


def cut_batch(
    input_ids: Tensor, attention_mask: Tensor, options: dict[str, Any], batch_size: int | None
) -> list[BatchPart]:
    """Cut a batch as TRL's `_get_per_token_logps_and_entropies` does. Images go with the sequences that they are in."""
    size, num_rows = batch_size or len(input_ids), len(input_ids)
    parts = [slice(first, first + size) for first in range(0, num_rows, size)]
    found = {name for name, value in options.items() if isinstance(value, Tensor | list)}
    if not found or len(parts) == 1:
        return [BatchPart(rows, input_ids[rows], attention_mask[rows], options) for rows in parts]
    known = {"num_images", *OF_TOKENS} | ({"pixel_values", "image_grid_thw"} if "image_grid_thw" in found else set())
    if others := sorted(found - known):
        raise ConfigError(
            f"the batch holds {', '.join(others)}, and routing replay cuts batches of images by "
            "image_grid_thw alone; let per_device_train_batch_size be all sequences of a rollout, or take replay='none'"
        )
    # the host waits for the grids once, before the first forward; TRL waits for them in each part
    patches = options["image_grid_thw"].prod(1).tolist() if "image_grid_thw" in found else []
    return [
        BatchPart(rows, input_ids[rows], attention_mask[rows], _options_of(options, found, rows, patches))
        for rows in parts
    ]


def join_results(results: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Join results of parts of a batch: rows one after another, scalars averaged, what is None left None."""
    return tuple(
        None if values[0] is None else torch.cat(values) if values[0].ndim else torch.stack(values).mean()
        for values in zip(*results, strict=True)
    )


def _options_of(options: dict[str, Any], found: set[str], rows: slice, patches: list[int]) -> dict[str, Any]:
    part = options | {name: options[name][rows] for name in found & {"num_images", *OF_TOKENS}}
    if "image_grid_thw" in found:
        first, last = sum(options["num_images"][: rows.start]), sum(options["num_images"][: rows.stop])
        begin, end = sum(patches[:first]), sum(patches[:last])
        images = {
            "image_grid_thw": options["image_grid_thw"][first:last],
            "pixel_values": options["pixel_values"][begin:end],
        }
        part |= images if first < last else dict.fromkeys([*images, "num_images"])
    return part
