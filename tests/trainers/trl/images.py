"""A processor of a tiny vision-language MoE, made here: nothing is downloaded."""

import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from examples.trl.tiny import tokenizer
from tests.trainers import vision_language

NAMES = ("image", "video", "start")
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
    """What reads the tokens of the processor; an image of 8 by 8 pixels is one of them."""
    reads = processor()
    ids = {name: reads.tokenizer.convert_tokens_to_ids(token) for name, token in zip(NAMES, TOKENS, strict=False)}
    return vision_language.policy(len(reads.tokenizer), **ids, seed=seed)


def painted(number):
    """An image of its own size and colours, one to six tokens of it."""
    width, height = 8 * (1 + number % 3), 8 * (1 + number % 2)
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(number))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def conversations(number):
    """Prompts of several lengths with one image or two, of several sizes."""
    asked = [[{"role": "user", "content": f"{'very ' * (i % 3)}many vowels {i}"}] for i in range(number)]
    return {"prompt": asked, "images": [[painted(i + j) for j in range(1 + i % 2)] for i in range(number)]}
