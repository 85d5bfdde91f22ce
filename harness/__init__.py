"""Proves that a distributed Llama 3 trainer does what its configuration says."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
