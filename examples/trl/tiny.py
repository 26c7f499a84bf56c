"""A Qwen3-MoE model and a tokenizer small enough for a laptop, made here from a seed: nothing is downloaded.

`agent` and `chat_tokenizer` are the same for conversations with a tool: whatever follows a "?" is a question to it.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOWELS = "aeiou"
ASK = "?"
CHAT = """{% for m in messages %}
{%- if m.role == 'tool' %}={{ m.content }}
{% elif m.role == 'assistant' %}{{ m.content }}
{%- for call in m.tool_calls or [] %}?{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<eos>
{%- else %}{{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"""
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": ":",
    "fields": {
        "tool_calls": {
            "open": ASK,
            "close_pattern": "<eos>|$",
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "look_up", "arguments": {"text": "{content}"}}},
        },
        "content": {"close_pattern": "<eos>|$", "content": "text"},
    },
}
"""How the text of a response is read as a message, for `tokenizer.parse_response`."""


def policy(seed=0):
    """Eight experts, two of them for each token, in three layers."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config)


def tokenizer():
    """One token for each byte, and two for padding and the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1, **{symbol: number + 2 for number, symbol in enumerate(alphabet)}}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def vowels(completions, **_):
    """A reward: how many characters are vowels."""
    return [float(sum(character in VOWELS for character in completion)) for completion in completions]


def agent(seed=0):
    """The policy, its turns ended and its tool asked every ten tokens or so, as a trained model would."""
    model = policy(seed)
    with torch.no_grad():
        model.lm_head.weight[[1, tokenizer().convert_tokens_to_ids(ASK)]] *= 3
    return model


def chat_tokenizer():
    """The tokenizer with a template of conversations, in which text behind a question mark calls `look_up`."""
    chats = tokenizer()
    chats.chat_template, chats.response_template = CHAT, RESPONSES
    return chats


def look_up(text: str) -> str:
    """Tell how long a text is.

    Args:
        text: any.

    Returns:
        Its length.
    """
    return f"{len(text)} letters"


def answers(completions, **_):
    """A reward: how many answers of the tool a conversation holds, less a little for each message."""
    return [sum(m["role"] == "tool" for m in messages) - 0.1 * len(messages) for messages in completions]
