"""A vision-language MoE of a few thousand weights, made here: nothing is downloaded."""

import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from examples.verl.tiny_checkpoint import SIZES

PATCH_VALUES = 3 * 2 * 4 * 4
"""Of a patch of 4 by 4 pixels; 2 by 2 patches become a token."""


def policy(vocab_size, *, image, video, start):
    """Eight experts, two of them for each token, in three layers; and the tokens of images in such a vocabulary."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    sizes = {"vocab_size": vocab_size, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}
    text = SIZES | sizes | {"rope_parameters": rope}
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
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start}
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    )
    model.generation_config.eos_token_id = 1
    return model
