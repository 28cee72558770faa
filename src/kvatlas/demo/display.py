"""What the demo shows: a live line while it plays, a comparison at the end."""

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvatlas.demo.outcomes import PlayedRequestOutcome, PolicyFigures
from kvatlas.demo.run import DemoReport
from kvatlas.schemas.printable import printable


class LiveDisplay:
    """An Audience that draws one line per policy; `with` owns the terminal."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self._console, self._num_requests = console, num_requests
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=12),
            TextColumn("{task.completed:>4}/{task.total}"),
            TextColumn("hits {task.fields[hits]:>3.0%}"),
            TextColumn("pulled {task.fields[pulled]}"),
            TextColumn("lag {task.fields[lag]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._asked = self._hits = self._pulled = 0
        self._lag = "-"

    def __enter__(self) -> "LiveDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def lagged(self, lag_ms: float) -> None:
        self._lag = f"{lag_ms:.1f} ms"

    def played(self, policy: str, outcomes: Sequence[PlayedRequestOutcome]) -> None:
        if policy not in self._tasks:
            self._asked = self._hits = self._pulled = 0
            self._tasks[policy] = self._progress.add_task(
                policy, total=self._num_requests, hits=0.0, pulled=0, lag="-"
            )
        newest = outcomes[-1]
        self._asked += newest.prompt_blocks
        self._hits += newest.local_blocks + newest.pulled_blocks
        self._pulled += newest.pulled_blocks
        self._progress.update(
            self._tasks[policy],
            completed=len(outcomes),
            hits=self._hits / max(self._asked, 1),
            pulled=self._pulled,
            lag=self._lag,
        )


def print_report(console: Console, report: DemoReport) -> None:
    """Print the comparison, what was verified, and where to go next."""
    title = f"{report.requests} requests on {report.workers} workers, {report.trace}"
    table = Table(title=Text(printable(title), "table.title"))
    for column in ("", "hits", "local", "pulled", "TTFT p50", "TTFT p99", "max/mean work"):
        table.add_column(column, justify="left" if not column else "right")
    for name, figures in report.policies.items():
        if isinstance(figures, PolicyFigures):
            table.add_row(name, *_cells(figures))
        else:
            table.add_row(name, f"{figures['hit_ratio']:.1%}", "", "", "", "", "")
    console.print(table)
    console.print(
        "Hits are shares of full prompt blocks; work is the prompt blocks that a worker computed. "
        "one_big_lru is one cache as large as the whole fleet, without any cost of moving KV. TTFT "
        "is modelled: queue, pull and prefill at the reference engine's rates; its KV is bytes in "
        "shared memory."
    )
    console.print(_verified(report))
    console.print("\nNext: serve a fleet and ask it, as README.md shows under 'Use it':")
    command = (
        "  .venv/bin/kvatlas serve --workers 2 --data kvatlas-data --archive sqlite:///kvatlas.db"
    )
    console.print(command, soft_wrap=True)
    if report.archive:
        command = printable(f"  .venv/bin/kvatlas replay --archive {report.archive}")
        console.print(command, soft_wrap=True, markup=False)


def _cells(figures: PolicyFigures) -> list[str]:
    return [
        f"{figures.hit_ratio:.1%}",
        f"{figures.local_hit_ratio:.1%}",
        f"{figures.pulled_ratio:.1%}",
        f"{figures.ttft_ms['p50']:.0f} ms",
        f"{figures.ttft_ms['p99']:.0f} ms",
        f"{figures.max_over_mean_work:.3f}",
    ]


def _verified(report: DemoReport) -> str:
    pull, events, delay = report.pull, report.events, report.convergence_ms
    return "\n".join(
        [
            f"\nIndex equals every engine: {'yes' if report.digest['equal'] else 'NO'}"
            f" ({report.digest['workers']} workers);"
            f" replay of {report.replay['batches']} batches equals live:"
            f" {'yes' if report.replay['digest_equal'] else 'NO'}.",
            f"Events: {events['published']} published, {events['applied']} applied,"
            f" {events['gaps']} gaps, {events['rejected']} rejected;"
            f" visible after {delay['p50']} ms (p99 {delay['p99']} ms).",
            f"Pulls over {pull.transport}: {pull.blocks} blocks ({pull.bytes / 2**20:.1f} MiB),"
            f" {pull.verified} verified, {pull.failed} failed and computed instead."
            if pull.blocks or pull.failed
            else "Pulls: none was worth it.",
        ]
    )


def report_json(report: DemoReport) -> str:
    """Return the report as one line of JSON."""
    return msgspec.json.encode(report).decode()
