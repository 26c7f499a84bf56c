"""What foreroute uses of vLLM, without a model. The server is in `entrypoints/openai/api_server.py`."""

import os

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.30.0")
