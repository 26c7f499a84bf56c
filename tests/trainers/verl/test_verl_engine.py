"""verl's own FSDP engine, as it was released, with our replay: which routes reach the experts in which pass."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from peft import get_peft_model
from tensordict import NonTensorData, NonTensorStack
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from foreroute.errors import AttachError, CaptureError, ConfigError, EngineError, ReplayError
from foreroute.trainers import weights_check
from foreroute.trainers.verl.fsdp import FSDPRoutingReplay, RoutingReplayEngine, register
from foreroute.trainers.verl.settings import MASKS
from tests.trainers.given_experts import follows, watched
from tests.trainers.verl.verl_book import Book
from tests.trainers.verl.verl_engines import full_weights, make, old_log_probs, on_cpu, tensordict, update


@pytest.fixture(scope="module")
def book(folder):
    return Book(folder)


def test_a_rollout_that_is_mixed_up_behind_the_first_is_in_the_log(group, folder, caplog, monkeypatch):
    monkeypatch.setattr(weights_check, "K3_LIMIT", 10)  # which such a rollout is beyond, too
    caplog.set_level("WARNING")  # of which importing vLLM makes an error
    book = Book(folder)
    engine = make(folder, "R3", lr=0.0)
    for routes, expected in ((book.routes, 0), ([each[::-1].copy() for each in book.routes], 1)):
        book.routes = routes
        old_log_probs(engine, tensordict(book.batch()))
        assert update(engine, tensordict(book.batch()))["metrics"]["sentinel/suspicions"] == [expected]
    [line] = [record.message for record in caplog.records if record.message.startswith("The sentinel:")]
    assert "pick other experts" in line
    book.routes = [np.roll(each[::-1], 1, axis=0) for each in book.routes]
    with pytest.raises(ReplayError, match="shift"):  # a first rollout a token off ends the run
        old_log_probs(make(folder, "R3"), tensordict(book.batch()))


@pytest.mark.shows("verl, FSDP engine", "asynchronous rollouts, of weights of several versions")
def test_rollouts_of_older_weights_may_be_far_and_those_of_the_newest_may_not(group, folder, book):
    engine = make(folder, "R3")
    batch = book.batch()
    old_log_probs(engine, tensordict(batch))
    batch["rollout_log_probs"][:3] -= 1.5
    for far, near, is_wrong in ((3, 4, False), (4, 3, True)):
        versions = NonTensorStack.from_list([NonTensorData(version) for version in [far] * 3 + [near] * 3])
        td = tensordict(batch | {"min_global_steps": versions, "max_global_steps": versions})
        with pytest.raises(EngineError, match=r"Weights.*arrive") if is_wrong else nullcontext():
            old_log_probs(engine, td)


def test_without_replay_verl_is_verl_and_the_mismatch_is_measured(group, folder, book):
    plain, ours = make(folder, "disabled", kind="verl"), make(folder, "disabled")
    assert type(ours) is RoutingReplayEngine is not type(plain)
    batch = tensordict(book.batch())
    for one, other in zip(old_log_probs(plain, batch)[0], old_log_probs(ours, batch)[0], strict=True):
        assert torch.equal(one, other)
    losses = [update(engine, tensordict(book.batch())) for engine in (plain, ours)]
    assert losses[0]["loss"] == losses[1]["loss"]
    cells = [
        set(a) != set(b)
        for routes, (native, _) in zip(book.routes, book.native, strict=True)
        for a, b in zip(routes.reshape(-1, 2).tolist(), native[:-1].reshape(-1, 2).tolist(), strict=True)
    ]
    assert losses[1]["metrics"]["mismatch/disagreement"] == [pytest.approx(np.mean(cells))]
    for one, other in zip(plain.module.parameters(), ours.module.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_in_the_precision_that_verl_trains_in_the_routes_are_followed_as_well(group, folder, book):
    engine = make(folder, "R3", mixed_precision=None)  # bfloat16, under autocast
    with watched(engine.module) as forwards:
        old_log_probs(engine, tensordict(book.batch()))
        output = update(engine, tensordict(book.batch()))
    first, *others = [follows(forward, book.by_tokens()) for forward in forwards]
    assert not first  # which is held against the model's own routes
    assert all(others)
    assert output["metrics"]["mismatch/disagreement"] == [0.0]


def test_a_reference_is_left_alone(group, folder, book, monkeypatch):
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", lambda **_: None)  # pins memory, without a GPU
    reference = make(folder, "R3", forward_only=True)
    assert reference.routing is None
    found, _ = old_log_probs(reference, tensordict(book.batch()))
    require_native(found, book)


OF_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LORA = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.shows("verl, FSDP engine", "LoRA, under FSDP2 on experts too, on one rank; the reference without it")
@pytest.mark.parametrize(("strategy", "experts"), [("fsdp2", True), ("fsdp", False)])
def test_adapters_are_replayed_and_the_policy_without_them_is_a_reference(strategy, experts, group, folder, book):
    with on_cpu():
        engine = make(folder, "R3", strategy=strategy, model=LORA | (OF_EXPERTS if experts else {}))
    update(engine, tensordict(book.batch()))  # the first, with a forward on the model's own routes
    with watched(engine.module) as forwards:
        update(engine, tensordict(book.batch()))
    assert all(follows(forward, book.by_tokens()) for forward in forwards)
    found, _ = old_log_probs(engine, tensordict(book.batch()))
    merged = Book(folder)
    adapted = get_peft_model(merged.model, engine.module.peft_config["default"])
    adapted.load_state_dict(full_weights(engine.module))
    moved = [name for name, each in adapted.named_parameters() if "lora_B" in name and each.any()]
    assert any("experts" in name for name in moved) == experts
    adapted.merge_and_unload()
    exact, rounding = merged.exact()
    for one, other, base in zip(found, exact, book.replayed(), strict=True):
        assert float((one - other).abs().max()) < 8 * rounding
        assert float((one - base).abs().max()) > 100 * rounding
    with engine.disable_adapter():
        found, _ = old_log_probs(engine, tensordict(book.batch()))
    require_native(found, book)


def require_native(found, book):
    for logprobs, (_, native) in zip(found, book.native, strict=True):
        np.testing.assert_allclose(logprobs.numpy(), native, rtol=0, atol=1e-4)


@pytest.mark.shows("verl, FSDP engine", "LoRA on experts under FSDP1", refused="PEFT does not find experts under FSDP1")
def test_what_would_have_no_effect_is_refused(group, folder, book, monkeypatch):
    engine = make(folder, "R3")
    with pytest.raises(CaptureError, match="'routed_experts'"):
        old_log_probs(engine, tensordict(book.batch(routes=False)))
    with pytest.raises(ConfigError, match=r"router_replay.mode.*target_parameters"):
        make(folder, "R3", model=LORA | OF_EXPERTS, strategy="fsdp")
    monkeypatch.setattr(RoutingReplayEngine.__bases__[1], "forward_backward_batch", lambda *_: {"metrics": {}})
    with pytest.raises(ReplayError, match="without forward_step"):
        update(engine, tensordict(book.batch()))


@pytest.mark.shows("verl, FSDP engine", "`fsdp_turbo`, TorchTitan, Automodel", refused="their engines have no replay")
def test_an_engine_that_has_no_replay_is_refused_where_one_or_masks_are_asked_for(monkeypatch):
    class Elsewhere:
        def __init__(self, engine_config, model_config=None):
            self.engine_config = engine_config

    monkeypatch.setitem(
        EngineRegistry._engines["language_model"], "elsewhere", dict.fromkeys(("cpu", "cuda"), Elsewhere)
    )
    asks = SimpleNamespace(router_replay=SimpleNamespace(mode="R3"))
    with pytest.raises(ConfigError, match=r"router_replay\.mode.*elsewhere"):
        EngineRegistry.new("language_model", "elsewhere", engine_config=asks)
    plain = SimpleNamespace(router_replay=SimpleNamespace(mode="disabled"))
    masked = SimpleNamespace(external_lib=["one", MASKS])
    with pytest.raises(ConfigError, match=r"Elsewhere.*masks"):
        EngineRegistry.new("language_model", "elsewhere", engine_config=plain, model_config=masked)


def test_a_release_that_lacks_a_hook_and_an_engine_of_others_in_our_place_are_refused_by_name(monkeypatch):
    register()  # a second time changes nothing
    with monkeypatch.context() as changed:
        changed.setattr(FSDPRoutingReplay, "backward_step", lambda self: None, raising=False)
        with pytest.raises(AttachError, match=r"FSDPEngineWithLMHead\.backward_step.*tested"):
            register()
    others = type("Others", (transformer_impl.FSDPEngineWithLMHead,), {})
    monkeypatch.setitem(EngineRegistry._engines["language_model"], "fsdp2", {"cpu": others})
    with pytest.raises(AttachError, match=r"strategy.*FSDPEngine"):
        register()
