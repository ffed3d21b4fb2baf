"""The tables of an ablation, in Markdown: KL in 10^-3 nats, intervals of 95 % clustered by document.

A document takes those that it names between `<!-- table: NAME -->` and `<!-- end -->`; all are printed. A step's worth is paired: the mean over
documents of the logarithm of the two KLs' ratio, so that documents on which everything is hard do not hide it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvarto.errors import UsageError
from kvarto.files import write_whole
from variants import KEY_STEPS, VALUE_STEPS

Models = dict[str, dict[str, Any]]
PEERS = (
    ("int4", "kivi4"), ("int4", "kivi4-g32"), ("int4", "turbo4"), ("int3", "kivi3"), ("int3", "turbo3"), ("int3", "turbo4"),
    ("int2", "kivi2"), ("int2", "kivi2-g32"), ("int2", "turbo2"), ("int2", "turbo3"),
)  # fmt: skip
"""(ours, theirs) of one name's bits, and where theirs have more."""
_PLACES = ("first", "page", "later")
_MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def models_of(file: Path) -> Models:
    """Of a result, by name. Raises UsageError."""
    try:
        models: Models = json.loads(file.read_text())["models"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError("result", "a file that ablation.py wrote", f"{file} ({error!r})") from None
    return models


def show(file: Path, into: Path | None) -> None:
    """Print the tables of a result, or put them into a document. Raises UsageError."""
    models = models_of(file)
    if into is None:
        for name, table in TABLES.items():
            print(f"\n{name}\n\n{table(models)}")
        return
    text = into.read_text()
    if unknown := [match[2] for match in _MARK.finditer(text) if match[2] not in TABLES]:
        raise UsageError(f"{into}, table", f"one of {', '.join(TABLES)}", unknown[0])
    filled = _MARK.sub(lambda match: f"{match[1]}{TABLES[match[2]](models)}\n{match[3]}", text)
    write_whole(into, filled.encode())


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else "not measured"


def _number(x: float) -> str:
    """Three digits, without an exponent."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _estimate(documents: Sequence[Sequence[float]], column: int) -> Any:
    from kvarto import stats

    return stats.clustered_mean([each[column] for each in documents], [each[0] for each in documents])


def _kl(case: dict[str, Any] | None, *, top1: bool = True) -> str:
    """KL [interval] top-1."""
    if case is None:
        return ""
    kl = _estimate(case["documents"], 1)
    text = _number(kl.mean * 1e3)
    if math.isfinite(kl.error):
        text += f" [{_number(max(kl.low, 0) * 1e3)}, {_number(kl.high * 1e3)}]"
    return f"{text}, {100 * _estimate(case['documents'], 2).mean:.1f} %" if top1 else text


def _cases(models: Models, **label: Any) -> dict[tuple[str, ...], dict[str, dict[str, Any]]]:
    """(name) to model to case, of those with these labels, in the file's order."""
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for model, result in models.items():
        for case in result["cases"]:
            if all(case.get(key) == value for key, value in label.items()):
                found.setdefault((case["name"],), {})[model] = case
    return found


def _ladder(models: Models, side: str) -> str:
    rows = []
    for bits in (8, 4, 3, 2):
        for (name,), of_model in _cases(models, section="fidelity", side=side, bits=bits).items():
            rows.append([f"{bits}", name, *_widths(of_model, side), *(_kl(of_model.get(model)) for model in models)])
    return _markdown(["bits", "variant", "with terms", "at D = 128", *models], rows)


def _widths(of_model: Mapping[str, dict[str, Any]], side: str) -> list[str]:
    """Bits of a number with all terms: as measured, of each D that was; and by the rule at D = 128."""
    cases = of_model.values()
    pairs = [(case["k_bits"], case["v_bits"]) for case in cases], [tuple(case["bits_128"]) for case in cases]
    return [
        ", ".join(dict.fromkeys(f"{ {'k': k, 'v': v, 'both': (k + v) / 2}[side]:.3g}" for k, v in of)) for of in pairs
    ]


def _ratio(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """KL after over KL before, geometric over documents, with an interval: below 1 the step pays."""
    if before is None or after is None:
        return ""
    from kvarto import stats

    pairs = [
        (one[1] / one[0], two[1] / two[0]) for one, two in zip(before["documents"], after["documents"], strict=True)
    ]
    if any(min(pair) <= 0 for pair in pairs):
        return ""
    logs = [math.log(two / one) for one, two in pairs]
    found = stats.clustered_mean(logs, [1.0] * len(logs))
    text = _factor(math.exp(found.mean))
    if math.isfinite(found.error):
        sure = "**" if found.high < 0 else ""
        text = f"{sure}{text}{sure} [{_factor(math.exp(found.low))}, {_factor(math.exp(found.high))}]"
    return text  # fmt: skip


def _factor(x: float) -> str:
    """Two places, two digits below a tenth."""
    return f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


def _steps(models: Models, side: str, steps: Sequence[tuple[str, str, str]]) -> str:
    """A step a row, a width of a model a column."""
    known = {bits: _cases(models, section="fidelity", side=side, bits=bits) for bits in (4, 3, 2)}
    columns = [(model, bits) for model in models for bits, found in known.items() if found]
    rows = []
    for what, before, after in steps:
        pairs = [[known[bits].get((name,), {}).get(model) for name in (before, after)] for model, bits in columns]
        cells = [_ratio(*pair) for pair in pairs]
        if any(cells):
            rows.append([what, before, *cells])
    return _markdown(["step", "added to", *(f"{model}, {bits} bits" for model, bits in columns)], rows)


def _peers(models: Models) -> str:
    """What ours multiply the KL of others by, both sides."""
    known = {name: of_model for (name,), of_model in _cases(models, section="fidelity", side="both").items()}
    rows = []
    for ours, theirs in PEERS:
        if ours in known and theirs in known:
            bits = [f"{name} ({_widths(known[name], 'both')[0]})" for name in (ours, theirs)]
            rows.append([*bits, *(_ratio(known[theirs].get(model), known[ours].get(model)) for model in models)])
    return _markdown(["ours (bits)", "theirs (bits)", *models], rows)


def _sink_mass(models: Models) -> str:
    rows = []
    for model, result in models.items():
        if sinks := result.get("sinks"):
            mass, norms = ([f"{x:.3g}" for x in sinks[key].values()] for key in ("mass", "norms"))
            rows.append([model, *mass, *norms])
    columns = ["mass: first token", "rest of first page", "later"]
    norms = ["norm of a key: first token", "later", "less the static mean: first token", "later"]
    return _markdown(["model", *columns, *norms], rows)


def _sink_errors(models: Models) -> str:
    """Of each variant, by place: root mean square error of a score; its square weighted by probability; what the output moves by, to first order."""
    rows = []
    for model, result in models.items():
        for each in result.get("sinks", {}).get("errors", []):
            root = [f"{math.sqrt(each[place]['square']):.3g}" for place in _PLACES]
            parts = [_number(1e3 * each[place][what]) for what in ("weighted", "output") for place in _PLACES]
            rows.append([model, each["name"], *root, *parts])
    header = [f"{what}: {place}" for what in ("score error", "p e^2 x 1000", "output x 1000") for place in _PLACES]
    return _markdown(["model", "keys, 4 bits", *header], rows)


def _sink_kl(models: Models) -> str:
    rows = []
    for model, result in models.items():
        cases = [case for case in result["cases"] if case["section"] == "coded"]
        for name in dict.fromkeys(case["name"] for case in cases):
            of = {case["coded"]: case for case in cases if case["name"] == name}
            rows.append([model, name, *(_kl(of.get(coded), top1=False) for coded in ("all", *_PLACES))])
    return _markdown(["model", "keys, 4 bits", "all", "first token", "rest of first page", "later alone"], rows)


def _grid(models: Models) -> str:
    """A format and sink a row, a window of a model a column."""
    found: dict[tuple[str, int], dict[tuple[str, int], dict[str, Any]]] = {}
    for model, result in models.items():
        for case in result["cases"]:
            if case["section"] == "grid":
                found.setdefault((case["name"], case["sink_tokens"]), {})[model, case["window_pages"]] = case
    windows = sorted({window for of in found.values() for _, window in of})
    columns = [(model, window) for model in models for window in windows]
    rows = [[name, f"{sink}", *(_kl(of.get(at), top1=False) for at in columns)] for (name, sink), of in found.items()]
    return _markdown(["format", "sink", *(f"{model}, window {64 * window}" for model, window in columns)], rows)


def _tasks(models: Models) -> str:
    """Of what ships: needles found; answers that are raw's to the letter, that follow the schema, that have the right values."""
    from kvarto.codecs import registry

    found: dict[str, dict[str, list[str]]] = {}
    for model, result in models.items():
        for each in result.get("tasks", []):
            if each["name"] == "raw" or each["name"] in registry:
                found.setdefault(each["name"], {})[model] = _task(result["tasks"][0], each, result["orders"])
    columns = ["needles (lost, gained)", "as raw", "by the schema", "right values"]
    rows = [
        [name, *(cell for model in models for cell in of.get(model, [""] * len(columns)))] for name, of in found.items()
    ]
    return _markdown(["format", *(f"{model}: {column}" for model in models for column in columns)], rows)


def _task(raw: dict[str, Any], each: dict[str, Any], orders: Sequence[dict[str, Any]]) -> list[str]:
    """Where no answer of `raw` follows the schema, none of the format's is to blame: a dash."""
    needles, answers = (list(zip(raw[what], each[what], strict=True)) for what in ("needles", "answers"))
    lost, gained = sum(a and not b for a, b in needles), sum(b and not a for a, b in needles)
    same = sum(a == b for a, b in answers)
    (by_raw, _), judged = (_judged(orders, of["answers"]) for of in (raw, each))
    return [
        f"{sum(each['needles'])} of {len(needles)} (-{lost} +{gained})",
        f"{same} of {len(answers)}",
        *(f"{count} of {len(answers)}" if by_raw else "-" for count in judged),
    ]


def _judged(orders: Sequence[dict[str, Any]], answers: Sequence[str]) -> tuple[int, int]:
    """How many follow the schema, and how many of these have the right values."""
    from kvarto.study.json_check import Extraction, score

    items = [
        score(Extraction(order["sentence"], (), order["expected"]), text)
        for order, text in zip(orders, answers, strict=True)
    ]
    return sum(item.follows_schema for item in items), sum(item.right_values for item in items)


def _runs(models: Models) -> str:
    rows = []
    for model, result in models.items():
        about, machine = result["about"], result["machine"]
        read = max((len(case["documents"]) for case in result["cases"]), default=0)
        texts = f"{read} of {result['document_tokens']} tokens, {about['text']}"
        moments = f"{len(about['calibration'])}, {about['calibration_text']}"
        rows.append(
            [
                model,
                f"{result['dim']}",
                texts,
                moments,
                machine["device"],
                machine["commit"],
                f"{result['seconds']:.0f}",
            ]
        )
    return _markdown(["model", "D", "documents", "for moments", "device", "commit", "seconds"], rows)


TABLES: dict[str, Callable[[Models], str]] = {
    "runs": _runs,
    "keys": lambda models: _ladder(models, "k"),
    "values": lambda models: _ladder(models, "v"),
    "both": lambda models: _ladder(models, "both"),
    "peers": _peers,
    "key-steps": lambda models: _steps(models, "k", KEY_STEPS),
    "value-steps": lambda models: _steps(models, "v", VALUE_STEPS),
    "tasks": _tasks,
    "sink-mass": _sink_mass,
    "sink-errors": _sink_errors,
    "sink-kl": _sink_kl,
    "grid": _grid,
}
