"""A Hugging Face folder: a tiny MoE model, and a tokenizer of single characters with a chat template."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foreroute.adapters import hf
from tests.train.small_runs import SIZES

CHARACTERS = "0123456789+-*=;?#() abcdefghijklmnopqrstuvwxyz\n"
SPECIAL = ["<pad>", "<end>", "<user>", "<bot>"]
NUM_TOKENS = len(SPECIAL) + len(CHARACTERS)
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def write_tokenizer(folder, *, characters=CHARACTERS, **special):
    tokens = [*SPECIAL, *characters]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "chat_template": TEMPLATE, **special}
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        additional_special_tokens=SPECIAL[2:],
        **{name: value for name, value in names.items() if value is not None},
    ).save_pretrained(folder)


def write_model(folder, *, vocab_size=NUM_TOKENS, **sizes):
    hf.build_model("qwen3_moe", seed=3, **{**SIZES, **sizes, "vocab_size": vocab_size}).save_pretrained(folder)
