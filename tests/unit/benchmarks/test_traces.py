from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from traces import Request, Shape, Words, facts, generate, lru_hit_rate, read, write


def test_a_seed_is_a_trace() -> None:
    assert generate(Shape()) == generate(Shape())
    assert generate(Shape()) != generate(Shape(seed=1))


@pytest.mark.parametrize("seed", range(5))
def test_requests_are_what_the_shape_says(seed: int) -> None:
    shape = Shape(seed=seed)
    requests = generate(shape)
    assert [request.due_seconds for request in requests] == sorted(request.due_seconds for request in requests)
    assert len(requests) >= shape.sessions + shape.loners
    for request in requests:
        assert (
            (len(request.hash_ids) - 1) * shape.block_tokens
            < request.prompt_tokens
            <= len(request.hash_ids) * shape.block_tokens
        )
        assert 1 <= request.output_tokens <= shape.output_most_tokens
    assert facts(requests, shape.block_tokens).ceiling > 0.4


def test_a_file_holds_a_trace(tmp_path: Path) -> None:
    requests = [replace(request, due_seconds=round(request.due_seconds, 3)) for request in generate(Shape())]
    write(tmp_path / "trace.jsonl", requests)
    assert read(tmp_path / "trace.jsonl", 64) == requests


def test_a_published_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}\n'
    )
    (request,) = read(path, 512)
    assert (request.due_seconds, request.prompt_tokens, request.output_tokens, len(request.hash_ids)) == (
        27.482,
        6955,
        52,
        14,
    )
    with pytest.raises(ValueError, match=r"trace.jsonl:1: 14 blocks of 64"):
        read(path, 64)
    path.write_text('\n{"timestamp": 0}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:2: not a request"):
        read(path, 512)


def test_equal_ids_are_equal_tokens_and_others_differ() -> None:
    words = Words(list(range(1000, 3000)), 64)
    blocks = [tuple(words.block(n)) for n in range(3000)]
    assert len(set(blocks)) == len(blocks)
    assert all(len(block) == 64 for block in blocks)
    first, second = (words.prompt(Request(0, length, 1, ids)) for length, ids in ((100, (1, 2)), (130, (1, 3, 4))))
    assert (len(first), len(second)) == (100, 130)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:100]


def test_what_a_cache_finds() -> None:
    a, b = Request(0, 192, 1, (1, 2, 3)), Request(1, 192, 1, (4, 5, 6))
    assert lru_hit_rate([a, b, a], 64, 384) == pytest.approx(
        128 / 576
    )  # the last block holds the token that is always computed
    assert lru_hit_rate([a, b, a], 64, 192) == 0
    assert lru_hit_rate([a, b, a], 64, 256) == pytest.approx(
        64 / 576
    )  # leaves were forgotten before what they stand on
    assert facts([a, b, a], 64).distinct_tokens == 384
