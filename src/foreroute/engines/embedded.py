"""The embedded rollout engine: a low-precision copy of the policy that samples with a key-value cache.

It stands in for vLLM or SGLang where there is none. What matters for replay is real: a copy of the weights, in another
precision, run token by token over a cache, routes its tokens by itself.

Letters: S sequences, V tokens of the vocabulary, T positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foreroute.adapters.checkpoint import Weights, quiet_transformers, whole_weights
from foreroute.adapters.hf import attach
from foreroute.adapters.hf.routed_transformer import saved_tensors
from foreroute.capture import Generation, Sampling
from foreroute.capture.sampling_masks import masks_of_steps
from foreroute.checks import MOST_INT32, as_int32, whole_number
from foreroute.core.caches import named_cache
from foreroute.engines.base import count_tokens
from foreroute.errors import ConfigError, DivergedError, shown
from foreroute.replay import Recording
from foreroute.trace import NO_VERSION, SAMPLING

__all__ = ["EmbeddedEngine"]

Precision = Literal["float32", "bfloat16", "fp8"]

E4M3_MAX = 448.0
NOT_IN_FP8 = ("embed", "lm_head", "gate.weight", "router", "norm", "bias")
"""Parts of the names of parameters that FP8 engines keep: embeddings, output head, routers, norms, biases."""


class EmbeddedEngine:
    """Batched sampling from a copy of a Hugging Face model, with routes, log-probs and sampling masks.

    Args:
        model: the policy, of a class of transformers; it is copied once, on its device, and not kept.
        precision: "float32", "bfloat16", or "fp8" (bfloat16 arithmetic on weights that were rounded to E4M3, with one
            scale per output channel). What `from_pretrained` of transformers keeps in float32 stays so.
        indexers: whether traces have the choices of sparse-attention indexers, which the model must have.
        weights: those of a policy that transformers has spread over ranks: `routed.gather_weights()`.

    Attributes:
        weight_version: the version last loaded; every trace has it.

    Raises:
        AttachError: as `hf.attach`.
        ConfigError: for another precision, and when the model is of no class of transformers, or has adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision = "bfloat16",
        *,
        indexers: bool = False,
        weights: Weights | None = None,
    ) -> None:
        if precision not in get_args(Precision):
            raise ConfigError(f"precision is {shown(precision)}; expected one of {', '.join(get_args(Precision))}")
        self._precision = precision
        self._indexers = indexers
        empty = _load_zeros(model, torch.float32 if precision == "float32" else torch.bfloat16)
        if weights is None and getattr(model.config, "distributed_config", None) is not None:
            raise ConfigError(
                "the policy of the embedded engine is spread over ranks; give weights=routed.gather_weights() too"
            )
        empty.to(next(model.parameters()).device)
        # contiguous, since the zeros that were loaded are one number each
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.data = tensor.data.contiguous()
        self._model: Any = empty.eval().requires_grad_(False)
        self._input_axis = _input_axes(self._model)
        self.weight_version = NO_VERSION
        self.load_weights(model.state_dict() if weights is None else weights, NO_VERSION)
        self._routed = attach(self._model)

    @torch.no_grad()
    def load_weights(self, weights: Weights, version: int) -> None:
        """Load the trainer's weights in the engine's precision; rows that follow are stamped with `version`.

        Warns where the version before had this number and other weights, which no trace could tell apart.

        Raises:
            ConfigError: when a weight is missing, which would keep its old value, or the version is no number.
        """
        whole_number(version, name="version of the weights", least=NO_VERSION, most=MOST_INT32, error=ConfigError)
        targets = self._model.state_dict()
        missing = {name for name, _ in saved_tensors(self._model)}
        is_same, changed = version == self.weight_version != NO_VERSION, 0
        for name, source in whole_weights(weights):
            missing.discard(name)
            target = targets.get(name)
            if target is None:
                continue
            is_kept = source.ndim < 2 or target.dtype != torch.bfloat16 or any(word in name for word in NOT_IN_FP8)
            if self._precision == "fp8" and not is_kept:
                source = _round_to_e4m3(source, self._input_axis.get(name, -1))
            changed += is_same and not torch.equal(target, source.to(target))
            target.copy_(source)
        if missing:
            raise ConfigError(
                f"{len(missing)} weights of the policy were not given, such as {min(missing)!r}; give all of them"
            )
        self.weight_version = version
        if changed:
            warnings.warn(
                f"{changed} weights are others than those that were loaded as version {version} before: rollouts of "
                "both carry one number. Count the version up with every update",
                stacklevel=2,
            )

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample as `Engine.generate` says, of `foreroute.engines.base`.

        A prompt is prefilled once, and its cache and its routes are shared by the group. Prompts of one length are
        decoded together, so that nothing is padded. `generator` is on the CPU or on the device of the model.

        Raises:
            ConfigError: without a prompt, for prompts in one array, for one without a token or with others than the
                model's, for an end token that it has not, for no generator, and when choices of indexers are asked for
                and the model has no indexer that can be recorded.
            DivergedError: when the model's logits are not finite.
        """
        device = self._model.get_input_embeddings().weight.device
        on_device = _generator_on(device, generator)
        lengths = np.array(count_tokens(prompts))
        self._require_known(prompts, sampling.end_token)
        parts, order = [], []
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length)
            tokens = torch.from_numpy(np.stack([prompts[int(i)] for i in alike]).astype(np.int64)).to(device)
            parts.append(self._decode(tokens, sampling, on_device))
            order.append((alike[:, None] * sampling.group_size + np.arange(sampling.group_size)).reshape(-1))
        return Generation.concatenate(parts).select(np.argsort(np.concatenate(order)))

    def close(self) -> None:
        """Do nothing: this engine is only memory."""

    def _require_known(self, prompts: Sequence[NDArray[np.int32]], end_token: int) -> None:
        """Raise `ConfigError` for tokens of prompts that the model does not know, and an end that it does not."""
        size = self._model.get_input_embeddings().num_embeddings
        for s, prompt in enumerate(prompts):
            if (highest := as_int32(prompt, name=f"prompt {s}", error=ConfigError).max()) >= size:
                raise ConfigError(f"prompt {s} has token {highest}; the model knows tokens 0 to {size - 1}")
        if end_token >= size:
            raise ConfigError(f"end_token is {end_token}; the model knows tokens 0 to {size - 1}")

    def _recording(self) -> AbstractContextManager[Recording]:
        return self._routed.record(weight_version=self.weight_version, indexers=self._indexers)

    def _decode(self, prompts_ST: Tensor, sampling: Sampling, generator: torch.Generator) -> Generation:
        group_size, end_token = sampling.group_size, sampling.end_token
        with self._recording() as recording:
            output = self._model(input_ids=prompts_ST, use_cache=True)
        prompt_trace = recording.trace().select(np.repeat(np.arange(len(prompts_ST)), group_size))
        caches = named_cache(output)
        for cache in caches.values():
            cache.batch_repeat_interleave(group_size)
        logits = output.logits[:, -1].repeat_interleave(group_size, dim=0)
        tokens, logprobs, kept_sets = [], [], []
        done = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        # the second recording has the rows of sampled tokens alone, and is joined to the prompts' below
        with self._recording() as recording:
            while True:
                token, logprob, kept_SV = _sample(logits, sampling, generator)
                if kept_SV is not None:
                    sequences, ids = np.nonzero(kept_SV.cpu().numpy())
                    kept_sets.append((sequences, ids))
                tokens.append(token)
                logprobs.append(logprob)
                done |= token == end_token
                if bool(done.all()) or len(tokens) == sampling.max_new_tokens:
                    break
                logits = self._model(input_ids=token[:, None], use_cache=True, **caches).logits[:, -1]
        responses_ST, logprobs_ST = (torch.stack(each, 1).cpu().numpy() for each in (tokens, logprobs))
        is_end_ST = responses_ST == end_token  # the first of a response is one of its tokens
        lengths = np.where(is_end_ST.any(axis=1), is_end_ST.argmax(axis=1) + 1, responses_ST.shape[1])
        # a sequence that has ended is sampled further until all have
        kept_ST = np.arange(responses_ST.shape[1]) < lengths[:, None]
        trace = prompt_trace.continued_by(recording.rollout(responses_ST, kept_ST))
        if kept_sets:
            masks = masks_of_steps(kept_sets, logits.shape[1], prompt_trace.lengths, lengths)
            trace = trace.with_stream(SAMPLING, masks)
        return Generation(trace, prompt_trace.lengths, logprobs_ST[kept_ST].astype(np.float32))


def _load_zeros(model: Any, dtype: torch.dtype) -> Any:
    """Have `from_pretrained` load zeros in the place of a model's weights, in the dtypes that it chooses."""
    # it keeps what a family lists in float32, such as routers, and what a class makes in a dtype of its own
    adapted = hasattr(model, "peft_config")
    if adapted or not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the embedded engine was given a {type(model).__name__}{' with adapters' if adapted else ''}; expected a "
            "model of transformers alone. Merge adapters into it first (merge_and_unload of PEFT)"
        )
    # one number each, expanded and in the wanted dtype, so that loading copies only what stays float32
    zeros = {
        name: torch.zeros((), dtype=dtype if each.is_floating_point() else each.dtype).expand(each.shape)
        for name, each in model.state_dict().items()
    }
    with quiet_transformers(), _whole_models(), torch.random.fork_rng(devices=[]):
        return type(model).from_pretrained(
            None, config=model.config, state_dict=zeros, dtype=dtype, local_files_only=True
        )


@contextmanager
def _whole_models() -> Iterator[None]:
    """Have transformers load whole models, also where a trainer of ZeRO-3 has it load parts."""
    from transformers.integrations import deepspeed

    kept = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept


def _generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """Return the generator itself, or one on the device with a seed that is drawn from it."""
    # it lives for one call, so that a checkpoint needs the state of the generator on the CPU alone
    if not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator is {shown(generator)}; expected one, as torch.Generator().manual_seed(0)")
    if generator.device == device:
        return generator
    seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    return torch.Generator(device).manual_seed(seed)


def _sample(logits_SV: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a token for each sequence, its log-prob where it was drawn, and bool [S, V] where tokens were left out."""
    scaled_SV = logits_SV.float() / (sampling.temperature or 1.0)
    kept_SV = _truncation_mask(scaled_SV, sampling) if sampling.truncates else None
    logprobs_SV = (scaled_SV if kept_SV is None else scaled_SV.masked_fill(~kept_SV, -torch.inf)).log_softmax(-1)
    if bool(logprobs_SV.isnan().any()):
        raise DivergedError("the policy's logits are not finite; resume from a checkpoint with a lower learning rate")
    if sampling.temperature == 0:
        token = logprobs_SV.argmax(-1, keepdim=True)
    else:
        token = torch.multinomial(logprobs_SV.exp(), 1, generator=generator)
    return token[:, 0], logprobs_SV.gather(1, token)[:, 0], kept_SV


def _truncation_mask(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """Return bool [S, V], the tokens left by min-p, then by top-k with all ties, then by top-p of what those left."""
    left_SV, ids = logits_SV, torch.zeros(0, dtype=torch.long)  # ids of tokens before, which no warper reads
    if sampling.min_p:
        left_SV = MinPLogitsWarper(sampling.min_p)(ids, left_SV)
    if sampling.top_k:
        left_SV = TopKLogitsWarper(sampling.top_k)(ids, left_SV)
    if sampling.top_p < 1:
        left_SV = TopPLogitsWarper(sampling.top_p)(ids, left_SV)
    return left_SV != -torch.inf


def _round_to_e4m3(weight: Tensor, input_axis: int) -> Tensor:
    """Round a weight to float8 E4M3 with one scale per output channel, and back to its dtype."""
    scale = weight.abs().amax(dim=input_axis, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def _input_axes(model: nn.Module) -> dict[str, int]:
    """Map weights of transposed experts to the axis of their input, -2; that of all others is the last."""
    return {
        f"{path}.{name}": -2
        for path, module in model.named_modules()
        if getattr(module, "is_transposed", False)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }
