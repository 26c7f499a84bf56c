"""What each release of vLLM answers, held against a Hugging Face forward in float32: README.md beside it.

    python -m tests.engines.releases .venv-vllm-0.28.0/bin/python .venv-vllm/bin/python .venv-vllm-0.32.0/bin/python

`server` starts a release, `cases` asks it, `reference` is what the answers are held against, `results` runs all cases
of a release, and `__main__` writes the table. Nothing here stands on `foreroute.engines`, so that requests are those of
any client.
"""
