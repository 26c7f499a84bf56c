"""How far one piece of work travels: which files of the package it enters, and how often it goes from one to another.

python make/hops.py [--way]

A small number means that a reader can follow the work. Functions compiled by numba are not seen.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import foreroute as fr
from benchmarks import megatron
from foreroute.adapters import hf
from foreroute.layout import pad

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
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
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


def main() -> None:
    """Print a line for each leg, and with `--way` the files that it enters."""
    with tempfile.TemporaryDirectory() as folder:
        megatron.start(folder, torch.device("cpu"))
        for name, work in {**of_one_process(Path(folder)), **of_megatron()}.items():
            way = files_entered(work)
            print(f"{name:56} files {len(set(way)):3d}  moves {len(way) - 1:4d}")
            if "--way" in sys.argv:
                print(*(f"    {each}" for each in way), sep="\n")


if __name__ == "__main__":
    main()
