"""Where other processes find the harness: a checkout must be named, an installed one must not hide their own packages."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from harness import ROOT
from harness.core.launch import python_path


def test_a_checkout_comes_before_what_is_named_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/more")
    assert python_path.python_path() == f"{ROOT}:/more"


def test_installed_packages_are_found_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_path, "ROOT", Path(sysconfig.get_path("purelib")).resolve())
    monkeypatch.setenv("PYTHONPATH", "/more")
    assert python_path.python_path() == "/more"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path.python_path() == ""
