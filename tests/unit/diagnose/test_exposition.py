"""The text format as Prometheus' own parser reads it, and what is no metrics page."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_pages import text_of
from kvarto.diagnose.exposition import Histogram, histogram, parse
from kvarto.errors import UsageError

PAGE = r"""# HELP a_total Things, with "quotes"
# TYPE a_total counter
a_total{path="C:\\x",say="\"hi\", {x}\n",model="m"} 3 1700000000000
a_total{model="n",} 4.5
b 1e-3
c NaN
d{le="+Inf"} +Inf # {trace="1"} 0.5
"""


def test_reads_labels_escapes_timestamps_and_exemplars():
    page = parse(PAGE)
    first, second = page.samples["a_total"]
    assert dict(first.labels) == {"path": "C:\\x", "say": '"hi", {x}\n', "model": "m"}
    assert (first.value, second.value, dict(second.labels)) == (3.0, 4.5, {"model": "n"})
    assert page.samples["b"][0].value == 0.001
    assert math.isnan(page.samples["c"][0].value)
    assert page.samples["d"][0].value == math.inf


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["x", "y:z", "w_total"]),
            st.dictionaries(
                st.sampled_from(["a", "b", "le_"]),
                st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Zl", "Zp"])),
            ),
            st.floats(allow_nan=False),
        ),
        min_size=1,
    )
)
def test_reads_what_prometheus_client_writes_as_it_reads_it(samples):
    parser = pytest.importorskip("prometheus_client.parser")
    escape = lambda text: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")  # noqa: E731
    lines = [
        name + "{" + ",".join(f'{key}="{escape(value)}"' for key, value in labels.items()) + "} " + repr(number)
        for name, labels, number in samples
    ]
    text = "\n".join(lines) + "\n"
    theirs = sorted(
        (each.name, sorted(each.labels.items()), each.value)
        for family in parser.text_string_to_metric_families(text)
        for each in family.samples
    )
    ours = sorted(
        (name, sorted(each.labels.items()), each.value) for name, found in parse(text).samples.items() for each in found
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty page"),
        (" \n\n", "an empty page"),
        ("<!DOCTYPE html>\n<html><body>Not found</body></html>", "HTML"),
        ('[{"iter": 3}]', "JSON"),
        ("# HELP only comments\n", "without a number"),
        ("a 1\nthis is a log line\n", "line 2"),
        ('a{b="c} 1\n', "labels"),
        ("a{b=c} 1\n", "labels"),
        ("a\n", "sample"),
        ("a one\n", "sample"),
        ("\x00\x01\x02", "sample"),
    ],
)
def test_what_is_no_page_is_one_clear_line(text, says):
    with pytest.raises(UsageError, match=says) as error:
        parse(text, "http://x/metrics")
    assert "http://x/metrics" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@given(st.text(max_size=300))
def test_any_text_is_a_page_or_one_line(text):
    said = ""
    try:
        parse(text)
    except UsageError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


def test_a_histogram_adds_label_sets_and_gives_the_bucket_of_a_quantile():
    page = parse(
        't_bucket{e="0",le="1"} 2\nt_bucket{e="0",le="5"} 3\nt_bucket{e="0",le="+Inf"} 4\nt_sum{e="0"} 20\n'
        't_bucket{e="1",le="1"} 6\nt_bucket{e="1",le="+Inf"} 6\nt_sum{e="1"} 3\n'
    )
    found = histogram(page, "t")
    assert found == Histogram((1.0, math.inf), (8.0, 10.0), 23.0)
    assert found.mean == 2.3
    assert found.quantile(0.8) == (0.0, 1.0)
    assert found.quantile(0.95) == (1.0, math.inf)
    assert found.minus(Histogram((1.0, math.inf), (8.0, 8.0), 3.0)) == Histogram((1.0, math.inf), (0.0, 2.0), 20.0)


def test_a_histogram_without_buckets_has_a_mean_and_one_without_anything_has_none():
    only = histogram(parse("t_sum 6\nt_count 4\n"), "t")
    assert only is not None
    assert only.mean == 1.5
    assert histogram(parse("x 1\n"), "t") is None
    empty = histogram(parse(text_of({}, {"t": (0, 1.0)})), "t")
    assert empty is not None
    assert empty.mean is None
    assert empty.quantile(0.5) is None
