"""Each check against engines and checkpoints that are right, wrong, and silent."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import engine_pages as pages
from engine_pages import answering, by_path, reply
from kvarto.diagnose.engines import registry as engines
from kvarto.diagnose.formats import known_format
from kvarto.doctor.check import Check, Outcome, Status, overall
from kvarto.doctor.checks import ORDER, registry
from kvarto.doctor.checks.evaluation import COVERED
from kvarto.doctor.checks.support import kinds_of
from kvarto.doctor.cli import examine
from kvarto.doctor.matrix import Question, cells_for, excluded, load
from kvarto.doctor.rollout import Arm, Rollout
from kvarto.plan.engines import engine_formats


class Vllm:
    """As much of vLLM as checks ask: `dtype` serves, `caching` is on, `hits` of prompts hit; it counts prompts that it completes."""

    def __init__(
        self,
        dtype: str = "fp8",
        caching: bool = True,
        hits: float = 0.5,
        version: str = "0.32.0",
        served: int = 100,
        **more: Any,
    ) -> None:
        self.dtype, self.caching, self.hits, self.version, self.served, self.more = (
            dtype,
            caching,
            hits,
            version,
            served,
            more,
        )
        self.fails = False

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/v1/completions":
            handler.rfile.read(int(handler.headers["Content-Length"]))
            if self.fails:
                reply(500, "no blocks")(handler)
                return
            self.served += 1
        info = f'block_size="16",num_gpu_blocks="100",cache_dtype="{self.dtype}",enable_prefix_caching="{self.caching}"'
        queries, label = 1000.0 * self.served, 'model_name="m",engine="0"'
        metrics = pages.text_of(
            {
                "vllm:num_requests_running": {label: 1}, "vllm:num_requests_waiting": {label: 0}, "vllm:kv_cache_usage_perc": {label: 0.1},
                "vllm:num_preemptions_total": {label: 0}, "vllm:cache_config_info": {info: 1}, "vllm:prompt_tokens_total": {label: queries},
                "vllm:prompt_tokens_cached_total": {label: queries * self.hits},
                "vllm:prefix_cache_queries_total": {label: queries}, "vllm:prefix_cache_hits_total": {label: queries * self.hits}, **self.more,
            },
            {"vllm:time_to_first_token_seconds": (10, 0.1), "vllm:inter_token_latency_seconds": (10, 0.1)},
        )  # fmt: skip
        chunked = {
            "vllm_config": {
                "scheduler_config": {"enable_chunked_prefill": True},
                "attention_config": {"backend": "FLASH_ATTN"},
            }
        }
        by_path(
            {
                "/metrics": (200, metrics), "/version": (200, json.dumps({"version": self.version})), "/v1/completions": (200, "{}"),
                "/v1/models": (200, json.dumps({"data": [{"id": "m", "root": "org/m"}]})),
                "/server_info?config_format=json": (200, json.dumps(chunked)),
            }
        )(handler)  # fmt: skip


@contextmanager
def vllm(**options: Any) -> Iterator[tuple[str, Vllm]]:
    engine = Vllm(**options)
    with answering(engine) as url:
        yield url, engine


def arm(source: str | Path, role: str = "candidate") -> Arm:
    return Arm(role, str(source))


def check(name: str, rollout: Rollout) -> list[Outcome]:
    return examine(rollout, [name])


def one(name: str, rollout: Rollout) -> Outcome:
    found = check(name, rollout)
    assert len(found) == 1, found
    return found[0]


def test_the_format_that_serves_is_read_and_compared():
    with vllm(dtype="fp8") as (url, _):
        assert one("format", Rollout(arm(url), wanted="fp8_e4m3")).status is Status.PASS
        wrong = one("format", Rollout(arm(url), wanted="int4_per_token_head"))
        assert (wrong.status, "int4_per_token_head was wanted, and fp8" in wrong.evidence) == (Status.FAIL, True)
    with vllm(dtype="auto") as (url, _):
        assert one("format", Rollout(arm(url))).status is Status.WARN
        assert one("format", Rollout(arm(url), wanted="fp8")).status is Status.FAIL


def test_monitoring_sees_missing_signals_a_dead_engine_and_prometheus():
    with vllm() as (url, _):
        host = url.removeprefix("http://")
        up = json.dumps({"data": {"result": [{"value": [1, "1"]}]}})
        asked = []

        def prometheus(handler: BaseHTTPRequestHandler) -> None:
            asked.append(handler.path)
            reply(200, up)(handler)

        with answering(prometheus) as at:
            first, second = check("monitoring", Rollout(arm(url), prometheus=at))
        assert (first.status, second.status) == (Status.PASS, Status.PASS)
        assert host.replace(":", "%3A") in asked[0]
        with answering(reply(200, json.dumps({"data": {"result": []}}))) as at:
            assert check("monitoring", Rollout(arm(url), prometheus=at))[1].status is Status.ASK
        with answering(reply(200, '{"data": "?"}')) as at:
            assert check("monitoring", Rollout(arm(url), prometheus=at))[1].status is Status.FAIL
        assert check("monitoring", Rollout(arm(url)))[1].status is Status.ASK
    dead = check("monitoring", Rollout(arm("http://127.0.0.1:1")))
    assert [each.status for each in dead] == [Status.FAIL]
    assert "refused" in dead[0].evidence
    with answering(by_path({"/metrics": (200, pages.triton())})) as url:
        assert check("monitoring", Rollout(arm(url)))[0].status is Status.WARN


def test_nan_is_counted_or_said_not_to_be():
    with vllm() as (url, _):
        assert one("NaN", Rollout(arm(url))).status is Status.WARN
    for count, status in ((0, Status.PASS), (2, Status.FAIL)):
        with vllm(**{"vllm:corrupted_requests_total": count}) as (url, _):
            assert one("NaN", Rollout(arm(url))).status is status


def test_prefix_caching_that_the_format_switched_off_fails():
    with vllm(caching=True, dtype="auto") as (before, _), vllm(caching=False) as (after, _):
        found = check("prefix caching", Rollout(arm(after), before=arm(before)))
        assert found[0].status is Status.FAIL
        assert "before the format: on" in found[0].evidence
    with vllm(caching=True) as (url, _):
        assert one("prefix caching", Rollout(arm(url))).status is Status.PASS


def test_prefix_caching_that_says_on_and_hits_no_more_fails():
    with vllm(hits=0.6, dtype="auto") as (before, _):
        for hits, status in ((0.0, Status.FAIL), (0.55, Status.PASS)):
            with vllm(hits=hits) as (after, _):
                switch, rate = check("prefix caching", Rollout(arm(after), baseline=arm(before)))
                assert (switch.status, rate.status) == (Status.PASS, status)
        with vllm(hits=0.0, served=3) as (young, _):  # 3,000 tokens say nothing
            assert len(check("prefix caching", Rollout(arm(young), baseline=arm(before)))) == 1


def test_switches_are_asked_for_where_the_engine_does_not_tell():
    with vllm() as (url, _):
        rollout = Rollout(arm(url))
        assert one("chunked prefill", rollout).status is Status.PASS
        assert one("paged KV", rollout).status is Status.PASS
    saved = Path(__file__).parent.parent / "diagnose" / "recorded" / "vllm-0.32-queue" / "1.prom"
    assert one("chunked prefill", Rollout(arm(saved))).status is Status.ASK
    llama = saved.parent.parent / "llamacpp-2026-10-queue" / "1.prom"
    assert one("paged KV", Rollout(arm(llama))).status is Status.WARN
    assert one("continuous batching", Rollout(arm(llama))).status is Status.ASK


def test_baseline_and_control_must_be_alike_and_plain():
    with vllm() as (candidate, _), vllm(dtype="auto") as (plain, _), vllm(dtype="auto") as (second, _):
        good = Rollout(arm(candidate), baseline=arm(plain), control=arm(second))
        assert one("baseline", good).status is Status.PASS
        assert "same model, version" in one("baseline", good).evidence
        assert one("control", good).status is Status.PASS
        assert one("control", replace(good, control=arm(plain))).status is Status.FAIL
        assert one("baseline", Rollout(arm(candidate))).status is Status.ASK
        assert one("baseline", Rollout(arm(candidate), baseline=arm(candidate))).status is Status.FAIL
        assert one("baseline", Rollout(arm(candidate), baseline=arm("http://127.0.0.1:1"))).status is Status.FAIL
    with vllm() as (candidate, _), vllm(dtype="auto", version="0.31.0") as (older, _):
        found = one("baseline", Rollout(arm(candidate), baseline=arm(older)))
        assert (found.status, "0.31.0" in found.evidence) == (Status.FAIL, True)
    with vllm() as (candidate, _), answering(by_path({"/metrics": (200, pages.tensorrt_llm(requests=1))})) as other:
        assert "TensorRT-LLM" in one("baseline", Rollout(arm(candidate), baseline=arm(other))).evidence


def test_the_candidate_must_generate_with_the_format():
    """vLLM 0.32 on a CPU without AVX-512 starts with fp8 if its check is lifted, tells all that is asked, and dies of the first request."""
    with vllm(dtype="fp8") as (url, engine):
        assert one("generation", Rollout(arm(url))).status is Status.PASS
        engine.fails = True
        assert one("generation", Rollout(arm(url))).status is Status.FAIL
        assert one("generation", Rollout(arm(url), may_send=False)).status is Status.ASK
    page = Path(__file__).parents[1] / "diagnose" / "recorded" / "vllm-0.32-fp8-idle" / "1.prom"
    assert one("generation", Rollout(arm(page))).status is Status.ASK


def test_the_fallback_must_answer():
    with vllm() as (candidate, _), vllm(dtype="auto") as (plain, engine):
        rollout = Rollout(arm(candidate), baseline=arm(plain))
        assert one("fallback", rollout).status is Status.PASS
        engine.fails = True
        assert one("fallback", rollout).status is Status.FAIL
        assert one("fallback", replace(rollout, may_send=False)).status is Status.ASK
        assert one("fallback", Rollout(arm(candidate))).status is Status.ASK


def test_the_off_switch_is_followed_through_a_gateway():
    with vllm() as (candidate, quantized), vllm(dtype="auto") as (plain, baseline):

        def gateway(handler: BaseHTTPRequestHandler, broken: bool = False) -> None:
            off = handler.headers["X-KV-Optout"] == "1" and not broken
            (baseline if off else quantized)(handler)

        def try_it(answer: Any) -> Outcome:
            with answering(answer) as at:
                return one(
                    "off switch",
                    Rollout(arm(candidate), baseline=arm(plain), gateway=at, off_header=("X-KV-Optout", "1")),
                )

        assert try_it(gateway).status is Status.PASS
        assert try_it(lambda handler: gateway(handler, broken=True)).status is Status.FAIL
        assert try_it(reply(503, "no")).status is Status.FAIL

        def both(handler: BaseHTTPRequestHandler) -> None:
            baseline.served += 1
            quantized(handler)

        assert try_it(both).status is Status.ASK
        assert one("off switch", Rollout(arm(candidate), baseline=arm(plain))).status is Status.ASK


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint(
    folder: Path, scales: Mapping[str, float], *, layers: int = 2, dtype: str = "F32", **config: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers, **config}))
    header, data = {}, b""
    for name, value in scales.items():
        raw = struct.pack("<f", value)[2:] if dtype == "BF16" else struct.pack("<f", value)
        header[name] = {"dtype": dtype, "shape": [1], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def names(layers: int, value: float = 0.5) -> dict[str, float]:
    return {f"model.layers.{layer}.self_attn.{side}_scale": value for layer in range(layers) for side in "kv"}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_scales_are_counted(tmp_path, dtype):
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    with vllm(dtype="fp8") as (url, _):
        for scales, config, status, says in [
            (names(2), {}, Status.PASS, "2 of 2 layers"),
            (names(2, 1.0), {}, Status.WARN, "all of them are 1.0"),
            (names(1), {}, Status.FAIL, "1 of 2 layers"),
            ({"x": 1.0}, {}, Status.WARN, "serves with 1.0"),
            ({"x": 1.0}, scheme, Status.FAIL, "promises"),
            (names(1), {"layer_types": ["full_attention", "linear_attention"]}, Status.PASS, "1 of 1 layers"),
        ]:
            folder = checkpoint(tmp_path / "model", scales, dtype=dtype, **config)
            found = one("calibration", Rollout(arm(url), checkpoint=folder))
            assert (found.status, says in found.evidence) == (status, True), found
        assert one("calibration", Rollout(arm(url))).status is Status.ASK
        assert one("calibration", Rollout(arm(url), checkpoint=tmp_path)).status is Status.FAIL
    with vllm(dtype="int8_per_token_head") as (url, _):
        assert one("calibration", Rollout(arm(url))).status is Status.PASS


def test_a_damaged_checkpoint_fails_in_one_line(tmp_path):
    folder = checkpoint(tmp_path / "model", names(2))
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with vllm() as (url, _):
        found = one("calibration", Rollout(arm(url), checkpoint=folder))
    assert found.status is Status.FAIL
    assert "not a sound safetensors file" in found.evidence
    assert "\n" not in found.evidence


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "gpu", "backend", "config", "status"),
    [
        ("fp8", "NVIDIA H100 80GB HBM3", "FLASH_ATTN", {}, Status.PASS),
        ("fp8", "A100", "TRITON_ATTN", {}, Status.FAIL),
        ("fp8", "H100", None, {}, Status.PASS),  # the engine tells FLASH_ATTN
        ("nvfp4", "H100", "FLASHINFER", {"head_dim": 128}, Status.PASS),
        ("nvfp4", "H100", "FLASHINFER", {"head_dim": 64}, Status.FAIL),
        ("nvfp4", "H100", "FLASHINFER", {"head_dim": 128, "model_type": "gpt_oss"}, Status.FAIL),
        ("nvfp4_4over6", "H100", "FLASHINFER", {"head_dim": 128}, Status.FAIL),
        ("fp8_e5m2", "H100", "FLASH_ATTN", {}, Status.FAIL),
        ("nvfp4", "B200", "FLASHINFER", {}, Status.PASS),
        ("turboquant_4bit_nc", "L4", "TURBOQUANT", {"sliding_window": 4096}, Status.FAIL),
        ("turboquant_4bit_nc", "L4", "TURBOQUANT", {"head_dim": 96}, Status.FAIL),
        ("turboquant_4bit_nc", "L4", "TURBOQUANT", {"head_dim": 128}, Status.PASS),
        ("fp8", None, "FLASH_ATTN", {}, Status.ASK),
        ("unheard_of", "H100", "FLASH_ATTN", {}, Status.ASK),
    ],
)
def test_support_by_format_gpu_backend_and_model(tmp_path, dtype, gpu, backend, config, status):
    folder = checkpoint(tmp_path / "m", {}, **config)
    with vllm(dtype=dtype) as (url, _):
        found = check("support", Rollout(arm(url), gpu=gpu, backend=backend, checkpoint=folder))
    statuses = [each.status for each in found]
    assert (statuses[0] if status is Status.FAIL else statuses[-1]) is status, found
    assert (Status.PASS in statuses) is (status is Status.PASS)
    if status in (Status.PASS, Status.FAIL):
        assert all("version" in each.evidence and "days ago" in each.evidence for each in found)


def test_cautions_are_shown_beside_what_allows_it(tmp_path):
    folder = checkpoint(tmp_path / "m", {}, kv_lora_rank=512)
    with vllm(dtype="fp8") as (url, _):
        found = check("support", Rollout(arm(url), gpu="H100", backend="FLASH_ATTN", checkpoint=folder))
    assert [each.status for each in found] == [Status.WARN, Status.PASS]
    assert "vllm#38652" in found[0].evidence
    assert "this engine is 0.32.0" in found[0].evidence
    assert "this engine" not in found[1].evidence


def test_an_old_cell_warns_with_its_age(tmp_path):
    with vllm(dtype="fp8") as (url, _):
        late = Rollout(arm(url), gpu="H100", backend="FLASH_ATTN", today=date(2028, 1, 1))
        found = check("support", late)
    assert found[-1].status is Status.WARN
    read = max(cell.read for cell in load().cells if cell.engine == "vllm" and "fp8" in cell.formats)
    assert f"{(date(2028, 1, 1) - read).days} days ago" in found[-1].evidence


def test_tensorrt_llm_behind_triton_has_the_cells_of_tensorrt_llm(tmp_path):
    path = tmp_path / "page"
    path.write_text('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.5\n')
    rollout = Rollout(arm(path), wanted="fp8", gpu="H100")
    assert Status.PASS in {each.status for each in check("support", rollout)}
    assert one("calibration", rollout).status is Status.ASK


def test_every_cell_has_a_source_and_names_that_exist():
    matrix = load()
    for cell in matrix.cells:
        assert cell.engine in engines
        assert cell.source
        assert cell.version
        assert cell.read <= date.today()
        assert set(cell.gpus) <= {*matrix.gpus.values(), "sm103"}
        assert set(cell.kinds) | set(cell.lacks) <= {"mla", "sliding", "hybrid", "sinks"}
        assert all(known_format(engines[cell.engine], name) for name in cell.formats), cell
    for kv in engine_formats():
        if kv.is_raw or kv.name == "llama.cpp:f32":
            continue
        names = [name.split(":")[1] for name in (kv.name, *kv.aliases)]
        asked = [Question(kv.engine, name, None, None, frozenset({"mla"}), None) for name in names]
        assert any(cells_for(question, matrix.cells) for question in asked), f"no cell speaks of {kv.name}"


def test_the_planner_refuses_no_gpu_that_the_matrix_allows():
    for cell in load().cells:
        for gpu in cell.gpus if cell.support == "yes" else ():
            for kv in (known_format(engines[cell.engine], name) for name in cell.formats):
                assert not gpu.startswith("sm") or kv.refuses_gpu(int(gpu[2:])) is None, f"{kv.name} on {gpu}"


def test_gpus_by_what_they_are_called():
    matrix = load()
    assert matrix.architecture("NVIDIA L40S") == "sm89"
    assert matrix.architecture("NVIDIA H100 80GB HBM3") == "sm90"
    assert matrix.architecture("sm89") == "sm89"
    assert matrix.architecture("Voodoo 2") is None


def test_kinds_of_models():
    assert kinds_of({"kv_lora_rank": 512}) == (frozenset({"mla"}), None)
    assert kinds_of({"layer_types": ["sliding_attention", "full_attention"], "head_dim": 64}) == (
        frozenset({"sliding"}),
        64,
    )
    assert kinds_of(
        {"sliding_window": 4096, "use_sliding_window": False, "hidden_size": 64, "num_attention_heads": 4}
    ) == (frozenset(), 16)
    assert kinds_of({"layer_types": ["linear_attention"]})[0] == {"hybrid"}
    assert kinds_of({"model_type": "gpt_oss", "layer_types": ["sliding_attention"]})[0] == {"sinks", "sliding"}


def test_a_limit_of_head_dimensions_needs_to_be_known():
    cell = next(cell for cell in load().cells if cell.head_dims)
    question = Question(cell.engine, cell.formats[0], None, None, frozenset(), None)
    assert excluded(cell, question) == ""
    assert "heads of" in excluded(cell, replace(question, head_dim=7))


# ---- all of it -------------------------------------------------------------------------------------------------------


def test_evaluation_asks_for_what_no_file_covers(tmp_path):
    with vllm() as (url, _):
        found = check("evaluation", Rollout(arm(url)))
        assert {each.status for each in found} == {Status.ASK}
        assert len(found) == len(COVERED) + 3
        (tmp_path / "study.json").write_text('{"schema_version": 7}')
        (tmp_path / "no.json").write_text("<html>")
        bad = check("evaluation", Rollout(arm(url), results=[tmp_path, tmp_path / "no.json", tmp_path / "absent"]))
        assert [each.status for each in bad[:3]] == [Status.FAIL] * 3
        assert all("\n" not in each.evidence for each in bad)
    with vllm(dtype="auto") as (url, _):
        assert one("evaluation", Rollout(arm(url))).status is Status.PASS


def test_exit_codes():
    outcome = lambda status: Outcome("x", status, "")  # noqa: E731
    assert overall([outcome(Status.PASS), outcome(Status.WARN)]) == 0
    assert overall([outcome(Status.PASS), outcome(Status.ASK)]) == 3
    assert overall([outcome(Status.ASK), outcome(Status.FAIL)]) == 1


def test_checks_are_registered_in_the_order_of_reports():
    assert set(registry) == set(ORDER)
    assert all(isinstance(each, Check) and each.asks for each in registry.values())


def test_a_dead_candidate_fails_and_asks_and_never_passes_what_it_cannot_see():
    found = examine(Rollout(arm("http://127.0.0.1:1"), wanted="fp8"))
    assert not [each for each in found if "--kv" in each.remedy], "the format was given"
    assert not [each for each in found if each.status is Status.PASS]
    assert overall(found) == 1
