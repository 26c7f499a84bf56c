"""The process that runs vLLM: `python -m foreroute.engines.vllm.worker FD`, with the Python of vLLM's environment.

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

from foreroute.adapters.versions import require_engine
from foreroute.engines.vllm.ipc import Frame, receive_frame, send_frame

MARKER = ".foreroute-vllm-worker"
"""The file that marks a folder as made for a worker alone, and as its to remove when the trainer was killed."""
MOST_SAID = 10_000
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
            if Path(MARKER).is_file():
                shutil.rmtree(Path.cwd(), ignore_errors=True)
            return
        try:
            reply = session.answer(frame)
        except Exception as error:  # whatever vLLM raises is the trainer's to read
            traceback.print_exc()
            reply = Frame({"error": f"{type(error).__name__}: {error}"[:MOST_SAID]})
        send_frame(channel, Frame({**reply.header, "request": frame.header.get("request")}, reply.arrays))


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

        require_engine("vLLM", vllm.__version__)
        self._llm = vllm.LLM(model=model, **options)
        return Frame({"engine_version": vllm.__version__})

    def _load_weights(self, folder: str, version: int) -> Frame:
        loaded = self._llm.collective_rpc("foreroute_load", args=(folder,))
        if not loaded or any(each != folder for each in loaded):
            raise RuntimeError(f"vLLM's workers loaded {loaded!r}, each was asked to load {folder!r}")
        # what is cached was computed, and routed, by the old weights
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")
        self._llm.llm_engine.set_weight_version(str(version))
        return Frame({})

    def _generate(self, header: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Frame:
        engine = self._llm.llm_engine
        version = engine.get_weight_version()
        # requests with seeds fail on the CPU when a prompt is prefilled in chunks: vLLM 0.30 winds back the offset of
        # their generators, and a CPU generator has none
        self._llm.collective_rpc("foreroute_seed", args=(header["seed"],))
        prompts = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        # names that no other request had, so that nothing left of one passes for an answer to this
        names = [f"{header['request']}/{number}" for number in range(len(prompts))]
        try:
            self._add(engine, names, prompts, header, arrays)
            outputs = _run(engine, header.get("abort_after"))
        except BaseException:
            engine.abort_request(names)
            raise
        return _packed([outputs[name] for name in names], version, masks=header["masks"])

    def _add(
        self,
        engine: Any,
        names: list[str],
        prompts: list[NDArray[Any]],
        header: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            params = SamplingParams(
                n=header["n"],
                **header["sampling"],
                max_tokens=int(arrays["max_tokens"][number]),
                routed_experts_prompt_start=int(arrays["starts"][number]),
                stop_token_ids=header["stop_token_ids"],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, params)


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
            # parallel samples of a request have states of their own, which share its external name
            states = engine.output_processor.request_states.values()
            for state in states:
                state.queue = _Aborted(outputs)
            engine.abort_request(list(dict.fromkeys(state.external_req_id for state in states)))
    return outputs


def _packed(outputs: list[Any], version: str, *, masks: bool) -> Frame:
    """All sequences, grouped by prompt, in one frame, with the sets of tokens that theirs were drawn from if wanted."""
    choices = [choice for output in outputs for choice in sorted(output.outputs, key=lambda choice: choice.index)]
    tokens = [np.asarray(choice.token_ids, np.int32) for choice in choices]
    logprobs = [
        [step[token].logprob for step, token in zip(choice.logprobs or [], choice.token_ids, strict=True)]
        for choice in choices
    ]
    reasons = [choice.finish_reason for choice in choices]
    if unknown := set(reasons) - {"stop", "length", "abort"}:
        raise RuntimeError(f"vLLM ended responses for the reasons {unknown}; expected stop, length or abort")
    routes = [choice.routed_experts for choice in choices]
    present = [rows for rows in routes if rows is not None]
    arrays = _packed_masks(choices) if masks else {}
    return Frame(
        {"weight_version": version},
        {
            **arrays,
            "finished": np.array([reason != "abort" for reason in reasons], np.uint8),
            "tokens": np.concatenate([*tokens, np.zeros(0, np.int32)]),
            "lengths": np.array([len(t) for t in tokens], np.int64),
            "logprobs": np.array([value for row in logprobs for value in row], np.float32),
            "routes": np.concatenate(present) if present else np.zeros((0, 0, 0), np.uint8),
            "num_rows": np.array([0 if rows is None else len(rows) for rows in routes], np.int64),
        },
    )


def _packed_masks(choices: list[Any]) -> dict[str, NDArray[Any]]:
    """The sets of all sampled tokens. Of one that was aborted before its first token there is none."""
    found = [choice.sampling_mask.token_ids if choice.sampling_mask else [] for choice in choices]
    sets = [np.asarray(ids, np.int32) for of_choice in found for ids in of_choice]
    return {
        "mask_counts": np.array([len(ids) for ids in sets], np.int64),
        "mask_ids": np.concatenate([*sets, np.zeros(0, np.int32)]),
    }


if __name__ == "__main__":
    main()
