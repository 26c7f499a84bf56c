"""The trace of a step in a folder: written in parts by several processes, and read in part by many others.

    rollout worker 0 ──▶ part-00000-of-00003-125.safetensors ──▶ rank 0: sequences 7 and 130, in layers 0 to 11
    rollout worker 1 ──▶ part-00001-of-00003-120.safetensors ──▶ rank 1: sequences 8, 9 and 301, in layers 12 to 23
    rollout worker 2 ──▶ part-00002-of-00003-131.safetensors     ...

A part is a trace file, which is there whole or not at all. Names are the index: which part this is, of how many, and
how many sequences it has. So writers share nothing, a step is whole when its last name is there, and a reader opens
those parts alone that hold its sequences. Sequences are numbered through all parts, in order. `docs/formats.md` says
what a store must promise.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from foreroute.checks import as_numbers, whole_number
from foreroute.errors import TraceContentError, TraceFileError, few, shown
from foreroute.files.container import as_location
from foreroute.files.locations import names_in, within
from foreroute.trace.checks import as_offsets
from foreroute.trace.container import RoutingTrace, concatenate
from foreroute.trace.file import FORMAT, Encoding, encode, read_trace
from foreroute.trace.spec import RoutedLayer

MOST_PARTS = 99_999
NAME = re.compile(r"part-([0-9]{5})-of-([0-9]{5})-([0-9]{1,9})\.safetensors")
CHUNK_ROWS = 256
"""Rows from which a sequence has a chunk of its own. Smaller ones take more bytes, by the tables of a frame."""
READERS = 8
"""Parts that are read at a time from a URL, which answers in tens of milliseconds. Files are read one by one."""
POLL_S = 0.5


def save_part(
    trace: RoutingTrace, folder: str | os.PathLike[str], part: int, parts: int, *, encoding: Encoding = "sets"
) -> Path | str:
    """Write part `part`, from 0, of the `parts` of a step, each by whoever has its sequences, and return where it is.

    A part is written once. What sequences share is stored with each, so that each is read alone.

    Args:
        trace: the sequences of this part.
        folder: of the step, a path or a URL. It is made, if it is not there.
        part: below `parts`.
        parts: how many the step has, 99,999 at most.
        encoding: as in `foreroute.save`; of all parts the same.

    Raises:
        TraceFileError: when the part is there already, or cannot be written.
        TraceContentError: as in `foreroute.save`, and when there cannot be such a part.
    """
    of = whole_number(parts, name="parts", most=MOST_PARTS)
    number = whole_number(part, name="part", least=0, most=of - 1)
    begins = f"part-{number:05d}-of-{of:05d}-"
    step = as_location(folder, TraceFileError)
    if there := [name for name in names_in(step, TraceFileError) if name.startswith(begins)]:
        raise TraceFileError(f"{folder} has part {number} already, {few(there)}; write a step again in another folder")
    location = within(step, f"{begins}{len(trace)}.safetensors")
    return FORMAT.write(location, *encode(trace, encoding, chunk_rows=CHUNK_ROWS), overwrite=False)


def load_parts(
    folder: str | os.PathLike[str],
    *,
    sequences: ArrayLike | None = None,
    layers: Iterable[RoutedLayer] | None = None,
    streams: Iterable[str] | None = None,
    wait_s: float = 0.0,
) -> RoutingTrace:
    """Read the sequences, layers and streams that a rank needs of a step, once all parts of it are there.

    Args:
        folder: of the step, a path or a URL.
        sequences: integers [S'], numbered through all parts, in any order; all in order when left out.
        layers: as in `foreroute.load`, like `streams`.
        streams: names.
        wait_s: seconds to wait for parts that are not there yet.

    Raises:
        TraceFileError: when parts are missing after `wait_s`, contradict each other, or are damaged.
        TraceContentError: when a sequence or a stream is not there, or no layer is asked for.
        SpecMismatchError: when a layer is not there, or parts are of different models.
    """
    step = as_location(folder, TraceFileError)
    names, counts = _parts_of(step, wait_s)
    starts = as_offsets(np.array(counts, np.int64))
    chosen = (
        np.arange(starts[-1]) if sequences is None else as_numbers(sequences, name="sequences", below=int(starts[-1]))
    )
    order = np.argsort(chosen, kind="stable")  # as they lie in the parts, so that nothing is copied while it is read
    part_of = np.searchsorted(starts, chosen[order], side="right") - 1
    touched = np.unique(part_of).tolist() or [0]  # without a sequence, for the model alone
    table, wanted = None if layers is None else tuple(layers), None if streams is None else tuple(streams)

    def read(part: int) -> RoutingTrace:
        numbers = chosen[order][part_of == part] - starts[part]
        return read_trace(within(step, names[part]), numbers, table, wanted, num_sequences=counts[part])[0]

    with ThreadPoolExecutor(READERS if isinstance(step, str) else 1) as readers:
        traces = list(readers.map(read, touched))
    for part, trace in zip(touched, traces, strict=True):
        traces[0].spec.require_same(trace.spec, what=names[part])
    joined = concatenate(traces) if len(traces) > 1 else traces[0]
    return joined if (np.diff(order) == 1).all() else joined.select(np.argsort(order))


def _parts_of(folder: Path | str, wait_s: float) -> tuple[list[str], list[int]]:
    """Return the names and the sequences of all parts, in order, once they are there."""
    if not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
        raise TraceContentError(f"wait_s is {shown(wait_s)}; expected seconds from 0")
    until = time.monotonic() + wait_s
    while True:
        matches = [match for name in names_in(folder, TraceFileError) if (match := NAME.fullmatch(name))]
        numbers = [(int(match[1]), int(match[2]), int(match[3])) for match in matches]
        found = {part: (match[0], count) for match, (part, _, count) in zip(matches, numbers, strict=True)}
        totals = {of for _, of, _ in numbers}
        if len(totals) > 1 or len(found) < len(numbers) or any(part >= of for part, of, _ in numbers):
            raise TraceFileError(
                f"{folder} has {few(match[0] for match in matches)}; expected each part once, numbered from 0, of one "
                "number of parts. Give each step a folder of its own"
            )
        num_parts = max(totals, default=0)
        if len(found) == num_parts > 0:
            return [found[part][0] for part in range(num_parts)], [found[part][1] for part in range(num_parts)]
        if (left := until - time.monotonic()) <= 0:
            missing = few(f"{part:05d}" for part in range(num_parts) if part not in found)
            raise TraceFileError(
                f"{folder} has {len(found)} of {num_parts} parts after {wait_s:g} s{'; it lacks ' * bool(missing)}"
                f"{missing}. Wait longer, or look after who writes them"
            )
        time.sleep(min(POLL_S, left))
