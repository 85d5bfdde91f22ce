"""A recording judged: by a declared layout, or by another recording that is trusted.

stored_recording.py, recorded.py             a recording as it is stored; as the run of a case, for the checks of the core.
anomalies.py                                 what is anomalous in it, whatever was requested; verdicts of that.
structure.py, figures.py                     what two recordings differ in: structure; costs.
judge_same_training.py, judge_sketched.py    numbers of one job by those of another, from sketches.
two_recordings.py                            both as evidence that is judged again under an assumption.
sketched.py, sketched_*.py                   why they differ: suspects, facts, and the place.
traced.py                                    traces as the run of a case.
"""
