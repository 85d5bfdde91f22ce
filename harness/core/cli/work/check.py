"""`harness check`: judging stored evidence again."""

from __future__ import annotations

import argparse

from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, worst_code
from harness.core.cli.work.options import other_trainer_lines
from harness.core.cli.work.verdict_codes import exit_code
from harness.core.evidence.store import EvidenceError
from harness.core.report.documents import case_document_here
from harness.core.report.output import print_error
from harness.core.report.stored import store_report
from harness.core.report.text import case_report, provenance_text
from harness.core.run.folders import find_case_folders
from harness.core.run.judging import judge_folder


def command(args: argparse.Namespace) -> int:
    """Judge stored evidence again, print and store its reports, and return the worst exit code.

    What cannot be read in one folder is printed and counts as not judged; the others are judged all the same. A report that
    cannot be stored is printed as an error, and changes no exit code.
    """
    judgements = []
    codes = []
    unread = list[str]()
    for folder in find_case_folders(args.folders):
        try:
            judgements.append(judge_folder(folder))
        except EvidenceError as error:
            print_error(str(error))
            codes.append(NOT_JUDGED)
            unread.append(str(error))
    if judgements:
        trainer_notes = other_trainer_lines(judgement.trainer for judgement in judgements)
        data = {"cases": list(map(case_document_here, judgements)), "unread": unread, "notes": trainer_notes}
        text_blocks = (
            *(f"{case_report(judgement)}\n" for judgement in judgements),
            provenance_text(judgements),
            *trainer_notes,
        )
        print_or_keep_document(args, "cases", data, *text_blocks)
    args.failed = "\n".join(unread)
    for judgement in judgements:
        try:
            store_report(judgement)
        except EvidenceError as error:  # somebody else's evidence is judged all the same
            print_error(f"the report was not stored: {error}")
    return worst_code([*codes, *map(exit_code, judgements)])
