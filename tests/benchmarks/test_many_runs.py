"""A plan of runs: order, seeds, folders of earlier jobs, and what is recorded."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import many_runs
from frugalvit.cli import main as cli
from frugalvit.cli import parser as parser

PLAN = """
- {name: features, command: "pretrain {data}/images"}
- {name: train, seeds: [0, 1], after: [features], command: "train {data}/images --init {features} --seed {seed}"}
- {name: probe, seeds: [0, 1], after: [train], command: "probe knn {train} {data}/images"}
"""


def test_a_plan_runs_in_order_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out, calls = tmp_path / "plan.yaml", tmp_path / "out", []
    plan.write_text(PLAN)
    fails = ["train_1"]

    def run(job: many_runs.Job, data: str, out: Path) -> dict[str, Any]:
        calls.append(" ".join(many_runs.fill_in(job, data, out)))
        return {"name": job.name} | ({"error": "no"} if job.name in fails else {"top1": 1.0})

    monkeypatch.setattr(many_runs, "run", run)
    monkeypatch.setattr(sys, "argv", ["many_runs", str(plan), "--data", "D", "--out", str(out), "--together", "3"])
    with pytest.raises(SystemExit, match="not finished: train_1, probe_1"):
        many_runs.main()
    assert calls[0] == "pretrain D/images" and f"probe knn {out}/train_0 D/images" in calls
    assert f"train D/images --init {out}/features --seed 1" in calls and len(calls) == 4
    fails.clear()
    calls.clear()
    with pytest.raises(SystemExit) as ended:
        many_runs.main()
    assert ended.value.code == 0 and calls == [
        f"train D/images --init {out}/features --seed 1",
        f"probe knn {out}/train_1 D/images",
    ]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if "error" not in line][-2:] == ["train_1", "probe_1"]
    assert all("commit" in line and "3 runs at a time" in line["hardware"] for line in lines)


@pytest.mark.parametrize(
    "plan", sorted(Path(__file__).parents[2].glob("benchmarks/plans/*.yaml")), ids=lambda p: p.stem
)
def test_plans_are_commands_that_exist(plan: Path, tmp_path: Path) -> None:
    for job in many_runs.read_plan(plan):
        words = many_runs.fill_in(job, "data", tmp_path)
        command = cli.find_command(words)
        assert command is not None, words
        parser.parse(command.load_config(), words[len(command.name.split()) :], command.name, command.help)
