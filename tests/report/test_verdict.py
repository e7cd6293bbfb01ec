"""What a report advises first."""

from pathlib import Path

import pytest

from frugalvit.report.run_record import RunRecord
from frugalvit.report.verdict import next_steps


@pytest.mark.parametrize("task", ["train", "detect", "segment"])
@pytest.mark.parametrize("alarms", [[], ["it predicts background everywhere"]])
def test_an_alarm_puts_its_advice_first(task: str, alarms: list[str]) -> None:
    record = RunRecord("run", Path("run"), setting={"data": "photos"}, summary={"task": task, "alarms": alarms})
    commands = [command for _, command in next_steps(record)]
    assert (commands[0] == "frugalvit advise photos") == bool(alarms)
    assert any(" predict run IMAGE" in command for command in commands)
