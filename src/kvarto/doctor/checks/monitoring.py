"""Can what goes wrong be seen? The engine's page, what stands on it, and whether somebody scrapes it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from kvarto.diagnose.scrape import base_of, get_json
from kvarto.diagnose.signals import Counter, Gauge, Timing
from kvarto.doctor.check import Check, Outcome, Status
from kvarto.doctor.rollout import Rollout
from kvarto.errors import KvartoError

_NAME = "monitoring"
_NEEDED = (Gauge.USAGE, Gauge.WAITING, Counter.PREEMPTIONS, Timing.TTFT, Timing.ITL)


def monitoring(rollout: Rollout) -> Iterator[Outcome]:
    """The page, then who scrapes it."""
    window = rollout.candidate.window
    if window is None:
        yield Outcome(
            _NAME, Status.FAIL, rollout.candidate.problem, "without its metrics nobody sees what the format does"
        )
        return
    title = window.engine.title
    if missing := window.missing(*_NEEDED):
        yield Outcome(
            _NAME,
            Status.WARN,
            f"{title} does not tell: {'; '.join(missing)}",
            "measure these in the gateway or in clients",
        )
    else:
        yield Outcome(_NAME, Status.PASS, f"{title} tells pool, queue, preemptions, first tokens and gaps")
    yield _scraped(rollout)


def _scraped(rollout: Rollout) -> Outcome:
    name = f"{_NAME}: scraped"
    if rollout.prometheus is None:
        return Outcome(name, Status.ASK, "no Prometheus was named", "name it: --prometheus http://HOST:9090")
    if not rollout.candidate.is_live:
        return Outcome(name, Status.ASK, "the candidate is a file", "give its address")
    host = rollout.candidate.base.split("://", 1)[1]
    query = quote('up{instance="' + host + '"}')
    url = f"{base_of(rollout.prometheus)}/api/v1/query?query={query}"
    try:
        answer = get_json(url, seconds=rollout.candidate.timeout_seconds)
        values = [float(each["value"][1]) for each in answer["data"]["result"]]
    except KvartoError as error:
        return Outcome(name, Status.FAIL, str(error), "is it Prometheus' address?")
    except (LookupError, TypeError, ValueError):
        return Outcome(
            name, Status.FAIL, f"{rollout.prometheus} does not answer as Prometheus does", "is it its address?"
        )
    if not values:
        return Outcome(
            name, Status.ASK, f"Prometheus has no target with instance {host}", "is it scraped under another name?"
        )
    up = all(values)
    return Outcome(
        name, Status.PASS if up else Status.FAIL, f"up of {host} is {min(values):g}", "" if up else "Prometheus cannot reach it"
    )  # fmt: skip


def nan(rollout: Rollout) -> Iterator[Outcome]:
    """Has the engine seen NaN in its logits?"""
    window = rollout.candidate.window
    count = None if window is None else window.counter(Counter.CORRUPTED)
    if count is None:
        remedy = "vLLM: VLLM_COMPUTE_NANS_IN_LOGITS=1" if window is not None and window.engine.name == "vllm" else ""
        yield Outcome("NaN", Status.WARN, "the engine does not count requests with NaN in their logits", remedy)
    elif count > 0:
        yield Outcome("NaN", Status.FAIL, f"{count:.0f} requests had NaN in their logits", "stop, and find out why")
    else:
        yield Outcome("NaN", Status.PASS, "0 requests had NaN in their logits")


CHECKS = (
    Check(_NAME, "can what goes wrong be seen?", monitoring),
    Check("NaN", "has the engine computed NaN?", nan),
)
