"""Nodes of one Linux machine: network namespaces, each with a link of a given rate, a /dev/shm and a host name.

    with NodeLab(2, bytes_per_s=50e6) as lab:
        found = lab.run(measured, ranks_per_node=2, args=(30,))   # measured(rank, num_ranks, 30) on four gloo processes

Bandwidth is real: token buckets of the kernel hold back what a node sends and what it receives, and cost no processor's
time. Latency is that of the kernel, tens of microseconds, and no network's. Nodes share the machine's processors.
It takes root, iproute2 and the kernel's bridge, veth and tbf; `reason_against` says what is missing.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from foreroute.testing.ranks import environment

TOOLS = ("ip", "tc", "unshare", "mount", "hostname")
NETWORK = "10.77.0"
"""Nothing of it leaves the machine: the bridge between nodes has no way out."""
PORT = 29_600
INTERFACE = "fr0"
LONGEST_QUEUE = "400ms"
"""What waits for longer is dropped, and sent again by TCP."""
BURST = 128 * 1024
"""Bytes of a bucket: two of the largest packets. What a full one lets through at once is free, so it is little."""
INSIDE = """
mount -t tmpfs -o size=2g tmpfs /dev/shm
hostname "$0"
ranks=$1; shift
for rank in $ranks; do "$@" "$rank" & started="$started $!"; done
for process in $started; do wait "$process"; done
"""
"""Begins the ranks of a node, which have no memory in common with other nodes."""
PATIENCE_S = 3600
_numbers = itertools.count()


class NodeLab:
    """A context of nodes that see each other and nothing else. Entering needs root; leaving takes them down.

    Args:
        num_nodes: how many.
        bytes_per_s: of the link of each node, in each direction.
    """

    def __init__(self, num_nodes: int, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        # names of a laboratory that was taken down are free a moment later
        name = f"fr{os.getpid()}l{next(_numbers)}"
        self._names = [f"{name}n{node}" for node in range(num_nodes)]
        self._bridge = f"{name}b"

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for node, name in enumerate(self._names):
                self._add(node, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)  # with both ends of its link
        with suppress(subprocess.CalledProcessError):
            _run("ip", "link", "del", self._bridge)

    def _add(self, node: int, name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "link", "set", name, "master", self._bridge, "up")
        _run("ip", "-n", name, "addr", "add", f"{_address(node)}/24", "dev", INTERFACE)
        for link in (INTERFACE, "lo"):
            _run("ip", "-n", name, "link", "set", link, "up")
        rate = f"{round(8 * self._bytes_per_s)}bit"
        bucket = ("root", "tbf", "rate", rate, "burst", str(BURST), "latency", LONGEST_QUEUE)
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, *bucket)  # what the node sends
        _run("tc", "qdisc", "add", "dev", name, *bucket)  # what it receives

    def run(self, work: Callable[..., Any], *, ranks_per_node: int, args: tuple[Any, ...] = ()) -> Any:
        """Run `work(rank, num_ranks, *args)` of an importable module; return what it returns on rank 0.

        Raises:
            RuntimeError: when a rank fails or hangs, with what the ranks of all nodes printed last.
        """
        num_ranks = len(self._names) * ranks_per_node
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            (folder / "order").write_bytes(pickle.dumps((work.__module__, work.__qualname__, args)))
            logs = [folder / f"{node}.log" for node in self._names]
            processes = [
                stack.enter_context(_ended_at_last(self._start(node, log, ranks_per_node, folder)))
                for node, log in enumerate(logs)
            ]
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end and None in (codes := [process.poll() for process in processes]):
                if any(codes):  # the others wait for it
                    break
                time.sleep(0.05)
            if any(code != 0 for code in codes):
                printed = (
                    f"{log.stem} printed\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}" for log in logs
                )
                raise RuntimeError(f"of {num_ranks} ranks some failed\n" + "\n".join(printed))
            return pickle.loads((folder / "found").read_bytes())

    def _start(self, node: int, log: Path, ranks_per_node: int, folder: Path) -> subprocess.Popen[str]:
        name, num_ranks = self._names[node], len(self._names) * ranks_per_node
        ranks = map(str, range(node * ranks_per_node, (node + 1) * ranks_per_node))
        inside = ("ip", "netns", "exec", name, "unshare", "--mount", "--uts", "--", "sh", "-ec", INSIDE, name)
        rank = (sys.executable, "-m", "benchmarks.harness.node_lab", str(folder), str(num_ranks))
        with log.open("w", encoding="utf-8") as printed:
            return subprocess.Popen(
                [*inside, " ".join(ranks), *rank],
                env=environment(GLOO_SOCKET_IFNAME=INTERFACE, OMP_NUM_THREADS="1"),
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )


def reason_against(num_nodes: int = 2) -> str:
    """Why this machine has no laboratory; empty where it has one."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(missing)}; they are in iproute2 and util-linux"
    try:
        with NodeLab(num_nodes, 1e6):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` says: {error.stderr.strip()}"


def carried_bytes() -> tuple[int, int]:
    """Bytes that the link of this process's node has sent and received so far, as the kernel counts them."""
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    sent, received = (int((folder / name).read_text(encoding="utf-8")) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


@contextmanager
def _ended_at_last(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill a process at last, with all that it has begun."""
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(node: int) -> str:
    return f"{NETWORK}.{node + 1}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _rank(folder: Path, num_ranks: int, rank: int) -> None:
    """One rank, inside of its node."""
    torch.set_num_threads(1)
    module, name, args = pickle.loads((folder / "order").read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{_address(0)}:{PORT}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    found = getattr(importlib.import_module(module), name)(rank, num_ranks, *args)
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
