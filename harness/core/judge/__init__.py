"""What several checks and causes need: all that a check may look at, and what is computed of it.

trial.py, stored_trial.py    what a check is given; finding.py, result.py, judgement.py: what it returns.
tolerance.py, numbers.py     how close is close, and numbers compared by it; golden.py: accepted curves.
contents.py, assembly.py     which slice a tensor's bytes are; slices put together to whole tensors.
places.py, held_values.py    who is fed and who computes losses; whole parameters as ranks hold them.
traffic.py, observed.py      what ranks moved, by axis; a layout as it was observed.
losses.py, labels.py, received_samples.py    what was fed, and the loss of it.
"""
