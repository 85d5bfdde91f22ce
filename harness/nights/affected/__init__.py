"""Cases that a change can affect: a night records which functions each case runs, a change is compared with that.

    recorder.py    in a rank: the functions of the trainer's repository that run.
    maps.py        the files that hold this for each case.
    sources.py     what changed from one commit to another, by functions.
    selecting.py   the cases that run what changed.

Anything that is not known counts as run: of an unaffected case all is known.
"""
