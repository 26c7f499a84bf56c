"""Figures of a GPU: replay, mismatch, transfers and training, in parts that are kept as they go.

Whether all is right there, tests say that are marked `gpu`; `make gpu` runs both. With `--device cpu` all that can run
does so at small sizes: this shows that the command works, and its figures say nothing.
"""
