"""What each idea of a KV codec is worth on a real model, and whose error the attention sink carries.

    python benchmarks/ablation.py smollm2-135m-instruct --documents 4 --tokens 512     # on a CPU: most of an hour
    python benchmarks/ablation.py MODEL --tokenize inputs.npz                          # tokens for a machine without texts or a tokenizer
    python benchmarks/ablation.py FOLDER --inputs inputs.npz --device cuda             # there: a minute or two
    python benchmarks/ablation.py --tables benchmarks/baselines/ablation.json [--into docs/ablation.md]

MODEL: a name that kvarto knows, or a folder with config.json and safetensors (with --gguf, weights in that file). Keys, values and both, at 4, 3
and 2 bits, read through `simulated.py`; own page and first page raw, positions from 128 on, KL against the raw run, moments from other documents.
--sink-study: with other sinks and windows, and with only some of the keys coded. The file at --out keeps other models that it holds. Tables need
scipy, the run does not.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import ablation_tables
from ablation_texts import Inputs, Wanted, build, open_inputs, save
from checkpoints import load
from kvarto.errors import KvartoError, UsageError
from kvarto.files import require_writable, write_whole
from kvarto.layout import PAGE_TOKENS, Side
from simulated import FIRST_SCORED, RAW, Reading, Simulation, Sums, calibrate, compare, greedy
from sink_study import SinkStudy, readings
from variants import Variant, codec, formats, key_variants, sink_variants, value_variants

BASELINE = Path(__file__).parent / "baselines" / "ablation.json"
RAW_BITS = 16.0
MOST_ANSWER_TOKENS = 48
TASK_BATCH = 24
SINKS_TOKENS, WINDOWS_PAGES = (0, 1, PAGE_TOKENS, 2 * PAGE_TOKENS), (0, 1, 4)
GRID_FORMATS = ("int4", "int2", "kivi2")


@dataclass(frozen=True)
class Case:
    """A reading with what names it in the file, all of `label` together."""

    label: dict[str, Any]
    reading: Reading

    def bits(self, dim: int) -> tuple[float, float]:
        """Of a number in keys and in values."""
        k, v = (side.bits(dim) if side else RAW_BITS for side in (self.reading.k, self.reading.v))
        return k, v


# ---- what is run -----------------------------------------------------------------------------------------------------


def fidelity_cases(bits: Sequence[int]) -> Iterator[Case]:
    """The ladders, one side raw; both sides; and formats of 8 bits to compare with."""
    for name in ("fp8", "int8"):
        k, v = codec(name, Side.K), codec(name, Side.V)
        for side, reading in (("k", Reading(k)), ("v", Reading(v=v)), ("both", Reading(k, v))):
            yield Case({"section": "fidelity", "side": side, "bits": 8, "name": name}, reading)
    for b in bits:
        for k in key_variants(b):
            yield Case({"section": "fidelity", "side": "k", "bits": b, "name": k.name}, Reading(k))
        for v in value_variants(b):
            yield Case({"section": "fidelity", "side": "v", "bits": b, "name": v.name}, Reading(v=v))
        for k, v in formats(b):
            yield Case({"section": "fidelity", "side": "both", "bits": b, "name": pair_name(k, v)}, Reading(k, v))


def pair_name(k: Variant, v: Variant) -> str:
    return k.name if k.name == v.name else f"{k.name} / {v.name}"


def sink_cases() -> Iterator[Case]:
    """Keys with only some tokens coded; shipped formats with other sinks and windows."""
    for k in sink_variants():
        for coded, reading in readings(k).items():
            yield Case({"section": "coded", "name": k.name, "coded": coded}, reading)
    for name in GRID_FORMATS:
        for sink in SINKS_TOKENS:
            for window in WINDOWS_PAGES:
                yield grid_case(name, sink, window)
    for name in ("fp8", "int8", "int3"):
        for sink in (0, PAGE_TOKENS):
            yield grid_case(name, sink, 0)


def grid_case(name: str, sink_tokens: int, window_pages: int) -> Case:
    reading = Reading(codec(name, Side.K), codec(name, Side.V), sink_tokens, window_pages)
    return Case({"section": "grid", "name": name, "sink_tokens": sink_tokens, "window_pages": window_pages}, reading)


def task_cases(bits: Sequence[int]) -> Iterator[Case]:
    """Those whose needles and JSON are looked at: nothing coded, what ships, the ladder's ends."""
    yield Case({"name": "raw", "bits": 16}, RAW)
    yield Case({"name": "fp8", "bits": 8}, Reading(codec("fp8", Side.K), codec("fp8", Side.V)))
    yield Case({"name": "int8", "bits": 8}, Reading(codec("int8", Side.K), codec("int8", Side.V)))
    for b in bits:
        for k, v in formats(b):
            yield Case({"name": pair_name(k, v), "bits": b}, Reading(k, v))


# ---- how -------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What is measured on one model."""

    simulation: Simulation
    inputs: Inputs
    options: argparse.Namespace
    began: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {line}", flush=True)

    def batches(self) -> Iterator[torch.Tensor]:
        """Documents int64 [B, T], those of one length together, `batch` at a time."""
        rows = sorted(self.inputs.documents, key=len)
        while rows:
            batch = [row for row in rows[: self.options.batch] if len(row) == len(rows[0])]
            rows = rows[len(batch) :]
            yield torch.tensor(batch, device=self.simulation.model.device)

    def read(self, cases: Sequence[Case]) -> Iterator[list[list[Sums]]]:
        """Every case on a batch, then the next batch: who stops early has fewer documents of all. Gives all sums so far, by case."""
        found: list[list[Sums]] = [[] for _ in cases]
        for number, tokens in enumerate(self.batches(), start=1):
            scored = tokens.shape[1] - FIRST_SCORED
            base = self.simulation.logits(tokens, scored=scored).log_softmax(dim=-1)
            for case, sums in zip(cases, found, strict=True):
                logits = self.simulation.logits(tokens, case.reading, scored=scored)
                sums += [compare(of_base, of_case) for of_base, of_case in zip(base, logits, strict=True)]
                kl, positions = sum(s.kl_nats for s in sums), sum(s.positions for s in sums)
                self.say(f"batch {number}  KL {kl / positions:.6f}  {' '.join(map(str, case.label.values()))}")
            yield found

    def needles(self, reading: Reading) -> list[bool]:
        """Whether greedy decoding gives each needle's whole number: it does if every token of it is the likeliest, given those before."""
        found = []
        for first in range(0, len(self.inputs.needles), TASK_BATCH):
            rows = self.inputs.needles[first : first + TASK_BATCH]
            tails = self.inputs.answer_tokens[first : first + TASK_BATCH]
            width = max(map(len, rows))
            tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
            scored = width - min(len(row) - tail for row, tail in zip(rows, tails, strict=True)) + 1
            best = self.simulation.logits(tokens, reading, scored=scored).argmax(dim=-1).cpu()
            for row, tail, says in zip(rows, tails, best, strict=True):
                at = len(row) - tail - 1 - (width - scored)
                found.append(says[at : at + tail].tolist() == list(row[-tail:]))
        return found

    def answers(self, reading: Reading, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What greedy decoding writes after each JSON prompt."""
        prompts, ends = self.inputs.extractions, set(self.inputs.line_ends)
        return greedy(self.simulation, reading, prompts, drafts, ends, MOST_ANSWER_TOKENS)

    def tasks(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Needles and JSON of each; what the first, raw, writes is the others' draft. Answers as text, judged when tables are made."""
        results, drafts = list[dict[str, Any]](), list(self.inputs.drafts)
        for case in cases:
            answers = self.answers(case.reading, drafts)
            drafts = drafts if results else [tuple(answer) for answer in answers]
            found = self.needles(case.reading)
            results.append({**case.label, "needles": found, "answers": [self.inputs.text(each) for each in answers]})
            self.say(f"needles {sum(found)} of {len(found)}  {case.label['bits']} {case.label['name']}")
        return results

    def sinks(self) -> dict[str, Any]:
        study = SinkStudy(self.simulation, sink_variants())
        for row in self.inputs.documents:
            study.add(torch.tensor(row))
        return study.results()


def as_json(case: Case, dim: int, sums: Sequence[Sums]) -> dict[str, Any]:
    """`documents`: [positions, KL in nats, same likeliest token], each summed over the positions."""
    (k, v), (k128, v128) = case.bits(dim), case.bits(128)
    documents = [[each.positions, each.kl_nats, each.top1] for each in sums]
    return {**case.label, "k_bits": k, "v_bits": v, "bits_128": [k128, v128], "documents": documents}


def run(
    simulation: Simulation, inputs: Inputs, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything that was asked for, on one model. `keep` gets what is known after each batch, and all of it at the end."""
    result: dict[str, Any] = {"machine": machine(options), "dim": simulation.dim, "layers": simulation.layers}
    runner = Run(simulation, inputs, options)
    calibrate(simulation, [torch.tensor(row) for row in inputs.calibration])
    runner.say("calibrated")
    result |= {"about": inputs.about, "document_tokens": len(inputs.documents[0]), "cases": []}
    cases = list(fidelity_cases(options.bits)) if options.fidelity else []
    cases += list(sink_cases()) if options.sink_study else []
    cases = [case for case in cases if options.only in " ".join(map(str, case.label.values()))]
    if options.sink_study:
        result["sinks"] = runner.sinks()
    for found in runner.read(cases):
        pairs = zip(cases, found, strict=True)
        result["cases"] = [as_json(case, simulation.dim, sums) for case, sums in pairs]
        result["seconds"] = time.monotonic() - runner.began
        keep(result)
    if options.tasks:
        of_tasks = [
            case for case in task_cases(options.bits) if case.reading is RAW or options.only in case.label["name"]
        ]
        result |= {"tasks": runner.tasks(of_tasks), "orders": list(inputs.orders)}
    result["seconds"] = time.monotonic() - runner.began
    keep(result)
    return result


def machine(options: argparse.Namespace) -> dict[str, Any]:
    device, revision = torch.cuda.get_device_name() if options.device.startswith("cuda") else "", options.commit
    if not (device and revision):
        import measure  # needs psutil, which a GPU's machine may lack

        device, revision = device or measure.cpu_name(), revision or measure.commit()
    return {
        "device": device, "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "commit": revision, "command": shlex.join(["ablation.py", *sys.argv[1:]]),
    }  # fmt: skip


# ---- the program -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted, add = Wanted(), parser.add_argument
    add("model", nargs="?", help="a name that kvarto knows, or a folder")
    add("--name", help="of the model in the file; its own unless given")
    add("--gguf", type=Path, help="weights, with the folder's config.json")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    add("--batch", type=int, help="documents at once: 1 on a CPU, all on a GPU, unless given")
    add("--text", default=wanted.text, help="builtin, handbook, perl, a file or a folder")
    add("--calibration-text", default=wanted.calibration_text, help="of it, documents that are not scored")
    add("--documents", type=int, default=wanted.documents)
    add("--tokens", type=int, default=wanted.document_tokens, help="of a document")
    add("--haystacks", type=int, default=wanted.haystacks, help="with six needles each")
    add("--extractions", type=int, default=wanted.extractions, help="JSON prompts")
    add("--seed", type=int, default=wanted.seed)
    add("--tokenize", type=Path, metavar="FILE", help="write the tokens to a .npz and stop")
    add("--inputs", type=Path, metavar="FILE", help="read that instead of texts")
    add("--bits", type=lambda text: [int(bit) for bit in text.split(",")], default=[4, 3, 2], help="4,3,2")
    add("--only", default="", help="cases whose label contains this")
    add("--sink-study", action="store_true", help="other sinks and windows, and whose error counts")
    add("--no-fidelity", dest="fidelity", action="store_false", help="without the ladders")
    add("--no-tasks", dest="tasks", action="store_false", help="without needles and JSON")
    add("--out", type=Path, default=BASELINE)
    add("--join", type=Path, nargs="+", metavar="FILE", help="put the models of these results into --out, and stop")
    add("--commit", help="where git is not at hand")
    add("--tables", type=Path, metavar="FILE", help="print the tables of a result, and stop")
    add("--into", type=Path, metavar="FILE", help="with --tables: put them between the marks of this document")
    options = parser.parse_args(arguments)
    if not (options.model or options.tables or options.join):
        parser.error("expected a model, --tables FILE or --join FILE")
    if wrong := set(options.bits) - {4, 3, 2}:
        parser.error(f"--bits: expected some of 4,3,2, got {wrong.pop()}")
    if options.tokens < 2 * FIRST_SCORED:
        parser.error(f"--tokens: expected at least {2 * FIRST_SCORED}, got {options.tokens}")
    return options


def wanted_of(options: argparse.Namespace) -> Wanted:
    return Wanted(
        text=options.text, calibration_text=options.calibration_text, documents=options.documents, document_tokens=options.tokens,
        calibration_documents=options.documents, haystacks=options.haystacks, extractions=options.extractions, seed=options.seed,
    )  # fmt: skip


def folder_of(model: str) -> Path:
    """A folder as it is; kvarto's names through kvarto, which fetches what is missing."""
    if Path(model, "config.json").is_file():
        return Path(model)
    from kvarto.models.load import resolve

    found = resolve(model)
    if not isinstance(found, Path):
        raise UsageError("model", "a name that kvarto knows, or a folder", model)
    return found


def put(path: Path, model: str, result: dict[str, Any]) -> None:
    """The result of a model into the file, beside those of others."""
    report = json.loads(path.read_text()) if path.exists() else {"models": {}}
    report["models"][model] = result
    write_whole(path, (json.dumps(report) + "\n").encode())


def main(options: argparse.Namespace) -> None:
    if options.tables:
        ablation_tables.show(options.tables, options.into)
        return
    if options.join:
        for file in options.join:
            for model, result in ablation_tables.models_of(file).items():
                put(options.out, model, result)
        return
    folder = folder_of(options.model)
    if options.inputs is None:
        inputs = build(transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True), wanted_of(options))
    else:
        inputs = open_inputs(options.inputs)
    if options.tokenize:
        save(inputs, options.tokenize)
        return
    require_writable(options.out)
    torch.backends.cuda.matmul.allow_tf32 = False
    options.batch = options.batch or (1 if options.device == "cpu" else len(inputs.documents))
    simulation = Simulation(load(folder, options.gguf, options.device))
    run(simulation, inputs, options, lambda result: put(options.out, options.name or folder.name, result))
    print(f"wrote {options.out}; tables: python benchmarks/ablation.py --tables {options.out}")


if __name__ == "__main__":
    try:
        main(parse())
    except KvartoError as error:
        raise SystemExit(str(error)) from None
