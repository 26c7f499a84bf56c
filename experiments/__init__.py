"""Replay in RL of a small MoE, and loads of its experts: a resumable grid of runs, and the page and
tables made of their figures.

`python -m experiments run` runs what is missing in `results.jsonl`, `python -m experiments page` redraws
`docs/evidence.md` and `results.md` from it.
"""
