"""What `foreroute doctor` is pointed at: models, traces, log-probs, checked before anything runs."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture import Generation, load_generation
from foreroute.errors import InputError
from foreroute.trace import RoutingTrace, load


@dataclass(frozen=True, kw_only=True)
class DoctorInputs:
    """Paths as the user gave them; None where not given."""

    model: Path | None = None
    checkpoint: Path | None = None
    generation: Path | None = None
    trace: Path | None = None
    logprobs: Path | None = None
    prompt_lengths: Path | None = None
    trainer_trace: Path | None = None
    trainer_logprobs: Path | None = None
    replayed_logprobs: Path | None = None

    def __post_init__(self) -> None:
        """Refuses combinations that say nothing, or two things at once."""
        if self.model is None and self.trainer_trace is None and self.trainer_logprobs is None:
            raise InputError(
                "there is no trainer to examine: give --model, or --trainer-trace and --trainer-logprobs of its passes"
            )
        if self.model is not None and (self.trainer_trace or self.trainer_logprobs or self.replayed_logprobs):
            raise InputError("--model computes the trainer's routes and log-probs; do not give them as well")
        if self.model is None and self.generation is None and self.trace is None and self.logprobs is None:
            raise InputError("there is no engine to compare with: give --generation, or --trace and --logprobs")
        if self.generation is not None and (self.trace or self.logprobs or self.prompt_lengths):
            raise InputError("--generation holds trace, log-probs and prompt lengths; do not give them as well")
        if self.model is not None and (self.logprobs is None) != (self.prompt_lengths is None):
            raise InputError("--logprobs and --prompt-lengths go together: they say which tokens were sampled")
        if self.logprobs is not None and self.model is not None and self.trace is None:
            raise InputError("--logprobs belong to the tokens of a --trace; give it as well")
        if self.checkpoint is not None and (self.model is None or self.model.suffix != ".toml"):
            raise InputError("--checkpoint is of foreroute train; give its configuration as --model FILE.toml")


@dataclass(frozen=True, eq=False)
class Engine:
    """The engine's side: a trace, and where known the log-probs of its response tokens."""

    trace: RoutingTrace | None
    generation: Generation | None
    logprobs_R: NDArray[Any] | None


def read_engine(inputs: DoctorInputs, max_sequences: int) -> Engine:
    """Read the engine's side, and of the trace and generation the first sequences.

    Raises:
        InputError: when a file is missing, damaged, or of another size than the rest.
    """
    generation = load_generation(inputs.generation) if inputs.generation else None
    trace = load(inputs.trace) if inputs.trace else None
    logprobs_R = read_array(inputs.logprobs, "f") if inputs.logprobs else None
    if trace is not None and logprobs_R is not None and inputs.prompt_lengths is not None:
        generation = Generation(trace, read_array(inputs.prompt_lengths, "iu"), logprobs_R.astype(np.float32))
    if inputs.model is None:
        if generation is not None:
            trace, logprobs_R = generation.trace, generation.logprobs_R
        return Engine(trace, None, logprobs_R)
    if generation is not None:
        generation = generation.select(np.arange(min(len(generation), max_sequences)))
        return Engine(generation.trace, generation, generation.logprobs_R)
    return Engine(None if trace is None else trace.select(np.arange(min(len(trace), max_sequences))), None, None)


def read_array(path: Path, kinds: str) -> NDArray[Any]:
    """A .npy file of one axis.

    Args:
        path: the file. No pickle is read.
        kinds: accepted dtype kinds, "f" or "iu".

    Raises:
        InputError: when it is missing, no .npy file, or of another shape or type.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not a readable .npy file: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
        seen = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        wanted = "floats" if kinds == "f" else "integers"
        raise InputError(f"{path} holds {seen}; expected {wanted} of one axis")
    return array.astype(np.int64) if kinds == "iu" else array


def read_model(path: Path, checkpoint: Path | None) -> tuple[Any, bool]:
    """A model, and whether it has its weights.

    Args:
        path: a TOML configuration of `foreroute train`, a folder of a Hugging Face model, or its config.json.
        checkpoint: of a run with that configuration.

    Raises:
        ConfigError, RunFolderError: when one of them cannot be read.
    """
    if path.suffix != ".toml":
        from foreroute.adapters.hf.local import load_local

        return load_local(path)
    from foreroute.train import load_checkpoint, load_config
    from foreroute.train.model import make_model
    from foreroute.train.tasks import make_task

    config = load_config(path)
    with closing(make_task(config)) as task:
        model = make_model(config.model, task, seed=0)
    if checkpoint is None:
        return model, config.model.path is not None
    state = load_checkpoint(checkpoint)["model"]
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        first = str(error).partition("\n")[0]
        raise InputError(f"{checkpoint} does not fit the model of {path}: {first}") from error
    return model, True
