"""Which layers of a model route, read off its `config.json`. Neither torch nor transformers is needed.

Every family says so in its own words, and leaves out what is its default. What is read here is what the classes of
transformers make of the same file; a family that is not in `_FAMILIES` is refused, because a default that is not known
would put every route into a wrong layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from foreroute.capture.model_facts import ModelFacts
from foreroute.capture.recognition import field_of, shown, whole_number
from foreroute.errors import CaptureError
from foreroute.trace import LayerKind, RoutedLayer, RoutingSpec
from foreroute.trace.spec import MAX_EXPERTS

MAX_LAYERS = 1 << 16
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
PICKS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_TYPES = {
    "dense": None,
    "sparse": LayerKind.DECODER,
    "moe": LayerKind.DECODER,
    "hash_moe": LayerKind.HASH,
}
"""What an entry of `mlp_layer_types` says of its layer."""
_NOT_ROUTED = ("mlp", "mamba", "attention", "linear_attention", "full_attention")
_PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}

Kinds = list[LayerKind | None]
"""For each decoder layer how it routes, None where it does not."""


def facts_of_config(config: object) -> ModelFacts:
    """Read the experts, picks and layers of a model off its configuration, as it lies beside the weights.

    Args:
        config: the parsed `config.json` of a model of transformers, of text alone or with `text_config`.

    Raises:
        CaptureError: when the family is not known, a field is missing or says something that is not understood, or
            two fields contradict each other; the message says to pass a trace of the model instead.
    """
    fields = _Fields(config)
    if (rule := _FAMILIES.get(fields.family)) is None:
        raise fields.wrong(f"model_type {fields.model_type!r:.60}, whose layers are not known here")
    kinds = rule(fields)
    fields.refuse_other_layers(kinds)
    routed = tuple(RoutedLayer(i, kind) for i, kind in enumerate(kinds) if kind is not None)
    if not routed:
        raise fields.wrong("no layer with experts")
    experts, picks = fields.one_of(EXPERTS, MAX_EXPERTS), fields.one_of(PICKS, MAX_EXPERTS)
    if picks > experts:
        raise fields.wrong(f"{picks} picks of {experts} experts")
    return ModelFacts(RoutingSpec(experts, picks, routed, model=fields.model_type), len(kinds))


def text_section(config: object) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the decoder: all of it where the model is of text alone.

    Raises:
        CaptureError: when it is no JSON object.
    """
    section = config
    for name in ("thinker_config", "text_config"):
        if isinstance(section, Mapping) and field_of(section, name) is not None:
            section = field_of(section, name)
    if not isinstance(section, Mapping):
        raise CaptureError(f"a model's configuration is a JSON object; found {shown(section)}")
    return section


class _Fields:
    """A configuration that remembers which of its fields were read."""

    def __init__(self, config: object) -> None:
        self._values = text_section(config)
        self._read: set[str] = set()
        model_type = field_of(self._values, "model_type") or field_of(config, "model_type")
        if not isinstance(model_type, str):
            raise self.wrong(f"model_type {shown(model_type)}")
        self.model_type, self.family = model_type, model_type.removesuffix("_text")

    def get(self, name: str) -> Any:
        """A field, None where it is not stated."""
        self._read.add(name)
        return field_of(self._values, name)

    @property
    def num_layers(self) -> int:
        """Decoder layers in all."""
        return self.count("num_hidden_layers", least=1)

    def count(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """A number of layers."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(f"no {name}")
        return whole_number(value, f"{name} of the configuration", least, MAX_LAYERS)

    def list_of(self, name: str) -> list[Any] | None:
        """A field that is a list, None where it is not stated."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise self.wrong(f"{name} {shown(value)}; expected a list of at most {MAX_LAYERS}")
        return value

    def one_for_each(self, name: str) -> list[Any] | None:
        """A field that is a list with an entry for each layer, None where it is not stated."""
        value = self.list_of(name)
        if value is not None and len(value) != self.num_layers:
            raise self.wrong(f"{name} of {len(value)} entries and {self.num_layers} layers")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """A list of layers."""
        values = self.list_of(name)
        return None if values is None else [whole_number(v, f"an entry of {name}", 0, MAX_LAYERS) for v in values]

    def one_of(self, names: tuple[str, ...], most: int) -> int:
        """The number that one of the names bears. All layers have it: a list of different ones is refused."""
        stated = {name: self.get(name) for name in names if self.get(name) is not None}
        values = {name: _only(value) for name, value in stated.items()}
        if len(set(map(shown, values.values()))) != 1:
            seen = [f"{name} {shown(value)}" for name, value in stated.items()]
            raise self.wrong(" and ".join(seen) or f"no {names[0]}")
        name, value = next(iter(values.items()))
        return whole_number(value, f"{name} of the configuration", 1, most)

    def refuse_other_layers(self, kinds: Kinds) -> None:
        """Raise `CaptureError` when a field that the family does not read says otherwise of the layers."""
        dense = {i for i, kind in enumerate(kinds) if kind is None}
        for name, of in _SAYS_DENSE.items():
            if name in self._read or field_of(self._values, name) is None:
                continue
            said = {i for i, kind in enumerate(of(self)) if kind is None}
            if said and said != dense:
                raise self.wrong(
                    f"{name} {shown(field_of(self._values, name))}, which {self.model_type} does not read, and which "
                    f"says that other layers are dense than {sorted(dense)[:12]}"
                )
        each = field_of(self._values, "per_layer_config")
        if isinstance(each, Mapping) and any(name in _names_in(each) for name in (*EXPERTS, *PICKS)):
            raise self.wrong("per_layer_config with experts of its own for some layers")

    def wrong(self, seen: str) -> CaptureError:
        """An error that says what was found, and what to do."""
        return CaptureError(f"the configuration has {seen}; pass a trace of the model instead of it")


def _names_in(entries: Mapping[Any, Any]) -> set[str]:
    """All names in the mappings of a mapping."""
    return {str(name) for entry in entries.values() if isinstance(entry, Mapping) for name in entry}


def _only(value: Any) -> Any:
    """The one number of a list that repeats it for each layer."""
    return value[0] if isinstance(value, list) and value and all(v == value[0] for v in value) else value


Rule = Callable[[_Fields], Kinds]


def _kinds(fields: _Fields, routed: Callable[[int], bool]) -> Kinds:
    return [LayerKind.DECODER if routed(i) else None for i in range(fields.num_layers)]


def _all(fields: _Fields) -> Kinds:
    return _kinds(fields, lambda i: True)


def _from(name: str, default: int) -> Rule:
    """Dense layers first: `name` says how many."""

    def rule(fields: _Fields) -> Kinds:
        first = fields.count(name, default)
        return _kinds(fields, lambda i: i >= first)

    return rule


def _dense_first(number: int) -> Rule:
    """A number of dense layers that only `mlp_layer_types` can change."""
    return lambda fields: _kinds(fields, lambda i: i >= number)


def _types_or(default: Rule) -> Rule:
    """`mlp_layer_types` where it is stated, else another rule."""

    def rule(fields: _Fields) -> Kinds:
        otherwise = default(fields)  # its fields count as read: the list goes before them
        stated = fields.one_for_each("mlp_layer_types")
        if stated is None:
            return otherwise
        unknown = [entry for entry in stated if not isinstance(entry, str) or entry not in _TYPES]
        if unknown:
            raise fields.wrong(f"mlp_layer_types with {shown(unknown[0])}, not one of {', '.join(_TYPES)}")
        return [_TYPES[entry] for entry in stated]

    return rule


def _by_frequency(fields: _Fields) -> Kinds:
    """`moe_layer_freq`: a distance of layers, or 0 and 1 for each."""
    if isinstance(fields.get("moe_layer_freq"), list):
        stated = fields.one_for_each("moe_layer_freq") or []
        flags = [whole_number(value, "an entry of moe_layer_freq", 0, 1) for value in stated]
        return _kinds(fields, lambda i: flags[i] == 1)
    step = fields.count("moe_layer_freq", 1, least=1)
    return _kinds(fields, lambda i: i % step == 0)


def _both(first: Rule, second: Rule) -> Rule:
    """Layers that two rules let route."""
    return lambda fields: [a and b for a, b in zip(first(fields), second(fields), strict=True)]


def _every(step_name: str) -> Rule:
    """Layer `step` - 1 and every one of that distance."""

    def rule(fields: _Fields) -> Kinds:
        step = fields.count(step_name, 1, least=1)
        return _kinds(fields, lambda i: (i + 1) % step == 0)

    return rule


def _but(default: tuple[int, ...]) -> Rule:
    """All but the layers that `mlp_only_layers` names."""

    def rule(fields: _Fields) -> Kinds:
        named = fields.numbers("mlp_only_layers")
        dense = set(default if named is None else named)
        return _kinds(fields, lambda i: i not in dense)

    return rule


def _named(name: str, default: Rule) -> Rule:
    """The layers in a list."""

    def rule(fields: _Fields) -> Kinds:
        otherwise, named = default(fields), fields.numbers(name)
        return otherwise if named is None else _kinds(fields, set(named).__contains__)

    return rule


def _step3p5(fields: _Fields) -> Kinds:
    """The layers in a list, or in text with commas."""
    text = fields.get("moe_layers_enum")
    if not isinstance(text, str):
        return _named("moe_layers_enum", _dense_first(3))(fields)
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,6}", part) for part in parts):
        raise fields.wrong(f"moe_layers_enum {shown(text)}; expected numbers of layers")
    return _kinds(fields, {int(part) for part in parts}.__contains__)


def _jamba(fields: _Fields) -> Kinds:
    period, offset = fields.count("expert_layer_period", 2, least=1), fields.count("expert_layer_offset", 1)
    return _kinds(fields, lambda i: i % period == offset)


def _ernie(fields: _Fields) -> Kinds:
    first, step = fields.count("moe_layer_start_index", 1), fields.count("moe_layer_interval", 1, least=1)
    end = fields.get("moe_layer_end_index")
    last = fields.num_layers - 1 if end == -1 else fields.count("moe_layer_end_index", fields.num_layers - 1)
    return _kinds(fields, lambda i: (i + 1) % step == 0 and first <= i <= last)


def _gemma(fields: _Fields) -> Kinds:
    has_experts = fields.get("enable_moe_block") is True
    return _kinds(fields, lambda i: has_experts)


def _deepseek_v4(fields: _Fields) -> Kinds:
    hashed = fields.count("num_hash_layers", 3)
    return [LayerKind.HASH if i < hashed else LayerKind.DECODER for i in range(fields.num_layers)]


def _nemotron_h(fields: _Fields) -> Kinds:
    """Every block is one mixer, of which experts are a kind. `num_hidden_layers` is not read."""
    blocks, pattern = fields.list_of("layers_block_type"), fields.get("hybrid_override_pattern")
    if blocks is None and isinstance(pattern, str) and len(pattern) <= MAX_LAYERS and set(pattern) <= _PATTERN.keys():
        blocks = [_PATTERN[letter] for letter in pattern]
    if blocks is None:
        raise fields.wrong(f"no layers_block_type, and hybrid_override_pattern {shown(pattern)}")
    if unknown := [block for block in blocks if block not in ("moe", *_NOT_ROUTED)]:
        raise fields.wrong(f"layers_block_type with {shown(unknown[0])}")
    return [LayerKind.DECODER if block == "moe" else None for block in blocks]


_FIRST_K = "first_k_dense_replace"

_FAMILIES: dict[str, Rule] = {
    "afmoe": _from("num_dense_layers", 1),
    "aria": _all,
    "axk1": _types_or(_both(_from(_FIRST_K, 1), _by_frequency)),
    "axk2": _types_or(_both(_from(_FIRST_K, 1), _by_frequency)),
    "bailing_hybrid": _types_or(_from(_FIRST_K, 2)),
    "beam": _types_or(_dense_first(3)),
    "cohere2_moe": _types_or(_from(_FIRST_K, 0)),
    "deepseek_v2": _from(_FIRST_K, 0),
    "deepseek_v3": _from(_FIRST_K, 3),
    "deepseek_v32": _types_or(_from(_FIRST_K, 3)),
    "deepseek_v4": _types_or(_deepseek_v4),
    "diffusion_gemma": _all,
    "dots1": _from(_FIRST_K, 0),
    "dots3_note": _types_or(_both(_from(_FIRST_K, 1), _by_frequency)),
    "ernie4_5_moe": _ernie,
    "ernie4_5_vl_moe": _types_or(_dense_first(1)),
    "exaone_moe": _types_or(_from(_FIRST_K, 1)),
    "flex_olmo": _all,
    "flint": _both(_every("decoder_sparse_step"), _but((0, 1))),
    "gemma4": _gemma,
    "glm4_moe": _from(_FIRST_K, 1),
    "glm4_moe_lite": _types_or(_dense_first(1)),
    "glm4v_moe": _from(_FIRST_K, 1),
    "glm5_next": _types_or(_dense_first(3)),
    "glm_moe_dsa": _types_or(_from(_FIRST_K, 3)),
    "gpt_oss": _all,
    "granitemoe": _all,
    "granitemoe_swa": _all,
    "granitemoehybrid": _all,
    "granitemoeshared": _all,
    "hunyuan_v1_moe": _all,
    "hy_v3": _types_or(_dense_first(1)),
    "hy_v4": _types_or(_dense_first(1)),
    "inkling": _types_or(_from("dense_mlp_idx", 0)),
    "inkling2": _all,
    "jamba": _jamba,
    "kimi_k2": _from(_FIRST_K, 3),
    "kimi_linear": _types_or(_from(_FIRST_K, 1)),
    "kolibri1": _all,
    "laguna": _types_or(_dense_first(1)),
    "lfm2_moe": _from("num_dense_layers", 2),
    "llama4": _named("moe_layers", _every("interleave_moe_layer_step")),
    "mellum": _types_or(_dense_first(0)),
    "mimo_v2_flash": _types_or(_dense_first(1)),
    "minimax": _all,
    "minimax_m2": _all,
    "minimax_m3_vl": _types_or(_by_frequency),
    "mistral4": _from(_FIRST_K, 0),
    "mistral_large4": _types_or(_from(_FIRST_K, 1)),
    "mixtral": _all,
    "muse_spark": _types_or(_dense_first(0)),
    "nemotron_h": _nemotron_h,
    "olmoe": _all,
    "openai_privacy_filter": _all,
    "phimoe": _all,
    "qwen2_moe": _both(_every("decoder_sparse_step"), _but(())),
    "qwen3_5_moe": _all,
    "qwen3_moe": _both(_every("decoder_sparse_step"), _but(())),
    "qwen3_next": _both(_every("decoder_sparse_step"), _but(())),
    "qwen3_omni_moe": _both(_every("decoder_sparse_step"), _but(())),
    "qwen3_vl_moe": _both(_every("decoder_sparse_step"), _but(())),
    "qwen4_exp": _all,
    "solar_open": _all,
    "step3p5": _types_or(_step3p5),
    "unlimited_ocr": _types_or(_from(_FIRST_K, 1)),
}
"""By `model_type`, without "_text": which decoder layers of a family route."""

_SAYS_DENSE: dict[str, Rule] = {
    _FIRST_K: _from(_FIRST_K, 0),
    "num_dense_layers": _from("num_dense_layers", 0),
    "dense_mlp_idx": _from("dense_mlp_idx", 0),
    "mlp_only_layers": _but(()),
    "decoder_sparse_step": _every("decoder_sparse_step"),
    "interleave_moe_layer_step": _every("interleave_moe_layer_step"),
    "moe_layer_freq": _by_frequency,
    "moe_layers": _named("moe_layers", _all),
    "moe_layers_enum": _step3p5,
    "mlp_layer_types": _types_or(_all),
    "expert_layer_period": _jamba,
    "moe_layer_interval": _ernie,
}
"""Fields that say which layers are dense, and how they are read where a family does not read them itself."""
