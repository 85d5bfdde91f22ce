"""Helpers that adapters share. docs/adapters.md has an example of each.

names.py               tables of names, and names by them.
requests.py            why a trainer cannot run a case: features that it is not known to support.
rows.py                rows of a weight in the order of another rotary embedding.
process_group.py       where the ranks of a launch meet.
weights.py             each rank's slices of the seed weights.
samples.py             a data-parallel rank's samples of a step.
learning_rate.py       the recipe's schedule in the place of a trainer's own.
checkpoints.py         the folder of a case's checkpoints, for an argument.
float64.py             casts to float32 leave a float64 recipe's values alone.
cpu_attention.py       ring attention on CPU.
script.py              a trainer that is a script, which is run as it is.
training_function.py   a trainer that is one function, stopped where its set-up is done.
environments.py        environments and releases that pip makes.
"""
