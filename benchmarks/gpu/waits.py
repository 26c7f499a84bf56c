"""How often sessions make the host wait for the device, and what they launch, beyond what the unpatched model does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Decoding
from benchmarks.gpu.counting import Counts, waits_on_cuda
from benchmarks.gpu.layers import SMALL_LAYER, layered_model, random_tokens, use_experts
from benchmarks.gpu.part import Part, Skipped
from benchmarks.gpu.stand_in import Counting, StandInTensor, move_to_stand_in
from foreroute.adapters import hf

VOCABULARY = 256
Session = Callable[[], AbstractContextManager[object]]
"""Opens one."""


def measure_waits(part: Part, bench: Bench, decoding: Decoding | None) -> None:
    """Of the host for the device in a session, its opening and its end, beyond those of the unpatched forward.

    The counter is shown one wait that it must see.
    """
    if part.device.type != "cuda":
        part.record(**modelled())
        return
    if not waits_on_cuda(lambda: bench.batch.sum().item()):
        raise Skipped("PyTorch's sync debug mode sees no wait in an .item() here, so that it would see none elsewhere")
    mask = torch.ones_like(bench.batch)

    def padded() -> None:
        with torch.no_grad():
            bench.routed.model(input_ids=bench.batch, attention_mask=mask, use_cache=False)

    kinds = _kinds(bench, padded)
    if decoding is not None:
        kinds[f"recording_of_{decoding.num_steps}_decode_steps"] = (bench.routed.record, decoding.steps)
    own: list[str] = []
    for name, (session, work) in kinds.items():
        without, whole = waits_on_cuda(work), waits_on_cuda(_whole(session, work))
        own += dict.fromkeys(_own(name, whole))
        part.record(**{f"syncs_added_by_{name}": len(whole) - len(without)})
    part.record(syncs_added_by_replay_aim="<= 0", syncs_of_foreroute=own)


def modelled() -> dict[str, Any]:
    """Waits and launches that replay and recording add, counted on a device that stands in for a GPU.

    Returns:
        `modelled_syncs_*`; `modelled_launches_added_*`, for each layer, and for each forward beside them.
    """
    counted = {num_layers: _counted_on_stand_in(num_layers) for num_layers in (1, 2)}
    figures: dict[str, Any] = {}
    own = []
    for name, (plain, whole) in counted[2].items():
        shallow_plain, shallow = counted[1][name]
        each = (whole.launches - plain.launches) - (shallow.launches - shallow_plain.launches)
        figures[f"modelled_syncs_added_by_{name}"] = len(whole.waits) - len(plain.waits)
        figures[f"modelled_launches_added_per_layer_by_{name}"] = each
        figures[f"modelled_launches_added_per_forward_by_{name}"] = shallow.launches - shallow_plain.launches - each
        own += _own(name, whole.waits)
    return figures | {"modelled_syncs_added_by_replay_aim": "<= 0", "modelled_syncs_of_foreroute": own}


def _counted_on_stand_in(num_layers: int) -> dict[str, tuple[Counts, Counts]]:
    """Of each kind of session: the unpatched forward, and a session around one."""
    model = layered_model(torch.device("cpu"), num_layers, VOCABULARY, SMALL_LAYER, dtype=torch.float32)
    use_experts(model, "batched_mm")  # the others ask what kind of device it is
    model.set_attn_implementation("eager")
    host = Bench.of(hf.attach(model), random_tokens(torch.device("cpu"), VOCABULARY, (2, 16)))
    move_to_stand_in(model)
    bench = Bench(host.routed, StandInTensor(host.batch), host.trace)
    mask = StandInTensor(torch.ones_like(host.batch))

    def padded() -> None:
        with torch.no_grad():
            model(input_ids=bench.batch, attention_mask=mask, use_cache=False)

    found = {}
    with Counting() as counting:
        for name, (session, work) in _kinds(bench, padded).items():
            found[name] = counting.count(work), counting.count(_whole(session, work))
    return found


def _kinds(bench: Bench, padded: Callable[[], object]) -> dict[str, tuple[Session, Callable[[], object]]]:
    """Sessions, and a forward for each; `padded` is the one that is given a mask."""
    replay = partial(bench.routed.replay, bench.trace)
    return {
        "replay": (partial(replay, telemetry=True), bench.forward),
        "replay_without_telemetry": (replay, bench.forward),
        "replay_with_mask": (partial(replay, telemetry=True), padded),
        "recording": (bench.routed.record, bench.forward),
    }


def _whole(session: Session, work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with session():
            work()

    return run


def _own(name: str, waits: list[str]) -> list[str]:
    """Those that the library itself asks for, each as "session: file:line"."""
    return [f"{name}: {each}" for each in waits if each.startswith("foreroute/")]
