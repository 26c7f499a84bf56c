"""What `foreroute doctor` is pointed at: models, traces, log-probs, checked before anything runs."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture import Generation, load_generation
from foreroute.errors import InputError, RunFolderError
from foreroute.files import open_regular, parse_json, read_text
from foreroute.trace import RoutingTrace, load

if TYPE_CHECKING:  # it loads torch
    from foreroute.train import TrainConfig

MOST_HEADER_BYTES = 10 + 0xFFFF
MOST_VALUES = 1 << 28
"""Log-probs of so many tokens take 1 GiB; a training step has a few million."""


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
        if self.checkpoint is not None and (self.model is None or not _is_of_a_run(self.model)):
            raise InputError(
                "--checkpoint is of foreroute train; give the run's configuration as --model FILE.toml, or its folder"
            )


@dataclass(frozen=True, eq=False)
class EngineOutput:
    """The engine's side: a trace, and where known the log-probs of its response tokens."""

    trace: RoutingTrace | None
    generation: Generation | None
    logprobs_R: NDArray[Any] | None


def with_last_rollout(inputs: DoctorInputs) -> DoctorInputs:
    """Add the last rollout that a run's folder kept at a checkpoint's step, where nothing but the folder was given."""
    folder = inputs.model
    if folder is None or folder.suffix == ".toml" or not _is_of_a_run(folder):
        return inputs
    if inputs.generation or inputs.trace or inputs.checkpoint:
        return inputs
    rollouts = _by_step(folder / "rollouts")
    both = rollouts.keys() & checkpoints_of(folder).keys()
    return replace(inputs, generation=rollouts[max(both)]) if both else inputs


def read_engine(inputs: DoctorInputs, max_sequences: int) -> EngineOutput:
    """Read the engine's side: the first sequences of trace and generation.

    Raises:
        InputError: when a file is missing, damaged, or of another size than the rest.
    """
    generation = load_generation(inputs.generation) if inputs.generation else None
    trace = load(inputs.trace) if inputs.trace else None
    logprobs_R = read_array(inputs.logprobs, "f") if inputs.logprobs else None
    if trace is not None and logprobs_R is not None and inputs.prompt_lengths is not None:
        generation = Generation(trace, read_array(inputs.prompt_lengths, "iu"), _as_float32(logprobs_R))
    if inputs.model is None:
        if generation is not None:
            trace, logprobs_R = generation.trace, generation.logprobs_R
        return EngineOutput(trace, None, logprobs_R)
    if generation is not None:
        generation = generation.select(np.arange(min(len(generation), max_sequences)))
        return EngineOutput(generation.trace, generation, generation.logprobs_R)
    return EngineOutput(None if trace is None else trace.select(np.arange(min(len(trace), max_sequences))), None, None)


def read_array(path: Path, kinds: str) -> NDArray[Any]:
    """Read a .npy file of one axis.

    Args:
        path: the file. No pickle is read, and nothing is allocated before its size is known to be there.
        kinds: accepted dtype kinds, "f" or "iu".

    Raises:
        InputError: when it is missing, no .npy file, damaged, or of another shape or type.
    """
    with open_regular(path, InputError) as file:
        begin = io.BytesIO(file.read(MOST_HEADER_BYTES))
        try:
            if (version := np.lib.format.read_magic(begin)) != (1, 0):
                raise ValueError(f"the file has version {version}; expected (1, 0), as of arrays of plain numbers")
            (*shape,), _, dtype = np.lib.format.read_array_header_1_0(begin)
        except Exception as error:  # whatever numpy's parser makes of bytes that are no header
            raise InputError(
                f"{path} is not a readable .npy file of plain numbers; numpy.save(path, array) writes one"
            ) from error
        if dtype.kind not in kinds or dtype.itemsize > 8 or len(shape) != 1:
            wanted = "floats" if kinds == "f" else "integers"
            raise InputError(f"{path} holds {dtype.str} of shape {shape}; expected {wanted} of one axis")
        held = os.fstat(file.fileno()).st_size - begin.tell()
        if shape[0] * dtype.itemsize != held or shape[0] > MOST_VALUES:
            raise InputError(
                f"{path} states {shape[0]:,} values of {dtype.itemsize} bytes and holds {held:,} bytes of them; "
                f"expected as many as stated, and {MOST_VALUES:,} values at most. It may be truncated"
            )
        file.seek(begin.tell())
        values: NDArray[Any] = np.frombuffer(file.read(held), dtype)
    return values.astype(np.int64 if kinds == "iu" else dtype.newbyteorder("="))


def _as_float32(logprobs_R: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        return logprobs_R.astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerModel:
    """The trainer's side: a model, and what is known of its weights.

    Attributes:
        model: a Hugging Face model.
        has_weights: whether it is more than a configuration.
        checkpoint: whose weights it has; None where it is no run's, or none was given.
        weight_version: of these weights, where they are a checkpoint's.
        before_step_0: the configuration that stands for the weights before step 0, where no checkpoint was given.
        checkpoints: of the run, paths by weight version.
        temperature: that the run's engine divides its logits by.
    """

    model: Any
    has_weights: bool
    checkpoint: Path | None = None
    weight_version: int | None = None
    before_step_0: str = ""
    checkpoints: Mapping[int, str] = field(default_factory=dict)
    temperature: float = 1.0

    def expected_version(self, trace: RoutingTrace | None) -> int | None:
        """Give the weight version that a trace must have; None where nothing is known."""
        known = trace is not None and any(version >= 0 for version in trace.versions)
        return self.weight_version if known else None


def read_trainer(inputs: DoctorInputs, trace: RoutingTrace | None) -> TrainerModel:
    """Load the model that `inputs.model` names.

    That is a TOML configuration of `foreroute train`, a folder of one of its runs or the config.json in it, a folder of
    a Hugging Face model, or its config.json. Of a run, the checkpoint is the one that `trace` was recorded under.

    Raises:
        ConfigError, DatasetError, RunFolderError: when one of the files cannot be read.
        InputError: when a checkpoint does not fit the model.
    """
    path, checkpoint = inputs.model, inputs.checkpoint
    assert path is not None, "called without a model"
    if path.name == "config.json" and _is_of_a_run(path.parent):
        path = path.parent
    if not _is_of_a_run(path):
        from foreroute.adapters.hf.local_models import load_local

        model, has_weights = load_local(path)
        return TrainerModel(model=model, has_weights=has_weights)
    from foreroute.train import load_config, parse_config

    if path.suffix == ".toml":
        config = load_config(path)
        held: dict[int, Path] = {}
        beside = [each.absolute().parent.parent for each in (inputs.generation, inputs.trace) if each is not None]
        for folder in [*beside, Path("runs") / config.name]:
            held = held or checkpoints_of(folder)
    else:
        stored = path / "config.json"
        values = parse_json(read_text(stored, RunFolderError), RunFolderError, name=str(stored))
        config, held = parse_config(values, source=str(stored)), checkpoints_of(path)
        checkpoint = checkpoint or _checkpoint_of(path, held, trace)
    return _trainer(config, path, checkpoint, {version: str(found) for version, found in held.items()})


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Find the checkpoints in a run's folder, by the weight version that each holds; none without such a folder."""
    return _by_step(folder / "checkpoints")


def _by_step(folder: Path) -> dict[int, Path]:
    from foreroute.train.folder import NAME

    found = {}
    with suppress(OSError):
        for path in folder.iterdir():
            if match := NAME.fullmatch(path.name):
                found[int(match[1])] = path
    return found


def _is_of_a_run(path: Path) -> bool:
    """Say whether it is a configuration of `foreroute train`, or the folder of a run."""
    return path.suffix == ".toml" or (path / "metrics.jsonl").exists() or (path / "checkpoints").is_dir()


def _checkpoint_of(folder: Path, held: Mapping[int, Path], trace: RoutingTrace | None) -> Path:
    """Choose the checkpoint that a trace was recorded under; the last one where there is none, or it does not say."""
    if not held:
        raise RunFolderError(f"{folder} holds no checkpoints, so there are no weights to examine")
    known = [version for version in trace.versions if version >= 0] if trace is not None else []
    if not known:
        return held[max(held)]
    if known[-1] not in held:
        raise RunFolderError(
            f"{folder} has no checkpoint of weight version {known[-1]}, under which the trace was recorded; it has "
            f"those of {', '.join(map(str, sorted(held)))}. Give a trace of one of these, or another --checkpoint"
        )
    return held[known[-1]]


def _trainer(config: TrainConfig, path: Path, checkpoint: Path | None, held: Mapping[int, str]) -> TrainerModel:
    from foreroute.train import load_checkpoint
    from foreroute.train.policy import make_model
    from foreroute.train.prompts import make_task

    model = make_model(config.model, make_task(config), seed=0)
    given: dict[str, Any] = {"checkpoints": held, "temperature": config.rollout.temperature}
    if checkpoint is None:
        return TrainerModel(model=model, has_weights=config.model.path is not None, before_step_0=str(path), **given)
    state = load_checkpoint(checkpoint)
    try:
        model.load_state_dict(state["model"])
    except (RuntimeError, TypeError, AttributeError) as error:
        seen = " ".join(str(error).split())
        raise InputError(f"{checkpoint} does not fit the model of {path}: {seen:.200}") from error
    return TrainerModel(model=model, has_weights=True, checkpoint=checkpoint, weight_version=state["step"], **given)
