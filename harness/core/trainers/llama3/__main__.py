"""Train one case, alone or under torchrun.

torchrun --nproc-per-node 4 -m harness.core.trainers.llama3 --case cases/data_parallel.yaml::fsdp_4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_cases
from harness.core.trainers.llama3 import adapter
from harness.core.trainers.llama3.checkpoint import latest
from harness.core.trainers.llama3.trainer import Trainer


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, or 2 for what a person got wrong, after printing one line on it."""
    try:
        options = parse_options(arguments)
        trainer = prepare(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    else:
        trainer.train(options.steps, checkpoints=options.checkpoint_dir, checkpoint_every=options.checkpoint_every)
        return 0
    finally:
        adapter.stop()


def prepare(options: argparse.Namespace) -> Trainer:
    """Return a trainer with something left to do. Raises ValueError."""
    case = read_case(options.case)
    checkpoint = latest(options.checkpoint_dir) if options.resume else None
    trainer = adapter.start(case, options.weights, options.device)
    if checkpoint is not None:
        trainer.resume(options.checkpoint_dir)
    last_step = case.training.steps if options.steps is None else options.steps
    if trainer.step >= last_step:
        raise ValueError(
            f"{checkpoint or case.name}: at step {trainer.step}, requested to train up to step {last_step}"
        )
    return trainer


def read_case(file_and_name: str) -> Case:
    """Return the case of FILE::NAME. Raises ValueError."""
    path, separator, name = file_and_name.partition("::")
    if not separator:
        raise ValueError(f"--case {file_and_name!r}: expected FILE::NAME, such as cases/data_parallel.yaml::fsdp_4")
    return find_case(name, load_cases(Path(path)))


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line, which is that of the process if `arguments` is None.

    Raises ValueError for --resume or --checkpoint-every without --checkpoint-dir.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m harness.core.trainers.llama3", description="Train one case."
    )
    parser.add_argument("--case", required=True, metavar="FILE::NAME")
    parser.add_argument("--steps", type=int, help="stop after this step; the schedule is still the recipe's")
    parser.add_argument("--weights", type=Path, help=".npz of full tensors by name; default: the seed's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue from the latest in --checkpoint-dir")
    options = parser.parse_args(arguments)
    if (options.resume or options.checkpoint_every) and options.checkpoint_dir is None:
        raise ValueError("--resume and --checkpoint-every need --checkpoint-dir")
    return options


if __name__ == "__main__":
    sys.exit(main())
