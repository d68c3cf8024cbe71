"""The demo as one HTML file that needs no other file and no network: charts, what happened, and the sums."""

from collections.abc import Callable, Sequence
from html import escape

from ..svg_chart import COLOURS, Chart, Mark, Series, line_chart, stacked_chart
from .recording import Point, Recording
from .verdict import Ending, used_once

_STYLE = f"""
:root {{ color-scheme: light dark; --faint: #8884; --card: #8881; --good: #1d7a46; --bad: #b3261e; }}
@media (prefers-color-scheme: dark) {{ :root {{ --good: #63cf93; --bad: #ff8a80; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2.5rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin-bottom: .25rem; }}
h2 {{ font-size: 1.1rem; margin: 2.25rem 0 .5rem; }}
.verdict {{ font-weight: 600; color: var(--good); }} .verdict.wrong {{ color: var(--bad); }}
figure {{ margin: 0; padding: .75rem; border: 1px solid var(--faint); border-radius: 10px; background: var(--card); }}
figure {{ overflow-x: auto; }} svg {{ width: 100%; min-width: 34rem; height: auto; display: block; }}
figcaption {{ font-size: .85rem; opacity: .8; }}
ol {{ padding-left: 1.75rem; }} li time {{ font-variant-numeric: tabular-nums; opacity: .7; margin-right: .5rem; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; font-size: .92rem; }}
th, td {{ text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--faint); }}
th, td {{ vertical-align: top; }}
td {{ font-variant-numeric: tabular-nums; }} code {{ font-size: .78rem; overflow-wrap: anywhere; }}
.key {{ display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin-right: .4rem; }}
.one {{ background: {COLOURS[0]}; }} .two {{ background: {COLOURS[1]}; }}
"""


def html(endings: Sequence[Ending], recording: Recording, faults: Sequence[str], *, slots: int, title: str) -> str:
    """Return the report."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        _verdict(faults),
        _figure("Who had which slots", _slots(endings, recording, slots), "Numbers mark the steps below."),
        "<h2>What happened</h2>",
        _steps(recording),
        _figure("Iterations", _progress(endings, recording), "Committed by each job; a change costs no iteration."),
        _figure("Training loss", _losses(endings, recording), "It goes on as if nothing had happened."),
        "<h2>The sums</h2>",
        _sums(endings),
        "<h2>Every change of workers</h2>",
        *(_changes(ending) for ending in endings),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _verdict(faults: Sequence[str]) -> str:
    if not faults:
        return '<p class="verdict">Same bits: both jobs have the parameters of undisturbed runs on one worker.</p>'
    return "".join(f'<p class="verdict wrong">Wrong: {escape(fault)}</p>' for fault in faults)


def _figure(heading: str, chart: str, caption: str) -> str:
    return f"<h2>{escape(heading)}</h2><figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _chart(endings: Sequence[Ending], recording: Recording, label: str, y_max: float, height: float) -> Chart:
    end = max((stretch.end for ending in endings for stretch in ending.stretches), default=1.0)
    marks = [Mark(step.seconds, step.text) for step in recording.steps]
    return Chart(label, "seconds", label, end, y_max, height=height, marks=marks)


def _slots(endings: Sequence[Ending], recording: Recording, slots: int) -> str:
    held = []
    for ending in endings:
        points = [(stretch.begin, float(stretch.workers)) for stretch in ending.stretches]
        points += [(ending.stretches[-1].end, 0.0)] if ending.stretches else []
        held.append(Series(ending.part.name, points))
    return stacked_chart(_chart(endings, recording, "slots", slots * 1.15, 280), held)


def _progress(endings: Sequence[Ending], recording: Recording) -> str:
    lines = [
        Series(ending.part.name, [(point.seconds, float(point.iteration)) for point in _points(ending, recording)])
        for ending in endings
    ]
    return line_chart(_chart(endings, recording, "iterations", _top(lines), 220), lines)


def _losses(endings: Sequence[Ending], recording: Recording) -> str:
    lines = [
        Series(
            ending.part.name,
            [(point.seconds, point.loss) for point in _points(ending, recording) if point.loss is not None],
        )
        for ending in endings
    ]
    return line_chart(_chart(endings, recording, "loss", _top(lines), 240), lines)


def _points(ending: Ending, recording: Recording) -> Sequence[Point]:
    return recording.points.get(ending.job.id, [])


def _top(lines: Sequence[Series]) -> float:
    return max((value for line in lines for _, value in line.points), default=1.0) * 1.05


def _steps(recording: Recording) -> str:
    items = (f"<li><time>{step.seconds:.1f} s</time>{escape(step.text)}</li>" for step in recording.steps)
    return f"<ol>{''.join(items)}</ol>"


def _score(name: str, value: float) -> str:
    return f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4g}"


def _sums(endings: Sequence[Ending]) -> str:
    heads = "".join(
        f'<th scope="col"><span class="key {name}"></span>{escape(ending.part.name)}</th>'
        for ending, name in zip(endings, ("one", "two"), strict=False)
    )
    rows: dict[str, Callable[[Ending], str]] = {
        "workers, one after the other": lambda e: ", ".join(str(stretch.workers) for stretch in e.stretches),
        "iterations": lambda e: f"{e.job.iteration:,}",
        "samples": lambda e: f"{e.job.samples_seen:,}",
        "slot-seconds": lambda e: f"{sum(s.workers * (s.end - s.begin) for s in e.stretches):,.0f}",
        "validation": lambda e: ", ".join(_score(name, value) for name, value in e.job.validation.items()) or "none",
        "every sample exactly once": _once,
        "params sha256": lambda e: f"<code>{escape(str(e.job.params_sha256))}</code>",
        "alone, on one worker": lambda e: f"<code>{escape(e.alone_sha256)}</code>",
    }
    body = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{tell(ending)}</td>" for ending in endings)}</tr>'
        for label, tell in rows.items()
    )
    return f'<div class="scroll"><table><thead><tr><td></td>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _once(ending: Ending) -> str:
    num = sum(count.num_epochs for count in ending.job.ledger if used_once(count))
    return f"in {num} of {sum(count.num_epochs for count in ending.job.ledger)} epochs"


def _changes(ending: Ending) -> str:
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("from", "to", "workers", "iterations"))
    rows = "".join(
        f"<tr><td>{s.begin:.1f} s</td><td>{s.end:.1f} s</td><td>{s.workers}</td><td>{s.first:,} to {s.last:,}</td></tr>"
        for s in ending.stretches
    )
    name = escape(ending.part.name)
    return (
        f'<details><summary>{name}: {len(ending.stretches)} memberships</summary><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
