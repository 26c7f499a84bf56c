"""verl's weight sync to vLLM, ended when the engine is: verl's own sender waits for its answers without a limit.

A worker tells its vLLM server to take weights. It sends the engine a message for the buffer, then one for each bucket,
and waits for an answer to each. Three things end a wait here: the server says that it failed, which verl would look at
last; the engine closes the connection, as one that is killed does, of which vLLM's server says nothing; or time.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import verl
import zmq
from verl.workers.rollout import base

from foreroute.errors import AttachError, EngineError
from foreroute.trainers.checks import require_api
from foreroute.trainers.verl.settings import SYNC_LIMIT_KEY, sync_limit_s

ROLLOUT = ("vllm", "async")
VERLS = "verl.workers.rollout.vllm_rollout.ServerAdapter"
OURS = f"{__name__}.vllm_rollout"
LOOK_MS = 500
"""How often a waiting worker looks what became of its server."""


def watch_vllm_syncs() -> None:
    """Have the workers of verl make `vllm_rollout` in the place of verl's own; other rollout engines are left alone.

    Raises:
        AttachError: when verl makes something else there.
    """
    registry = getattr(base, "_ROLLOUT_REGISTRY", {})
    found = registry.get(ROLLOUT)
    if found not in (VERLS, OURS):
        raise AttachError(f"verl makes {found} in its workers for a rollout of vLLM; expected {VERLS}, which is known")
    registry[ROLLOUT] = OURS


def vllm_rollout(config: Any, *args: Any, **kwargs: Any) -> Any:
    """The `ServerAdapter` of verl, a worker's one client of its vLLM server, whose syncs are watched.

    Raises:
        AttachError: when this release of verl has no longer what this stands on.
        ConfigError: when the limit is no number of seconds.
    """
    # they import vLLM, which a run with another engine does not have
    from verl.workers.rollout.vllm_rollout import ServerAdapter
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    limit_s = sync_limit_s(config)
    require_api("verl", verl, BucketedWeightSender, {"_init_socket": (), "async_send_weights": ("weights",)})
    require_api("verl", verl, ServerAdapter, {"_execute_method": ("method", "non_block")})
    client = type(ServerAdapter.__name__, (KeptAnswer, ServerAdapter), {})(config, *args, **kwargs)
    bind = getattr(BucketedWeightSender._init_socket, "of_verl", BucketedWeightSender._init_socket)

    def init_socket(self: Any) -> None:
        bind(self)
        self.socket = WatchedSocket(self.socket, self.zmq_handle, client, limit_s)

    init_socket.of_verl = bind  # type: ignore[attr-defined]
    BucketedWeightSender._init_socket = init_socket
    return client


class KeptAnswer:
    """Keeps what the server answers to a sync; put it before verl's `ServerAdapter` among the bases.

    Attributes:
        answer: of the server, at the end of the last sync that it was told of; None where there is no server.
    """

    answer: Future[object] | None = None

    async def _execute_method(self, method: str, non_block: bool = False, *args: Any, **kwargs: Any) -> Any:
        answer = await super()._execute_method(method, non_block, *args, **kwargs)  # type: ignore[misc]
        if non_block and answer is not None:
            self.answer = answer.future()
        return answer


class WatchedSocket:
    """What verl's sender uses of its socket, with an end to every wait.

    Args:
        socket: of ZeroMQ, bound.
        handle: its address, which names the replica and the rank in it.
        client: of the server.
        limit_s: seconds that the engine may take for one answer.
    """

    def __init__(self, socket: Any, handle: str, client: KeptAnswer, limit_s: float) -> None:
        self._socket, self._handle, self._client, self._limit_s = socket, handle, client, limit_s
        self._num_answers = 0
        self._closed = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send_pyobj(self, message: object) -> None:
        """Raises `EngineError` when no engine is there to take it."""
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """Raises `EngineError` when no answer comes."""
        self._wait(zmq.POLLIN)
        self._num_answers += 1
        answer: bytes = self._socket.recv()
        return answer

    def close(self) -> None:
        self._socket.disable_monitor()
        self._closed.close()
        self._socket.close()

    def _wait(self, event: int) -> None:
        number = self._num_answers
        what = f"bucket {number} of the weights" if number else "the buffer for the weights"
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._closed, zmq.POLLIN)
        end = time.monotonic() + self._limit_s
        while True:
            happened = dict(poller.poll(min(LOOK_MS, 1000 * self._limit_s)))
            # an engine that is done closes too, behind its last answer, and both may come between two looks
            if self._socket in happened or self._socket.poll(0, event):
                return
            answer = self._client.answer
            failure = answer.exception() if answer is not None and answer.done() else None
            if failure is not None:
                seen = f"failed before it took {what}, with {type(failure).__name__}"
            elif self._closed in happened:
                seen = f"closed the connection before it took {what}: it died, or could not load them"
            elif time.monotonic() > end:
                seen = f"did not take {what} within {self._limit_s:g} s ({SYNC_LIMIT_KEY})"
            else:
                continue
            raise EngineError(
                f"the vLLM engine at {self._handle} {seen}. Expected an answer to each bucket of a weight sync. Its "
                "weights are no longer those of one step; its own error stands in the output. Start the run again: "
                "verl goes on from its last checkpoint"
            ) from failure
