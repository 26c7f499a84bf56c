"""The small forward that finds the routers of a model and proves replay on it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AttachError

PROBE_TOKENS = 8
BESIDE_TOKENS = "attention_mask", "position_ids"


@dataclass(frozen=True)
class Probe:
    """A small forward of a model, with the same random numbers every time."""

    model: nn.Module
    given: Mapping[str, Any]
    tokens: str  # which argument holds tokens, [B, T], or embeddings, [B, T, D]
    takes_any: bool = True  # whether **kwargs of the model take `use_cache`

    @classmethod
    def of(cls, model: nn.Module, example: Mapping[str, Any] | None = None, num_tokens: int = PROBE_TOKENS) -> Probe:
        """Make it of the arguments of a call; without them, of tokens on the device of the embedding.

        Raises `AttachError` when an example has no tokens.
        """
        if example is None:
            return cls(model, {}, "input_ids")._with_tokens(num_tokens)
        if not isinstance(example, Mapping):
            raise AttachError(
                f"example is a {type(example).__name__}; expected the arguments of a call of {type(model).__name__} by "
                "their names"
            )
        rows = {
            name: value
            for name, value in example.items()
            if isinstance(value, Tensor)
            and name not in BESIDE_TOKENS
            and value.dtype != torch.bool
            and value.numel()
            and value.ndim == (3 if value.is_floating_point() else 2)
        }
        integers_first = sorted(rows, key=lambda name: rows[name].is_floating_point())
        named = [name for name in ("input_ids", "tokens", *integers_first) if name in rows]
        if not named:
            raise AttachError(
                f"example has {', '.join(example) or 'nothing'}; expected the arguments of a call of "
                f"{type(model).__name__}, among them tokens, integers [B, T] of one row or more"
            )
        return cls(model, dict(example), named[0], takes_any=False)

    def _with_tokens(self, num: int) -> Probe:
        try:
            embedding: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        except Exception as error:
            raise self.does_not_run(error) from error
        weight: Tensor = embedding.weight  # type: ignore[assignment]
        # where accelerate offloaded it, it takes tokens from anywhere
        offloaded = weight.is_meta and hasattr(embedding, "_hf_hook")
        device = torch.device("cpu") if offloaded else weight.device
        # a weight that ranks share out may have no row here
        num_words = getattr(embedding, "num_embeddings", weight.shape[0])
        return replace(self, given={self.tokens: torch.arange(num, device=device)[None] % num_words})

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return tuple(self.given[self.tokens].shape[:2])

    def run(self, *, use_cache: bool = False) -> Any:
        torch.manual_seed(0)
        takes = inspect.signature(self.model.forward).parameters
        is_any = self.takes_any and any(p.kind is p.VAR_KEYWORD for p in takes.values())
        options = {"use_cache": use_cache} if "use_cache" in takes or is_any else {}
        return self.model(**options | dict(self.given))

    def hidden(self) -> Tensor:
        """Give its first output."""
        return first_tensor(self.run())

    def does_not_run(self, error: Exception) -> AttachError:
        """Say what may be wrong with it."""
        model = self.model
        if any(parameter.numel() == 0 for parameter in model.parameters()):
            return AttachError(
                f"{type(model).__name__} has parameters without elements, as models have that were made partitioned, "
                "for DeepSpeed's ZeRO stage 3, and nothing gathers them yet; call deepspeed.initialize first"
            )
        takes = inspect.signature(model.forward).parameters.values()
        needs = [each.name for each in takes if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
        needs = needs or [each.name for each in takes][:1]
        mode = "" if model.training else " in eval mode"
        return AttachError(
            f"{type(model).__name__} does not run{mode} on {' and '.join(self.given) or 'input_ids'} alone "
            f"({type(error).__name__}: {error}). Mend that if it fails without foreroute too. Attach a model that "
            "takes other arguments by those of a call, foreroute.core.attach(model, example={...}), of which this one "
            f"needs {', '.join(needs)}; one that runs only as it trains after model.train(); and of a speech model the "
            "part that takes tokens, such as the decoder"
        )


def first_tensor(output: Any) -> Tensor:
    """Give logits or hidden states of what a model returned, and no cache."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    found: Tensor = next(value for value in values if isinstance(value, Tensor))
    return found
