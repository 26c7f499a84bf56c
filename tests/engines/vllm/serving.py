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
from foreroute.engines.vllm.server_engine import EXTENSION

FLAGS = [
    *("--dtype", "float32", "--max-model-len", "256", "--block-size", "32", "--max-num-seqs", "8"),
    *("--enforce-eager", "--skip-tokenizer-init", "--enable-return-routed-experts", "--no-enable-chunked-prefill"),
    *("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION),
]
START_S = 180
LOG = "server.log"
"""In the folder of the server."""
LAST_LINES = 40


@contextmanager
def reserved_port():
    """A port of 127.0.0.1 that nobody is given while the context is open, and that vLLM can bind.

    A socket is bound to it and never listens. vLLM binds with SO_REUSEADDR and without SO_REUSEPORT
    (`vllm.entrypoints.launchers.launcher.create_server_socket`, 0.30). Linux lets such sockets share a port as long as
    none of the others listens. It refuses all others, and gives the port to nobody who asks for any port.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def with_stand_ins(part, python, folder):
    """What is run in the place of this Python, so that a "worker" or a "server" has those of `masks_worker`."""
    script, wrapper = Path(__file__).with_name(f"masks_{part}.py"), folder / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{python}" "{script}" "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


@contextmanager
def served(python, checkpoint, folder, *more):
    """The address of a server, which may still be starting, and its process."""
    link = folder / "path"
    link.mkdir()
    (link / "foreroute").symlink_to(Path(foreroute.__file__).parent)
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
    with reserved_port() as port, open(folder / LOG, "wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *FLAGS, *more],
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


def wait_for(url, process, folder):
    """Return when the server answers; raise with the end of its log when it has ended, or does not answer in time."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.3)
    code = process.poll()
    why = f"did not answer within {START_S} s" if code is None else f"ended with code {code} before it answered"
    lines = (folder / LOG).read_text(errors="replace").splitlines()[-LAST_LINES:]
    raise RuntimeError("\n".join([f"the vLLM server {why}; the last lines of its log:", *lines]))
