"""The way of one piece of work through the source: the measure of how hard it is to read.

    python -m make.hops [--json] [--way]

For each piece it counts the files and functions of the package that are entered, and the moves from one file to
another. A small number means that a reader can follow the work.

    decode             a generation of an answer of vLLM's server
    save, load         a trace of two sequences, to a file and back
    plan               a plan from counts, and the schedule of one cell on one rank
    page               the HTML page of a run of two steps
    replayed_forward   a session is opened, a model of four layers runs on recorded routes, the session is closed
    replayed_rows      the same, of rows made once, as in an update after the recompute and in later epochs
    replayed_tensors   the same of integer tensors, by `foreroute.core` alone
    replayed_forward_megatron
                       two micro-batches, forward and backward, in Megatron's schedule, on routes that were cut before
    planned_cell       the forward of one layer's experts in the executor, in a group of one rank
    planned_cell_megatron
                       the same on Megatron-Core, from the output of the router to that of the layer
    training_step      one step of the reference trainer, in one process; files of `train/` alone
    training_step_trl  the second step of TRL on a rollout, under R3
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import foreroute as fr
from benchmarks.harness.models import CPU, start_megatron
from benchmarks.megatron import Bench
from foreroute.adapters import hf
from foreroute.adapters.hf.loading import spread
from foreroute.capture import decode
from foreroute.core import attach
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.plan.schedule import CellSchedule
from foreroute.records import read_runs
from foreroute.report.run import write_report
from foreroute.train import parse_config, train
from foreroute.train.loop import Trainer

PACKAGE = Path(fr.__file__).parent
LAYERS = 4
LINKS = Links(4e9, 1e9, 2e9, 1e-5, 5e-5)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass
class Way:
    """The files that a piece of work enters, in order, and the functions that it calls.

    Attributes:
        within: files outside this folder are not counted.
        files: one entry for each move.
        functions: file and qualified name of each.
    """

    within: Path = PACKAGE
    files: list[str] = field(default_factory=list)
    functions: set[tuple[str, str]] = field(default_factory=set)

    def begin(self) -> None:
        """Note the calls of this thread, until `end`."""
        # anew each time: the first one imports and fills caches, which is no part of the way
        self.files, self.functions = [], set()
        sys.setprofile(self._note)

    def end(self, *_: Any) -> None:
        """Note no more; it can be a hook of torch."""
        sys.setprofile(None)

    def along(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The work, whose last call is noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return work(*args, **kwargs)
            finally:
                self.end()

        return noted

    def counts(self) -> dict[str, int]:
        """Count files, functions and moves."""
        return {
            "files": len(set(self.files)),
            "functions": len(self.functions),
            "moves": max(0, len(self.files) - 1),
        }

    def _note(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(self.within)):
            return
        short = str(Path(name).relative_to(PACKAGE))
        if short.startswith("testing/"):  # what stands in for a GPU
            return
        self.functions.add((short, frame.f_code.co_qualname))
        if not self.files or self.files[-1] != short:
            self.files.append(short)


def way_of(work: Callable[[], object]) -> Way:
    """The way of a second call."""
    way = Way()
    for _ in range(2):
        way.along(work)()
    return way


def measure(folder: Path) -> dict[str, Way]:
    """The way of each piece of work by name."""
    routed = hf.attach(
        hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", vocab_size=64, **SIZES).eval()
    )
    ids = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    with routed.record() as recording, torch.no_grad():
        routed.model(ids)
    trace = recording.trace()
    file = folder / "trace.safetensors"
    core = attach(routed.model)
    with core.record() as of_tensors, torch.no_grad():
        routed.model(ids)
    [routes], mask = of_tensors.ids(), torch.ones_like(ids)

    rows = routed.rows(trace)

    def replay(routes: Any) -> None:
        with routed.replay(routes):
            routed.model(ids)

    def replay_tensors() -> None:
        with core.replay(routes, mask):
            routed.model(ids, attention_mask=mask)

    return {
        **from_answer_to_page(folder),
        "save": way_of(lambda: fr.save(trace, file, overwrite=True)),
        "load": way_of(lambda: fr.load(file)),
        "replayed_forward": way_of(partial(replay, trace)),
        "replayed_rows": way_of(partial(replay, rows)),
        "replayed_tensors": way_of(replay_tensors),
        "planned_cell": planned_cell(folder),
        "training_step": training_step(folder),
        "training_step_trl": training_step_trl(folder),
        # it stands in for a GPU in the whole process
        **of_megatron(folder),
    }


def from_answer_to_page(folder: Path) -> dict[str, Way]:
    """The way of an answer of vLLM, of a plan and what a rank does by it, and of a run's page."""
    rng = np.random.default_rng(0)
    spec = fr.RoutingSpec(8, 2, tuple(map(fr.RoutedLayer, range(LAYERS))))
    routes_RLK = rng.permuted(np.tile(np.arange(8), (6, LAYERS, 1)), axis=2)[:, :, :2]
    choice = {"token_ids": [4, 5, 6], "routed_experts": routes_RLK[3:5].tolist()}
    answer = {"prompt_token_ids": [1, 2, 3], "prompt_routed_experts": routes_RLK[:3].tolist(), "choices": [choice]}
    counts_MLGE = rng.integers(0, 50, (2, LAYERS, 2, 8))
    topology = Topology(num_ranks=2, ranks_per_node=2, redundant_slots=1, links=LINKS)

    def plan() -> object:
        return CellSchedule.of(fr.planner.plan(counts_MLGE, topology).cell(0, 0), counts_MLGE[0, 0], 0)

    training_step(folder, "page")
    return {
        "decode": way_of(lambda: decode(answer, model=spec)),
        "plan": way_of(plan),
        "page": way_of(lambda: write_report(read_runs([folder / "page"]), folder / "page.html")),
    }


def planned_cell(folder: Path) -> Way:
    """One layer's experts, forward, under a plan. Hooks of torch on the layer begin and end the counting."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", world_size=1, rank=0)
    whole = hf.build_model("qwen3_moe", seed=0, experts_implementation="eager", vocab_size=64, **SIZES)
    routed = hf.attach(spread(whole, torch.device("cpu")))
    ids = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))
    with routed.record() as recording, torch.no_grad():
        routed.model(ids)
    trace = recording.trace()
    rows = routed.rows(trace)
    counts_MLGE = routed.gather_counts([rows])
    topology = Topology(num_ranks=1, ranks_per_node=1, redundant_slots=0, links=LINKS)
    plan = fr.planner.plan(counts_MLGE, topology, home_LE=routed.home_LE)
    experts = routed.model.model.layers[1].mlp.experts
    way = Way()
    experts.register_forward_pre_hook(lambda *_: way.begin())
    experts.register_forward_hook(way.end)
    for _ in range(2):
        with routed.execute(plan, counts_MLGE, [rows]), routed.replay(rows):
            routed.model(ids).logits.square().mean().backward()
    dist.destroy_process_group()
    return way


def of_megatron(folder: Path) -> dict[str, Way]:
    """A replayed step in Megatron's schedule; and a planned cell, from the first step of a layer behind its router."""
    start_megatron(str(folder), CPU)
    bench = Bench.of({})
    shards = bench.shards()
    replayed = way_of(bench.replayed(shards=shards))
    counts_MLGE = bench.routed.gather_counts(shards)
    topology = Topology(num_ranks=1, ranks_per_node=1, redundant_slots=0, links=LINKS)
    plan = fr.planner.plan(counts_MLGE, topology, PlanOptions(slots="shared"), home_LE=bench.routed.home_LE)
    block = bench.model.decoder.layers[1].mlp
    way = Way()
    block.register_forward_hook(way.end)
    for _ in range(2):
        with bench.routed.execute(plan, counts_MLGE, shards):
            preprocess = block.preprocess

            def begin(*args: Any, preprocess: Callable[..., Any] = preprocess) -> Any:
                way.begin()
                return preprocess(*args)

            with mock.patch.object(block, "preprocess", begin):
                bench.replayed(shards=shards)()
    dist.destroy_process_group()
    return {"replayed_forward_megatron": replayed, "planned_cell_megatron": way}


def training_step(folder: Path, name: str = "run") -> Way:
    """The second step of a run; the files of `train/` alone."""
    values = {
        "name": "hops",
        "model": {"family": "qwen3_moe", "experts_implementation": "eager", "sizes": SIZES},
        "warm_start": {"max_steps": 1},
        "rollout": {"prompts": 2, "group_size": 2},
        "rl": {"steps": 2},
    }
    way = Way(PACKAGE / "train")
    with mock.patch.object(Trainer, "run_step", way.along(Trainer.run_step)):
        train(parse_config(values, source="make.hops"), folder / name)
    return way


def training_step_trl(folder: Path) -> Way:
    """The second step, from TRL's `training_step` on."""
    from datasets import Dataset
    from trl import GRPOConfig

    from examples.trl.tiny import policy, tokenizer
    from foreroute.trainers.trl import GRPOTrainer

    settings = {
        "num_iterations": 2,  # of each rollout, so that the second step has an old-log-prob pass behind it
        "max_steps": 2,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 4,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    trainer = GRPOTrainer(
        model=policy(),
        processing_class=tokenizer(),
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        train_dataset=Dataset.from_dict({"prompt": ["a", "b", "c", "d"]}),
        args=GRPOConfig(str(folder / "trl"), **settings),
    )
    way = Way()
    with mock.patch.object(GRPOTrainer, "training_step", way.along(GRPOTrainer.training_step)):
        trainer.train()
    return way


def main() -> None:
    """Print a line for each piece of work; `--way` adds the files that it enters, `--json` a line for programs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ways = measure(Path(folder))
    for name, way in ways.items():
        counts = way.counts()
        print(f"{name:29}" + "".join(f"{what} {count:4d}  " for what, count in counts.items()))
        if "--way" in sys.argv:
            print(*(f"    {each}" for each in way.files), sep="\n")
    if "--json" in sys.argv:
        print(json.dumps({"case": "hops", "metrics": {name: way.counts() for name, way in ways.items()}}))


if __name__ == "__main__":
    main()
