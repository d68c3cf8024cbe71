"""The demo, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
def test_the_demo_tells_its_story_and_finds_the_same_bits(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    done = subprocess.run(
        [sys.executable, "-m", "resile", "demo", "--json", "-o", str(picture)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME BITS" in done.stderr
    document = json.loads(done.stdout)
    assert document["faults"] == []
    assert [job["state"] for job in document["jobs"]] == ["completed", "completed"]
    assert "watch it in a browser: http://127.0.0.1:" in done.stderr
    assert "/#token=" in done.stderr
    report = (tmp_path / "demo.html").read_text()
    assert document["report"] == str(tmp_path / "demo.html")
    assert all(job["params_sha256"] in report for job in document["jobs"])
    assert picture.read_bytes().startswith(b"\x89PNG")
