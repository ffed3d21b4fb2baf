"""Configs with anything in them: an answer, or an error of ours; never a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvarto.errors import KvartoError
from kvarto.plan.config import cached_model, make_config
from kvarto.plan.engines import plain_bytes
from kvarto.plan.weights import weights_of
from unit.plan.samples import CONFIGS

_SCALARS = st.sampled_from([None, True, 0, -1, 1, 3, 1.5, 1e99, math.nan, math.inf, "", "full_attention", "M*", 10**12])
_ANYTHING = (
    _SCALARS
    | st.lists(_SCALARS, max_size=3)
    | st.just([["full_attention"]] * 3)
    | st.just([1] * 200)
    | st.just({})
    | st.just({"no_op": 3})
)


@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_a_spoilt_config_is_refused_or_read(name: str, data: st.DataObject) -> None:
    config: dict[str, Any] = copy.deepcopy(CONFIGS[name])
    table = config
    key = data.draw(st.sampled_from(sorted(table)))
    if isinstance(table[key], dict):
        table = table[key]
        key = data.draw(st.sampled_from(sorted(table)))
    if isinstance(table[key], list) and table[key] and data.draw(st.booleans()):
        table[key][data.draw(st.integers(0, len(table[key]) - 1))] = data.draw(_ANYTHING)
    elif data.draw(st.booleans()):
        table[key] = data.draw(_ANYTHING)
    else:
        del table[key]
    json.dumps(config)
    with contextlib.suppress(KvartoError):
        made = make_config(name, config)
        assert plain_bytes(cached_model(made)).sequence(1000) > 0
        assert weights_of(made, None).nbytes > 0
