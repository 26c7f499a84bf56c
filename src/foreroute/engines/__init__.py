"""What samples, each imported by name: embedded (a copy of the policy in this process), vllm, sglang.

base            what every engine does                                            Engine, OutsideEngine
sequences       what one sampled, held against what was asked                        Response, Sample
weights_folder  the folder through which an engine is handed checkpoints
http            JSON over HTTP, for engines behind a server
"""
