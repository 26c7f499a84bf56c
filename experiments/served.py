"""vLLM against itself: what `noise.py` does with the embedded engine, done with vLLM on the CPU, in bfloat16.

Sequences are longer, because vLLM keeps whole blocks of 32 positions in its prefix cache.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from experiments.cells import Cell
from experiments.models import configuration
from experiments.noise import CHUNK, against_trainer, compared
from experiments.starts import loaded
from experiments.static import figures_of
from foreroute.adapters.checkpoint import ModelWriter, ServedModel
from foreroute.adapters.hf import RoutedTransformer
from foreroute.capture import Generation
from foreroute.engines.vllm import ServerSettings, VLLMEngine
from foreroute.engines.vllm_server import ENVIRONMENT
from foreroute.trace import RoutingTrace
from foreroute.train.loop import make_trainer

OPTIONS: dict[str, Any] = {"block_size": 32, "max_num_batched_tokens": 16384, "max_num_seqs": 256}
"""Of every engine: whole sequences of a pass fit into one step."""
ALL = 1 << 20
PASSES: tuple[tuple[dict[str, Any], dict[str, dict[str, Any]]], ...] = (
    (
        {"enable_prefix_caching": True},
        {
            "whole": {"batch": ALL},
            "again": {"batch": ALL},
            "alone": {"batch": 1},
            "prefix": {"batch": ALL, "cached": True},
        },
    ),
    ({"enable_prefix_caching": False, "long_prefill_token_threshold": CHUNK}, {"chunks": {"batch": ALL}}),
)
"""Options of an engine, and the passes that are made with it; `noise.py` says what they are."""
LIMIT_S = 600.0


def run_served(cell: Cell, base: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Sample with vLLM, compute the tokens again with vLLM and with the trainer.

    Raises:
        EngineError: when there is no vLLM environment; FOREROUTE_VLLM_PYTHON names its Python, else it is `.venv-vllm`.
    """
    python = Path(os.environ.get("FOREROUTE_VLLM_PYTHON", ".venv-vllm/bin/python"))
    config = configuration(base, cell.settings, cell.seed)
    task, policy = loaded(config, checkpoint)
    settings = ServerSettings(python=python, precision="bfloat16", options={**OPTIONS, "enable_prefix_caching": False})
    with VLLMEngine(ServedModel.of(policy), settings) as engine:
        trainer = make_trainer(config, task, policy, engine)
        experience = trainer.roll_out()
    found = passes(policy, experience.generation, python) | {"sampled": experience.generation}
    whole = found.pop("whole")
    own = {name: figures_of(*compared(other, whole)) for name, other in found.items()}
    return against_trainer(trainer, experience) | own


def passes(
    policy: RoutedTransformer, generation: Generation, python: Path, dtype: str = "bfloat16"
) -> dict[str, Generation]:
    """Compute the tokens of a rollout by all of `PASSES`, by name, at the weights of the policy."""
    found = {}
    with TemporaryDirectory(prefix="evidence-vllm-") as place:
        folder = Path(place)
        ModelWriter(policy.model).write(folder / "model")
        trace = generation.trace
        np.savez(folder / "tokens.npz", tokens_N=trace.token_ids_N, lengths_S=trace.lengths)
        for options, asked in PASSES:
            own = {"dtype": dtype, "max_model_len": int(trace.lengths.max()) + 1, "skip_tokenizer_init": True}
            own |= {"enable_return_routed_experts": True, "trust_remote_code": False}
            # compiled on the CPU, vLLM 0.30 returns routes that are all zero
            own |= {"gpu_memory_utilization": 0.5, "enforce_eager": True}
            text = json.dumps({"options": {**own, **OPTIONS, **options}, "passes": asked})
            (folder / "passes.json").write_text(text, encoding="utf-8")
            script = Path(__file__).with_name("vllm_passes.py").absolute()
            environment = {**ENVIRONMENT, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            environment.pop("PYTHONPATH", None)
            with open(folder / "log", "wb") as log:
                command = [str(python.absolute()), str(script), str(folder)]
                subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=True)
            for name in asked:
                found[name] = _scored(generation, np.load(folder / f"{name}.npz"))
    return found


def _scored(generation: Generation, arrays: Mapping[str, Any]) -> Generation:
    trace = generation.trace
    bounds = trace.offsets[1:-1]
    ids = [each[:-1] for each in np.split(arrays["ids_NLK"], bounds)]  # the last token of a rollout has no route
    tokens = [trace.tokens(s) for s in range(len(trace))]
    scored = RoutingTrace.from_sequences(trace.spec, tokens, ids, weight_version=0)
    return Generation(scored, generation.prompt_lengths, arrays["logprobs_N"][generation.sampled_N])
