"""Code that several checks and causes share: the input of a check, its output, and values computed from the evidence.

trial.py, stored_trial.py    the input of a check; finding.py, result.py, judgement.py: its output.
tolerance.py, numbers.py     bounds on rounding, and numbers compared by them; golden.py: accepted curves.
contents.py, assembly.py     the slice that a tensor's bytes are; slices assembled into whole tensors.
places.py, held_values.py    ranks that receive samples, ranks that compute losses; whole parameters as ranks hold them.
traffic.py, observed.py      bytes that ranks moved, by axis; a layout as it was observed.
losses.py, labels.py, received_samples.py    samples that ranks received, and their loss.
"""
