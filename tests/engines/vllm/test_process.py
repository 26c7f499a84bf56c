"""The worker process and its protocol, on a fake vLLM: what comes back, and every way to fail."""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling
from foreroute.engines import vllm
from foreroute.engines.vllm.ipc import MAGIC, Frame, receive_frame, send_frame
from foreroute.engines.vllm.worker_process import WorkerProcess
from foreroute.errors import CaptureError, ConfigError, EngineError
from foreroute.testing.ranks import environment
from foreroute.trace import SAMPLING as MASKS
from tests.engines.small_policy import SAMPLING, policy, prompts, seeded


@pytest.fixture(scope="module")
def routed():
    return policy()


def test_sequences_are_grouped_by_prompt_with_one_row_less_than_tokens(routed, fake_settings):
    asked = prompts(5, 9)
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine:
        engine.load_weights(routed.model.state_dict(), version=4)
        first = engine.generate(asked, replace(SAMPLING, group_size=3), seeded())
        again = engine.generate(asked, replace(SAMPLING, group_size=3), seeded())
        other = engine.generate(asked, replace(SAMPLING, group_size=3), seeded(2))
        assert engine.counters() == {"preemptions": 2, "prefix_cache_queries": 0, "prefix_cache_hits": 0}
    trace = first.trace
    assert [trace.tokens(s)[: len(asked[s // 3])].tolist() for s in range(6)] == [
        asked[s // 3].tolist() for s in range(6)
    ]
    assert trace.versions == (4,)
    assert (~trace.valid_N).nonzero()[0].tolist() == (trace.offsets[1:] - 1).tolist()
    assert trace.provenance["engine_version"] == "0.30.0-fake"
    assert set(first.logprobs_R) == {-1.5}
    assert first.response_lengths.max() <= SAMPLING.max_new_tokens
    assert again.trace.equals(trace)
    assert not other.trace.equals(trace)


def test_without_an_end_token_every_response_is_as_long_as_it_may_be(routed, fake_settings):
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine:
        generation = engine.generate(prompts(5, 9), replace(SAMPLING, end_token=-1, group_size=8), seeded())
    assert set(generation.response_lengths) == {SAMPLING.max_new_tokens}


def test_a_resumed_rollout_keeps_rows_and_versions_of_its_beginning(routed, fake_settings):
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine:
        engine.load_weights(routed.model.state_dict(), version=1)
        partial = engine.generate_until(prompts(5, 9), replace(SAMPLING, group_size=2), seeded(), engine_steps=4)
        engine.load_weights(routed.model.state_dict(), version=2)
        done = engine.resume(partial, SAMPLING, seeded(5))
        assert engine.resume(done, SAMPLING, seeded(6)) is done
    assert not partial.finished_S.all()
    assert done.finished_S.all()
    for s in range(4):
        before, after = partial.trace.select([s]), done.trace.select([s])
        kept = before.num_rows - 1
        assert after.truncated([kept]).equals(before.truncated([kept]))
        if not partial.finished_S[s]:
            assert set(after.weight_versions_N[kept:-1]) == {2}
    assert done.generation().response_lengths.max() <= SAMPLING.max_new_tokens
    assert len(done.logprobs_R) == done.response_lengths.sum()


def test_masks_stand_on_the_rows_of_their_tokens_and_are_asked_for_alone(routed, fake_settings):
    cut = replace(SAMPLING, group_size=2, top_k=3)
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings(sampling_masks=True)) as engine:
        engine.load_weights(routed.model.state_dict(), version=1)
        partial = engine.generate_until(prompts(5, 9), cut, seeded(), engine_steps=4)
        done = engine.resume(partial, cut, seeded(5)).generation()
        whole = engine.generate(prompts(5, 9), replace(cut, top_k=0, top_p=0.9), seeded())
        for plain in (replace(cut, top_k=0), replace(cut, top_k=0, temperature=0)):
            assert not engine.generate(prompts(5, 9), plain, seeded()).trace.streams
    assert not partial.finished_S.all()
    for generation, size in ((done, 3), (whole, 0)):
        masks = generation.trace.streams[MASKS]
        assert np.array_equal(masks.valid_N, rows_before_sampled(generation))
        rows = np.flatnonzero(masks.valid_N)
        # of 64 tokens that top-p could keep the fake keeps all, which left nothing out
        assert set(masks.counts_ND[rows, 0]) == {size}
        for row in rows[: len(rows) * (size > 0)]:
            ids, token = masks.ids[masks.offsets[row] : masks.offsets[row + 1]], generation.trace.token_ids_N[row + 1]
            assert ids.tolist() == list(range(max(0, token - 2), max(0, token - 2) + 3))


def rows_before_sampled(generation):
    """Bool [N], the rows that predict a sampled token."""
    rows = np.zeros(generation.trace.num_rows, bool)
    rows[np.flatnonzero(generation.sampled_N) - 1] = True
    return rows


def test_cuts_need_an_engine_that_returns_masks(routed, fake_settings):
    with (
        vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine,
        pytest.raises(ConfigError, match=r"does not return sampling masks.*set sampling_masks in ProcessSettings"),
    ):
        engine.generate(prompts(4), replace(SAMPLING, top_p=0.9), seeded())


@pytest.mark.parametrize(
    ("behaviour", "error", "said"),
    [
        ("refuses to load", EngineError, "could not load the model: RuntimeError: Unsupported CPU attention"),
        ("prints and dies", EngineError, r"died \(exit code 7\)(.|\n)*something terrible"),
        ("dies", EngineError, r"died \(signal SIGABRT\) when asked to generate"),
        ("zero routes", CaptureError, "enforce_eager=True"),
        ("another trainer", EngineError, "version '17', the trainer loaded version 1"),
        ("busy cache", EngineError, "could not load weights: RuntimeError: the prefix cache"),
        ("loads others", EngineError, "could not load weights: RuntimeError: vLLM's workers loaded"),
        ("aborts", EngineError, "aborted response 0 of 4"),
        ("repeats", EngineError, "for the reasons {'repetition'}"),
    ],
)
def test_a_failing_worker_is_reported_and_ended(routed, fake_settings, behaviour, error, said):
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings(behaviour)) as engine:
        process = engine._worker._process
        with pytest.raises(error, match=said):
            rollout(engine, routed)
    assert process.poll() is not None


def test_a_worker_that_hangs_is_ended_in_time(routed, fake_settings):
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings("hangs")) as engine:
        engine.load_weights(routed.model.state_dict(), version=1)
        engine._settings = replace(engine._settings, timeout_s=0.5)
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"did not generate within 0\.5 s and was ended"):
            engine.generate(prompts(4), replace(SAMPLING, group_size=2), seeded())
        assert time.monotonic() - start < 10
        assert not engine._worker.alive
        with pytest.raises(EngineError, match=r"was ended before: it did not generate within 0\.5 s\. Make a new"):
            engine.counters()


def test_a_worker_that_reads_nothing_is_ended_in_time(tmp_path):
    worker = WorkerProcess([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), tmp_path)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"did not sample within 0\.3 s and was ended"):
        worker.send({"op": "x"}, {"a": np.zeros(1 << 24, np.uint8)}, what="sample", timeout_s=0.3)
    assert time.monotonic() - start < 10
    assert not worker.alive


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(routed, fake_settings):
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine:
        engine.load_weights(routed.model.state_dict(), version=1)
        wanted = engine.generate(prompts(4, 40), SAMPLING, seeded())
        # as when something comes in between a request and its answer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._worker, "receive", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompts(4, 40, seed=5), SAMPLING, seeded(2))
        assert engine.generate(prompts(4, 40), SAMPLING, seeded()).trace.equals(wanted.trace)
        assert engine.counters()["preemptions"] == 2


def test_a_request_that_is_interrupted_ends_the_worker(routed, fake_settings):
    """A real signal, while the answer is waited for."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings("slow")) as engine:
        engine.load_weights(routed.model.state_dict(), version=1)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompts(4), SAMPLING, seeded())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert not engine._worker.alive
        with pytest.raises(EngineError, match="KeyboardInterrupt came in between when it was asked to generate"):
            engine.generate(prompts(4), SAMPLING, seeded())


@pytest.mark.parametrize("number", [7, None, True, 0, -1, "3"])
def test_an_answer_with_another_number_is_damaged(tmp_path, number):
    reply = (
        "import socket, sys; from foreroute.engines.vllm.ipc import Frame, receive_frame, send_frame\n"
        f"channel = socket.socket(fileno=int(sys.argv[-1])); receive_frame(channel)\n"
        f"send_frame(channel, Frame({{'request': {number!r}}}))"
    )
    worker = WorkerProcess([sys.executable, "-c", reply], dict(os.environ), tmp_path)
    asked = worker.send({"op": "x"}, what="count", timeout_s=30)
    with pytest.raises(EngineError, match="it answers request"):
        worker.receive(asked, "count", timeout_s=30)
    assert not worker.alive


def test_weights_that_were_loaded_half_way_sample_nothing(routed, fake_settings):
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings("busy cache")) as engine:
        with pytest.raises(EngineError, match="prefix cache"):
            engine.load_weights(routed.model.state_dict(), version=1)
        with pytest.raises(EngineError, match="weights are unknown"):
            engine.generate(prompts(4), SAMPLING, seeded())


def test_nothing_is_left_in_the_engine_of_a_request_that_failed(routed, fake_settings):
    refused = [*prompts(5), np.array([63, 1], np.int32)]
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings("refuses 63")) as engine:
        engine.load_weights(routed.model.state_dict(), version=1)
        wanted = engine.generate(prompts(5, 9), SAMPLING, seeded())
        with pytest.raises(EngineError, match="ValueError: refused"):
            engine.generate(refused, SAMPLING, seeded(3))
        assert engine.generate(prompts(5, 9), SAMPLING, seeded()).trace.equals(wanted.trace)


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": np.array([1], np.int64)},
        {"lengths": np.array([1, 1], np.int64)},
        {"tokens": np.zeros(1, np.int32)},
        {"logprobs": np.zeros(4, np.float32)},
        {"finished": np.ones(3, np.uint8)},
        {"routes": np.zeros((1, 3, 4), np.uint8)},
        {"routes": None},
        {"mask_counts": None},
        {"mask_counts": np.array([3, 1], np.int64)},
        {"mask_ids": np.zeros(3, np.int32)},
    ],
)
def test_arrays_that_are_not_of_one_another_are_refused(routed, fake_settings, changes):
    reply = {
        "lengths": np.array([1, 2], np.int64),
        "num_rows": np.array([4, 5], np.int64),
        "finished": np.ones(2, np.uint8),
        "tokens": np.zeros(3, np.int32),
        "logprobs": np.zeros(3, np.float32),
        "routes": np.tile(np.arange(4, dtype=np.uint8), (9, 3, 1)),
        "mask_counts": np.array([1, 2, 1], np.int64),
        "mask_ids": np.array([0, 0, 1, 0], np.int32),
    } | changes
    arrays = {name: array for name, array in reply.items() if array is not None}
    with vllm.ProcessEngine(ServedModel.of(routed), fake_settings(sampling_masks=True)) as engine:
        engine.load_weights(routed.model.state_dict(), version=0)
        engine._worker.receive = Mock(return_value=Frame({"weight_version": "0"}, arrays))
        with pytest.raises(EngineError, match="expected those of 2 sequences"):
            engine.generate(prompts(4, 4), Sampling(max_new_tokens=2, end_token=3, top_k=2), seeded())


@pytest.mark.parametrize("version", ["0.27.1", "0.31.0", "0.31.0rc1", "1.0.0+cpu"])
def test_a_vllm_of_a_version_that_does_not_work_is_refused_by_name(routed, fake_settings, monkeypatch, version):
    monkeypatch.setenv("FAKE_VLLM_VERSION", version)
    with (
        vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine,
        pytest.raises(EngineError, match=re.escape(f"vLLM {version} does not work") + ".*install 0.30.0") as refused,
    ):
        rollout(engine, routed)
    assert "could not load the model: EngineError" in str(refused.value), "the worker looks before vLLM starts"


def test_an_environment_without_vllm_says_so(routed, fake_settings, tmp_path):
    with pytest.raises(EngineError, match=r"there is no vLLM environment: .*Install vllm==0\.30\.0"):
        vllm.ProcessSettings(python=tmp_path / "missing")
    with pytest.raises(TypeError, match="'python'"):  # no folder of a clone is a default for others
        vllm.ProcessSettings()
    bare = replace(fake_settings(), python=Path(sys.executable), options={})
    with (
        vllm.ProcessEngine(ServedModel.of(routed), bare) as engine,
        pytest.raises(EngineError, match="No module named 'vllm'"),
    ):
        rollout(engine, routed)


def test_options_that_foreroute_sets_and_sequences_too_long_are_refused(routed, fake_settings):
    with pytest.raises(ConfigError, match="logprobs_mode"):
        fake_settings(options={"logprobs_mode": "raw_logprobs"})
    with (
        vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine,
        pytest.raises(ConfigError, match="max_model_len is 256"),
    ):
        engine.generate(prompts(230), replace(SAMPLING, group_size=2), seeded())


def test_an_exception_in_the_trainer_ends_the_worker(routed, fake_settings):
    started = []

    def trainer():
        with vllm.ProcessEngine(ServedModel.of(routed), fake_settings()) as engine:
            started.append(engine._worker)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer()
    assert not started[0].alive
    assert not started[0].log.parent.exists()


def test_a_killed_trainer_takes_its_worker_with_it(fake_settings):
    """The worker sees its channel close."""
    script = (
        "import os, sys; from foreroute.engines import vllm; from pathlib import Path\n"
        "from foreroute.adapters.checkpoint import ServedModel; from tests.engines.small_policy import policy\n"
        "settings = vllm.ProcessSettings(python=Path(sys.argv[1]), options={'behaviour': 'good'})\n"
        "engine = vllm.ProcessEngine(ServedModel.of(policy()), settings); engine.counters()\n"
        "print(engine._worker._process.pid, engine._worker.log.parent, flush=True); os.kill(os.getpid(), 9)"
    )
    trainer = subprocess.run(
        [sys.executable, "-c", script, fake_settings().python], env=environment(), capture_output=True, timeout=120
    )
    worker, folder = trainer.stdout.decode().split()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}/exe").exists()
    assert not Path(folder).exists()


def test_a_worker_removes_no_folder_that_was_not_made_for_it(tmp_path):
    folder = tmp_path / "foreroute-vllm-mine"
    folder.mkdir()
    (folder / "kept.txt").write_text("mine")
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "foreroute.engines.vllm.worker", str(theirs.fileno())]
        worker = subprocess.Popen(command, cwd=folder, pass_fds=(theirs.fileno(),), env=environment())
    ours.close()
    assert worker.wait(60) == 0
    assert (folder / "kept.txt").read_text() == "mine"


def test_frames_come_back_as_they_were_sent():
    ours, theirs = socket.socketpair()
    arrays = {"a": np.arange(12, dtype=np.uint16).reshape(3, 2, 2), "none": np.zeros((0, 3), np.float32)}
    with ours, theirs:
        send_frame(ours, Frame({"op": "x", "text": "é"}, arrays))
        got = receive_frame(theirs, timeout_s=5)
        assert got.header == {"op": "x", "text": "é"}
        assert all(got.arrays[n].dtype == a.dtype and np.array_equal(got.arrays[n], a) for n, a in arrays.items())
        with pytest.raises(TypeError, match="float64"):
            send_frame(ours, Frame({}, {"a": np.zeros(1)}))
        with pytest.raises(TimeoutError):
            receive_frame(theirs, timeout_s=0.05)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<4sI", MAGIC, 1 << 30),
        struct.pack("<4sI", MAGIC, 2) + b"{}",
        struct.pack("<4sI", MAGIC, 4) + b"\xff\xff\xff\xff",
        *(
            struct.pack("<4sI", MAGIC, len(header)) + header
            for header in (
                b'{"arrays": [["a", "object", [1]]]}',
                b'{"arrays": [["a", "uint8", [-1]]]}',
                b'{"arrays": [["a", "uint8", [1e3]]]}',
                b'{"arrays": [["a", "float32", [1000000000000000]]]}',
                b'{"arrays": [[]]}',
                b'{"arrays": 3}',
                b"[" * 5000 + b"]" * 5000,
            )
        ),
    ],
)
def test_what_is_no_frame_is_refused_before_memory_is_taken(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        with pytest.raises(EngineError, match="frame"):
            receive_frame(theirs, timeout_s=5)


def test_a_frame_cut_short_is_noticed():
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(struct.pack("<4sI", MAGIC, 100) + b"{")
        with pytest.raises(EOFError):
            receive_frame(theirs, timeout_s=5)


def rollout(engine, routed):
    engine.load_weights(routed.model.state_dict(), version=1)
    return engine.generate(prompts(4, 40), replace(SAMPLING, group_size=2), seeded())
