"""Engine output in, routing trace out: wires are recognised, decoded, checked and assembled. No torch, no engine.

recognise    which form an output has, where the routes lie     recognise, Recognised
wires        the forms, and which engine writes which           WireKind, ENGINES
arrays       bytes, text and lists to arrays
decode       the door: tokens, rows and layers put in place     decode; masks in sampling_masks
indexers     choices of sparse-attention indexers               with_indexer_choices
checks       captures that cannot be true                       refuse_constant_layers
model_facts  what an engine's layer axis means                  ModelFacts; facts_of_config in model_config
encode       the way out                                        encode, WRITABLE
trajectory   one sequence from the captures of its turns        Trajectory
generation   what an engine is asked for and hands back         Sampling, Generation, save_generation
"""

from foreroute.capture.checks import refuse_constant_layers
from foreroute.capture.decode import decode
from foreroute.capture.encode import WRITABLE, encode
from foreroute.capture.generation import Generation, Sampling, load_generation, save_generation
from foreroute.capture.indexers import with_indexer_choices
from foreroute.capture.model_config import facts_of_config
from foreroute.capture.model_facts import ModelFacts
from foreroute.capture.recognition import Recognised, recognise
from foreroute.capture.trajectory import Trajectory
from foreroute.capture.wires import ENGINES, WireKind

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
    "with_indexer_choices",
]
