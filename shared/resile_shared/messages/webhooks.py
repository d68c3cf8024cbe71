"""Webhooks: the receivers that a pool calls when a job ends, and what each has got so far."""

import base64
import binascii
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from .message import Count, Id, Line, Message, Text, Time

MAX_WEBHOOKS = 20
MAX_URL = 2000
SECRET_PREFIX = "whsec_"
_SECRET_BYTES = range(24, 65)

WebhookEvent = Literal["completed", "failed", "stopped"]


def _check_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not text.isascii() or " " in text:
        raise ValueError("must be a URL as in https://example.org/hook")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user and password: the receiver checks the signature instead")
    if parts.fragment:
        raise ValueError("must have no #fragment: it is never sent")
    return text


def key_of(secret: str) -> bytes:
    """Return the key that a secret stands for. Raises ValueError."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(SECRET_PREFIX) or len(key) not in _SECRET_BYTES:
        raise ValueError(f"must be {SECRET_PREFIX} and 24 to 64 bytes in base64")
    return key


def _check_secret(text: str) -> str:
    key_of(text)
    return text


WebhookUrl = Annotated[Line, Field(max_length=MAX_URL), AfterValidator(_check_url)]
WebhookSecret = Annotated[str, Field(max_length=128), AfterValidator(_check_secret)]


class Webhook(Message):
    """One receiver. Monitors write it by compare-and-set: who has stored a claim makes the next attempt."""

    id: Id
    url: WebhookUrl
    secret: WebhookSecret
    events: tuple[WebhookEvent, ...] = Field(min_length=1, max_length=3)
    created: Time
    after: Count = Field(description="sequence of the newest event that was delivered or given up")
    attempts: Count = Field(default=0, description="to deliver the next event")
    claimed_by: Id | None = Field(default=None, description="the monitor that makes an attempt now")
    retry_at: Time | None = Field(default=None, description="when the next attempt is due; None: at once")
    num_delivered: Count = 0
    num_given_up: Count = 0
    last_error: Text = Field(default="", description="of the newest attempt; empty if it succeeded")
    last_attempt: Time | None = None
