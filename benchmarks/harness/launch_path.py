"""Replay on the launch path of a forward: waits of the host for the device, and operators.

Both are counted on a device that stands in for a GPU, beyond what the unpatched model does there.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.models import CPU, Sizes, gpt_model, start_megatron
from foreroute.adapters import hf
from foreroute.layout import pad
from foreroute.testing.counting_device import DEVICE, OtherDevice, other_device
from foreroute.testing.models import FAMILIES
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutingTrace

LENGTHS, VOCABULARY, NUM_LAYERS = (9, 6, 4), 50, 4
Batch = dict[str, Tensor]


def begun() -> Callable[[], dict[str, Any]]:
    """Begin to count, in processes beside this one; what is returned waits for them.

    It gives `waits`, of the host in one replayed forward, the most of any batch, and by batch; and `aten`, operators
    added to a forward and to forward plus backward of a padded batch, whose rows were made before, and to the first
    forward.
    """
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))  # one stands in for CUDA as a whole
    of_megatron, of_hugging_face = pool.submit(_of_megatron), pool.submit(_of_hugging_face)
    pool.shutdown(wait=False)

    def counted() -> dict[str, Any]:
        hf_waits, aten = of_hugging_face.result()
        by_batch = {"hf": hf_waits, "megatron": dict(of_megatron.result())}
        waits: dict[str, Any] = {name: max(found.values()) for name, found in by_batch.items()}
        return {"waits": waits | {"by_batch": by_batch}, "aten": aten}

    return counted


def batches() -> dict[str, Batch]:
    """Arguments of one forward over the same sequences, by what says where they are."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    found: dict[str, Batch] = {}
    for side in ("left", "right"):
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_side=side)
            for each in (tokens, [torch.ones_like(each) for each in tokens])
        )
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        found[f"padded_{side}"] = {"input_ids": ids, "attention_mask": mask}
        found[f"padded_{side}_with_positions"] = found[f"padded_{side}"] | {"position_ids": positions}
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    found["packed"] = {"input_ids": torch.cat(tokens)[None], "position_ids": positions[None]}
    return found


class Launches(TorchDispatchMode):
    """Counts operators while it is open, backward ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], object]) -> int:
    """Count the operators of one call, those of backward too."""
    counting = Launches()
    with counting:
        work()
    return counting.number


def _of_hugging_face() -> tuple[dict[str, int], dict[str, int]]:
    """Waits by batch. Operators added to a forward and a step of a padded one, when rows are made and used again."""
    torch.set_num_threads(1)
    sizes = FAMILIES["qwen3_moe"] | {"num_hidden_layers": NUM_LAYERS}
    model = hf.build_model("qwen3_moe", seed=0, experts_implementation="batched_mm", **sizes)
    tokens = [row[row > 0].numpy() for row in batches()["padded_right"]["input_ids"]]
    routed = hf.attach(model)
    trace = _with_tokens(synthetic_trace(routed.spec, LENGTHS, seed=0, complete=True), tokens)
    with other_device() as device:
        routed = hf.attach(model.to(DEVICE))
        waits = {}
        for name, batch in batches().items():
            there = {key: value.to(DEVICE) for key, value in batch.items()}

            def forward(there: Batch = there) -> Tensor:
                logits: Tensor = model(**there, use_cache=False).logits
                return logits

            waits[name] = -_waits(device, forward)
            with routed.replay(trace):
                waits[name] += _waits(device, forward)
            if name == "padded_left":
                own = launches(forward), launches(lambda: forward().sum().backward())
                with routed.replay(trace):
                    first = launches(forward)
                    again = launches(forward), launches(lambda: forward().sum().backward())
        aten = {"first_forward": first - own[0], "forward": again[0] - own[0], "step": again[1] - own[1]}
        return waits, aten


def _of_megatron() -> dict[str, int]:
    """Waits in a forward of one chunk, by what it replays."""
    torch.set_num_threads(1)
    width, small = 16, Sizes(64, 4, 4, experts=16, top_k=8, expert_width=32)
    with tempfile.TemporaryDirectory() as folder:
        start_megatron(folder, CPU)
        model = gpt_model(small, {}, width, position_embedding_type="learned_absolute")
        from foreroute.adapters import megatron

        torch.cuda.current_device = lambda: DEVICE  # type: ignore[assignment,return-value]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, VOCABULARY, (2, width), generator=generator)
        is_padding = torch.arange(width) >= torch.tensor([[width], [width - 5]])
        with other_device() as device:
            routed = megatron.attach(model.to(DEVICE))
            positions, causal = torch.arange(width).expand_as(ids), torch.ones(width, width, dtype=torch.bool).triu(1)
            there = [each.to(DEVICE) for each in (ids, positions, causal[None, None])]
            waits = {}
            for name, padding in (("whole", None), ("padded", is_padding)):
                lengths = [width, width] if padding is None else (~padding).sum(1).tolist()
                tokens = [row[:length].numpy() for row, length in zip(ids, lengths, strict=True)]
                trace = _with_tokens(synthetic_trace(routed.spec, lengths, seed=0, complete=True), tokens)
                layout = pad(lengths, side="right", order="sbhd", to=width)
                given = {} if padding is None else {"padding_mask": padding.to(DEVICE)}

                def forward(given: Batch = given) -> object:
                    return model(*there, **given)

                unpatched = _waits(device, forward)
                sessions = {
                    "trace": routed.replay(trace),
                    "trace_and_layout": routed.replay(trace, layout),
                    "shard": routed.replay(routed.shard(trace, layout)),
                }
                for kind, session in sessions.items():
                    with session:
                        waits[f"{name}_{kind}"] = _waits(device, forward) - unpatched
        torch.distributed.destroy_process_group()
    return waits


def _with_tokens(trace: RoutingTrace, tokens: list[Any]) -> RoutingTrace:
    routes = np.split(trace.expert_ids_NLK, trace.offsets[1:-1])
    return RoutingTrace.from_sequences(trace.spec, tokens, routes)


def _waits(device: OtherDevice, forward: Callable[[], object]) -> int:
    device.reads.clear()
    with torch.no_grad():
        forward()
    return sum(device.reads.values())
