"""The patch for verl itself, applied to the released verl: what its FSDP engine alone does or refuses.

What it has in common with ours is in test_verl_ranks.py, by whose runs it is judged. Nothing of foreroute.trainers is
imported in a process that has the patch.
"""

import importlib
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

if find_spec("verl") is None:  # which ranks import from the patched folder, and not before
    pytest.skip("there is no verl in this environment: run `make night PART=verl`", allow_module_level=True)

from tests.trainers.given_experts import differing, watched
from tests.trainers.verl.verl_batches import nested
from tests.trainers.verl.verl_book import PROMPT, RESPONSE, Book
from tests.trainers.verl.verl_ranks import run


@pytest.fixture(scope="module")
def found(folder, patched):
    return run(1, "test_verl_upstream.refuse_and_compare", folder, patched)[0]


def test_routes_a_token_off_are_seen(found):
    rows, others = found["a token off"]
    assert others > 0.5 * rows > 0
    assert min(found["metrics"]["router_replay/native_disagreement"]) > 0.5


def test_what_would_not_be_replayed_is_refused(found):
    said = found["refused"]
    assert "missing 'routed_experts'" in said["no routes"]
    assert "rows of zeros before the last trained token" in said["zeros"]
    assert "rows of zeros before the last trained token" in said["a gap"]
    # nothing depends on what a tool said last
    assert said["a tool's answer"] == said["a tool's answer, without padding"] == "nothing"
    assert "routed_experts has 5 layers" in said["layers"]
    assert "rows with an id out of range" in said["out of range"]
    assert "does not say `enable_routing_replay`" in said["another trainer"]
    assert "enable_rollout_routing_replay=False" in said["R2 with a rollout's"]
    for name, words in REFUSED_SETTINGS.items():
        assert words[1] in said[name]


REFUSED_SETTINGS = {
    "turbo": ({"strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
    "critic": ({"model_type": "value_model"}, "reference policy or a critic"),
    "offload": ({"offload_policy": True}, "param_offload"),
}


@contextmanager
def verl_of(patched):
    """This process imports verl from there, and nothing of foreroute.trainers."""
    sys.path.insert(0, str(patched))
    importlib.import_module("examples.verl.verl_on_cpu")  # before verl
    import verl

    assert Path(verl.__file__).is_relative_to(patched)
    yield
    assert not [name for name in sys.modules if name.startswith("foreroute.trainers")]


def train(folder, runs, patched):
    """Those of test_verl_ranks.py, by verl's own engine."""
    with verl_of(patched):
        from tests.trainers.verl import test_verl_ranks

        return test_verl_ranks.train(folder, runs, kind="verl")


def refuse_and_compare(folder, patched):
    with verl_of(patched):
        return _refuse_and_compare(folder)


def _refuse_and_compare(folder):
    from verl.workers.engine.fsdp.router_replay import FSDPRouterReplay

    from tests.trainers.verl.test_verl_ranks import SAID
    from tests.trainers.verl.verl_engines import make, old_log_probs, tensordict, update

    book = Book(folder)
    routes, batch = book.by_tokens(), book.batch()
    results, engine = {}, make(folder, kind="verl")
    laid_out = FSDPRouterReplay._to_model_inputs
    off = mock.patch.object(FSDPRouterReplay, "_to_model_inputs", lambda *args: laid_out(*args).roll(1, 1))
    with off, watched(engine.module) as forwards:
        results["metrics"] = update(engine, tensordict(batch, **SAID))["metrics"]
    results["a token off"] = differing(forwards, routes)

    def ask(values, change=lambda td: td, engine=engine, said=SAID):
        return refusal(old_log_probs, engine, change(tensordict(values, **said)))

    said = {name: ask(values) for name, values in spoilt(batch).items()}
    said["a tool's answer, without padding"] = ask(spoilt(batch)["a tool's answer"], without_padding)
    said["another trainer"] = ask(batch, said={})
    said["R2 with a rollout's"] = ask(batch, engine=make(folder, "R2", kind="verl"))
    said |= {name: refusal(FSDPRouterReplay, configured(**each)) for name, (each, _) in REFUSED_SETTINGS.items()}
    return results | {"refused": said}


def spoilt(batch):
    """Batches that lack something."""
    routes, mask = batch["routed_experts"], batch["response_mask"]
    gap, far = routes.clone(), routes.clone()
    gap[:, PROMPT - 1] = 0  # the last token of each prompt
    far[:, PROMPT - 1, 1] = torch.tensor([0, 8])
    lengths = mask.sum(1, keepdim=True)
    at_the_end = torch.arange(PROMPT + RESPONSE) >= PROMPT + lengths - 2
    short = routes.masked_fill(at_the_end[..., None, None], 0)
    trained = mask * (mask.cumsum(1) < lengths)
    return {
        "no routes": {name: values for name, values in batch.items() if name != "routed_experts"},
        "zeros": {**batch, "routed_experts": torch.zeros_like(routes)},
        "a gap": {**batch, "routed_experts": gap},
        "a tool's answer": {**batch, "routed_experts": short, "response_mask": trained, "loss_mask": trained},
        "layers": {**batch, "routed_experts": torch.cat([routes, routes[:, :, :2]], 2)},
        "out of range": {**batch, "routed_experts": far},
    }


def without_padding(td):
    """With prompts and responses nested as well, as verl's trainer on TransferQueue has them."""
    real = td["attention_mask"].bool()
    for name, kept in (("prompts", real[:, :PROMPT]), ("loss_mask", real[:, PROMPT:])):
        td[name] = nested([row[keep].numpy() for row, keep in zip(td[name], kept, strict=True)])
    return td


def configured(*, model_type="language_model", **changes):
    """What the patch looks at of an engine."""
    replay = SimpleNamespace(mode="R3", record_file=None, replay_file=None)
    config = {"strategy": "fsdp2", "forward_only": False, "offload_policy": False, "router_replay": replay, **changes}
    return SimpleNamespace(engine_config=SimpleNamespace(**config), model_config=SimpleNamespace(model_type=model_type))


def refusal(run, *args):
    try:
        run(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"
