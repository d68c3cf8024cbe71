"""The commands that show and change whom the pool calls when a job ends."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import Answer, pool_command

if TYPE_CHECKING:
    from resile_shared.http.api import WebhookView

    from ..client import AsyncClient

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Show or change the receivers that the pool calls when a job ends.",
)


@pool_command(app, "list", short_help="List the webhooks and the state of their deliveries.")
async def list_webhooks(client: "AsyncClient") -> Answer:
    """List the webhooks in the order of their creation, with the error of the newest attempt."""
    webhooks = await client.webhooks()
    lines = [_line(webhook) for webhook in webhooks]
    return {"webhooks": webhooks}, lines or ["there are no webhooks: add one with `resile webhook add URL`"]


@pool_command(app, "add", short_help="Call a URL when a job completes or fails.", is_keyed=True)
async def add_webhook(
    client: "AsyncClient",
    url: Annotated[str, typer.Argument(metavar="URL", help="Receiver of the POST requests: http:// or https://")],
    *,
    event: Annotated[
        list[str] | None,
        typer.Option(metavar="EVENT", help="completed, failed or stopped; may be repeated. Default: the first two."),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET", envvar="RESILE_WEBHOOK_SECRET", help="whsec_ and a key in base64. Default: a new one."
        ),
    ] = None,
) -> Answer:
    r"""Have the pool call URL when a job ends, and print the secret with which the receiver checks what it gets.

    \b
    resile webhook add https://ci.example.org/resile
    resile webhook add https://ci.example.org/resile --event failed

    docs/events.md says what is sent, how it is signed, and when it is sent again.
    """
    added = await client.add_webhook(url, events=event or ("completed", "failed"), secret=secret)
    return added, [f"{added.id} is called for {' and '.join(added.events)} jobs", f"its secret: {added.secret}"]


@pool_command(app, "remove", short_help="Remove a webhook.", is_keyed=True)
async def remove_webhook(
    client: "AsyncClient",
    webhook: Annotated[str, typer.Argument(metavar="ID", help="The webhook, as in `resile webhook list`.")],
) -> Answer:
    """Remove a webhook. What was not delivered yet never is."""
    await client.remove_webhook(webhook)
    return {"id": webhook}, [f"{webhook} is removed"]


def _line(webhook: "WebhookView") -> str:
    trouble = f"  attempt {webhook.attempts} failed: {webhook.last_error}" if webhook.last_error else ""
    counts = f"{webhook.num_delivered} delivered, {webhook.num_given_up} given up"
    return f"{webhook.id}  {webhook.url}  {','.join(webhook.events)}  {counts}{trouble}"
