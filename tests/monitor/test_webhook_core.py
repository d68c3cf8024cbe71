"""Webhooks: what is signed, who may attempt a delivery, and when it is given up."""

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from resile_monitor.webhooks.core import (
    LONGEST_PAUSE_SECONDS,
    MAX_ATTEMPTS,
    Pace,
    claimed,
    delivery,
    seconds_to_wait,
    settled,
    signature,
)
from resile_shared.http.api import NewWebhook
from resile_shared.messages.jobs import JobEvent, JobState
from resile_shared.messages.webhooks import Webhook

from .examples import item

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
PACE = Pace(attempt_seconds=10.0, first_pause_seconds=5.0)
EVENT = JobEvent(
    job="job-1",
    name="digits",
    tenant="default",
    state=JobState.COMPLETED,
    priority=5000,
    item=item(7, generation=3, iteration=100, kind="completed"),
)


def webhook(**changes: Any) -> Webhook:
    fields = {"id": "hook-1", "url": "http://h/x", "secret": SECRET, "events": ("completed",), "created": NOW}
    return Webhook.model_validate({**fields, "after": 4, **changes})


def test_what_is_sent_is_a_signed_cloud_event_with_an_id_that_stays() -> None:
    first, again = (delivery(webhook(), EVENT, now=NOW + timedelta(seconds=late)) for late in (0, 60))
    document = orjson.loads(first.body)
    assert (document["id"], document["type"], document["subject"]) == ("job-1-7", "resile.job.completed", "job-1")
    assert JobEvent.model_validate(document["data"]) == EVENT
    assert first.headers["webhook-id"] == again.headers["webhook-id"] == "job-1-7"
    sent = first.headers["webhook-timestamp"]
    assert sent == str(int(NOW.timestamp()))
    version, _, given_signature = first.headers["webhook-signature"].partition(",")
    expected = hmac.new(KEY, b"job-1-7." + sent.encode() + b"." + first.body, hashlib.sha256).digest()
    assert (version, base64.b64decode(given_signature)) == ("v1", expected)
    assert first.headers["webhook-signature"] != again.headers["webhook-signature"]


def test_the_signature_is_that_of_the_published_example() -> None:
    """The test vector of the Standard Webhooks specification's reference libraries."""
    made = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        id_="msg_p5jXN8AQM9LWM0D4loKWxJek",
        sent="1614265330",
        body=b'{"test": 2432232314}',
    )
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_claim_keeps_all_others_away_until_its_holder_must_be_gone() -> None:
    claim = claimed(webhook(), by="monitor-1", now=NOW)
    assert (claim.claimed_by, claim.attempts) == ("monitor-1", 1)
    for unchanged in (0.0, 29.0):
        wait = seconds_to_wait(claim, by="other", pace=PACE, now=NOW, unchanged_seconds=unchanged)
        assert wait == pytest.approx(30.0 - unchanged)
    assert seconds_to_wait(claim, by="other", pace=PACE, now=NOW, unchanged_seconds=31.0) == 0


def test_a_monitor_does_not_wait_for_a_claim_of_its_own_whose_answer_was_lost() -> None:
    claim = claimed(webhook(), by="me", now=NOW)
    assert seconds_to_wait(claim, by="me", pace=PACE, now=NOW, unchanged_seconds=0.0) == 0
    assert claimed(claim, by="me", now=NOW).attempts == 2


def test_an_attempt_that_fails_is_repeated_later_and_later_and_then_given_up() -> None:
    record, pauses = webhook(), []
    for _ in range(MAX_ATTEMPTS):
        record = settled(claimed(record, by="m", now=NOW), sequence=9, error="x" * 999, pace=PACE, now=NOW)
        pauses.append(seconds_to_wait(record, by="me", pace=PACE, now=NOW, unchanged_seconds=0.0))
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 640, 900, 900, 900, 0]
    assert (record.after, record.attempts, record.num_given_up, record.num_delivered) == (9, 0, 1, 0)
    assert record.last_error == "x" * 200


def test_an_attempt_that_succeeds_goes_on_with_the_next_event() -> None:
    failed = settled(claimed(webhook(), by="m", now=NOW), sequence=9, error="no", pace=PACE, now=NOW)
    done = settled(claimed(failed, by="m", now=NOW), sequence=9, error="", pace=PACE, now=NOW)
    assert (done.after, done.attempts, done.num_delivered, done.num_given_up) == (9, 0, 1, 0)
    assert (done.claimed_by, done.retry_at, done.last_error) == (None, None, "")


@given(skew=st.floats(-1e6, 1e6), unchanged=st.floats(0, 1e6))
def test_no_clock_makes_a_receiver_wait_for_longer_than_the_longest_pause(skew: float, unchanged: float) -> None:
    record = webhook(attempts=3, retry_at=NOW + timedelta(seconds=skew))
    wait = seconds_to_wait(record, by="me", pace=PACE, now=NOW, unchanged_seconds=unchanged)
    assert 0 <= wait <= max(0.0, LONGEST_PAUSE_SECONDS - unchanged)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "ftp://example.org/",
        "file:///etc/passwd",
        "http://",
        "http://a:b@example.org/",
        "http://example.org/#x",
        "http://example.org/a b",
        "http://example.org:0/",
        "http://example.org:99999/",
        "http://[::1/",
        "http://example.org/\n",
        "http://exämple.org/",
        "http://example.org/" + 2000 * "x",
    ],
)
def test_a_url_that_cannot_be_called_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        NewWebhook.model_validate({"url": url})


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", SECRET[6:], "whsec_" + 100 * "A", "whsec_*" * 8])
def test_a_secret_that_is_none_is_refused(secret: str) -> None:
    with pytest.raises(ValidationError):
        NewWebhook.model_validate({"url": "https://example.org/", "secret": secret})
