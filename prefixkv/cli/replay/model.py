"""What the layers of a model keep, from its config: KV of all tokens, of a window, or one state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from prefixkv.spi import ConfigError, pages_for

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "fp8": 1}
_STATE_BYTES: Final = 4  # of a number of a recurrent state, which kernels keep in float32
_FULL: Final = ("full_attention", "attention", "*")
_WINDOW: Final = ("sliding_attention", "chunked_attention")
_LINEAR: Final = ("linear_attention",)
_MAMBA: Final = ("mamba", "mamba2", "M")
_NOTHING: Final = ("moe", "mlp", "-", "E")


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that keep the KV of the last `tokens` tokens; `token_bytes` for each of them."""

    layers: int
    tokens: int
    token_bytes: int

    def bytes_behind(self, page_tokens: int) -> int:
        """Return the bytes with which computing goes on at the end of a page: whole pages."""
        return pages_for(self.tokens - 1, page_tokens) * page_tokens * self.token_bytes

    def bytes_running(self, page_tokens: int) -> int:
        """Return the bytes that a request takes while it runs, in whole pages."""
        return (pages_for(self.tokens - 1, page_tokens) + 1) * page_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the layers of a model keep: `full_layers` KV of all tokens, `windows` of the last ones,
    `state_layers` one state of `state_bytes` in all."""

    name: str
    full_layers: int
    full_token_bytes: int
    windows: tuple[Window, ...] = ()
    state_layers: int = 0
    state_bytes: int = 0

    @property
    def all_token_bytes(self) -> int:
        """Bytes of a token where layers with windows keep all tokens, as the others do."""
        return self.full_token_bytes + sum(one.token_bytes for one in self.windows)

    @property
    def is_plain(self) -> bool:
        """True where all layers of the model keep all tokens."""
        return not self.windows and not self.state_layers

    def checkpoint_bytes(self, page_tokens: int) -> int:
        """Return the bytes of a checkpoint: all windows and states with which the model goes on at
        the end of a page."""
        return sum(one.bytes_behind(page_tokens) for one in self.windows) + self.state_bytes

    def running_bytes(self, page_tokens: int) -> int:
        """Return the bytes of windows and states of one request that runs."""
        return sum(one.bytes_running(page_tokens) for one in self.windows) + self.state_bytes


def model_shape(path: Path) -> ModelShape:
    """Read what the layers of a model keep from its config.json, or from the folder it is in.

    Raises: ConfigError, which names what is missing or not known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path} is not read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--model {path} holds no object")
    inner = config.get("text_config")
    return _Reader(path, inner if isinstance(inner, dict) else config).shape()


class _Reader:
    """Reads one model's config."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if dtype not in _BYTES:
            self._refuse(f"dtype {dtype!r} is none of {', '.join(_BYTES)}")
        self._item = _BYTES[dtype]

    def shape(self) -> ModelShape:
        counts = Counter(self._kinds())
        full = sum(counts[kind] for kind in _FULL)
        known = (*_FULL, *_WINDOW, *_LINEAR, *_MAMBA, *_NOTHING)
        if others := sorted(set(counts) - {*known, "kda"}):
            self._refuse(f"layers of kind {', '.join(others)} are not known")
        windows = []
        for kind, key in zip(_WINDOW, ("sliding_window", "attention_chunk_size"), strict=True):
            if counts[kind]:
                bytes_each = counts[kind] * self._kv_bytes()
                windows.append(Window(counts[kind], self._number(key), bytes_each))
        linear = sum(counts[kind] for kind in _LINEAR)
        mamba = sum(counts[kind] for kind in _MAMBA)
        state_bytes = (
            (linear * self._linear_bytes() if linear else 0)
            + (mamba * self._mamba_bytes() if mamba else 0)
            + (counts["kda"] * self._kda_bytes() if counts["kda"] else 0)
        )
        return ModelShape(
            name=str(self._config.get("model_type") or self._path.stem),
            full_layers=full,
            full_token_bytes=full * self._kv_bytes() if full else 0,
            windows=tuple(windows),
            state_layers=linear + mamba + counts["kda"],
            state_bytes=state_bytes,
        )

    def _kinds(self) -> list[str]:
        """Return the kind of each layer, as the model's config names it, in one of several ways."""
        get = self._config.get
        for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            if (found := get(key)) is not None:
                return [str(kind) for kind in found]
        layers = range(self._number("num_hidden_layers"))
        if (of_kimi := get("linear_attn_config")) is not None:
            kda = {*of_kimi.get("kda_layers", ())}  # counted from 1
            return ["kda" if at + 1 in kda else "full_attention" for at in layers]
        # The last layer of each group is another one than those before it.
        for key, kind in (
            ("sliding_window_pattern", "sliding_attention"),
            ("full_attention_interval", "linear_attention"),
        ):
            if get(key):
                every = self._number(key)
                return ["full_attention" if (at + 1) % every == 0 else kind for at in layers]
        if get("attn_layer_period"):
            every, first = self._number("attn_layer_period"), int(get("attn_layer_offset", 0))
            return ["attention" if at % every == first else "mamba" for at in layers]
        is_sliding = get("sliding_window") and get("use_sliding_window", True)
        return ["sliding_attention" if is_sliding else "full_attention" for _ in layers]

    def _kv_bytes(self) -> int:
        """Return the bytes of a token in one layer with attention."""
        get = self._config.get
        if get("kv_lora_rank"):
            return (self._number("kv_lora_rank") + self._number("qk_rope_head_dim")) * self._item
        heads = self._number("num_attention_heads")
        kv_heads = get("num_key_value_heads") or heads
        head_dim = get("head_dim") or self._number("hidden_size") // heads
        return 2 * int(kv_heads) * int(head_dim) * self._item

    def _linear_bytes(self) -> int:
        """Return the bytes of the state of a layer with gated delta nets."""
        keys, values = (self._number(f"linear_num_{what}_heads") for what in ("key", "value"))
        key_dim, value_dim = (self._number(f"linear_{what}_head_dim") for what in ("key", "value"))
        width = 2 * keys * key_dim + values * value_dim
        conv = width * (self._number("linear_conv_kernel_dim") - 1) * self._item
        return conv + values * key_dim * value_dim * _STATE_BYTES

    def _mamba_bytes(self) -> int:
        """Return the bytes of the state of a Mamba 2 layer."""
        heads = self._number("mamba_num_heads", "mamba_n_heads")
        inner = heads * self._number("mamba_head_dim", "mamba_d_head")
        size = self._number("ssm_state_size", "mamba_d_state")
        width = inner + 2 * self._number("n_groups", "mamba_n_groups") * size
        conv = width * (self._number("conv_kernel", "mamba_d_conv") - 1) * self._item
        return conv + inner * size * _STATE_BYTES

    def _kda_bytes(self) -> int:
        """Return the bytes of the state of a layer of Kimi's delta attention."""
        of = _Reader(self._path, self._config["linear_attn_config"])
        heads, dim = of._number("num_heads"), of._number("head_dim")
        conv = 3 * heads * dim * (of._number("short_conv_kernel_size") - 1) * self._item
        return conv + heads * dim * dim * _STATE_BYTES

    def _number(self, *keys: str) -> int:
        """Return the first of these settings that a model's config has."""
        for key in keys:
            value = self._config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return self._refuse(f"it has no number {' or '.join(keys)}")

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"--model {self._path}: {why}")
