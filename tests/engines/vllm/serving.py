"""vLLM's OpenAI-compatible server, started and ended by tests."""

import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import foreroute
from foreroute.engines.vllm.server import EXTENSION

FLAGS = [
    *("--dtype", "float32", "--max-model-len", "256", "--block-size", "32", "--max-num-seqs", "8"),
    *("--enforce-eager", "--skip-tokenizer-init", "--enable-return-routed-experts", "--no-enable-chunked-prefill"),
    *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION),
]
START_S = 180


@contextmanager
def served(python, checkpoint, folder, *more):
    """The address of a server; it may still be starting."""
    link = folder / "path"
    link.mkdir()
    (link / "foreroute").symlink_to(Path(foreroute.__file__).parent)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        "PYTHONPATH": str(link),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    # not the `vllm` command, which looks for a distribution of that name and finds vllm-cpu
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", "tiny"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            [*command, *address, *FLAGS, *more],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def wait_for(url, process):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.3)
    raise TimeoutError("the vLLM server did not start; see its server.log")
