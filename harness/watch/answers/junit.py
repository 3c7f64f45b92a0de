"""The answer as JUnit XML, for a CI system that shows test results."""

from __future__ import annotations

from xml.etree import ElementTree

from harness.report.wording import printable
from harness.watch.answers.answer import Answer
from harness.watch.exit_codes import NOT_OBSERVED, NOTHING_FOUND


def junit(answer: Answer) -> str:
    """Return one test suite with one test case; what could not be observed is an error.

    Characters that XML cannot hold are written as text, whatever a script calls its tensors.
    """
    failed = answer.exit_code not in (NOTHING_FOUND, NOT_OBSERVED)
    unobserved = answer.exit_code == NOT_OBSERVED
    suite = ElementTree.Element(
        "testsuite",
        name="harness.watch",
        tests="1",
        failures=str(int(failed)),
        errors=str(int(unobserved)),
    )
    case = ElementTree.SubElement(suite, "testcase", classname="harness.watch", name="replicas")
    text = "\n".join(map(printable, answer.lines()))
    if failed or unobserved:
        kind = answer.diagnoses[0].cause if answer.diagnoses else "unknown"
        problem = ElementTree.SubElement(
            case,
            "failure" if failed else "error",
            type=kind,
            message=printable(answer.headline),
        )
        problem.text = text
    else:
        ElementTree.SubElement(case, "system-out").text = text
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(
        suite, encoding="unicode"
    )
