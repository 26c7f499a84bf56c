"""An encoder-decoder: both stacks recorded and replayed, each with a trace of its own tokens."""

from dataclasses import replace

import pytest
import torch
from transformers import SwitchTransformersForConditionalGeneration

import foreroute as fr
from foreroute.adapters import hf
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, ReplayError, SpecMismatchError
from tests.adapters.hf.families import build
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, gradients, random_routes
from tests.replay.session_subject import same
from tests.tiers import grid

READ, WRITTEN = batch_of(9, 6, 4), batch_of(5, 7, 3, seed=1)
BATCH = {**READ, "decoder_input_ids": WRITTEN["input_ids"], "decoder_attention_mask": WRITTEN["attention_mask"]}
KEPT = WRITTEN["attention_mask"].bool()


def encoder_decoder():
    config = build(
        "switch_transformers", num_decoder_layers=2, num_sparse_decoder_layers=2, router_jitter_noise=0.0
    ).config
    config.is_encoder_decoder, config.decoder_start_token_id = True, 0
    torch.manual_seed(0)
    model = SwitchTransformersForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.fixture
def model():
    return encoder_decoder()


@pytest.fixture
def routed(model):
    return hf.attach_stacks(model)


def logits_of(model):
    return model(**BATCH, use_cache=False).logits


def step(model):
    logits = logits_of(model)
    (logits.log_softmax(-1)[..., 3][KEPT]).sum().backward()
    found = gradients(model)
    model.zero_grad()
    return logits.detach(), found


def own_of(routed):
    with routed.record() as recordings, torch.no_grad():
        logits_of(routed.model)
    return [recording.trace() for recording in recordings]


def other_of(routed):
    specs = [stack.spec for stack in routed.stacks]
    return [random_routes(spec, batch) for spec, batch in zip(specs, (READ, WRITTEN), strict=True)]


def test_own_routes_of_both_stacks_come_back_from_files_and_change_no_bit(model, routed, tmp_path):
    native, untouched = step(model)
    traces = own_of(routed)
    assert [trace.num_rows for trace in traces] == [19, 15]
    assert [{layer.kind for layer in trace.spec.layers} for trace in traces] == [{"encoder"}, {"decoder"}]
    traces = [fr.load(fr.save(trace, tmp_path / str(i))) for i, trace in enumerate(traces)]
    with routed.replay(traces):
        replayed, grads = step(model)
    assert torch.equal(replayed, native)
    assert same(grads, untouched)


@grid("use_reentrant", [None, True, False], quick=1)
def test_other_routes_are_obeyed_by_both_with_the_gradients_of_routers_forced_by_hand(model, routed, use_reentrant):
    traces, by_hand = other_of(routed), encoder_decoder()
    for stack, trace, batch in zip(("encoder", "decoder"), traces, (READ, WRITTEN), strict=True):
        kept = batch["attention_mask"].bool()
        paths = [path for path, each in by_hand.named_modules() if path.startswith(stack) and path.endswith("router")]
        for layer, path in enumerate(paths):
            router = by_hand.get_submodule(path)

            ids_N = torch.from_numpy(trace.expert_ids_NLK[:, layer, 0].astype(int))

            def forward(hidden, router=router, kept=kept, ids_N=ids_N):
                logits = router.classifier(hidden)
                ids = logits.argmax(-1)
                ids[kept] = ids_N
                index = torch.nn.functional.one_hot(ids, logits.shape[-1])
                index = index * (index.cumsum(dim=-2) <= router.expert_capacity)
                return index, logits.softmax(-1).gather(-1, ids[..., None]), logits

            router.forward = forward
    expected, by_formula = step(by_hand.train())
    enable_checkpointing(model, use_reentrant)
    model.train()
    with routed.replay(traces), routed.record() as recordings:
        logits, grads = step(model)
    assert [recording.trace().equals(trace) for recording, trace in zip(recordings, traces, strict=True)] == [True] * 2
    torch.testing.assert_close(logits[KEPT], expected[KEPT])
    assert grads.keys() == by_formula.keys()
    for name, grad in by_formula.items():
        torch.testing.assert_close(grads[name], grad)
    assert any(grads[name].any() for name in grads if name.startswith("encoder") and "router" in name)
    assert not torch.allclose(logits[KEPT], step(encoder_decoder())[0][KEPT], atol=1e-3)


def test_what_was_generated_is_recorded_and_replayed(model, routed):
    with routed.record(weight_version=3) as recordings:
        sampled = model.generate(**READ, max_new_tokens=5, do_sample=False)
    read, written = recordings.encoder.trace(), recordings.decoder.rollout(sampled)
    assert read.lengths.tolist() == [9, 6, 4]
    assert written.lengths.tolist() == [sampled.shape[1]] * 3
    assert written.valid_N.sum() == written.num_rows - 3
    with routed.replay([read, written], weight_version=3, telemetry=True) as sessions, torch.no_grad():
        model(**READ, decoder_input_ids=sampled, use_cache=False)
    assert [session.agreement().routing.rows for session in sessions] == [19, written.num_rows - 3]
    part = [trace.select([2, 0]) for trace in (read, written)]
    chosen = {name: value[[2, 0]] for name, value in READ.items()}
    with routed.replay(part), torch.no_grad():
        model(**chosen, decoder_input_ids=sampled[[2, 0]], use_cache=False)
    with pytest.raises(ReplayError, match=r"continues a key-value cache.* num_beams=1"), routed.record():
        model.generate(**READ, num_beams=2, max_new_tokens=2)


def test_a_router_has_its_parameters_in_one_list(model, routed):
    routers = [each for name, each in model.named_parameters() if "router" in name]
    assert {*map(id, routed.router_parameters())} == {*map(id, routers)}


def test_traces_that_are_not_of_their_stack_are_refused(model, routed):
    read, written = other_of(routed)
    with pytest.raises(SpecMismatchError, match="routed layers"), routed.replay([written, read]):
        pass
    for wrong in (read, [read], [read, written, written]):
        with pytest.raises(ConfigError, match="a trace of the encoder's tokens"), routed.replay(wrong):
            pass
    with pytest.raises(ConfigError, match='counts="native"'), routed.replay([read, written], counts="replayed"):
        pass
    moved = replace(written, token_ids_N=written.token_ids_N + 1)
    with pytest.raises(BatchMismatchError), routed.replay([read, moved]):
        logits_of(model)
    with pytest.raises(ReplayError, match="no forward of the attached model ran"), routed.replay([read, written]):
        model.get_encoder()(**READ)
    assert torch.equal(logits_of(model), logits_of(encoder_decoder()))


def test_a_row_that_the_encoder_lacks_is_one_that_every_token_depends_on(model, routed):
    read, written = other_of(routed)
    valid_N = read.valid_N.copy()
    valid_N[-1] = False  # the last of a sequence, which only a decoder may lack
    lacking = replace(read, valid_N=valid_N)
    for missing in ("error", "drop"):
        refused = pytest.raises(BatchMismatchError, match="1 rows of the encoder have no route")
        with refused, routed.replay([lacking, written], missing=missing):
            pass
    with routed.replay([lacking, written], missing="native"), torch.no_grad():
        logits_of(model)


def test_each_door_says_for_whom_the_other_is(model):
    with pytest.raises(AttachError, match=r"encoder and in a decoder.*Use attach_stacks\(model\)"):
        hf.attach(model)
    with pytest.raises(AttachError, match=r"does not route in an encoder and in a decoder; use attach\(model\)"):
        hf.attach_stacks(model.get_encoder())
    encoder, decoder = hf.attach(model.get_encoder()), hf.attach(model.get_decoder())
    with encoder.record() as read, decoder.record() as written, torch.no_grad():
        logits_of(model)
    assert (read.trace().num_rows, written.trace().num_rows) == (19, 15)
