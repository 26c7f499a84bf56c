"""What `benchmarks.fuzz` tries: every reader of foreign bytes, and the malformed inputs that it is given."""
