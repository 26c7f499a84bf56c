"""The code of docs/trl.md runs, in order, as a reader would have it."""

import re
from pathlib import Path

from datasets import Dataset

from examples.trl.tiny import policy, tokenizer, vowels
from tests.trainers.trl.trl_runs import PROMPTS, SETTINGS

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def a_users_things():
    return {
        "model": policy(),
        "fresh_model": policy(seed=1),
        "tokenizer": tokenizer(),
        "reward": vowels,
        "dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "settings": {**SETTINGS, "max_steps": 2},
    }


def test_every_block_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "trl.md").read_text()
    blocks = [(page[: found.start(1)].count("\n"), found.group(1)) for found in FENCE.finditer(page)]
    assert len(blocks) == 4
    namespace = a_users_things()
    for line, code in blocks:
        exec(compile("\n" * line + code, "docs/trl.md", "exec"), namespace)
