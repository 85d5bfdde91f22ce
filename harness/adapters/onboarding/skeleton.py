"""The text of an adapter and of its first cases, begun with the facts observed about a script."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.adapters.onboarding.matching import Match, match, table
from harness.adapters.onboarding.observed import CASE, Facts, Flag
from harness.adapters.onboarding.spellings import meaning
from harness.core.case.case import Case
from harness.reference.config import ModelConfig, TrainingConfig

NO_DATA_SET = "TODO nothing that makes samples was found."
ANY = "name data all_valid global_batch seq_len steps optimizer beta1 beta2 eps weight_decay decay norm_eps rope_theta rates"
"""Fields that are written into a script or handed over; first.yaml requests what they are."""
LAUNCHED = ("resume", "save_to", "saved_step")
AMBIGUOUS = ("--hidden", "--hidden-size", "--width", "--hidden_size")

ADAPTER = '''"""{script} under the harness, unedited. Begun by `harness init`; `harness doctor` says what is wrong.{seen}"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.adapter import Case, ScriptAdapter, checkpoints, halves, in_one, pairs

# theirs=ours, a part of a name each; nothing after = leaves the part out.
NAMES = pairs("""{names}""")

# What of a case this adapter passes on; a case that requests anything else is skipped, with that reason.
KNOWN = dict.fromkeys("""{known}""".split(), ...)
KNOWN |= {{{written}}}


class {name}(ScriptAdapter):
    name, names, known = "{stem}", NAMES, KNOWN
    script = Path(__file__).parent / "{script}"{attributes}

    def arguments(self, case: Case, device: str) -> list[str]:
        return [
{arguments}
        ]

    def samples(self, script: Any, case: Case, rank: int) -> None:
        import torch

        from harness.adapter import RecipeSamples, RecipeStream, recipe_batches

{data}
{methods}

adapter = {name}()
'''
ROWS = """
    def rows(self, case: Case) -> dict:
        return halves(case)  # its rotary embedding turns halves of a head, not neighbours; else leave this out
"""
FUSED = """
    def fused(self, case: Case) -> dict:
        return in_one(case, {declared})
"""
CASES = """# Begun by `harness init`. What the script has written into it, rather than as a flag, is requested here.

defaults:"""
DATA = {
    "samples": "RecipeSamples(case{shuffled}{form})",
    "stream": "RecipeStream(case, rank, case.dims.dp{form})",
    "generator": "recipe_batches(case, rank, case.dims.dp)",
    "function": "next(trained if torch.is_grad_enabled() else evaluated)",
}


def adapter(path: Path, facts: Facts, file: Path) -> str:
    """Return the text of an adapter in this file."""
    stem, found, data = path.stem, matched(facts), facts.data
    declared = ", ".join(f'"{one}"' for one in found.declarations)
    by = f"samples: {data[0]} by the recipe's, which the script brings to its ranks" if data else ""
    saves = facts.saves[0] if facts.saves else "TODO"
    return ADAPTER.format(
        stem=stem,
        name="".join(part.capitalize() for part in re.split(r"\W|_", stem)) or "Mine",
        script=os.path.relpath(path, file.parent),
        seen="".join(f"\n\nUnlike the reference: {part}." for part in other_parts(facts)),
        names=_folded([f"{theirs}={ours}" for theirs, ours in table(found.names).items()]),
        known=_folded(list(dict.fromkeys([*ANY.split(), *_seed(facts), *_fields(facts), *_dims(facts)]))),
        written=", ".join(f'"{key}": {value!r}' for key, value in _written(facts).items()),
        attributes=(f'\n    replaces = ("{by}",)' * bool(data)) + f'\n    saves = "{saves}"' * bool(_resuming(facts)),
        arguments="\n".join(f"            {line}" for line in _arguments(facts)),
        data="\n".join(f"        {line}" for line in _data(facts)),
        methods=(ROWS if facts.halves else "") + (FUSED.format(declared=declared) if declared else ""),
    )


def cases(facts: Facts) -> str:
    """Return one device, and the smallest case of each wrapper and option that the script has."""
    written = {key: value for key, (value,) in _of_model(facts).items()}
    written |= {key: value for key, value in facts.sizes.items() if value != getattr(CASE.model, key)}
    lines = [f"  training: {{{_yaml(_recipe(facts))}}}", f"  model: {{{_yaml(written)}}}", "", "cases:"]
    lines += [f"  single: {{why: {CASE.why}}}"]

    def add(name: str, what: str, why: str) -> None:
        lines.append(f"  {name}: {{dims: {what}, why: {why}}}")

    for wrapper, name in facts.wrappers.items():
        own = ", features: {wrapper: fsdp1}" * (wrapper == "fsdp1")
        two = ("{dp_replicate: 2}" if wrapper == "ddp" else "{dp_shard: 2}") + own
        add(name, two, "Two ranks must do what one does.")
        if name == "fsdp_2" and "dp_replicate" in _fields(facts):
            add("hsdp_2x2", f"{{dp_replicate: 2, dp_shard: 2}}{own}", "Replicas of shards must do what one rank does.")
        if _resuming(facts):
            then = f"{two}, resume: [{{after: 1, dims: {two}}}]"
            add(f"{name}_resumes", then, "A run that resumes must do what one run does.")
    if "tp" in _dims(facts):
        off = dict.fromkeys(_without(facts), False)
        own = f", features: {{{_yaml(off)}}}" * bool(off)
        add("tp_2", f"{{tp: 2}}{own}", "Two ranks that share each matrix must do what one does.")
    return "\n".join([CASES, *lines, ""])


def matched(facts: Facts) -> Match:
    return match(facts.shapes, facts.heads or CASE.model.n_heads)


def other_parts(facts: Facts) -> list[str]:
    return list(facts.other_parts([name for name in facts.shapes if name not in matched(facts).names]))


# ---- flags


def meanings(facts: Facts) -> dict[str, str]:
    """Return the expression of a case by flag. A hidden size is the feed-forward's if another flag is the model's."""
    found = {flag.name: said for flag in facts.flags if (said := meaning(flag.name))}
    sure = {said for name, said in found.items() if name not in AMBIGUOUS}
    if "model.dim" in sure and "model.ffn_dim" not in sure:
        found |= {name: "model.ffn_dim" for name in AMBIGUOUS if name in found}
    if "resume" not in found.values() or "save_to" not in found.values():
        found = {name: said for name, said in found.items() if said not in LAUNCHED}
    return found


def command_line(facts: Facts, case: Case) -> list[str]:
    """Return the words that `arguments` of the adapter returns."""
    return eval(f"[{chr(10).join(_arguments(facts))}\n]", {"case": case, "device": "cpu"})


def passed_on(facts: Facts) -> list[str]:
    """Return the flags that request something of a case."""
    return [flag.name for flag, line in zip(facts.flags, _arguments(facts), strict=True) if not line.startswith("#")]


def _arguments(facts: Facts) -> Iterator[str]:
    known = meanings(facts)
    for flag in facts.flags:
        yield _argument(flag, known.get(flag.name, ""))


def _argument(flag: Flag, said: str) -> str:
    name, part = flag.name, said.partition(".")[0]
    sharded = next((one for one in flag.choices if "fsdp" in one), "")
    if said in LAUNCHED:
        value = "" if flag.switch else "={case.saved_step}" if said == "saved_step" else "={checkpoints.folder()}"
        when = {"resume": "case.resume", "save_to": "case.saved_step or case.resume"}.get(said, "case.saved_step")
        return f'*([f"{name}{value}"] if {when} else []),'
    if sharded and "ddp" in flag.choices:
        return f"f\"{name}={{'ddp' if case.wrapper == 'ddp' else '{sharded}'}}\","
    if flag.switch and part in ("features", "dims") and said != "dims.tp":
        wrapped = {"dims.dp_replicate": "case.wrapper == 'ddp'", "dims.dp_shard": "case.wrapper in ('fsdp1', 'fsdp2')"}
        return f'*(["{name}"] if {wrapped.get(said, f"case.{said}")} else []),'
    if flag.switch or not said:
        return (
            f"# {name}{' is a switch' * flag.switch}: left at {flag.default}{'; TODO it is required' * flag.required}"
        )
    said = "training.global_batch" if said == "local_batch" and "global" in flag.help else said
    look = "  # of one rank and microbatch; TODO is it?" if said == "local_batch" else ""
    if said == "training.dtype" and "float64" not in flag.choices:
        told, look = "'float32' if case.training.dtype == 'float64' else case.training.dtype", "  # Script widens it"
        return f'f"{name}={{{told}}}",{look}'
    return f'f"{name}={{{said if said == "device" else f"case.{said}"}}}",{look}'


def _resuming(facts: Facts) -> list[str]:
    return [name for name, said in meanings(facts).items() if said == "resume"]


# ---- what the adapter passes on, and what is written into the script


def _fields(facts: Facts) -> list[str]:
    switches, known = {flag.name for flag in facts.flags if flag.switch}, meanings(facts).items()
    said = {said for name, said in known if not (name in switches and said.startswith("dims."))}
    fields = {re.split(r"\W", one.partition(".")[2] or one)[0] for one in said}
    return sorted(fields - {*LAUNCHED, "device", "local_batch"})


def _dims(facts: Facts) -> list[str]:
    """Return the axes that wrappers and flags speak of; degrees without a flag follow from the number of ranks."""
    axes = {"ddp": "dp_replicate", "fsdp2": "dp_shard", "fsdp1": "dp_shard"}
    tp = ["tp"] * ("parallelize_module" in facts.words)
    return list(dict.fromkeys([*(axes[one] for one in facts.wrappers), *tp]))


def _without(facts: Facts) -> list[str]:
    """Return what tensor parallel does only by a name that the script never uses."""
    by = {"sequence_parallel": "SequenceParallel", "loss_parallel": "loss_parallel"}
    return [key for key, word in by.items() if word not in facts.words] if "parallelize_module" in facts.words else []


def _of_model(facts: Facts) -> dict[str, tuple[Any]]:
    order = [key for key in vars(ModelConfig()) if key in (found := matched(facts).other_sizes(CASE.model))]
    return {key: (found[key],) for key in order}


def _written(facts: Facts) -> dict[str, Any]:
    """Return the values of KNOWN that the script has and no flag passes on."""
    recipe = {key: value for key, value in _recipe(facts).items() if key in ("seed", "max_norm")}
    fixed = {key: (value,) for key, value in recipe.items() if key not in _fields(facts)}
    off = {key: (False,) for key in _without(facts)}
    return {"wrapper": tuple(facts.wrappers)} | _of_model(facts) | fixed | off


def _seed(facts: Facts) -> list[str]:
    """Return the seed, which only the samples have, unless the script's sampler shuffles by another seed."""
    return [] if facts.sampler and facts.sampler[0] else ["seed"]


def _recipe(facts: Facts) -> dict[str, Any]:
    """Return the constants of the optimizer and the sampler that are not a case's usual ones."""
    seed = {"seed": facts.sampler[1]} if facts.sampler and facts.sampler[0] and facts.sampler[1] is not None else {}
    seen = facts.recipe | ({} if "max_norm" in facts.recipe or not facts.optimizer else {"max_norm": None})
    seen = {"optimizer": "sgd" if facts.optimizer == "SGD" else "adamw"} | seen | seed
    usual = vars(TrainingConfig())
    return {"all_valid": True} | {key: value for key, value in seen.items() if value != usual[key]}


def _yaml(values: dict[str, Any]) -> str:
    texts = {key: as_yaml(value) if isinstance(value, float) else json.dumps(value) for key, value in values.items()}
    return ", ".join(f"{key}: {text}" for key, text in texts.items())


def as_yaml(value: float) -> str:
    """Return a number with a fraction, as YAML reads it."""
    text = repr(float(value))
    return text if "." in text else text.replace("e", ".0e")


def _data(facts: Facts) -> Iterator[str]:
    """Yield how the recipe's samples get into the script's own loader."""
    if not facts.data:
        yield f"# {NO_DATA_SET} A data set is replaced by RecipeSamples(case), a stream by"
        yield "# RecipeStream(case, rank, case.dims.dp), a generator by recipe_batches(case, rank, case.dims.dp):"
        yield '# script.replace("ITS_NAME", lambda *_, **__: ..)'
        return
    name, kind, form = facts.data
    keys, shuffled = form.split(), ", shuffled=True" if facts.sampler and facts.sampler[0] else ""
    forms = {"pair": "", "joined": ", form=lambda tokens, labels: torch.cat([tokens, labels[-1:]])"}
    other = f', form=lambda tokens, labels: {{"{keys[0]}": tokens, "{keys[-1]}": labels}}'
    if kind == "function":
        yield "trained, evaluated = (recipe_batches(case, rank, case.dims.dp) for _ in range(2))"
    made = DATA[kind].format(shuffled=shuffled, form=forms.get(form, other))
    yield f'script.replace("{name}", lambda *_, **__: {made})'


def _folded(words: list[str], width: int = 100) -> str:
    lines = [""]
    for word in words:
        lines += [""] if len(lines[-1]) + len(word) > width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n    ".join(lines)
