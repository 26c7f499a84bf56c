"""What docs/train.md shows of precision, memory and rollouts ahead goes together."""

import re
import tomllib
from pathlib import Path

from foreroute.train import parse_config
from tests.train.expert_parallel_steps import scored_by_tokens
from tests.train.small_runs import small_values, trainer_of

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


def test_the_configurations_of_the_page_run_in_one():
    base = small_values()
    page = (
        PAGE.read_text(encoding="utf-8").partition("## Precision, memory and rollouts ahead")[2].partition("\n## ")[0]
    )
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    for name, section in [item for block in blocks for item in tomllib.loads(block).items()]:
        base[name] = {**base.get(name, {}), **section}
    assert base["model"].keys() >= {"dtype", "gradient_checkpointing", "lora"}
    assert base["rollout"]["max_staleness"] == 1
    trainer = trainer_of(parse_config(base, source="the page"))
    with scored_by_tokens():
        steps = [trainer.run_step()[1] for _ in range(2)]
    trainer.close()
    assert all(step["grad_norm"] > 0 for step in steps)
    assert [step["staleness"] for step in steps] == [0, 1]
