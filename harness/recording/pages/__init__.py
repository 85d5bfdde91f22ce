"""A recording, or traces, as text and pages.

recording_page.py    what a job's ranks did; recording_own.py: groups of its own.
recording_layout.py  checks of a declared layout; compared.py: two jobs; same_training.py: numbers of two jobs.
trace_page.py, timeline_page.py, hang_page.py    traces, their times, why a job hung.
"""
