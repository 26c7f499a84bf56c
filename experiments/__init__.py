"""What replay does to RL of a small MoE: a resumable grid of runs, and the page that is drawn from their figures.

`python -m experiments run` runs what is missing in `results.jsonl`, `python -m experiments page` redraws
`docs/evidence.md` from it.
"""
