"""The doctor: what it reads from the sources, and what it says when a piece is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli, doctor

ROOT = Path(doctor.__file__).resolve().parent.parent


def test_interfaces_are_read_without_importing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('raise RuntimeError\nPRIVATE_INTERFACES: tuple[str, ...] = ("m.a", "m.b")\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text('PRIVATE_INTERFACES = ("m.b", "m.c")\n')
    (tmp_path / "c.py").write_text("x = 1\n")
    assert doctor.private_interfaces(tmp_path) == ["m.a", "m.b", "m.c"]


def test_every_interface_of_the_project_is_present() -> None:
    names = doctor.private_interfaces()
    assert [name for name in names if not doctor.interface_present(name)] == []


@pytest.mark.parametrize(
    ("name", "present"),
    [
        ("os.path.join", True),
        ("collections.OrderedDict.move_to_end", True),
        ("collections.OrderedDict.move_to_start", False),
        ("argparse.ArgumentParser.epilog", True),
        ("argparse.ArgumentParser.epilogue", False),
        ("argparse.ArgumentParser.epilog.deeper", False),
        ("no_such_module.thing", False),
        ("os.path", True),
        ("libmindspore_core.so:_ZN9mindspore10ThreadPool20SetSpinCountMinValueEv", True),
        ("libmindspore_core.so:_ZN9mindspore10ThreadPool19SetSpinCountNoValueEv", False),
        ("libno_such.so:main", False),
    ],
)
def test_presence(name: str, present: bool) -> None:
    assert doctor.interface_present(name) is present


def test_a_missing_interface_gives_advice_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "private_interfaces", lambda: ["os.path.join", "mindspore.common.recompute._gone"])
    assert cli.main(["doctor", "--no-exchange"]) == 1
    output = capfd.readouterr().out
    assert "MISSING" in output and "mindspore.common.recompute._gone" in output and "mindspore==2.10.0" in output


def test_an_owner_is_one_row_that_marks_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["os.path._gone", "os.path.join", "os.path.split"]
    monkeypatch.setattr(doctor, "private_interfaces", lambda: names)
    assert cli.main(["doctor", "--no-exchange"]) == 1
    (row,) = [line for line in capfd.readouterr().out.splitlines() if " os.path " in line]
    assert row.startswith("MISSING") and "_gone is missing, join, split" in row


def test_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "find_msrun", lambda: None)
    assert cli.main(["doctor", "--json"]) == 1
    findings = json.loads(capfd.readouterr().out)
    checks = {check["name"]: check for check in findings["checks"]}
    assert not findings["ok"] and not checks["msrun"]["ok"] and "msrun comes with it" in checks["msrun"]["advice"]
    assert checks["send and receive"]["found"] == "not tried"
    assert checks["MindSpore"]["ok"] and checks["numpy"]["ok"] and checks["Python"]["ok"]


def test_a_wrong_device_target(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEVICE_TARGET", "TPU")
    assert cli.main(["doctor", "--no-exchange", "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    assert "must be CPU or Ascend, but is 'TPU'" in checks["device target"]["found"]


def test_the_command_line_loads_no_mindspore() -> None:
    code = "import sys; from pipeline import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "doctor" in done.stdout
