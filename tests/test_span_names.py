"""The documented names of spans are those of the code."""

import pytest

from tests.span_names import FILE, is_known, written


def test_the_document_lists_the_names_that_the_code_gives() -> None:
    assert written(FILE.read_text()) == FILE.read_text(), "run `python -m tests.span_names`"


@pytest.mark.parametrize(
    ("name", "is_documented"),
    [
        ("publish resile.job.{job}.allocation", True),
        ("handle resile.report.{job}.growth_refused", True),
        ("decide upon report: growth refused", True),
        ("sampled iteration", True),
        ("publish resile.job.job-1.allocation", False),
        ("decide upon Tick", False),
        ("PUT /v1/jobs/job-1", False),
    ],
)
def test_a_name_with_an_id_is_none_of_them(name: str, *, is_documented: bool) -> None:
    assert is_known(name) == is_documented
