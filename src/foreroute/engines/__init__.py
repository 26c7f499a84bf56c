"""Engines that sample, each imported by name: embedded (a copy of the policy in this process), vllm, sglang.

base          the door of every engine, and what those outside share: weights, requests and responses
http          JSON over HTTP, for engines behind a server
vllm_server   vLLM's server as a child of the trainer
inside_vllm   the part that runs in the environment of vLLM
"""
