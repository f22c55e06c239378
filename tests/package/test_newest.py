"""tools/newest.py: what it says of a run of tests, and that its files exist."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import newest

REPORT = """<testsuites><testsuite>
<testcase classname="tests.integrations.trl.test_sft" name="test_a"/>
<testcase classname="tests.integrations.trl.test_sft" name="test_b">
<failure message="UnsupportedError: TRL 1.17.0 has no f&#10;more">trace</failure></testcase>
<testcase classname="" name="tests.integrations.trl.test_async">
<error>ImportError: gone</error></testcase>
</testsuite></testsuites>"""
FOUND = [
    "integrations.trl.test_sft.test_b: UnsupportedError: TRL 1.17.0 has no f",
    "integrations.trl.test_async: ImportError: gone",
]


@pytest.mark.parametrize(("report", "found"), [(REPORT, FOUND), ("", ["pytest did not end"])])
def test_versions_and_failures(
    report: str,
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / ".venvs/newest-trl").mkdir(parents=True)
    monkeypatch.setattr(newest, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "check_output", lambda *args, **kwargs: "trl 1.17.0\ntorch 2\n")

    def run(parts: list[str | Path], cwd: Path) -> SimpleNamespace:
        command = [str(part) for part in parts]
        assert any("trl/test_contract.py" in word for word in command) and cwd == tmp_path
        (file,) = (w.partition("=")[2] for w in command if w.startswith("--junitxml="))
        if report:
            Path(file).write_text(report)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    assert newest.check("trl") == 1
    said = capsys.readouterr().out
    assert said.startswith("trl: trl 1.17.0, torch 2\n")
    assert f"trl: {len(found)} failed\n" in said and all(f"  {line}\n" in said for line in found)


def test_its_files_exist() -> None:
    for trainer, names in newest.TESTS.items():
        for name in names:
            assert (newest.ROOT / f"tests/integrations/{trainer}/test_{name}.py").exists()
