"""verl's own FSDP engine, as it was released, with our replay: which routes reach the experts in which pass.

Rollouts are of text, of images (packed positions on four axes), and of verl's agent loop with a tool, of which verl
keeps the routes of the last request alone: it has a row for each token of the turns before it.
"""

import asyncio
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from peft import get_peft_model
from tensordict import NonTensorData, NonTensorStack
from transformers.utils import get_json_schema
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.replica import TokenOutput

from examples.trl.tiny import chat_tokenizer, look_up
from examples.verl.tiny_checkpoint import VOCABULARY, save_policy
from foreroute.adapters import hf
from foreroute.errors import AttachError, CaptureError, ConfigError, EngineError, ReplayError
from foreroute.trainers import weights_check
from foreroute.trainers.verl.fsdp import FSDPRoutingReplay, RoutingReplayEngine, register
from foreroute.trainers.verl.settings import MASKS
from tests.trainers.given_experts import differing, drawn_anew, follows, native, watched
from tests.trainers.verl.verl_book import RESPONSE, Book
from tests.trainers.verl.verl_engines import full_weights, make, old_log_probs, on_cpu, tensordict, update
from tests.trainers.vision_language import PATCH_VALUES, policy


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
    plain, ours = make(folder, "disabled", whose="verl"), make(folder, "disabled")
    assert type(ours) is RoutingReplayEngine is not type(plain)
    batch = tensordict(book.batch())
    for one, other in zip(old_log_probs(plain, batch)[0], old_log_probs(ours, batch)[0], strict=True):
        assert torch.equal(one, other)
    losses = [update(engine, tensordict(book.batch())) for engine in (plain, ours)]
    assert losses[0]["loss"] == losses[1]["loss"]
    cells = [
        set(a) != set(b)
        for routes, (own, _) in zip(book.routes, book.native, strict=True)
        for a, b in zip(routes.reshape(-1, 2).tolist(), own[:-1].reshape(-1, 2).tolist(), strict=True)
    ]
    assert losses[1]["metrics"]["mismatch/disagreement"] == [pytest.approx(np.mean(cells))]
    for one, other in zip(plain.module.parameters(), ours.module.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())


@pytest.mark.parametrize(("replay", "times"), [("R3", 1), ("R2", 1), ("disabled", 0)])
def test_a_policy_whose_indexers_choose_for_themselves_is_warned_of(group, folder, monkeypatch, replay, times):
    monkeypatch.setattr(hf.RoutedTransformer, "indexers", object())
    with warnings.catch_warnings(record=True, action="always") as found:
        make(folder, replay)
    assert sum("verl has no field for their choices" in str(each.message) for each in found) == times


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
    for logprobs, (_, own) in zip(found, book.native, strict=True):
        np.testing.assert_allclose(logprobs.numpy(), own, rtol=0, atol=1e-4)


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


IMAGE, VIDEO, START = 250, 251, 252
SHAPES = ((1, 2, 4), None, (1, 2, 2), (1, 2, 4))
"""Of the images of the sequences, of 2, no, 1 and 2 tokens."""


class ImageBook(Book):
    """Sequences with images."""

    def __init__(self, folder):
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.folder, self.pairs, self.images, self.given = folder, [], [], []
        self.model = policy(VOCABULARY, image=IMAGE, video=VIDEO, start=START).eval()
        save_policy(folder)  # for its tokenizer
        self.model.save_pretrained(folder)
        self.routed = hf.attach(self.model)
        for shape in SHAPES:
            images, tokens = {}, []
            if shape is not None:
                patches = shape[1] * shape[2]
                images = {"pixel_values": torch.randn(patches, PATCH_VALUES, generator=generator)}
                images["image_grid_thw"] = torch.tensor([shape])
                tokens = [START, *[IMAGE] * (patches // 4)]
            prompt = np.array([*rng.integers(2, 200, 2), *tokens, rng.integers(2, 200)])
            self.pairs.append((prompt, rng.integers(2, 200, int(rng.integers(3, RESPONSE + 1)))))
            self.images.append(images)
            self.given.append(images | types_of(torch.from_numpy(np.concatenate(self.pairs[-1]))[None]))
        self.draw(rng, 0.3, spread=0.02, first=0.0)

    def batch(self):
        batch = super().batch()
        positions = batch["position_ids"][:, None].repeat(1, 4, 1)
        for s, images in enumerate(self.images):
            kept = batch["attention_mask"][s].bool()
            ids = batch["input_ids"][s, kept][None]
            axes, _ = self.model.model.get_rope_index(ids, image_grid_thw=images.get("image_grid_thw"), **types_of(ids))
            positions[s, 1:, kept] = axes[:, 0]
        return batch | {"position_ids": positions}

    def tensordict(self, **settings):
        td = tensordict(self.batch(), **settings)
        tu.assign_non_tensor_stack(td, "multi_modal_inputs", self.images)
        return td


def types_of(ids):
    return {"mm_token_type_ids": (ids == IMAGE).int()}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return ImageBook(str(tmp_path_factory.mktemp("images")))


@pytest.mark.shows("verl, FSDP engine", "images (Qwen3-VL-MoE), packed and padded, on one rank")
@pytest.mark.parametrize(
    "layout", [{}, {"use_fused_kernels": True}, {"use_remove_padding": False}], ids=["packed", "fused", "padded"]
)
def test_routes_of_images_are_followed_and_the_mismatch_falls(group, images, layout):
    k3, fused, wanted = {}, {"use_fused_kernels": "use_fused_kernels" in layout}, images.by_tokens()
    for replay in ("R3", "disabled"):
        engine = make(images.folder, replay, lr=0.0, model=fused)
        old_log_probs(engine, images.tensordict(**layout))  # the first rollout is checked
        with watched(engine.module) as forwards:
            old_log_probs(engine, images.tensordict(**layout))
        rows, others = differing(forwards, wanted)
        assert rows == 3 * sum(map(len, wanted.values()))  # in three layers, those of images too
        metrics = update(engine, images.tensordict(**layout))["metrics"]
        k3[replay] = metrics["mismatch/k3"][0]
        assert (others == 0) == (replay == "R3")
        assert (metrics["mismatch/disagreement"] == [0.0]) == (replay == "R3")
    assert metrics["mismatch/disagreement"][0] > 0.05
    assert k3["R3"] < k3["disabled"] / 4, k3


CALL = 'hm <tool_call>{"name": "look_up", "arguments": {"text": "abc"}}</tool_call>'
WIDTHS = {"prompt_length": 16, "response_length": 300}


class Servers:
    """Answers requests with these texts, as verl's client of its servers does, and with routes of all tokens."""

    def __init__(self, texts, routes):
        self._texts, self._routes = [[*chat_tokenizer()(text)["input_ids"], 1] for text in texts], routes

    async def generate(self, request_id, *, prompt_ids, **_):
        response = self._texts.pop(0)
        routes = self._routes([*prompt_ids, *response])
        log_probs = [-1.0] * len(response)
        return TokenOutput(token_ids=response, log_probs=log_probs, routed_experts=routes, stop_reason="completed")


async def looped(servers):
    """What verl's agent loop makes of a conversation."""
    multi_turn = {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1, "format": "hermes"}
    multi_turn |= {"max_tool_response_length": 64, "tool_response_truncate_side": "right"}
    rollout = SimpleNamespace(multi_turn=SimpleNamespace(**multi_turn), full_determinism=False, **WIDTHS)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    schema = OpenAIFunctionToolSchema.model_validate(get_json_schema(look_up))
    loop = ToolAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=servers,
        tokenizer=chat_tokenizer(),
        processor=None,
        dataset_cls=None,
        data_config=DictConfigWrap({}),
        tools=ToolListWrap([FunctionTool("look_up", look_up, schema)]),
    )
    return await loop.run({"logprobs": True}, raw_prompt=[{"role": "user", "content": "how many"}])


async def agent_loop_batch(outputs):
    """verl's own padding and stacking, on a worker that has no servers."""
    worker = object.__new__(AgentLoopWorker)
    worker.rollout_config, worker.tokenizer = SimpleNamespace(**WIDTHS), chat_tokenizer()
    worker._compute_multi_modal_inputs = lambda *_: {}
    worker._compute_position_ids = lambda ids, mask, *_: (mask.cumsum(1) - 1).clamp(min=0)
    worker._get_mm_processor_kwargs = lambda *_: None
    worker._compute_score = worker._compute_teacher_logprobs = AsyncMock(return_value=None)
    worker.reward_loop_worker_handles, worker.distillation_enabled = None, False
    return worker._postprocess([await worker._agent_loop_postprocess(each, False, raw_prompt=[]) for each in outputs])


@pytest.mark.shows("verl, FSDP engine", "agent loop with tools")
def test_verls_engine_gives_experts_the_routes_of_every_turn(group, folder):
    """Of which a part is drawn at random, so that the model would not take them by itself."""
    model, rng, routes = Book(folder, count=1).model, np.random.default_rng(5), {}

    def drawn(tokens):
        routes[tuple(tokens)] = rows = drawn_anew(native(model, tokens)[0][:-1], 0.1, rng)
        return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1).astype(np.uint8)

    servers = [Servers(texts, drawn) for texts in (["no call"], [CALL, CALL, "and so"])]
    outputs = [asyncio.run(looped(each)) for each in servers]
    batch = asyncio.run(agent_loop_batch(outputs))
    del batch.batch["rollout_log_probs"]  # the server's are none of a model
    engine = make(folder, "R3", lr=0.0)
    with watched(engine.module) as forwards:
        old_log_probs(engine, tensordict(batch.batch, max_token_len_per_gpu=400))
    whole = {tokens: routes[tokens] for tokens in (tuple(o.prompt_ids + o.response_ids) for o in outputs)}
    own, *replayed = forwards
    assert differing([own], whole)[1] > 0  # the first is held against the model's own routes
    # in two layers
    assert differing(replayed, whole) == (2 * sum(map(len, whole.values())), 0)
