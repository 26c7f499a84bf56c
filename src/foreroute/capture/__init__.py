"""Engine output in, routing trace out: the form is recognised, the routes are put in place and checked. No torch, no
engine.

decode          the doors: tokens, rows and layers put in place
logprobs        log-probs of sampled tokens
recognition     which form an output has, where the routes lie
arrays          fields, arrays, text and bytes from outside
verl_batch      padded and packed batches of verl, ms-swift and SkyRL
checks          captures that look like one that failed
sampling_masks  the sets that tokens were drawn from
indexers        choices of sparse-attention indexers             with_indexer_choices
skycap          records of SkyRL's gateway for agents            read_skycap
nemo_gym        token ids that NeMo Gym captured                 read_nemo_gym
agents          what both of these give                          AgentRollout
generation      what an engine is asked for and hands back       Sampling, Generation, save_generation
"""

from foreroute.capture.agents import AgentRollout
from foreroute.capture.decode import decode, decode_generation
from foreroute.capture.generation import Generation, Sampling, load_generation, save_generation
from foreroute.capture.indexers import with_indexer_choices
from foreroute.capture.nemo_gym import read_nemo_gym
from foreroute.capture.skycap import read_skycap

__all__ = [
    "AgentRollout",
    "Generation",
    "Sampling",
    "decode",
    "decode_generation",
    "load_generation",
    "read_nemo_gym",
    "read_skycap",
    "save_generation",
    "with_indexer_choices",
]
