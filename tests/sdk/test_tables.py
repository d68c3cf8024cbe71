"""What the command line shows of a job."""

from resile.cli.tables import job_details

from .test_demo import job


def test_a_job_is_shown_with_all_its_settings_on_one_line_each() -> None:
    """Without control characters: names of variables are whatever the submitter chose."""
    shown = list(job_details(job(settings={"mounts": "/data", "env": "A, B\n\x1b[2J"}, history=())))
    rows = dict(line.split(maxsplit=1) for line in shown)
    assert (rows["mounts"], rows["env"]) == ("/data", r"A, B\n\x1b[2J")


def test_a_gang_is_shown_with_what_a_failure_does_to_it() -> None:
    def row(*, restartable: bool) -> str:
        view = job(gang=True, restartable=restartable, settings={"gang": "yes"}, history=())
        (found,) = (line for line in job_details(view) if line.startswith("gang"))
        return found.split(maxsplit=1)[1]

    assert row(restartable=False) == "fails with any of its workers"
    assert row(restartable=True).startswith("starts again after a failure")
