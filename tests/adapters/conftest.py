"""Folders that look like torchtitan of a time."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Looks like torchtitan of 2024."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "train.py").write_text("def main(job_config: JobConfig): ...")
    return tmp_path


@pytest.fixture
def release_of_2025(checkout: Path) -> Path:
    """Looks like torchtitan 0.1.0."""
    (checkout / "train.py").unlink()
    (checkout / "torchtitan" / "train.py").write_text("class Trainer: ...")
    return checkout


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Looks like torchtitan 0.3.0."""
    (tmp_path / "torchtitan" / "models" / "llama3").mkdir(parents=True)
    (tmp_path / "torchtitan" / "models" / "llama3" / "config_registry.py").touch()
    (tmp_path / "torchtitan" / "trainer.py").write_text("class Trainer:\n    num_pipeline_parallel_microbatches: int\n")
    return tmp_path


@pytest.fixture
def middle(tmp_path: Path) -> Path:
    """Looks like torchtitan 0.1.0."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "train.py").write_text("class Trainer:\n    gradient_accumulation_steps: int\n")
    return tmp_path
