"""torchtitan 0.3.0 emulates float8 with another recipe than is requested: one scale a tensor, for "rowwise" too.

On machines without 8-bit matmuls Float8LinearConverter.Config(emulate=True) stands in for them in tests. It makes torchao's
configuration of the recipe, then replaces it by `Float8LinearConfig(emulate=True)`, whose recipe is torchao's default. Nothing
says so: what is logged is the recipe that was requested.

python upstream_bugs/torchtitan_float8_emulation.py     one process; exits with 1 while it is so
"""

from __future__ import annotations

import sys

import titan_on_cpu  # noqa: F401
from torchtitan.components.quantization.float8 import Float8LinearConverter

OPERANDS = ("cast_config_input", "cast_config_weight", "cast_config_grad_output")


def scales(recipe: str) -> list[str]:
    """Return the granularity of the scales of forward's input and weight, and of backward's gradient."""
    made = Float8LinearConverter(Float8LinearConverter.Config(recipe_name=recipe, emulate=True))
    return [getattr(made.torchao_config, operand).scaling_granularity.name for operand in OPERANDS]


def main() -> int:
    found = {recipe: scales(recipe) for recipe in ("rowwise", "rowwise_with_gw_hp")}
    print("\n".join(f"{recipe}: scales are {', '.join(of)}" for recipe, of in found.items()))
    return int("TENSORWISE" in found["rowwise"])


if __name__ == "__main__":
    sys.exit(main())
