"""Verl's own sender and receiver of weights: a sync whose other end dies, fails or is silent has an end."""

import asyncio
import itertools
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make test-verl`")
pytest.importorskip("vllm", reason="verl's sender is imported with vLLM's server: run `make test-verl`")

from verl.workers.rollout import base, vllm_rollout
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

import foreroute.trainers.verl.fsdp  # noqa: F401  what external_lib does
from foreroute.errors import AttachError, ConfigError, EngineError
from foreroute.trainers.verl.weight_sync import watch_vllm_syncs

HANGS_S = 8
"""A sender that has not ended by then waits for ever: its limit is at most half a second here."""
WEIGHTS = [(f"weight{i}", torch.full((200_000,), float(i))) for i in range(3)]
"""In buckets of 1 MB: no two of them fit into one."""
FIRST_BUCKET_ONLY = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.REP)
socket.connect(sys.argv[1])
for _ in range(2):  # the buffer, the first bucket
    socket.recv()
    socket.send(b"")
socket.recv()
print("second bucket", flush=True)
time.sleep(600)
"""


@pytest.fixture
def handle(tmp_path):
    return f"ipc://{tmp_path}/replica-0-rank-1.sock"


class Server:
    """Verl's client of a server without Ray: an answer to each call that is not waited for."""

    def __init__(self, config, device_mesh):
        self.config, self.device_mesh, self.pending = config, device_mesh, Future()

    async def _execute_method(self, method, non_block=False, timeout=None, args=(), kwargs=None):
        return SimpleNamespace(future=lambda: self.pending) if non_block else None


@pytest.fixture
def client(monkeypatch):
    """Makes what a worker of verl makes for its vLLM server, with a limit, in a sync."""
    monkeypatch.setattr(vllm_rollout, "ServerAdapter", Server)
    monkeypatch.setattr(BucketedWeightSender, "_init_socket", BucketedWeightSender._init_socket)

    def make(limit_s, *, told=True):
        config = SimpleNamespace(custom={"weight_sync_limit_s": limit_s})
        made = base.get_rollout_class("vllm", "async")(config=config, device_mesh="mesh")
        assert (made.config, made.device_mesh) == (config, "mesh")
        asyncio.run(made._execute_method("update_weights_from_ipc", non_block=told, kwargs={"use_shm": True}))
        return made

    return make


def in_thread(function, *args):
    """What it returns or raises, in time."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            # verl's tensors end here, before the shared memory below them, where a garbage collector takes any order
            for raised in filter(None, (error, error.__context__)):
                traceback.clear_frames(raised.__traceback__)
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def send(handle):
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    return in_thread(lambda: asyncio.run(sender.async_send_weights(iter(WEIGHTS))))


def receive(handle, take):
    receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    return in_thread(receiver.receive_weights, take)


def test_verls_own_sender_waits_without_a_limit(handle):
    """What is mended; a late engine ends the wait."""
    sent = send(handle)
    with pytest.raises(TimeoutError):
        sent.result(timeout=1)
    receive(handle, lambda weights, is_last: None).result(timeout=HANGS_S)
    sent.result(timeout=HANGS_S)


def test_a_watched_sync_brings_every_weight(handle, client):
    client(30)
    client(30)  # another client of the process watches no second time
    for _ in range(20):  # the last answer and the end of the connection come together
        received = []
        taken = receive(handle, partial(keep, received))
        send(handle).result(timeout=HANGS_S)
        taken.result(timeout=HANGS_S)
        assert [name for name, _ in received] == [name for name, _ in WEIGHTS]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(received, WEIGHTS, strict=True))


def keep(received, weights, is_last):
    received += [(name, weight.clone()) for name, weight in weights]


@pytest.mark.parametrize("told", [True, False])
def test_a_dead_engine_ends_the_sync_at_once(told, handle, client):
    client(30, told=told)
    with engine_at(handle) as engine:
        sent = send(handle)
        assert engine.stdout.readline() == b"second bucket\n"
        engine.send_signal(signal.SIGKILL)
        with pytest.raises(
            EngineError,
            match=r"replica-0-rank-1\.sock closed the connection before it took bucket 2 .* last checkpoint",
        ):
            sent.result(timeout=HANGS_S)


def test_a_dead_server_ends_the_sync_at_once(handle, client):
    server = client(30)
    sent = send(handle)
    server.pending.set_exception(ConnectionResetError("of Ray"))
    with pytest.raises(EngineError, match=r"failed before it took the buffer .* ConnectionResetError") as raised:
        sent.result(timeout=HANGS_S)
    assert str(raised.value.__cause__) == "of Ray"


def test_an_engine_that_cannot_load_ends_the_sync(handle, client):
    server = client(30)
    numbers = itertools.count(1)

    def fail_at_the_last(weights, is_last):
        if next(numbers) == len(WEIGHTS):
            server.pending.set_exception(ValueError("of vLLM"))
            raise ValueError("of vLLM")

    taken = receive(handle, fail_at_the_last)
    with pytest.raises(EngineError, match=r"failed before it took bucket 3 of .*ValueError"):
        send(handle).result(timeout=HANGS_S)
    assert taken.exception(timeout=HANGS_S)


@pytest.mark.parametrize("told", [True, False])
def test_a_silent_engine_ends_the_sync_at_its_limit(told, handle, client):
    client(0.7, told=told)
    with (
        engine_at(handle),
        pytest.raises(
            EngineError,
            match=r"did not take bucket 2 of the weights within 0\.7 s \(rollout\.custom\.weight_sync_limit_s",
        ),
    ):
        send(handle).result(timeout=HANGS_S)


def test_an_engine_that_was_dead_before_ends_the_sync_at_its_limit(handle, client):
    client(0.2)
    with pytest.raises(EngineError, match=r"did not take the buffer for the weights within 0\.2 s"):
        send(handle).result(timeout=HANGS_S)


@contextmanager
def engine_at(handle):
    """One that takes the first bucket, and then does nothing."""
    with subprocess.Popen([sys.executable, "-c", FIRST_BUCKET_ONLY, handle], stdout=subprocess.PIPE) as engine:
        try:
            yield engine
        finally:
            engine.kill()


def test_a_release_that_syncs_otherwise_is_refused(client, monkeypatch):
    with pytest.raises(ConfigError, match="weight_sync_limit_s is 0"):
        client(0)
    for owner, method in ((BucketedWeightSender, "_init_socket"), (Server, "_execute_method")):
        with monkeypatch.context() as patch:
            patch.delattr(owner, method)
            with pytest.raises(AttachError, match=rf"no {owner.__name__}\.{method}"):
                client(1)
    monkeypatch.setitem(base._ROLLOUT_REGISTRY, ("vllm", "async"), "other.Client")
    with pytest.raises(AttachError, match=r"verl makes other\.Client in its workers"):
        watch_vllm_syncs()
