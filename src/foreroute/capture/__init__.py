"""Engine output in, routing trace out: the form is recognised, the routes are put in place and checked. No torch, no
engine.

decode          the door: tokens, rows and layers put in place
recognition     which form an output has, where the routes lie
arrays          fields, arrays, text and bytes from outside
verl_batch      the padded batch of verl
checks          captures that look like one that failed          refuse_constant_layers
sampling_masks  the sets that tokens were drawn from
indexers        choices of sparse-attention indexers             with_indexer_choices
trajectory      one sequence from the captures of its turns      Trajectory
generation      what an engine is asked for and hands back       Sampling, Generation, save_generation
"""

from foreroute.capture.checks import refuse_constant_layers
from foreroute.capture.decode import decode
from foreroute.capture.generation import Generation, Sampling, load_generation, save_generation
from foreroute.capture.indexers import with_indexer_choices
from foreroute.capture.trajectory import Trajectory

__all__ = [
    "Generation",
    "Sampling",
    "Trajectory",
    "decode",
    "load_generation",
    "refuse_constant_layers",
    "save_generation",
    "with_indexer_choices",
]
