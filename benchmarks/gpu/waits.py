"""How often sessions make the host wait for the device, and what they launch, beyond what the unpatched model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Decoding
from benchmarks.gpu.counting import Counts, waits_on_cuda
from benchmarks.gpu.layers import SMALL_LAYER, layered_model, random_tokens, use_experts
from benchmarks.gpu.part import Part, Skipped
from benchmarks.gpu.stand_in import Counting, StandInTensor, move_to_stand_in
from foreroute.adapters import hf

VOCABULARY = 256


def measure_waits(part: Part, bench: Bench, decoding: Decoding | None) -> None:
    """Of the host for the device, beyond those of the unpatched forward. The counter is shown one that it must see."""
    if part.device.type != "cuda":
        part.record(**modelled())
        return
    if not waits_on_cuda(lambda: bench.batch.sum().item()):
        raise Skipped("PyTorch's sync debug mode sees no wait in an .item() here, so that it would see none elsewhere")
    mask = torch.ones_like(bench.batch)

    def padded() -> None:
        with torch.no_grad():
            bench.routed.model(input_ids=bench.batch, attention_mask=mask, use_cache=False)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "replay": (bench.replayed(bench.forward), bench.forward),
        "replay_without_telemetry": (bench.replayed(bench.forward, telemetry=False), bench.forward),
        "replay_with_mask": (bench.replayed(padded), padded),
        "recording": (bench.recorded(bench.forward), bench.forward),
    }
    if decoding is not None:
        pairs[f"recording_of_{decoding.num_steps}_decode_steps"] = (decoding.recorded(), decoding.steps)
    own = []
    for name, (candidate, baseline) in pairs.items():
        without, with_it = (waits_on_cuda(work) for work in (baseline, candidate))
        own += dict.fromkeys(_own(name, with_it))
        part.record(**{f"syncs_added_by_{name}": len(with_it) - len(without)})
    part.record(syncs_added_by_replay_aim="<= 0", syncs_of_foreroute=own)


def modelled() -> dict[str, Any]:
    """Waits and launches that replay and recording add, counted on a device that stands in for a GPU.

    Returns:
        `modelled_syncs_added_by_*`; `modelled_launches_added_*`, for each layer, and for each forward beside them.
    """
    counted = {num_layers: _counted_on_stand_in(num_layers) for num_layers in (1, 2)}
    figures: dict[str, Any] = {}
    for name, (shallow, plain), (deep, deep_plain) in (
        (name, counted[1][name], counted[2][name]) for name in counted[1]
    ):
        each = (deep.launches - deep_plain.launches) - (shallow.launches - plain.launches)
        figures[f"modelled_syncs_added_by_{name}"] = len(deep.waits) - len(deep_plain.waits)
        figures[f"modelled_launches_added_per_layer_by_{name}"] = each
        figures[f"modelled_launches_added_per_forward_by_{name}"] = shallow.launches - plain.launches - each
    own = [each for name, (found, _) in counted[2].items() for each in _own(name, found.waits)]
    return figures | {"modelled_syncs_added_by_replay_aim": "<= 0", "modelled_syncs_of_foreroute": own}


def _counted_on_stand_in(num_layers: int) -> dict[str, tuple[Counts, Counts]]:
    """What each kind of session does beside what the unpatched model does on the same arguments."""
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

    with Counting() as counting:
        plain, plain_padded = counting.count(bench.forward), counting.count(padded)
        return {
            "replay": (counting.count(bench.replayed(bench.forward)), plain),
            "replay_without_telemetry": (counting.count(bench.replayed(bench.forward, telemetry=False)), plain),
            "replay_with_mask": (counting.count(bench.replayed(padded)), plain_padded),
            "recording": (counting.count(bench.recorded(bench.forward)), plain),
        }


def _own(name: str, waits: list[str]) -> list[str]:
    """Those that the library itself asks for, each as "session: file:line"."""
    return [f"{name}: {each}" for each in waits if each.startswith("foreroute/")]
