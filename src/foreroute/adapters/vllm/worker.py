"""The process that runs vLLM: `python -m foreroute.adapters.vllm.worker FD`, with the Python of vLLM's environment.

It answers the frames of one trainer on the socket FD, one after the other, and ends when the trainer is gone. Only the
light core of foreroute is imported here, so that two environments with different pins can meet.

    load          start the engine on a checkpoint
    load_weights  take over new weights, forget the prefix cache, note their version
    generate      sample; finished and aborted requests come back with routes and log-probabilities
    counters      what the engine counted since it started
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.vllm.frames import Frame, receive_frame, send_frame

FOLDER_PREFIX = "foreroute-vllm-"
COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}


def main() -> None:
    """Serve until the channel closes."""
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    session = Session()
    while True:
        try:
            frame = receive_frame(channel)
        except EOFError:
            # a killed trainer cannot remove what it made for this worker
            if Path.cwd().name.startswith(FOLDER_PREFIX):
                shutil.rmtree(Path.cwd(), ignore_errors=True)
            return
        try:
            reply = session.answer(frame)
        except Exception as error:  # whatever vLLM raises is the trainer's to read
            traceback.print_exc()
            reply = Frame({"error": f"{type(error).__name__}: {error}"})
        send_frame(channel, reply)


class Session:
    """One engine."""

    def __init__(self) -> None:
        self._llm: Any = None

    def answer(self, frame: Frame) -> Frame:
        """Do what a frame asks for."""
        header = frame.header
        match header["op"]:
            case "load":
                return self._load(header["model"], header["options"])
            case "load_weights":
                return self._load_weights(header["folder"], header["version"])
            case "generate":
                return self._generate(header, frame.arrays)
            case "counters":
                found = {metric.name: getattr(metric, "value", None) for metric in self._llm.get_metrics()}
                return Frame({key: found.get(name) for name, key in COUNTERS.items()})
            case other:
                raise ValueError(f"unknown request {other!r}")

    def _load(self, model: str, options: dict[str, Any]) -> Frame:
        import vllm

        self._llm = vllm.LLM(model=model, **options)
        return Frame({"engine_version": vllm.__version__})

    def _load_weights(self, folder: str, version: int) -> Frame:
        self._llm.collective_rpc("foreroute_load", args=(folder,))
        # what is cached was computed, and routed, by the old weights
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")
        self._llm.llm_engine.set_weight_version(str(version))
        return Frame({})

    def _generate(self, header: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Frame:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        version = engine.get_weight_version()
        # requests with seeds fail on the CPU when a prompt is prefilled in chunks: vLLM 0.30 winds back the offset of
        # their generators, and a CPU generator has none
        self._llm.collective_rpc("foreroute_seed", args=(header["seed"],))
        prompts = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                n=header["n"],
                temperature=header["temperature"],
                max_tokens=int(arrays["max_tokens"][number]),
                routed_experts_prompt_start=int(arrays["starts"][number]),
                stop_token_ids=[header["end_token"]],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt.tolist()}, params)
        outputs = _run(engine, header.get("abort_after"))
        return _packed([outputs[str(number)] for number in range(len(prompts))], version)


class _Aborted:
    """Takes the last output of an aborted request, which vLLM makes only for requests that have a queue."""

    def __init__(self, outputs: dict[str, Any]) -> None:
        self._outputs = outputs

    def put(self, output: Any) -> None:
        self._outputs[output.request_id] = output


def _run(engine: Any, abort_after: int | None) -> dict[str, Any]:
    """Step until every request is finished, or for `abort_after` steps. Outputs by request."""
    outputs: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        steps += 1
        if steps == abort_after:
            states = engine.output_processor.request_states.values()
            for state in states:
                state.queue = _Aborted(outputs)
            engine.abort_request(list(dict.fromkeys(state.external_req_id for state in states)))
    return outputs


def _packed(outputs: list[Any], version: str) -> Frame:
    """All sequences, grouped by prompt, in one frame."""
    choices = [choice for output in outputs for choice in sorted(output.outputs, key=lambda choice: choice.index)]
    tokens = [np.asarray(choice.token_ids, np.int32) for choice in choices]
    logprobs = [
        [step[token].logprob for step, token in zip(choice.logprobs or [], choice.token_ids, strict=True)]
        for choice in choices
    ]
    routes = [choice.routed_experts for choice in choices]
    present = [rows for rows in routes if rows is not None]
    return Frame(
        {"weight_version": version},
        {
            "finished": np.array([choice.finish_reason != "abort" for choice in choices], np.uint8),
            "tokens": np.concatenate([*tokens, np.zeros(0, np.int32)]),
            "lengths": np.array([len(t) for t in tokens], np.int64),
            "logprobs": np.array([value for row in logprobs for value in row], np.float32),
            "routes": np.concatenate(present) if present else np.zeros((0, 0, 0), np.uint8),
            "num_rows": np.array([0 if rows is None else len(rows) for rows in routes], np.int64),
        },
    )


if __name__ == "__main__":
    main()
