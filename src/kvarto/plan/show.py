"""A plan in a terminal of 80 columns: tables and sentences."""

from __future__ import annotations

from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvarto.plan.answer import Answer, FormatAnswer
from kvarto.plan.engines import engines
from kvarto.plan.gpu import gpus
from kvarto.plan.ours import headline as headline_codec
from kvarto.plan.prefixes import PrefixAnswer

_BAR = 30


def show(console: Console, made: Answer, prefixes: PrefixAnswer | None, *, whole: bool) -> None:
    """Print all of it. `whole`: the formats were chosen; else the main ones are shown, and it is said that there are others."""
    if not whole:
        made = replace(made, formats=tuple(each for each in made.formats if _is_main(each.name)),
                       refused=tuple(each for each in made.refused if _is_main(each.name)))  # fmt: skip
        if prefixes is not None:
            prefixes = replace(prefixes, rows=tuple(row for row in prefixes.rows if _is_main(row.name)))
    _head(console, made)
    if prefixes is not None:
        _prefixes(console, prefixes)
        return
    console.print(_memory(made))
    if made.refused:
        _refused(console, made)
    if made.kv_share is not None:
        console.print(_speed(made))
        _labelled(console, "prompt", prompt(made))
        console.print(_shares(made))
    for each in _waterfalls(made):
        console.print(_waterfall(made, each))
    _sentences(console, made)
    if not whole:
        console.print(
            "Other formats: --formats all, sglang, tensorrt-llm, llama.cpp; curves: -o plan.html",
            style="dim",
            highlight=False,
        )


def _is_main(name: str) -> bool:
    return headline_codec(name) or name.startswith("vllm:")


def show_gpus(console: Console) -> None:
    """The list of GPUs."""
    table = _table(
        "GPUs (dense compute, 10^12 a second)", ["name"], ["memory", "bandwidth", "16-bit", "FP8"], last="source"
    )
    for gpu in gpus().values():
        fp8 = f"{gpu.fp8_flops / 1e12:,.0f}" if gpu.fp8_flops else ""
        bandwidth = f"{gpu.bandwidth / 1e9:,.0f} GB/s"
        table.add_row(gpu.name, size(gpu.memory_bytes), bandwidth, f"{gpu.bf16_flops / 1e12:,.0f}", fp8, gpu.source)
    console.print(table)


def size(nbytes: float) -> str:
    """Bytes as people read them: three digits and a binary unit."""
    sign, nbytes = ("-" if nbytes < 0 else ""), abs(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    digits = 0 if unit == "B" or nbytes >= 100 else 1 if nbytes >= 10 else 2
    return f"{sign}{nbytes:,.{digits}f} {unit}"


def tokens(count: int | None) -> str:
    """Tokens, whole up to seven digits, then in millions."""
    return "-" if count is None else f"{count:,}" if count < 10_000_000 else f"{count / 1e6:,.1f}M"


def gain(value: float | None) -> str:
    """How much faster, in percent."""
    return "-" if value is None else f"{100 * (value - 1):+.0f}%" if abs(value - 1) >= 0.005 else "0%"


def headline(made: Answer) -> list[tuple[str, str]]:
    """What is asked, as (name, sentence)."""
    model, asked = made.model, made.scenario
    lines = [("model", f"{model.short_name} ({model.family}, {len(model.layers)} layers)"), ("cache", model.attention)]
    constant = f", and {size(made.plain_constant_bytes)} a sequence" if made.plain_constant_bytes else ""
    lines.append(("16 bits", f"{made.plain_bytes_per_token:,.0f} bytes a token{constant}"))
    if made.weights:
        parameters = made.weights.parameters
        active = f", {parameters.active / 1e9:.3g}B active" if parameters.routed else ""
        lines.append(
            (
                "weights",
                f"{parameters.total / 1e9:.3g}B parameters{active}, {made.weights.dtype}: {size(made.weights.nbytes)}",
            )
        )
    if made.budget:
        spread = f", tp {made.budget.tp}, pp {made.budget.pp}" if made.budget.gpus > 1 else ""
        lines.append(
            ("GPU", f"{made.budget.gpus} x {made.budget.gpu.title}, {size(made.budget.gpu.memory_bytes)}{spread}")
        )
    load = f"{asked.concurrency} sequences of {asked.context_tokens:,} tokens, of which {asked.output_tokens:,} are generated"
    return [*lines, ("load", load)]


def prompt(made: Answer) -> str:
    """What no format of the cache makes faster."""
    seconds, share = made.prefill_seconds_bound or 0.0, made.prefill_share or 0.0
    length = f"{1e3 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"
    return f"{made.scenario.prompt_tokens:,} tokens take at least {length} alone, {share:.0%} of a request's time by the bounds"


def _head(console: Console, made: Answer) -> None:
    for name, line in headline(made):
        _labelled(console, name, line)
    if made.weights_unknown:
        _labelled(console, "weights", f"not known: {made.weights_unknown}")


def _labelled(console: Console, name: str, line: str) -> None:
    """A word, and beside it text that wraps under itself."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=7)
    grid.add_column(overflow="fold")
    grid.add_row(Text(name, "dim"), Text(line))
    console.print(grid)


def _table(title: str, left: list[str], right: list[str], last: str = "") -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        min_width=min(len(title), 78),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    if last:
        table.add_column(last, overflow="fold")
    return table


def _grouped(table: Table, made: Answer, cells: object) -> None:
    """A row for each format, under its engine's name."""
    assert callable(cells)
    engine = ""
    for each in made.formats:
        if each.engine != engine:
            engine = each.engine
            of = engines().get(engine)
            table.add_row(Text(f"{of.title} {of.version}" if of else engine, "dim"))
        short = each.name.removeprefix(f"{each.engine}:")
        table.add_row(Text(f" {short}", "bold" if each.name == made.baseline else ""), *cells(each))


def _memory(made: Answer) -> Table:
    room = any(each.sequences is not None for each in made.formats)
    asked = made.scenario
    right = ["B/token", "sequence", "smaller"]
    if room:
        right += ["pool", "seqs", "longest"]
    where = "" if not made.budget or made.budget.gpus == 1 else ", on the fullest GPU"
    ways = f"; longest: context of {asked.concurrency} at once" if room else ""
    table = _table(f"Memory at {asked.context_tokens:,} tokens{where}{ways}", ["format"], right)

    def cells(each: FormatAnswer) -> list[str | Text]:
        row: list[str | Text] = [f"{each.bytes_per_token:,.0f}", size(each.bytes_per_sequence), f"{each.smaller:.2f}x"]
        if room:
            enough = f"{each.sequences:,}"
            row += [
                tokens(each.pool_tokens),
                Text(enough, "" if each.fits else "red"),
                tokens(each.longest_context_tokens),
            ]
        return row

    _grouped(table, made, cells)
    return table


def _speed(made: Answer) -> Table:
    asked = made.scenario
    bound = ["a step", "gain", "pays from", "tokens/s"]
    right = ["bound", "gain", "from", "measured", "gain", "from"] if made.measured else bound
    table = _table(
        f"Decode at {asked.concurrency} x {asked.context_tokens:,}: bounds of what is possible", ["format"], right
    )

    def cells(each: FormatAnswer) -> list[str]:
        row = [f"{1e3 * (each.step_seconds_bound or 0):.2f} ms", gain(each.gain_bound)]
        row.append(_from(each, each.break_even_tokens))
        if not made.measured:
            row.append(f"{each.tokens_per_second_bound or 0:,.0f}")
        else:
            seconds = each.measured_step_seconds
            row += ["-" if seconds is None else f"{1e3 * seconds:.2f} ms", gain(each.measured_gain)]
            row.append("" if seconds is None else _from(each, each.measured_break_even_tokens))
        return row

    _grouped(table, made, cells)
    return table


def _from(each: FormatAnswer, count: int | None) -> str:
    """A context; nothing for formats that are not smaller, for which it is no question."""
    if each.smaller < 1.01:
        return ""
    return "never" if count is None else f"{count:,}"


def _shares(made: Answer) -> Table:
    contexts = sorted({cell.context_tokens for cell in made.cells})
    table = _table(f"KV share of a {made.baseline} step's bytes", ["batch"], [f"{context:,}" for context in contexts])
    for batch in sorted({cell.batch for cell in made.cells}):
        row = [cell for cell in made.cells if cell.batch == batch]
        table.add_row(
            f"{batch}", *(f"{cell.kv_share:.0%}" for cell in sorted(row, key=lambda cell: cell.context_tokens))
        )
    return table


def _waterfalls(made: Answer) -> list[FormatAnswer]:
    """The baseline, and the first of ours with 8 and 4 bits, or else the first others."""
    with_one = [each for each in made.formats if each.waterfall]
    wanted = [name for name in (made.baseline, "int4", "vllm:fp8_e4m3") if any(each.name == name for each in with_one)][
        :2
    ]
    return [each for each in with_one if each.name in wanted]


def _waterfall(made: Answer, each: FormatAnswer) -> Table:
    table = _table(f"A GPU's memory in {each.name}, {made.scenario.concurrency} sequences", ["", ""], [""])
    table.show_header = False
    whole = max(1, sum(abs(piece.nbytes) for piece in each.waterfall))
    for piece in each.waterfall:
        name, tone = (piece.name, "cyan") if piece.nbytes >= 0 else ("MISSING", "red")
        table.add_row(
            name,
            Text("█" * max(piece.nbytes != 0, round(_BAR * abs(piece.nbytes) / whole)), tone),
            size(abs(piece.nbytes)),
        )
    return table


def _refused(console: Console, made: Answer) -> None:
    by_reason: dict[str, list[str]] = {}
    for each in made.refused:
        by_reason.setdefault(each.reason, []).append(each.name)
    for reason, names in by_reason.items():
        console.print(Text(f"Not possible: {', '.join(names)}: {reason}", "dim"))


def _sentences(console: Console, made: Answer) -> None:
    if made.advice:
        console.print(Text("Advice", "bold"))
    for rule in made.advice:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(
            Text(f"{rule.step}", "cyan"), Text.assemble(rule.say, "\n", (f"{rule.because} [{rule.source}]", "dim"))
        )
        console.print(grid)
    if made.notes:
        console.print(Text("Notes", "bold"))
    for note in made.notes:
        console.print(Text(f" - {note}", "dim"))
    if made.kv_share is not None:
        console.print(
            Text(" - speeds are upper bounds: memory and arithmetic at rated speed, nothing else takes time", "dim")
        )


def _prefixes(console: Console, prefixes: PrefixAnswer) -> None:
    replayed, trace = prefixes.replayed, prefixes.trace
    about = "about " if trace.estimated else ""
    counted = f"{replayed.requests:,} requests, {about}{replayed.prompt_tokens:,} prompt tokens, blocks of {trace.block_tokens}"
    _labelled(console, "trace", f"{trace.name} ({trace.kind}): {counted}")
    table = _table("Prefix cache under LRU", ["format"], ["room", "hit rate", "tokens saved", "of most"])
    for row in prefixes.rows:
        of = f"{row.hit_rate / prefixes.ceiling:.0%}" if prefixes.ceiling else "-"
        table.add_row(row.name, tokens(row.capacity_tokens), f"{row.hit_rate:.1%}", f"{row.saved_tokens:,}", of)
    most = replayed.most_tokens
    table.add_row(
        Text("without end", "dim"), tokens(most), f"{prefixes.ceiling:.1%}", f"{replayed.saved_tokens(most):,}", "100%"
    )
    console.print(table)
    for note in prefixes.notes:
        console.print(Text(f" - {note}", "dim"))
