"""A vision-language MoE of a few thousand weights and its processor, made here: nothing is downloaded."""

import torch
from PIL import Image
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from examples.trl.tiny import tokenizer

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


def policy(seed=0):
    """Eight experts, two of them for each token, in three layers; an image of 8 by 8 pixels is a token."""
    reads = processor()
    text = {
        "vocab_size": len(reads.tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    }
    ids = {f"{name}_token_id": getattr(reads, f"{name}_token_id") for name in ("image", "video", "vision_start")}
    torch.manual_seed(seed)
    model = Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    )
    model.generation_config.eos_token_id = 1
    return model


def painted(number):
    """An image of its own size and colours, one to six tokens of it."""
    width, height = 8 * (1 + number % 3), 8 * (1 + number % 2)
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(number))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def conversations(number):
    """Prompts with an image, of several lengths."""
    asked = [[{"role": "user", "content": f"{'very ' * (i % 3)}many vowels {i}"}] for i in range(number)]
    return {"prompt": asked, "image": [painted(i) for i in range(number)]}
