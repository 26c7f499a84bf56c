"""A Hugging Face folder: a tiny MoE model, and a tokenizer of single characters with a chat template."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foreroute.adapters import hf
from tests.train.small_runs import SIZES

TOKENS = ["<pad>", "<end>", "<user>", "<bot>", *"0123456789+-*=;?#() abcdefghijklmnopqrstuvwxyz\n"]
NUM_TOKENS = len(TOKENS)
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def write_model(folder, *, vocab_size=NUM_TOKENS):
    hf.build_model("qwen3_moe", seed=3, **SIZES, vocab_size=vocab_size).save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "chat_template": TEMPLATE}
    special = ["<user>", "<bot>"]
    PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=special, **names).save_pretrained(folder)
