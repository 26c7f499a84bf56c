"""TRL's GRPOTrainer on rollouts that are given to it, with a clock that runs between its rollouts alone."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from foreroute.train.record import Experience

Order = list[int]


@dataclass(frozen=True)
class Batches:
    """Cuts of a rollout, the same on both sides.

    Attributes:
        sequences: S, of a rollout.
        group_size: responses to each prompt.
        mini_steps: optimizer steps on a rollout.
        micro_batch: sequences of a forward of TRL.
    """

    sequences: int
    group_size: int
    mini_steps: int
    micro_batch: int


class TimedGRPOTrainer(GRPOTrainer):
    """TRL's own code; the clock stops while it generates and scores, but for the old-log-prob pass in it.

    Attributes:
        seconds: of each rollout: old log-probs, losses, gradients, optimizer steps, and TRL's loop around them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: list[float] = []
        self._started: float | None = None
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        self._stop()
        self.seconds.append(0.0)
        output = super()._generate_and_score_completions(inputs)
        self._start()
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._started is not None:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._start()
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._stop()
        return output

    def _start(self) -> None:
        self._started = time.thread_time()

    def _stop(self) -> None:
        if self._started is not None:
            self.seconds[-1] += time.thread_time() - self._started
            self._started = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as always, and read the clock of the last rollout."""
        output = super().train(*args, **kwargs)
        self._stop()
        return output


def train(
    model: Any,
    rollouts: list[tuple[Experience, Order]],
    batches: Batches,
    *,
    learning_rate: float,
    before_each: Callable[[int], object],
) -> list[float]:
    """Train on the rollouts, one after the other, with TRL's GRPO.

    Args:
        model: the policy.
        rollouts: each with the order in which its sequences are taken, where TRL shuffles.
        batches: how they are cut.
        learning_rate: of AdamW, constant.
        before_each: called with the number of each rollout when TRL asks for it, off the clock.

    Returns:
        Seconds of processor time for each rollout.
    """
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    handed_out: list[int] = []

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        number = len(handed_out)
        before_each(number)
        handed_out.append(number)
        generation = rollouts[number][0].generation
        responses = [generation.response(s).tolist() for s in range(len(generation))]
        tokens = [generation.trace.tokens(s).tolist() for s in range(len(generation))]
        return {
            "prompt_ids": [whole[: -len(response)] for whole, response in zip(tokens, responses, strict=True)],
            "completion_ids": responses,
            "logprobs": [[0.0] * len(response) for response in responses],
        }

    def in_our_order(batch: dict[str, Any]) -> dict[str, Any]:
        order = rollouts[handed_out[-1]][1]
        return {
            name: value[order] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in batch.items()
        }

    def rewards(prompts: list[Any], **_: Any) -> list[float]:
        return list(rollouts[handed_out[-1]][0].rewards_S.tolist())

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(grpo_trainer, "shuffle_sequence_dict", in_our_order),
    ):
        longest = max(int(each.generation.response_lengths.max()) for each, _ in rollouts)
        trainer = TimedGRPOTrainer(
            model=model,
            processing_class=_words(model.config.vocab_size),
            reward_funcs=rewards,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["t0"] * (batches.sequences // batches.group_size)}),
            rollout_func=roll_out,
            args=_settings(folder, batches, len(rollouts), longest, learning_rate),
        )
        trainer.train()
    return trainer.seconds


def _settings(folder: str, batches: Batches, rollouts: int, longest: int, learning_rate: float) -> GRPOConfig:
    """GSPO as `rl.method = "gspo"` has it, on rewards less their group's mean, and nothing that costs time."""
    per_rollout = batches.sequences // batches.micro_batch
    return GRPOConfig(
        output_dir=folder,
        max_steps=rollouts * batches.mini_steps,
        per_device_train_batch_size=batches.micro_batch,
        steps_per_generation=per_rollout,
        gradient_accumulation_steps=per_rollout // batches.mini_steps,
        num_generations=batches.group_size,
        max_completion_length=longest,
        loss_type="grpo",
        importance_sampling_level="sequence",
        scale_rewards="none",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        router_aux_loss_coef=0.0,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=10**6,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def _words(size: int) -> Any:
    """A tokenizer with a word for each token: TRL decodes what it is given for the reward functions."""
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", padding_side="left"
    )
