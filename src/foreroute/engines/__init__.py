"""What samples, each imported by name: embedded (a copy of the policy in this process), vllm, sglang.

base            what every engine does                                 Engine, OutsideEngine
sequences       what one is asked and answers, held against each other     Request, Response
weights_folder  the folder through which an engine is handed checkpoints
http            JSON over HTTP, for engines behind a server
vllm_server     vLLM's server as a child of the trainer
inside_vllm     what runs in the environment of vLLM
"""
