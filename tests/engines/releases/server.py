"""One release of vLLM behind its HTTP server on a CPU, started and ended here, and asked with httpx."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import foreroute

LENGTH, BLOCK, BLOCKS, STEP_TOKENS = 512, 32, 20, 48
"""Longest sequence, tokens of a block, blocks of the cache, and tokens of a step: small, so that prompts come in chunks
and eight requests do not fit."""
FLAGS = [
    *("--dtype", "float32", "--max-model-len", str(LENGTH), "--block-size", str(BLOCK), "--max-num-seqs", "8"),
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-batched-tokens", str(STEP_TOKENS)),
    *("--enable-chunked-prefill", "--enable-prefix-caching", "--enforce-eager", "--skip-tokenizer-init"),
    *("--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs"),
    *("--worker-extension-cls", "foreroute.engines.inside_vllm.WorkerExtension"),
]
START_S, ANSWER_S = 1200, 300
LAST_LINES = 40
REFUSAL = r"^  Value error, (.*?) \[type=value_error|Worker failed with error '(.*?)', please"
"""How a server says in its log that it will not start: its configuration does not, or its worker."""
NAME = "tiny"


class RefusedError(Exception):
    """An answer that is no success, or a start with flags that do not go together: what the server said."""


class Server:
    """A server that answers, asked by a client of httpx that has its address."""

    def __init__(self, client: httpx.Client, process: subprocess.Popen, log: Path):
        self.client, self.process, self.log = client, process, log
        self.release: str = self.get("/version")["version"]

    def lives(self) -> bool:
        try:
            return self.process.poll() is None and self.client.get("/health").is_success
        except httpx.HTTPError:
            return False

    def fatal_error(self) -> str:
        """The first error that its engine wrote down, such as "AssertionError", with the line of code before it."""
        lines = re.findall(r"^\(EngineCore.*?\] +(.*\w.*)$", self.log.read_text(errors="replace"), re.M)
        at = next((n for n, line in enumerate(lines) if re.match(r"[\w.]*Error\b", line)), None)
        return "no error in its log" if not at else f"{lines[at]} at `{lines[at - 1]}`"

    def get(self, path: str):
        """The JSON of an answer, or `RefusedError`."""
        return _read(self.client.get(path))

    def post(self, path: str, body: dict | None = None):
        """The JSON of an answer, None where it is empty, or `RefusedError`."""
        return _read(self.client.post(path, json=body or {}))

    def stream(self, path: str, body: dict) -> Iterator[dict]:
        """The choice in each chunk of a streamed answer, as it comes; or `RefusedError`."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            if not answer.is_success:
                answer.read()
                _read(answer)
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield from json.loads(line.removeprefix("data: "))["choices"]

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels; 0 before anything was counted."""
        found = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", self.client.get("/metrics").text, re.M)
        return sum(map(float, found))


def _read(answer: httpx.Response):
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        said = answer.json()
        said = said.get("error", said)
        words = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        words = answer.text
    raise RefusedError(f"HTTP {answer.status_code}: {words}")


@contextmanager
def serving(python: Path, checkpoint: Path, *more: str, stand_ins: str):
    """A server that answers, ended when the context is; with flags beside `FLAGS`, and these of the `stand_ins`.

    Raises `RefusedError` when its flags do not go together, and `RuntimeError` with the end of its log otherwise.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "path").mkdir()
        (folder / "path" / "foreroute").symlink_to(Path(foreroute.__file__).parent)
        environment = {
            # one thread adds in one order
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": str(folder / "path"),
            "STAND_INS": stand_ins,
        }
        socket, log = folder / "socket", folder / "log"
        wrapper = [str(Path(__file__).with_name("stand_ins.py"))] if stand_ins else []
        command = [str(python.absolute()), *wrapper, "-m", "vllm.entrypoints.openai.api_server", "--uds", str(socket)]
        command += ["--model", str(checkpoint), "--served-model-name", NAME, *FLAGS, *more]
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=out, stderr=out, start_new_session=True
            )
        transport = httpx.HTTPTransport(uds=str(socket))
        try:
            with httpx.Client(transport=transport, base_url="http://vllm", timeout=ANSWER_S) as client:
                _wait(client, process, log)
                yield Server(client, process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def _wait(client: httpx.Client, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if client.get("/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    code = process.poll()
    why = f"did not answer within {START_S} s" if code is None else f"ended with code {code} before it answered"
    said = log.read_text(errors="replace")
    if refused := re.search(REFUSAL, said, re.M):
        raise RefusedError(refused[1] or refused[2])
    lines = said.splitlines()[-LAST_LINES:]
    raise RuntimeError("\n".join([f"the vLLM server {why}; the last lines of its log:", *lines]))
