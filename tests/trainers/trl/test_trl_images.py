"""Rollouts with images under TRL: what the experts are given in updates, and the mismatch that is left."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from examples.trl.tiny import tokenizer
from foreroute.core.hooks import overridden
from foreroute.errors import BatchMismatchError
from foreroute.trace import PIXELS
from foreroute.trainers.trl import GRPOTrainer
from tests.trainers.given_experts import watched
from tests.trainers.trl.tools_runs import told_apart
from tests.trainers.trl.trl_runs import logged, make
from tests.trainers.vision_language import policy

TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
CHAT = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"""


class Processor(Qwen3VLProcessor):
    """That of Qwen3-VL without its video processor, which takes torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        for name, token in zip(("image", "video", "vision_start", "vision_end"), TOKENS, strict=True):
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor():
    texts = tokenizer()
    texts.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    texts.chat_template = CHAT
    patches = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return Processor(patches, texts, chat_template=CHAT)


def painted(number):
    """An image of its own size and colours."""
    width, height = 8 * (1 + number % 3), 8 * (1 + number % 2)
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(number))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def generating_with_other_routers(model):
    """While the model samples, its routers have other weights, as an engine in another precision would."""
    weights = [router.weight for router in model.modules() if type(router).__name__ == "Qwen3VLMoeTextTopKRouter"]
    assert len(weights) == 3

    def generate(original, *args, **kwargs):
        kept, noise = [weight.data for weight in weights], torch.Generator().manual_seed(0)
        for weight in weights:
            weight.data = weight + 0.02 * torch.randn(weight.shape, generator=noise)
        try:
            return original(*args, **kwargs)
        finally:
            for weight, own in zip(weights, kept, strict=True):
                weight.data = own

    return overridden(model, "generate", generate)


def trained(folder, replay):
    """On prompts of several lengths with one image or two, of several sizes; 8 by 8 pixels are a token."""
    reads = processor()
    image, video, start, _ = reads.tokenizer.convert_tokens_to_ids(TOKENS)
    model = policy(len(reads.tokenizer), image=image, video=video, start=start)
    asked = [[{"role": "user", "content": f"{'very ' * (i % 3)}many vowels {i}"}] for i in range(8)]
    images = [[painted(i + j) for j in range(1 + i % 2)] for i in range(8)]
    chosen = {"max_steps": 2, "max_completion_length": 6, "gradient_checkpointing": False, "beta": 0.0}
    given = {"prompts": asked, "columns": {"images": images}, "reward_funcs": told_apart}
    trainer = make(folder, model=model, processing_class=reads, replay=replay, **given, **chosen)
    rollouts, take = [], trainer.routing.take
    trainer.routing.take = lambda rollout: (rollouts.append(rollout.trace), take(rollout))
    with generating_with_other_routers(model), watched(model) as batches:
        trainer.train()
    return trainer, rollouts, batches


@pytest.mark.slow
@pytest.mark.shows("TRL", "images (Qwen3-VL-MoE)")
def test_routes_of_images_are_replayed_in_updates_and_the_mismatch_falls(folder):
    trainer, (rollout,), batches = trained(folder, "R3")
    image = trainer.model.config.image_token_id
    routes_of = {tuple(rollout.tokens(s).tolist()): s for s in range(len(rollout))}
    is_image = rollout.token_ids_N == image
    assert np.array_equal(rollout.streams[PIXELS].valid_N, is_image)
    num_compared = 0
    for batch in (batch for batch in batches if batch.grad):
        for tokens, rows in batch.find(routes_of):
            part = rollout.select([routes_of[tokens]])
            here = part.token_ids_N == image
            assert np.array_equal(batch.ids_LRK()[:, rows[here]], part.expert_ids_NLK[here].swapaxes(0, 1))
            num_compared += here.sum()
    assert num_compared == is_image.sum()  # in two steps each sequence is used once
    assert set(logged(trainer, "mismatch/disagreement")) == {0.0}
    assert min(logged(trainer, "mismatch/native_disagreement")) > 0.01
    without, *_ = trained(folder, "none")
    assert min(logged(without, "mismatch/disagreement")) > 0.01
    k3, native = logged(trainer, "mismatch/k3")[0], logged(without, "mismatch/k3")[0]
    assert k3 < native / 2, (k3, native)


@pytest.mark.slow
def test_an_update_on_another_image_is_refused(folder, monkeypatch):
    compute = GRPOTrainer._compute_loss

    def painted_over(self, model, inputs):
        return compute(self, model, inputs | {"pixel_values": -inputs["pixel_values"]})

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", painted_over)
    with pytest.raises(BatchMismatchError, match=r"pixels.*another"):
        trained(folder, "R3")
