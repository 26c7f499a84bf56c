"""How far one piece of work travels: which files of the package it enters, and how often it goes from one to another.

python -m make.hops [--way]

A small number means that a reader can follow the work. Functions compiled by numba are not
seen.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import foreroute as fr
from benchmarks import megatron
from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.layout import pad
from foreroute.plan import Links, Topology

PACKAGE = str(Path(fr.__file__).parent)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
ANSWER = {
    "prompt_token_ids": [5, 6],
    "choices": [{"token_ids": [7, 8], "routed_experts": [[[0, 1]] * 2] * 3}],
}


def files_entered(work: Callable[[], object]) -> list[str]:
    """The files of the package whose functions are called, one entry for each move."""
    way: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            short = str(Path(name).relative_to(PACKAGE))
            if not way or way[-1] != short:
                way.append(short)

    work()  # imports and caches
    threading.setprofile(note)  # of the planner's threads
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return way


def of_one_process(folder: Path) -> dict[str, Callable[[], object]]:
    """A trace from an engine's answer to a replayed forward of a Hugging Face model."""
    routed = hf.attach(hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", **SIZES).eval())
    ids = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))

    def record() -> Any:
        with routed.record() as recording:
            routed.model(ids)
        return recording.trace()

    def replay() -> None:
        with routed.replay(trace, telemetry=True) as session:
            routed.model(ids)
        session.agreement()

    trace = record()
    file = folder / "trace.safetensors"
    return {
        "engine answer -> trace": lambda: fr.capture.decode(ANSWER, model=routed.spec, weight_version=7),
        "trace -> file": lambda: fr.save(trace, file, overwrite=True),
        "file -> trace": lambda: fr.load(file),
        "one recorded forward, Hugging Face": record,
        "one replayed forward with telemetry, Hugging Face": replay,
    }


def of_megatron() -> dict[str, Callable[[], object]]:
    """The routes of a micro-batch cut to a rank, and the forward step that replays them."""
    bench = megatron.Bench.of({}, width=8)
    routed, trace, tokens = bench.routed, bench.traces[0], bench.tokens[0]
    layout = pad(trace.lengths, side="right", order="sbhd")
    shard = routed.shard(trace, layout)

    def replay() -> None:
        step = routed.replaying(megatron.forward_step, telemetry=True)
        with torch.no_grad():
            step(iter([{"tokens": tokens, "routes": shard}]), bench.model)
        step.agreement()

    return {
        "trace -> shard of a rank, Megatron-Core": lambda: routed.shard(trace, layout),
        "one replayed micro-batch with telemetry, Megatron-Core": replay,
    }


def of_a_plan() -> dict[str, Callable[[], object]]:
    """A plan from counts to gradients, in a group of one rank, which has nothing to transfer."""
    routed = hf.attach(hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", **SIZES))
    placed = hf.distribute(routed.model)
    ids = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    with routed.record() as recording, torch.no_grad():
        routed.model(ids)
    trace = recording.trace()
    rows = BatchRows.replayed(trace, ids)
    assert rows.routed_LE is not None, "they are replayed"
    counts_MLGE = rows.routed_LE[None, :, None]
    links = Links(4e9, 1e9, 2e9, 1e-5, 5e-5)
    topology = Topology(num_ranks=1, ranks_per_node=1, redundant_slots=0, links=links)
    step_plan = fr.planner.plan(counts_MLGE, topology, home_LE=placed.home_LE)
    steps = iter(range(1 << 30))

    def execute() -> None:
        placed.begin_step(next(steps), step_plan, counts_MLGE)
        with routed.replay(trace), placed.executing(0, rows):
            loss = routed.model(ids).logits.square().mean()
        loss.backward()
        placed.sum_gradients()

    return {
        "counts -> plan": lambda: fr.planner.plan(counts_MLGE, topology, home_LE=placed.home_LE),
        "plan -> gradients of one replayed micro-step": execute,
    }


def main() -> None:
    """Print a line for each leg, and with `--way` the files that it enters."""
    with tempfile.TemporaryDirectory() as folder:
        megatron.start(folder, torch.device("cpu"))
        for name, work in {**of_one_process(Path(folder)), **of_megatron(), **of_a_plan()}.items():
            way = files_entered(work)
            print(f"{name:56} files {len(set(way)):3d}  moves {len(way) - 1:4d}")
            if "--way" in sys.argv:
                print(*(f"    {each}" for each in way), sep="\n")


if __name__ == "__main__":
    main()
