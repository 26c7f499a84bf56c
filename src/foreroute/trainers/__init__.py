"""Trainers of other projects, and which of their passes is which. Each is imported by name, on request."""
