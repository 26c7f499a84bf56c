"""What releases of vLLM answer beside a Hugging Face model: README.md has what was seen."""
