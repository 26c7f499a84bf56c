"""Frameworks whose models are replayed and executed. Each adapter is imported by name, on request."""
