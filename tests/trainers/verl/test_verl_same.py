"""One trace through Hugging Face, TRL and verl's FSDP engine: the same log-probs. Runs where TRL is."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import foreroute as fr
from foreroute.adapters import hf

ROOT = Path(__file__).parents[3]
WORKER = "tests.trainers.verl.verl_log_probs_worker"


@pytest.fixture(scope="module")
def given(tmp_path_factory, verl_python):
    """A checkpoint, a rollout with routes that no model would take, and TRL's log-probs of it."""
    from examples.trl.tiny import policy, tokenizer
    from tests.trainers.trl.routes_book import Book
    from tests.trainers.trl.trl_runs import make, old_log_probs

    folder = tmp_path_factory.mktemp("same")
    model = policy()
    model.save_pretrained(folder / "policy")
    tokenizer().save_pretrained(folder / "policy")
    book = Book(model)
    trainer = make(str(folder / "run"), model=model, rollout_func=book, max_steps=1, learning_rate=0.0)
    return folder, book, old_log_probs(trainer)


def through_hugging_face(book, dtype):
    from examples.trl.tiny import policy

    model = policy().eval().to(dtype)
    model.set_experts_implementation("eager")
    routed = hf.attach(model)
    found = {}
    for tokens, routes in book.routes.items():
        ids = torch.tensor([tokens])
        with torch.no_grad(), routed.replay(fr.RoutingTrace.from_sequences(routed.spec, [tokens], [routes])):
            logits = model(input_ids=ids).logits[:, :-1]
        found[tokens] = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0].numpy()
    return found


def through_verl(folder, book, python):
    arrays = {}
    for s, (tokens, routes) in enumerate(book.routes.items()):
        arrays |= {f"tokens{s}": np.array(tokens), f"routes{s}": routes, f"prompt{s}": book.prompt_lengths[tokens]}
    np.savez(folder / "given.npz", **arrays)
    command = [python, "-m", WORKER, folder / "policy", folder / "given.npz", folder / "found.npz"]
    source = Path(fr.__file__).parents[1]
    # another Python than this one, whose packages it must not see
    paths = os.pathsep.join([str(source), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = np.load(folder / "found.npz")
    return {tokens: found[f"arr_{s}"] for s, tokens in enumerate(book.routes)}


def test_the_same_trace_gives_the_same_log_probs_through_hugging_face_trl_and_verl(given, verl_python):
    folder, book, of_trl = given
    exact, of_hf = (through_hugging_face(book, dtype) for dtype in (torch.float64, torch.float32))
    of_verl = through_verl(folder, book, verl_python)
    rounding = max(np.abs(exact[tokens] - of_hf[tokens]).max() for tokens in exact)
    assert 0 < rounding < 1e-4
    assert len(exact) == 8
    for tokens, wanted in exact.items():
        assert np.abs(of_verl[tokens] - wanted).max() < 8 * rounding
        response = slice(book.prompt_lengths[tokens] - 1, None)
        assert np.abs(of_trl[tokens] - wanted[response]).max() < 8 * rounding
        assert np.abs(of_verl[tokens] - of_hf[tokens]).max() < 8 * rounding
        # the control: another trace, the model's own, says something else
        assert np.abs(book.native[tokens][1] - wanted).max() > 100 * rounding
