"""What the compiler makes of the program that fits and seals a page, without a GPU: that sums over rows stay within a warp.

`python tests/unit/kernels/test_triton_seal_compiled.py` prints the number of barriers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hopper import aligned, examine, hopper, run_in_another_process

# To put codes in the order of bytes, and to count what is clamped, for either side. A sum that leaves its warp would need dozens more.
BARRIERS = 24


def test_sums_stay_within_a_warp(tmp_path: Path) -> None:
    assert run_in_another_process(__file__, cache=tmp_path) <= BARRIERS


# ---- in the other process --------------------------------------------------------------------------------------------


def _compile() -> Any:
    import triton
    from triton.compiler import ASTSource

    from kvarto.formats import parse_format
    from kvarto.kernels.triton_seal import launch_options, make_plan
    from kvarto.kernels.triton_seal_slab import seal
    from kvarto.layout import Geometry, Side

    geometry, chosen = Geometry(8, 128, 128), parse_format("int4")
    raw, layout = parse_format("bf16").layout(geometry), chosen.layout(geometry)
    plans = [
        make_plan(raw, layout, side, codec.sealing(layout.slab(side)))
        for side, codec in ((Side.K, chosen.k), (Side.V, chosen.v))
    ]
    constants = {
        "RAW_PAGE": raw.nbytes, "RAW_PAIR": raw.pair_nbytes, "PAGE": layout.nbytes, "PAIR": layout.pair_nbytes,
        "K": plans[0], "V": plans[1], "k_scales": None, "v_scales": None,
    }  # fmt: skip
    types = {"raw_ids": "*i32", "sealed_ids": "*i32", "saturated": "*i64"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*u8") for name in seal.arg_names}
    source = ASTSource(seal, signature, constants, aligned(signature, "-"))
    return triton.compile(source, target=hopper(), options=launch_options(*plans))


if __name__ == "__main__":
    _, instructions = examine(_compile().asm["cubin"])
    json.dump(sum(kind == "BAR" for _, kind, _ in instructions), sys.stdout)
