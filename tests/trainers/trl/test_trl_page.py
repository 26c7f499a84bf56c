"""The code of docs/trl.md runs, in order, as a reader would have it, and the scripts of examples/trl."""

import difflib
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from examples.trl.tiny import agent, answers, chat_tokenizer, look_up, policy, tokenizer, vowels
from foreroute.capture import Sampling
from foreroute.engines.embedded import EmbeddedEngine
from tests.tiers import grid
from tests.trainers.trl.tools_runs import PROMPTS as CONVERSATIONS
from tests.trainers.trl.trl_runs import PROMPTS, SETTINGS, logged

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "trl"
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@grid("script", ["grpo_r3.py", "grpo_tools.py"], quick=0, day=1)
def test_scripts_replay_every_turn(script, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, folder])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a script
    trainer = runpy.run_path(str(EXAMPLES / script))["trainer"]
    assert len(logged(trainer, "loss")) == trainer.args.max_steps
    assert set(logged(trainer, "mismatch/disagreement")) == {0.0}


def test_three_lines_turn_replay_on():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("grpo.py", "grpo_r3.py"))
    changed = [line for line in difflib.ndiff(before[1:], after[1:]) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) == 3, changed


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "trl.md").read_text()
    blocks = [(page[: found.start(1)].count("\n"), found.group(1)) for found in FENCE.finditer(page)]
    assert len(blocks) == 4
    (line, code), *others = blocks
    names = {}
    exec(compile("\n" * line + code, "docs/trl.md", "exec"), names)  # a whole file
    new_model = policy(seed=2)
    engine = EmbeddedEngine(new_model)  # made before the trainer, as the page says

    def run_agent(prompts, trainer):
        """An agent of one turn."""
        engine.load_weights(trainer.model.state_dict(), trainer.state.global_step)
        asked = [np.array(ids, np.int32) for ids in trainer._tokenize_prompts(prompts)[0]]
        return engine.generate(asked, Sampling(8, 1), torch.Generator())

    names |= {
        "tokenizer": tokenizer(),
        "reward": vowels,
        "dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "settings": {**SETTINGS, "max_steps": 2},
        "new_model": new_model,
        "agent": agent(),
        "chat_tokenizer": chat_tokenizer(),
        "answers": answers,
        "look_up": look_up,
        "conversations": Dataset.from_dict({"prompt": CONVERSATIONS}),
        "run_agent": run_agent,
    }
    for line, code in others:
        exec(compile("\n" * line + code, "docs/trl.md", "exec"), names)
