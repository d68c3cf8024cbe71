"""The commands, their options and their help."""

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from . import (
    administration,
    chaos,
    check,
    dataset,
    host,
    jobs,
    models,
    publish,
    results,
    serve,
    simulate,
    tenant,
    trace,
    up,
    watch,
    webhook,
)
from .options import DEFAULT_HOME, Compat, Data, Mounts, Requirements, With, environment, naming_flags, required

SECTIONS = {
    "Train": ("run", "check", "demo"),
    "Jobs": ("submit", "serve", "jobs", "job", "wait", "top", "pause", "resume", "priority", "stop", "delete"),
    "What a job did": ("logs", "events", "trace", "model", "models", "output", "ledger", "usage"),
    "Pool": ("up", "host", "hosts", "drain", "undrain", "page", "policy", "tenant", "dataset"),
    "Operate and integrate": ("simulate", "chaos", "publish", "webhook"),
}
"""The commands, as `resile --help` lists them."""


class _Commands(typer.core.TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands in sections."""
        width = max(map(len, self.commands))
        for section, names in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), self._summary(name)) for name in names])

    def _summary(self, name: str) -> str:
        return self.commands[name].get_short_help_str(limit=80)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Of a KeyboardInterrupt, typer would make an exit that says nothing."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


app = typer.Typer(
    name="resile",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Elastic deep-learning training: change the number of workers at any iteration, get the same bits.",
)


@app.callback(invoke_without_command=True)
def _resile(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"resile {version_of('resile')}")
        raise typer.Exit


@app.command(
    short_help="Train a script on this machine, with any number of workers.",
    epilog="Exit status: 0 completed, 1 failed, 2 invalid arguments, 130 or 143 stopped by Ctrl-C or SIGTERM.",
)
def run(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="The training script: what `python SCRIPT` would run.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after `--`.")
    ] = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            metavar="N",
            help="Number of workers, at most num_shards. Default: one for each core, at most 4.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="Change the number of workers at these iterations: 0:1,50:4,120:3"),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="BATCHES",
            help="Replay the global batches of another run, from its result: 0:64,120:256. The script declares a "
            "batch_range.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[ID]",
            help="Resume from the newest checkpoint of the script's newest run, or of run ID; "
            "with the arguments and the batches of that run unless you give others.",
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            metavar="old|new",
            help="With --resume, if the script, a module of its project or the arguments have changed: resume with "
            "those that the run began with, or with the present ones, whose bits are not those of an undisturbed run.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Copy the trained model here: FILE.pt for torch.load, else safetensors.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K[=V]",
            help="Set an environment variable in the workers; without a value, to that of this environment, so that "
            "a secret is not in the command line. May be repeated.",
        ),
    ] = None,
    packages: With = None,
    requirements: Requirements = None,
    data: Data = None,
    mounts: Mounts = None,
    compat: Compat = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run. Default: the name of the script.")
    ] = None,
    home: Annotated[
        Path,
        typer.Option(metavar="DIR", envvar="RESILE_HOME", help="Folder for runs, their logs and checkpoints."),
    ] = DEFAULT_HOME,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Store checkpoints and the model here instead: file://, s3://, gs://, az://"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; everything else goes to stderr.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only what the script prints, and errors.")] = False,
) -> int:
    r"""Train SCRIPT on this machine, with any number of workers, without a pool.

    The trained parameters are the same, bit for bit, for any number of workers, however often it changes. If the
    script lets its batch change, this holds for the same batches.

    \b
    resile run train.py                           one worker for each core, at most 4
    resile run train.py --workers 3 -- --lr 0.1   three workers; --lr is the script's own option
    resile run train.py --plan 0:1,50:4,120:3     grow to 4 workers at iteration 50, shrink to 3 at 120
    resile run train.py --resume                  resume from the newest checkpoint
    resile run train.py --with 'einops>=0.8'      with a package that is not installed here
    resile run train.py --data mnist              with data that is registered: `resile dataset`
    resile run main.py --compat ibm-edt           a script for IBM Elastic Distributed Training
    resile run train.py -o model.safetensors      keep the trained model

    Ctrl-C stops the run and leaves no process behind. The output of workers is kept in the run's folder below
    DIR/runs, which holds the last 20 runs. Temporary files of workers (TMPDIR) are deleted when the run ends.
    """
    from resile_shared.storage.local_datasets import find_dataset

    from ..job_options import worker_environment
    from ..local.plan import parse_batches, parse_plan
    from ..local.settings import Resume, RunSettings

    with naming_flags():
        variables = worker_environment(environment(env), compat)
    settings = RunSettings(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        plan=parse_plan(plan) if plan is not None else None,
        batches=parse_batches(batches) if batches is not None else (),
        requirements=required(packages, requirements),
        data=tuple(find_dataset(home, name) for name in dict.fromkeys(data or ())),
        mounts=tuple(mounts or ()),
        env=variables,
        home=home,
        storage=storage,
        resume=Resume.of(resume, code),
        name=name,
        output=output,
    )
    from ..pool.home import check_loopback
    from .run import train  # imported here: it loads on Linux only, which the settings have checked

    check_loopback()
    return train(settings, as_json=as_json, quiet=quiet)


@app.command(short_help="Two jobs share a pool, and end with the same bits as alone.")
def demo(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the picture.")] = Path(
        "demo-out/demo.png"
    ),
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Home of the demo's pool. Default: a temporary folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; everything else goes to stderr.")
    ] = False,
) -> int:
    """Run two jobs on a pool of two hosts with four slots each, and draw what happens.

    Job 1 takes all eight slots; job 2 is submitted, and each gets four; its priority is raised, and they get three and
    five; a host is killed, and they share the other one until it is back; job 1 completes, and job 2 takes all eight.
    The demo succeeds if all this happened, every sample was used exactly once in every epoch, and both jobs end with
    the parameters of an undisturbed run on one worker, bit for bit.
    """
    from .demo import show

    return show(home=home, output=output, as_json=as_json)


for group in (check, up, jobs, serve, watch, trace, administration, results, models, publish, simulate, host):
    app.add_typer(group.app)
app.add_typer(tenant.app, name="tenant")
app.add_typer(dataset.app, name="dataset")
app.add_typer(webhook.app, name="webhook")
app.add_typer(chaos.app, name="chaos")

command = typer.main.get_command(app)
assert isinstance(command, typer.core.TyperGroup)
_subs: list[Any] = [command]
for _sub in _subs:  # raw docstrings spell \b, the marker of examples, in letters
    _subs += _sub.commands.values() if isinstance(_sub, typer.core.TyperGroup) else ()
    _sub.help = (_sub.help or "").replace("\\b", "\b")
