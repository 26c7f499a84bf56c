"""Engine output in, routing trace out: wires are recognised, decoded, checked and assembled. No torch, no engine."""

from foreroute.capture.containers import Recognised, recognise
from foreroute.capture.decode import decode
from foreroute.capture.facts import ModelFacts
from foreroute.capture.generation import Generation
from foreroute.capture.generation_file import load_generation, save_generation
from foreroute.capture.kinds import WireKind
from foreroute.capture.trajectory import Trajectory

__all__ = [
    "Generation",
    "ModelFacts",
    "Recognised",
    "Trajectory",
    "WireKind",
    "decode",
    "load_generation",
    "recognise",
    "save_generation",
]
