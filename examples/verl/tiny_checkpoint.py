"""A Qwen3-MoE checkpoint small enough for a laptop, made here from a seed: nothing is downloaded."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 258
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def save_policy(folder, *, seed=0, **changes):
    """Write model and tokenizer where verl loads them from. Layer 0 is dense, as in many models."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**{**SIZES, "mlp_only_layers": [0], "intermediate_size": 64, **changes})
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # verl's agent loop looks for this end of a turn in every tokenizer of a Qwen model
    vocabulary = {"<pad>": 0, "<|im_end|>": 1, **{symbol: number + 2 for number, symbol in enumerate(alphabet)}}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '=' if add_generation_prompt }}"
    tokenizer.save_pretrained(folder)
    return str(folder)
