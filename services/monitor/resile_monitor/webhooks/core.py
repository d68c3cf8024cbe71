"""What is sent to a receiver, and when the next attempt may be made and by whom."""

import base64
import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson

from resile_shared.messages.jobs import JobEvent
from resile_shared.messages.message import timestamp
from resile_shared.messages.webhooks import Webhook, key_of

MAX_ATTEMPTS = 12
LONGEST_PAUSE_SECONDS = 900.0
CLAIM_FACTOR = 3.0
"""A claim that has not changed for this many times the limit of an attempt has lost its holder."""
MAX_ERROR = 200


@dataclass(frozen=True)
class Pace:
    """How long one attempt may take, and how long the pause is after the first one that failed."""

    attempt_seconds: float
    first_pause_seconds: float

    def pause_seconds(self, attempts: int) -> float:
        """Return the pause after ``attempts`` failed attempts."""
        return float(min(self.first_pause_seconds * 2 ** min(attempts - 1, 30), LONGEST_PAUSE_SECONDS))


@dataclass(frozen=True)
class Delivery:
    """One event as it goes to one receiver."""

    body: bytes
    headers: dict[str, str]


def delivery(webhook: Webhook, event: JobEvent, *, now: datetime, trace_url: str | None = None) -> Delivery:
    """Return the event as a signed CloudEvent. Its id is the same in every attempt.

    ``trace_url`` is where a collector shows the trace of the event.
    """
    kind = event.item.kind
    id_ = f"{event.job}-{event.item.number}"
    document = {
        "specversion": "1.0",
        "id": id_,
        "source": "resile",
        "type": f"resile.job.{kind}",
        "subject": event.job,
        "time": timestamp(event.item.time),
        "datacontenttype": "application/json",
        **({"traceurl": trace_url} if trace_url else {}),
        "data": event.model_dump(mode="json"),
    }
    body = orjson.dumps(document)
    sent = str(int(now.timestamp()))
    headers = {
        "Content-Type": "application/cloudevents+json",
        "User-Agent": "resile-webhook/1",
        "webhook-id": id_,
        "webhook-timestamp": sent,
        "webhook-signature": signature(webhook.secret, id_=id_, sent=sent, body=body),
    }
    return Delivery(body, headers)


def signature(secret: str, *, id_: str, sent: str, body: bytes) -> str:
    """Return the signature of a delivery, as Standard Webhooks 1.0 specifies it (standardwebhooks.com)."""
    digest = hmac.new(key_of(secret), f"{id_}.{sent}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def seconds_to_wait(webhook: Webhook, *, by: str, pace: Pace, now: datetime, unchanged_seconds: float) -> float:
    """Return in how many seconds ``by`` may claim an attempt, given how long the record has not changed.

    It does not wait for a claim of its own: it is making no attempt, and the answer to a write was lost. Clocks of
    monitors may differ: no pause exceeds the longest one on the clock of the monitor that waits.
    """
    if webhook.claimed_by not in (None, by):
        return max(0.0, CLAIM_FACTOR * pace.attempt_seconds - unchanged_seconds)
    if webhook.retry_at is None:
        return 0.0
    pause = (webhook.retry_at - now).total_seconds()
    return max(0.0, min(pause, LONGEST_PAUSE_SECONDS - unchanged_seconds))


def claimed(webhook: Webhook, *, by: str, now: datetime) -> Webhook:
    """Return the record with the claim to the next attempt."""
    return _changed(webhook, claimed_by=by, attempts=webhook.attempts + 1, last_attempt=now, retry_at=None)


def settled(webhook: Webhook, *, sequence: int, error: str, pace: Pace, now: datetime) -> Webhook:
    """Return the record after an attempt; an empty ``error`` means that it succeeded."""
    if error and webhook.attempts < MAX_ATTEMPTS:
        pause = timedelta(seconds=pace.pause_seconds(webhook.attempts))
        return _changed(webhook, claimed_by=None, retry_at=now + pause, last_error=error[:MAX_ERROR])
    counts = {"num_given_up": webhook.num_given_up + 1} if error else {"num_delivered": webhook.num_delivered + 1}
    return _changed(
        webhook, after=sequence, attempts=0, claimed_by=None, retry_at=None, last_error=error[:MAX_ERROR], **counts
    )


def _changed(webhook: Webhook, **fields: object) -> Webhook:
    return Webhook.model_validate({**webhook.model_dump(), **fields})
