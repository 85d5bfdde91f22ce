"""How large numbers of many ranks are, and how long reading them takes: `python -m benchmarks.many_sketches FOLDER`.

The numbers are made up: one recorded step of Llama 3 405B on 16,384 ranks, in stages of a pipeline, FSDP2 and tensor
parallelism, with AdamW's two averages and the weights before and after. Prints bytes of all files, seconds and memory.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harness.recording.judged.same_training import load_numbers
from harness.recording.sketches import (
    BUCKETS,
    GRADIENT,
    WEIGHTS,
    Box,
    RankSketches,
    Sketch,
    save_sketches,
    sketch_file,
    text_of_boxes,
)

DIM, LAYERS, HIDDEN, OF_KEYS, VOCABULARY = 16384, 126, 53248, 1024, 128256
STAGES, DATA, TENSOR, MICROBATCHES = 16, 128, 8, 16
MATRICES = {
    "attention.wq": (DIM, DIM, 0),
    "attention.wk": (OF_KEYS, DIM, 0),
    "attention.wv": (OF_KEYS, DIM, 0),
    "attention.wo": (DIM, DIM, 1),
    "feed_forward.w1": (HIDDEN, DIM, 0),
    "feed_forward.w3": (HIDDEN, DIM, 0),
    "feed_forward.w2": (DIM, HIDDEN, 1),
}
"""Matrix of a block -> rows, columns, and the dim that tensor parallelism cuts."""
KINDS = ((0, WEIGHTS), (1, GRADIENT), (1, WEIGHTS), (1, "exp_avg"), (1, "exp_avg_sq"))


def parameters(stage: int) -> Iterator[tuple[str, int, int, int | None]]:
    """Yield name, rows, columns and the dim that tensor parallelism cuts; None for none."""
    if stage == 0:
        yield "tok_embeddings.weight", VOCABULARY, DIM, 0
    for layer in range(LAYERS * stage // STAGES, LAYERS * (stage + 1) // STAGES):
        yield from ((f"layers.{layer}.{name}.weight", *shape) for name, shape in MATRICES.items())
        yield from ((f"layers.{layer}.{name}.weight", DIM, 1, None) for name in ("attention_norm", "ffn_norm"))
    if stage == STAGES - 1:
        yield "norm.weight", DIM, 1, None
        yield "output.weight", VOCABULARY, DIM, 0


def slice_of(rows: int, columns: int, dim: int | None, data: int, tensor: int) -> Box:
    """Return the slice of a matrix that a rank holds: its data rank's rows of its tensor rank's part.

    dim: which tp cuts, or None.
    """
    top, of_tensor = (rows * tensor // TENSOR, rows // TENSOR) if dim == 0 else (0, rows)
    left, width = (columns * tensor // TENSOR, columns // TENSOR) if dim == 1 else (0, columns)
    edges = [top + of_tensor * at // DATA for at in (data, data + 1)]
    return Box(((edges[0], edges[1]),), ((left, left + width),))


def rank_sketches(rank: int, random: np.random.Generator) -> RankSketches:
    """Return made-up sketches of a rank: of each of its parameters, the weights before, and gradient, weights and
    averages after."""
    stage, rest = divmod(rank, DATA * TENSOR)
    data, tensor = divmod(rest, TENSOR)
    held = [*parameters(stage)]
    boxes = {name: slice_of(rows, columns, dim, data, tensor) for name, rows, columns, dim in held}
    sketches = tuple(
        Sketch(step, kind, name, text_of_boxes([box]), box.size[0] * box.size[1], 1.0, random.standard_normal(BUCKETS))
        for (step, kind), (name, box) in itertools.product(KINDS, boxes.items())
    )
    rows = random.integers(0, 2**62, (MICROBATCHES, 1)).tolist() if stage == 0 else []
    return RankSketches(
        rank,
        STAGES * DATA * TENSOR,
        shapes={name: (rows, columns) if columns > 1 else (rows,) for name, rows, columns, _ in held},
        dtypes={name: "float32" for name, *_ in held},
        sketches=sketches,
        passes={1: tuple(map(tuple, rows))},
        tokens={1: rank} if rows else {},
        norms={1: 1.0},
        optimizers=("AdamW(betas (0.9, 0.95), weight_decay 0.1)",),
    )


def main() -> None:
    """Write the numbers of all ranks, load them, and print bytes, seconds and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    (folder / "ranks").mkdir(parents=True)
    random = np.random.default_rng(1)
    for rank in range(STAGES * DATA * TENSOR):
        save_sketches(sketch_file(folder, rank), rank_sketches(rank, random))
    size = sum(path.stat().st_size for path in (folder / "ranks").iterdir())
    began = time.perf_counter()
    numbers = load_numbers(folder)
    took, memory = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{len(numbers.ranks)} ranks, {len(numbers.whole)} tensors: {size / 1e6:.0f} MB")
    print(f"read and added up in {took:.1f} s with {memory / 1e3:.0f} MB of memory")


if __name__ == "__main__":
    main()
