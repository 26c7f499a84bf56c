"""Vision-language models attached as a whole: a trace is bound to the pixels behind each token of an image."""

import importlib
from math import prod

import pytest
import torch

import foreroute as fr
from foreroute.adapters import hf
from foreroute.adapters.hf.pixels import ImageTokens
from foreroute.errors import BatchMismatchError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trace import PIXELS
from tests.adapters.hf.families import build, config_fields, with_live_values
from tests.adapters.hf.family_checks import require_bit_equal
from tests.adapters.hf.model_runs import batch_of
from tests.tiers import grid

IMAGE, VIDEO, START = 45, 44, 46
GRIDS = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "qwen3_omni_moe", "minimax_m3_vl", "glm5_next")
SHAPES = {"large": (1, 4, 4), "wide": (1, 2, 4)}  # 4 tokens and 2
SEQUENCES = ([1, "large", 3, "wide", 5, 6], [7, 8, 9, 10], [11, 12, "wide", 13])
WHOLE = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
}
NAMES_OF = {
    1: "depth num_hidden_layers num_layers encoder_layers",
    32: (
        "hidden_size out_hidden_size d_model embed_dim vision_output_dim intermediate_size encoder_ffn_dim "
        "projector_input_dim projector_output_dim"
    ),
    4: "num_heads num_attention_heads num_key_value_heads encoder_attention_heads",
    8: "head_dim",
}
TOWER = {name: size for size, names in NAMES_OF.items() for name in names.split()} | {"deepstack_visual_indexes": [0]}


def build_whole(name, **overrides):
    text_config = build(name).config.to_dict()
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    model_class = getattr(module, WHOLE[name])
    parts = {
        part: {field: value for field, value in TOWER.items() if field in config_fields(sub_class)}
        for part, sub_class in model_class.config_class.sub_configs.items()
        if part != "text_config"
    }
    config = model_class.config_class(**parts, text_config=text_config, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_live_values(model_class(config).eval())


def build_seeing(name="qwen3_vl_moe"):
    """A model, attached, and the width of its patches."""
    model = build_whole(name, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START)
    vision = model.config.vision_config
    width = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    return model, hf.attach(model), width


class Seen:
    """Sequences of tokens and images, which can be padded, chosen and given other pixels."""

    def __init__(self, width, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [[token for each in sequence for token in tokens_of(each)] for sequence in SEQUENCES]
        self.images = [
            [
                (torch.randn(prod(SHAPES[each]), width, generator=generator), SHAPES[each])
                for each in s
                if each in SHAPES
            ]
            for s in SEQUENCES
        ]

    def batch(self, sequences=(0, 1, 2), *, left=False, images=None):
        batch = batch_of(*(len(self.tokens[s]) for s in sequences), side="left" if left else "right")
        ids, real_BT = batch["input_ids"], batch["attention_mask"].bool()
        ids[real_BT] = torch.tensor([token for s in sequences for token in self.tokens[s]])
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
        if shown := [image for s in sequences for image in (images or self.images)[s]]:
            batch["pixel_values"] = torch.cat([patches for patches, _ in shown])
            batch["image_grid_thw"] = torch.tensor([grid_thw for _, grid_thw in shown])
        return batch


def tokens_of(each):
    return [START, *[IMAGE] * (prod(SHAPES[each]) // 4)] if each in SHAPES else [each]


def outputs(model, batch):
    with torch.no_grad():
        return model(**batch, use_cache=False).logits[batch["attention_mask"].bool()]


@grid("name", WHOLE, quick=2)
def test_a_whole_model_replays_its_own_text_routes_bit_for_bit(name):
    model = build_whole(name)
    require_bit_equal(build_whole(name), model, hf.attach(model))


@pytest.mark.shows("Hugging Face", "images, bound by a digest of their pixels")
@grid("name", GRIDS, quick=1)
def test_routes_of_images_replay_bit_for_bit_on_their_own_pixels_alone(name, tmp_path):
    model, routed, width = build_seeing(name)
    seen, other = Seen(width), Seen(width, seed=1)
    trace, native = recorded(routed, seen.batch(left=True))
    trace = fr.load(fr.save(trace, tmp_path / "trace.safetensors"))
    for chosen, left in (((0, 1, 2), False), ((2, 0), True), ((1,), False)):
        part = trace.select(chosen)
        model.model.rope_deltas = None  # older releases take those of the batch before it for one without images
        with routed.replay(part):
            replayed = outputs(model, seen.batch(chosen, left=left))
        if chosen == (0, 1, 2):
            torch.testing.assert_close(replayed, native, rtol=0, atol=1e-5)
    with routed.replay(trace):
        assert torch.equal(outputs(model, seen.batch(left=True)), native)

    second = [[seen.images[0][0], other.images[0][1]], [], seen.images[2]]
    exchanged = [[seen.images[0][0], seen.images[2][0]], [], [seen.images[0][1]]]
    for chosen, images, place in (
        ((0, 1, 2), other.images, "sequence 0, position 2"),
        ((2, 0), second, "sequence 1, position 8"),
        ((0, 1, 2), exchanged, "sequence 0, position 8"),
    ):
        said = rf"{place}.*pixels.*another image"
        refuse(said, routed, trace.select(chosen), seen.batch(chosen, images=images))


@pytest.mark.shows("Hugging Face", "videos")
@grid("name", ("qwen3_vl_moe", "glm4v_moe"), quick=1)
def test_videos_are_told_apart_too(name):
    """GLM-4.5V has tokens of images stand for them."""
    model, routed, width = build_seeing(name)
    token = VIDEO if name == "qwen3_vl_moe" else IMAGE
    tokens = torch.tensor([[1, START, *[token] * 4, 3, 4]])
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "video_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    batch["mm_token_type_ids"] = 2 * (tokens == token).int()
    batch["pixel_values_videos"] = torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    trace, native = recorded(routed, batch)
    with routed.replay(trace):
        assert torch.equal(outputs(model, batch), native)
    batch["pixel_values_videos"] = batch["pixel_values_videos"].roll(4, 0)  # the same pieces of it in other places
    refuse("sequence 0, position 2", routed, trace, batch)


def recorded(routed, batch):
    with routed.record() as recording:
        native = outputs(routed.model, batch)
    return recording.trace(), native


def refuse(said, routed, routes, batch):
    with pytest.raises(BatchMismatchError, match=said), routed.replay(routes):
        outputs(routed.model, batch)


def test_images_left_out_or_painted_over_are_noticed_and_digests_can_be_left_out():
    model, routed, width = build_seeing()
    batch = Seen(width).batch()
    trace, _ = recorded(routed, batch)
    blind = {name: each for name, each in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    refuse(r"no pixels.*token", routed, trace, blind)
    refuse(r"recorded.*none", routed, recorded(routed, blind)[0], batch)
    with routed.replay(trace.without_streams(PIXELS)):
        outputs(model, blind)
    rows = routed.rows(trace)
    with routed.replay(rows):
        outputs(model, batch)
    batch["pixel_values"][-1, -1] += 1
    refuse("sequence 2, position 4", routed, rows, batch)


def test_pixels_that_belong_to_unknown_tokens_are_warned_of(monkeypatch):
    monkeypatch.setitem(TOWER, "image_size", 16)
    monkeypatch.setitem(TOWER, "patch_size", 2)
    model = build_whole("step3p7", image_token_id=IMAGE)  # which is told of no grid
    tokens = torch.tensor([[1, *[IMAGE] * 4, 3]])
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        model(input_ids=tokens, pixel_values=torch.zeros(1, 3, 16, 16), use_cache=False)
    with pytest.warns(UserWarning, match=r"pixel_values.*known"):
        assert PIXELS not in recording.trace().streams


def test_a_digest_is_what_files_hold_for_good():
    patches = torch.arange(12 * 6).view(12, 6) / 2 - 9  # which bfloat16 holds
    found = ImageTokens(IMAGE, VIDEO, 4).of_patches(patches, torch.tensor([(1, 2, 4), (1, 2, 2)])).tolist()
    assert found == [185031652899035758, 105911145952979814, 246601517637838445]


def test_digests_are_made_and_compared_where_the_batch_is_and_nobody_waits():
    tokens, layout = torch.tensor([[1, IMAGE, IMAGE, 2]]), ImageTokens(IMAGE, VIDEO, 4)
    given = {"pixel_values": torch.randn(8, 6), "image_grid_thw": torch.tensor([(1, 2, 4)])}
    expected = layout.digests(tokens, given)
    with other_device() as device:
        there = tokens.to(DEVICE), {name: each.to(DEVICE) for name, each in given.items()}
        device.reads.clear()
        found = layout.digests(*there)
        assert not device.reads
        assert torch.equal(found.values_here, expected)
