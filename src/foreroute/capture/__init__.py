"""Engine output in, routing trace out: wires are recognised, decoded, checked and assembled. No torch, no engine."""

from foreroute.capture.containers import Recognised, recognise
from foreroute.capture.decode import decode
from foreroute.capture.encode import WRITABLE, encode
from foreroute.capture.engines import ENGINES
from foreroute.capture.facts import ModelFacts
from foreroute.capture.generation import Generation
from foreroute.capture.generation_file import load_generation, save_generation
from foreroute.capture.kinds import WireKind
from foreroute.capture.model_config import facts_of_config
from foreroute.capture.sampling import Sampling
from foreroute.capture.suspect import refuse_constant_layers
from foreroute.capture.trajectory import Trajectory

__all__ = [
    "ENGINES",
    "WRITABLE",
    "Generation",
    "ModelFacts",
    "Recognised",
    "Sampling",
    "Trajectory",
    "WireKind",
    "decode",
    "encode",
    "facts_of_config",
    "load_generation",
    "recognise",
    "refuse_constant_layers",
    "save_generation",
]
