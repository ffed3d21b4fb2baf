"""`kvarto.Cache`: quantized pages as the cache of a transformers model.

    model.generate(**inputs, cache=kvarto.Cache(model, "int4"))

A decoder layer hands its new keys and values to `Cache.update` and then calls the attention function with what it got back. Ours keeps them
until that call, which brings the queries and the mask, and then lets PagedKV store and attend at once (`PagedKV.extend`). Tokens that the
mask calls padding are not stored; everything transformers counts (`get_seq_length`, masks, positions, crop) is in columns, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from kvarto.attention import Footprint, LayerKV, LayerSpec, PagedKV
from kvarto.errors import ShapeError, Unsupported, UsageError
from kvarto.formats import Format, Policy, parse_policy
from kvarto.integrations.interface import Columns, attach, is_attached, mark
from kvarto.integrations.quirks import check_options, plan_layers

_START_AGAIN = "call cache.reset() and start again"


@dataclass
class _State:
    """What a Cache and its layers share, so that neither holds the other: a cache that is let go gives its memory back at once, not when
    Python next looks for cycles, which the bytes of tensors do not hasten.

    columns  bool [B, columns], False for padding; None before the first token
    padded   False if no column is padding
    waiting  the layer, if any, whose keys have not reached attention yet
    """

    kv: PagedKV
    model_name: str
    columns: Tensor | None = None
    padded: bool = False
    waiting: int | None = None

    def expect_attended(self) -> None:
        """Raise Unsupported if a layer's keys never reached kvarto's attention function."""
        if self.waiting is not None:
            reason = f"the keys of layer {self.waiting} never reached kvarto's attention function"
            remedy = f"the cache was made for {self.model_name}; with any other model, use that model's own cache"
            raise Unsupported(f"{reason}; {remedy}")


@dataclass(frozen=True)
class _Padding:
    """What a mask knows.

    state          of the cache that it was made for
    columns        bool [B, past + T], False for padding
    valid          its new columns [B, T], or None if none is padding
    padded         False if no column is padding
    window_tokens  the sliding window that the model asked the mask to have, or None
    """

    state: _State
    columns: Tensor
    valid: Tensor | None
    padded: bool
    window_tokens: int | None


class _Layer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a Cache: `index` counts among the layers that cache keys and values."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, state: _State, index: int) -> None:
        super().__init__()
        self.state, self.index, self.columns = state, index, 0
        self.is_sliding = self.paged.spec.sliding_tokens is not None
        self._new: tuple[Tensor, Tensor] | None = None

    @property
    def paged(self) -> LayerKV:
        """The pages behind this layer."""
        return self.state.kv.layers[self.index]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check the first keys and values, [B, Hkv, T, D], against what the model's config promised."""
        geometry = self.paged.spec.geometry
        for name, x, dim in (("keys", key_states, geometry.k_dim), ("values", value_states, geometry.v_dim)):
            if (x.shape[1], x.shape[3]) != (geometry.heads, dim):
                expected, got = f"[B, {geometry.heads}, T, {dim}] as in the model's config", tuple(x.shape)
                raise ShapeError(f"{name} of layer {self.index}", expected, got, "use the model's own cache")
            if x.dtype != self.paged.dtype or x.device != self.paged.sealed.pages.device:
                expected = f"{self.paged.dtype} on {self.paged.sealed.pages.device}"
                remedy = (
                    "make the cache after moving the model, and load the model in that dtype instead of using autocast"
                )
                raise ShapeError(f"{name} of layer {self.index}", expected, f"{x.dtype} on {x.device}", remedy)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values until attention is called; they come back as they are, the keys marked with this layer."""
        self.state.expect_attended()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._new, self.state.waiting = (key_states, value_states), self.index
        return mark(key_states, self), value_states

    def attend(
        self, module: Any, query: Tensor, value: Tensor, padding: _Padding | None, options: dict[str, Any]
    ) -> Tensor:
        """query [B, Hq, T, Dk] to [B, T, Hq, Dv]; the keys are those of the last `update`, and so must value [B, Hkv, T, Dv] be."""
        name = type(module).__name__
        new, self._new, self.state.waiting = self._new, None, None
        if new is None or value is not new[1]:
            raise Unsupported(f"{name} attends twice, or to altered values; use the model's own cache")
        if padding is None or padding.state is not self.state:
            raise Unsupported(
                f"{name} attends with a mask that transformers did not make for this cache; pass a 2D attention_mask or none"
            )
        if padding.window_tokens != self.paged.spec.sliding_tokens:
            got, expected = padding.window_tokens, self.paged.spec.sliding_tokens
            raise Unsupported(
                f"{name} masks with a window of {got} tokens, its config says {expected}; use the model's own cache"
            )
        check_options(module, query, options)
        self.columns += query.shape[
            2
        ]  # before anything is stored: should that break off, `Cache.held_columns` will notice
        out = self.state.kv.extend(
            self.index, query, *new, padding.valid,
            scale=query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"],
            softcap=options.get("softcap"), sinks=options.get("s_aux"),
        )  # fmt: skip
        self.state.columns, self.state.padded = padding.columns, padding.padded
        return out.transpose(1, 2).contiguous()

    def get_seq_length(self) -> int:
        """Columns held, padding included."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that a mask covers, 0): all of them, on sliding layers too, because the kernel hides what is behind the window."""
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """See `Cache.crop`, which has checked that it can be done."""
        self.paged.crop(-tokens_to_remove)
        self.columns += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `Cache.reorder_cache`."""
        self.paged.reorder(beam_idx.tolist())

    def reset(self) -> None:
        """See `Cache.reset`."""
        self.paged.clear()
        self.columns, self._new = 0, None


class Cache(cache_utils.Cache):  # type: ignore[misc]
    """A cache for `model.generate(..., cache=...)` or `model(..., cache=...)` that keeps K and V in quantized pages.

    policy   a format as text ("int4", "int8/int4+window256", "int4+skip=0,-1"), the path of a policy file, a Format or a Policy; `skip` counts the
             layers that cache
    kernel   a kernel's name, or None for the best one

    Raises Unsupported with the reason for a model that cannot use it; then the model is as it was. The model is attached (`interface.attach`):
    with any other cache, or none, it computes what it computed before. For inference only.
    """

    def __init__(self, model: Any, policy: str | Format | Policy, *, kernel: str | None = None) -> None:
        planned = plan_layers(model)
        specs = [layer for layer in planned if isinstance(layer, LayerSpec)]
        kv = PagedKV(specs, _policy(policy), dtype=model.dtype, device=model.device, kernel=kernel)
        self._state = _State(kv, type(model).__name__)
        self._config = model.config.get_text_config(decoder=True)
        indices = iter(range(len(specs)))
        super().__init__(
            layers=[_Layer(self._state, next(indices)) if isinstance(layer, LayerSpec) else layer for layer in planned]
        )
        attach(model)

    def __repr__(self) -> str:
        return f"kvarto.Cache({self.policy}, {len(self.kv.layers)} layers, {self.get_seq_length()} columns)"

    @property
    def kv(self) -> PagedKV:
        """The pages of all layers."""
        return self._state.kv

    # ---- reports ---------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """What was asked for, parsed."""
        return self.kv.policy

    @property
    def format(self) -> Format:
        """The format of all layers that are not skipped."""
        return self.kv.policy.format

    @property
    def kernel_names(self) -> str:
        """The kernels really used."""
        return self.kv.kernel_names

    def footprint(self) -> Footprint:
        """Bytes of keys and values, in use and allocated; recurrent states of hybrid models are transformers' and not counted."""
        return self.kv.footprint()

    @property
    def batch_size(self) -> int:
        """Sequences held, or -1 before the first token."""
        return -1 if self._state.columns is None else self._state.columns.shape[0]

    # ---- masks -----------------------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As `_Layer.get_mask_sizes`; the number of columns carries this cache to the mask function. Raises Unsupported if that is not ours."""
        if not is_attached(self._config):
            now = self._config._attn_implementation
            raise Unsupported(
                f"the model's attention implementation was set to {now} after the cache was made; make a new cache"
            )
        columns, offset = super().get_mask_sizes(query_length, layer_idx)
        return Columns(columns, self), offset

    def check_model(self, config: Any) -> None:
        """Raise Unsupported if `config` is that of another model than the one this cache was made for."""
        text_config = config.get_text_config(decoder=True)
        if text_config is not self._config and text_config != self._config:  # a copied cache has a copied config
            raise Unsupported(
                f"the cache was made for {_described(self._state.model_name, self._config)}, and is used with "
                f"{_described('a model', text_config)}; make a cache for each model"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `_Layer.update`. Raises Unsupported for a layer that the model of this cache does not have."""
        if layer_idx >= len(self.layers):
            raise Unsupported(
                f"layer {layer_idx} wants to be cached, and the cache was made for {self._state.model_name} with "
                f"{len(self.layers)} layers; make a cache for each model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def padding_mask(
        self,
        tokens: int,
        attention_mask: Tensor | None,
        *,
        sequences: int,
        window_tokens: int | None,
        device: torch.device,
    ) -> Tensor:
        """A marked bool mask [B, 1, 1, past + T], False for padding, from attention_mask [B, past + T] or None if there is no padding.

        Waits for the device once, to look at attention_mask; and without one only where a page was sealed since the last time.
        """
        self._state.expect_attended()
        if attention_mask is not None or self.kv.checks_due:
            self.check()
        held = self.held_columns()
        shape = (sequences, held + tokens)
        columns = (
            torch.ones(shape, dtype=torch.bool, device=device) if attention_mask is None else attention_mask.bool()
        )
        if self.batch_size not in (-1, sequences):
            raise ShapeError("sequences", f"the {self.batch_size} that are held", sequences, _START_AGAIN)
        if tuple(columns.shape) != shape:
            raise ShapeError(
                "attention_mask", f"[B, past + T] = {shape}", tuple(columns.shape), "it covers cached columns too"
            )
        if attention_mask is None and not self._state.padded:
            return mark(columns[:, None, None], _Padding(self._state, columns, None, False, window_tokens))
        as_held, new_padded = self._compare(columns, held)
        if not as_held:
            raise UsageError(
                "attention_mask",
                f"the padding that the {held} cached columns were stored with",
                "another",
                _START_AGAIN,
            )
        valid = columns[:, held:] if new_padded else None
        return mark(
            columns[:, None, None],
            _Padding(self._state, columns, valid, self._state.padded or new_padded, window_tokens),
        )

    def _compare(self, columns: Tensor, held: int) -> tuple[bool, bool]:
        """Whether columns [B, past + T] say of the `held` ones what is known of them, and whether new ones are padding: one question."""
        new_valid = columns[:, held:].all()
        if self._state.columns is None:
            return True, not bool(new_valid)
        as_held, no_padding = torch.stack([(columns[:, :held] == self._state.columns).all(), new_valid]).tolist()
        return as_held, not no_padding

    def check(self) -> None:
        """Raise NotFinite if keys or values on a GPU were not finite: before each forward pass that waits for the GPU anyway; see `PagedKV.check`."""
        self.kv.check()

    def held_columns(self) -> int:
        """Columns that every layer holds. Raises Unsupported if a forward pass broke off between layers, or within one."""
        held = {0 if self._state.columns is None else self._state.columns.shape[1]}
        held |= {layer.columns for layer in self.layers if isinstance(layer, _Layer)}
        if len(held) > 1:
            raise Unsupported(f"a forward pass broke off, and layers hold {sorted(held)} columns; {_START_AGAIN}")
        return held.pop()

    # ---- sequences -------------------------------------------------------------------------------------------------

    def adopt(self, sequences: int, tokens: int) -> None:
        """Count what was put into an empty cache's pages directly (`kv`), `tokens` of each sequence, as read: for measuring on pages of noise."""
        self._state.columns = torch.ones(
            (sequences, tokens), dtype=torch.bool, device=self.kv.layers[0].sealed.pages.device
        )
        for layer in self.layers:
            if isinstance(layer, _Layer):
                layer.is_initialized, layer.columns = True, tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last -tokens_to_remove columns back, 0 for none. Raises Unsupported if that reaches further than one page boundary."""
        if tokens_to_remove > 0:
            raise UsageError("tokens_to_remove", "0 or a negative number", tokens_to_remove)
        self._state.expect_attended()
        self.held_columns()
        self.check()
        if tokens_to_remove < 0:
            self._check_crop(-tokens_to_remove)
        super().crop(tokens_to_remove)
        if self._state.columns is not None and tokens_to_remove < 0:
            self._state.columns = self._state.columns[:, :tokens_to_remove]

    def _check_crop(self, tokens: int) -> None:
        if not self.is_croppable:
            raise Unsupported(
                f"crop of {tokens} tokens: a recurrent state cannot be taken back; prefill the sequence again"
            )
        if self._state.columns is not None and not bool(self._state.columns[:, -tokens:].all()):
            raise Unsupported(f"crop of {tokens} tokens: some of them are padding; prefill the sequences again")
        for layer in self.kv.layers:
            if reason := layer.why_not_crop(tokens):
                raise Unsupported(f"crop of {tokens} tokens: {reason}; prefill the sequence again")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was; int64 [B], B may change. Pages are shared, not copied."""
        self._state.expect_attended()
        self.check()
        if self._state.columns is not None:
            self._state.columns = self._state.columns[beam_idx.to(self._state.columns.device)]
            super().reorder_cache(beam_idx.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` sequences, next to each other."""
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, int64 [B] or bool [B]."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def reset(self) -> None:
        """Forget every sequence; storage is kept for reuse."""
        self._state.columns, self._state.padded, self._state.waiting = None, False, None
        super().reset()


def _described(model: str, config: Any) -> str:
    where = f", from {config.name_or_path}" if config.name_or_path else ""
    return f"{model} ({config.model_type}, {config.num_hidden_layers} layers{where})"


def _policy(policy: str | Format | Policy) -> Policy:
    if isinstance(policy, Format):
        return Policy(policy)
    return policy if isinstance(policy, Policy) else parse_policy(policy)
