"""How often sessions make the host wait for the device, beyond what the unpatched model does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Decoding
from benchmarks.gpu.counting import waits_on_cuda
from benchmarks.gpu.part import Part, Skipped

Session = Callable[[], AbstractContextManager[object]]
"""Opens one."""


def measure_waits(part: Part, bench: Bench, decoding: Decoding | None) -> None:
    """Of the host for the device in a session, its opening and its end, beyond those of the unpatched forward.

    The counter is shown one wait that it must see.
    """
    if part.device.type != "cuda":
        raise Skipped(
            "only a GPU is waited for; `python -m benchmarks replay` counts on a device that stands in for one"
        )
    if not waits_on_cuda(lambda: bench.batch.sum().item()):
        raise Skipped("PyTorch's sync debug mode sees no wait in an .item() here, so that it would see none elsewhere")
    mask = torch.ones_like(bench.batch)

    def padded() -> None:
        with torch.no_grad():
            bench.routed.model(input_ids=bench.batch, attention_mask=mask, use_cache=False)

    replay = partial(bench.routed.replay, bench.trace)
    kinds: dict[str, tuple[Session, Callable[[], object]]] = {
        "replay": (partial(replay, telemetry=True), bench.forward),
        "replay_without_telemetry": (replay, bench.forward),
        "replay_with_mask": (partial(replay, telemetry=True), padded),
        "recording": (bench.routed.record, bench.forward),
    }
    if decoding is not None:
        kinds[f"recording_of_{decoding.num_steps}_decode_steps"] = (bench.routed.record, decoding.steps)
    own: list[str] = []
    for name, (session, work) in kinds.items():
        without, whole = waits_on_cuda(work), waits_on_cuda(_whole(session, work))
        own += dict.fromkeys(f"{name}: {place}" for place in whole if place.startswith("foreroute/"))
        part.record(**{f"syncs_added_by_{name}": len(whole) - len(without)})
    part.record(syncs_added_by_replay_aim="<= 0", syncs_of_foreroute=own)


def _whole(session: Session, work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with session():
            work()

    return run
