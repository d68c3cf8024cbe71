"""The command that shows and changes how jobs share slots."""

from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.policies import POLICIES_HELP, PolicyName

from .options import Answer, pool_command

if TYPE_CHECKING:
    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)


@pool_command(app, short_help="Show or change how jobs share slots.")
async def policy(
    client: "AsyncClient",
    name: Annotated[
        PolicyName | None, typer.Argument(metavar="[NAME]", help=f"{POLICIES_HELP}. Default: unchanged.")
    ] = None,
    *,
    preemption: Annotated[
        bool | None,
        typer.Option(
            "--preemption/--no-preemption",
            help="Whether a job may lose slots to another one. Default: unchanged.",
            show_default=False,
        ),
    ] = None,
) -> Answer:
    r"""Show how jobs share slots, or change it while they train.

    \b
    resile policy                             show the policy of the pool
    resile policy priority                    change it: jobs follow at their next iteration boundary
    resile policy fifo --no-preemption        no job loses slots to another one

    The pool keeps the policy until it is changed again, also when it is stopped and started.
    """
    if name is None and preemption is None:
        view = await client.policy()
    else:
        view = await client.change_policy(name, preemption=preemption)
    lines = [f"policy      {view.policy}", f"preemption  {'on' if view.preemption else 'off'}"]
    return {"policy": view.policy, "preemption": view.preemption}, lines
