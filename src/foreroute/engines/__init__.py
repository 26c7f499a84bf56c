"""What samples: a copy of the policy in this process, vLLM, SGLang. Each engine is imported by name, on request."""
