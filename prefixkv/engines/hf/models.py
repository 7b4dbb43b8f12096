"""The transformers models that are served: from a folder of safetensors, or a config and a seed.

A model that would be served wrongly is refused by name: by its config where that is enough, and by
a trial, which compares its logits on the paged pool with those of the plain model. `Reference` is a
plain model to compare answers with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prefixkv import DecodeConfig, KVPool, ModelConfig, PoolGroup, PrefillConfig, StatePool
from prefixkv.engines.hf.attention import NAME, FlatPool, Plan
from prefixkv.engines.hf.folder import MODEL_FILES, check_folder, end_tokens, one_line, token_ids
from prefixkv.engines.hf.layers import (
    DTYPES,
    NO_SLOT,
    Row,
    StateMemory,
    check_served,
    find_layers,
)
from prefixkv.errors import CapacityError, ConfigError
from prefixkv.spi import GroupPages, as_pages, check_device, default_topic, pages_for

Config = TypeVar("Config", DecodeConfig, PrefillConfig)

# A small Llama: 1.2 million parameters.
SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 4096, "initializer_range": 0.08, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
_LONG_TRIAL: Final = 512  # tokens: a trial of a longer window than that would take too long


class ExtraState(Enum):
    """What a model keeps of a text beside the KV of every token, and checkpoints are of."""

    NONE = "none"
    STATES = "states of recurrent layers"
    WINDOWS = "the last tokens, in layers with a window"


SLIDING: Final = "sliding"
"""Name of the group of a pool with the layers that have a window."""

# Checkpoints of states and windows: as many as this share of the KV pool's bytes holds, within
# these bounds.
_CHECKPOINT_SHARE: Final = 0.25
_CHECKPOINTS: Final = (16, 256)


class PagedModel:
    """A model over paged pools, and slots of state pools for recurrent layers. Owned by one thread.

    Args:
        model: as `AutoModelForCausalLM` makes it; it is taken over.
        context: limit of tokens per sequence; None: the number that the model was made for.
        identity: names all that its KV depends on (`ModelConfig`). None: computed by `identity_of`.
        trial: True to compare it with the plain model first, on a few tokens.
        name: for display only. "": the kind of model.

    Raises ConfigError, which names the reason, for a model that is not served.
    """

    def __init__(
        self,
        model: Any,
        context: int | None = None,
        identity: ModelConfig | None = None,
        trial: bool = True,
        name: str = "",
    ) -> None:
        # 1. Refuse by the config before anything costly: the identity reads all weights.
        self.config = config = model.config.get_text_config()
        with _as_config_error(f"{config.model_type} is not served"):
            self.context = check_served(model, context)
            self.name = name or str(config.model_type)
            self.identity = identity or identity_of(model)
            self.model = model.eval().requires_grad_(False)
            self.device = next(model.parameters()).device
            self.dtype: torch.dtype = next(model.parameters()).dtype
            if self.dtype not in DTYPES:
                raise ConfigError(
                    f"the model is of {self.dtype}, one of {', '.join(DTYPES.values())}"
                )
            self.vocab_size = int(config.vocab_size)
            num_heads = int(config.num_attention_heads)
            self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
            # transformers has an error of its own where layers differ.
            with _as_config_error("heads of several sizes"):
                head_dim = getattr(config, "head_dim", None)
            self.head_dim = int(head_dim or config.hidden_size // num_heads)
            # 2. What its layers keep, by a forward without pages.
            _attend_plainly(self.model)
            self.layers = find_layers(self.model, self.context)
            # 3. The trial begins without pages too, and needs the sizes above.
            if trial:
                _run_trial(self)
            self.model.set_attn_implementation(NAME)

    @property
    def num_layers(self) -> int:
        """Number of layers that keep the KV of every token; those with a window do not count."""
        return len(self.layers.full)

    @property
    def window(self) -> int:
        """Tokens that a token sees in layers with a window, itself among them; 0: none."""
        return self.layers.window

    @property
    def extra_state(self) -> ExtraState:
        if self.layers.parts:
            return ExtraState.STATES
        return ExtraState.WINDOWS if self.window else ExtraState.NONE

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's state in all layers."""
        return sum(one.num_heads * one.head_bytes for one in self.layers.tensors)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Token ids that end a text, from the model's own settings."""
        return tuple(token_ids(self.model.generation_config))

    def configured(self, config: Config, num_pages: int, page_size: int) -> Config:
        """Return a node's config with the model's identity, and with `num_checkpoints` where it
        keeps some and does not say how many. Raises ConfigError."""
        if config.checkpoints and self.extra_state is ExtraState.NONE:
            raise ConfigError(
                f"checkpoints: {config.checkpoints} are of states and windows, and the model has "
                "neither recurrent layers nor windows"
            )
        events = config.kv_events
        if events is not None and not events.topic:  # by which routers subscribe
            events = replace(events, topic=default_topic(config.name, self.name))
        config = replace(config, model=self.identity, kv_events=events)
        keeps = config.cache if isinstance(config, PrefillConfig) else config.compute is not None
        if keeps and not config.checkpoints:
            config = replace(config, checkpoints=self.num_checkpoints(num_pages, page_size))
        return config

    def make_pool(
        self, num_pages: int, page_size: int = 16, order: str = "layer_major",
        shared: bool = False, *, step_tokens: int = 1, requests: int = 64, checkpoints: int = 0,
        window_pages: int = 0,
    ) -> KVPool:  # fmt: skip
        """Create a pool on the model's device. Raises as `KVPool.create`.

        Args:
            step_tokens: of the window group, the most tokens of a prompt per forward:
                `chunk_tokens` on prefill, 1 on decode.
            requests, checkpoints: number of windows that the group has room for.
            window_pages: pages of the group. 0: as many as these need, but no more than the pool
                has (no more memory than without windows), and enough for one request.
        """
        if window_pages and not self.window:
            raise ConfigError(
                f"window_pages: {window_pages} are of layers with a window, and the model has none"
            )

        def create(pages: int, layers: Sequence[int]) -> KVPool:
            return KVPool.create(
                pages, page_size, len(layers), self.num_kv_heads, self.head_dim,
                dtype=DTYPES[self.dtype], order=order, device=str(self.device), shared=shared,
            )  # fmt: skip

        pool = create(num_pages, self.layers.full)
        if not self.window:
            return pool
        if not window_pages:
            most = (self.window + step_tokens + page_size - 3) // page_size + 1  # of a request
            kept = pages_for(self.window - 1, page_size)
            window_pages = min(num_pages, requests * most + checkpoints * kept)
            window_pages = max(window_pages, most + kept)
        last = create(window_pages, self.layers.sliding)
        return pool.with_groups(PoolGroup(SLIDING, last, self.window, step_tokens))

    def num_checkpoints(self, num_pages: int, page_size: int) -> int:
        """Return the default beside a pool of `num_pages`: as many checkpoints as a quarter of its
        bytes holds, 16 to 256; 0 for a model that needs none."""
        if self.extra_state is ExtraState.NONE:
            return 0
        layer_bytes = 2 * page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        share = int(_CHECKPOINT_SHARE * num_pages * self.num_layers * layer_bytes)
        kept = pages_for(self.window - 1, page_size) if self.window else 0
        num_bytes = self.state_bytes + kept * len(self.layers.sliding) * layer_bytes
        least, most = _CHECKPOINTS
        return min(max(share // num_bytes, least), most)

    def flat_pool(self, pool: KVPool) -> FlatPool:
        """Raises as `FlatPool`, and for another window group than `make_pool` makes."""
        groups = {group.name: (group.window, group.pool) for group in pool.groups}
        window, last = groups.pop(SLIDING, (0, None))
        if groups or window != self.window:
            raise ConfigError(
                f"the pool has groups with windows of {[group.window for group in pool.groups]}, "
                f"the model has a window of {self.window or None}: make_pool makes one that fits"
            )
        sliding = None if last is None else FlatPool(last, self.layers.sliding, window)
        return FlatPool(pool, self.layers.full, sliding=sliding)

    def make_states(self, num_slots: int, shared: bool = False) -> StateMemory:
        """Create the states on the model's device, one per slot. Raises as `StatePool.create`."""
        tensors = self.layers.tensors
        pool = StatePool.create(tensors, num_slots, device=str(self.device), shared=shared)
        return StateMemory(pool, self.layers)

    @torch.inference_mode()
    def forward(
        self, flat: FlatPool, rows: Sequence[Row], memory: StateMemory | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Run over new tokens of several sequences; their KV goes to pages, their states to slots.

        Returns the logits behind the wanted tokens of all rows, [wanted, vocabulary], and the rows
        with NaN or infinity in a hidden state of a new token or a logit (-inf rules a token out and
        is allowed): what these wrote is zero then.
        """
        plan = Plan(flat, rows, memory, self.device)
        ids = torch.from_numpy(np.concatenate([row.tokens for row in rows], dtype=np.int64))
        ends = np.cumsum([len(row.tokens) for row in rows]).tolist()
        at = [
            end + place if place < 0 else end - len(row.tokens) + place
            for row, end in zip(rows, ends, strict=True) for place in row.wanted
        ]  # fmt: skip
        keep = torch.tensor(at, dtype=torch.int64, device=self.device)
        hidden: list[torch.Tensor] = []
        hook = self.model.base_model.register_forward_hook(
            lambda *call: hidden.append(call[-1].last_hidden_state[0])
        )
        try:
            logits: torch.Tensor = self.model(
                input_ids=ids.to(self.device)[None], position_ids=plan.positions, use_cache=False,
                logits_to_keep=keep, prefixkv_plan=plan,
            ).logits[0]  # fmt: skip
        finally:
            hook.remove()
        return logits, _not_finite(plan, hidden[0], logits, keep)

    def event(self) -> torch.cuda.Event | None:
        """Return a CUDA event after all work so far, for `ready=` and `after=`; None on the CPU."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device).record_event() if is_gpu else None


def _not_finite(
    plan: Plan, hidden: torch.Tensor, logits: torch.Tensor, keep: torch.Tensor
) -> list[int]:
    """Return the sequences of which a number is not finite, and erase what they have written.
    `keep`: the tokens that the logits follow."""
    # A token attends to itself, so K or V of NaN shows in its own hidden state, whatever window
    # later tokens have. The largest logit is NaN where one is, and -inf where no token is left.
    most = logits.amax(1)
    # A sum that is finite is of numbers that are; it costs a tenth of looking at each.
    if math.isfinite(float(hidden.sum(dtype=torch.float32)) + float(most.sum(dtype=torch.float32))):
        return []
    off = torch.cat([~hidden.isfinite().all(1), ~most.isfinite()])
    tokens = torch.arange(len(hidden), device=off.device)
    owners = torch.searchsorted(plan.last, tokens)
    found = sorted({*owners[torch.cat([tokens, keep])[off]].tolist()})
    if found:  # else the sum alone was too large
        plan.erase(torch.isin(owners, torch.tensor(found, device=off.device)))
    return found


# --- identity ------------------------------------------------------------------------------------

_DIGEST_BYTES: Final = 16
_NOT_THE_MODELS: Final = frozenset({"_name_or_path", "transformers_version", "architectures"})
"""Keys of a config, at any depth, that describe its origin and not the model."""


def identity_of(model: Any) -> ModelConfig:
    """Return name and version: a digest of its config, and one of every number of its weights.

    Two models may use each other's KV where both digests are equal. Neither depends on the location
    of the files, or on how the tensors are spread over them. Reads all weights: see
    `weights_digest`.
    """
    config = json.dumps(_without_origin(model.config.to_dict()), sort_keys=True, default=str)
    name = f"{type(model).__name__} {_digest(config.encode())}"
    return ModelConfig(name, weights_digest(model))


def weights_digest(model: Any) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of all tensors. Reads all weights, by
    several threads; from a GPU each copies a tensor to the host at a time."""
    # Sorted by name: the order of a state dict is that of the model's construction.
    entries = sorted(model.state_dict().items())
    with ThreadPoolExecutor(4, "prefixkv-digest") as pool:
        return _digest(b"".join(pool.map(_hash_entry, entries)))


def _hash_entry(entry: tuple[str, Any]) -> bytes:
    name, value = entry
    if not isinstance(value, torch.Tensor):  # a module's own kind of state (`get_extra_state`)
        return hashlib.blake2b(repr(entry).encode()).digest()
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = hashlib.blake2b(repr((name, str(value.dtype), tuple(value.shape))).encode())
    whole.update(memoryview(raw))  # type: ignore[arg-type]  # numpy's stub says no Buffer
    return whole.digest()  # without the GIL


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _without_origin(value: Any) -> Any:
    """Return a config without the keys that describe its origin, at any depth."""
    if isinstance(value, dict):
        kept = {str(key): _without_origin(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if key not in _NOT_THE_MODELS}
    if isinstance(value, list | tuple):
        return [_without_origin(one) for one in value]
    return value


# --- where models come from -----------------------------------------------------------------------


def make_model(
    config: Any = "llama",
    seed: int = 0,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    context: int | None = None,
    trial: bool = True,
    **sizes: Any,
) -> PagedModel:
    """Make a model with random weights, equal for equal seed and sizes (and version of torch).

    `config` is a transformers config, or a kind of one ("llama", "qwen3", "mistral") with the sizes
    of `SMALL`, replaced by those in `sizes`. `dtype` is "float32", "bfloat16" or "float16".

    Raises ConfigError; CapacityError where the device has not enough memory.
    """
    check_device(device)
    element = _element(dtype)
    if isinstance(config, str):
        # An unknown kind, or sizes that do not go together, have errors of their own.
        with _as_config_error(f"there is no model {config!r}"):
            known = AutoConfig.for_model(config)
            small = {name: size for name, size in SMALL.items() if hasattr(known, name)}
            config = AutoConfig.for_model(config, **{**small, **sizes})
    elif sizes:
        raise ConfigError(f"{', '.join(sizes)}: the config has its sizes already")
    # On the CPU and in a forked generator: equal weights on every device, and the caller's random
    # numbers stay as they were.
    with torch.random.fork_rng(devices=()), _as_config_error("the model is not made"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=element)
    name = f"{config.model_type} made from seed {seed}"
    return _paged(model, device, context, trial, name)


def load_model(
    folder: str | Path,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    context: int | None = None,
    trial: bool = True,
) -> PagedModel:
    """Load a model from a folder with its config and its weights as safetensors. Nothing outside
    the folder is read, and no code in it is run.

    Its identity covers config and weights, and costs one reading of them. Each end token that the
    generation config, the config or the tokenizer names ends an answer. `dtype` None is the
    config's.

    Raises ConfigError; CapacityError where the device has not enough memory.
    """
    # What can be refused before the weights are read.
    path = check_folder(folder, MODEL_FILES)
    check_device(device)
    element = None if dtype is None else _element(dtype)
    # A file that is cut off or malformed has errors of the packages' own, and a kind of weights
    # that needs another package an ImportError.
    with _as_config_error(f"model folder {path} is not loaded"):
        # It may come from anywhere: only safetensors, which hold no code, and no remote code.
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=element or "auto", local_files_only=True, use_safetensors=True,
            trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    # transformers makes up what is missing, and only logs it.
    if missing := sorted(found.get("missing_keys", ())):
        raise ConfigError(
            f"model folder {path} is not loaded: it lacks {len(missing)} of the model's weights, "
            f"{missing[0]} for one"
        )
    model.generation_config.eos_token_id = end_tokens(path, model)
    return _paged(model, device, context, trial, path.resolve().name)


def _element(dtype: object) -> torch.dtype:
    """Raises ConfigError for a dtype that is not served."""
    names = {name: element for element, name in DTYPES.items()}
    if not isinstance(dtype, str) or dtype not in names:
        raise ConfigError(f"dtype is {dtype!r}, one of {', '.join(names)} is needed")
    return names[dtype]


def _paged(model: Any, device: str, context: int | None, trial: bool, name: str) -> PagedModel:
    # Before the model moves: the digest reads it on the host, without copies from a device.
    identity = identity_of(model)
    try:
        model = model.to(device)
    except RuntimeError as error:
        raise CapacityError(f"the model does not fit on {device}: {one_line(error)}") from error
    return PagedModel(model, context, identity, trial, name)


@contextmanager
def _as_config_error(what: str) -> Iterator[None]:
    """Raise ConfigError, which begins with `what`, for whatever is raised; CapacityError where the
    device has not enough memory."""
    try:
        yield
    except Exception as error:
        is_full = isinstance(error, CapacityError | torch.OutOfMemoryError)
        kind = CapacityError if is_full else ConfigError
        raise kind(f"{what}: {one_line(error)}") from error


def unpaged_copy(model: PagedModel) -> Any:
    """Return a copy of the model and its weights, with transformers' attention."""
    copy = deepcopy(model.model)
    _attend_plainly(copy)
    return copy


class Reference:
    """A copy of a model, as transformers runs it. Owned by one thread, and computes with one:
    several, on a busy machine, wait for each other at every small kernel."""

    def __init__(self, model: PagedModel) -> None:
        self.model = unpaged_copy(model)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    @torch.inference_mode()
    def answer(self, tokens: Sequence[int], max_new_tokens: int) -> list[int]:
        """Return the greedy answer of transformers' own `generate`, its end token included."""
        prompt = torch.tensor([list(tokens)], device=self.model.device)
        # The number of threads is the process's, not this call's: put it back in any case.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            generated = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        finally:
            torch.set_num_threads(threads)
        answer: list[int] = generated[0, len(tokens) :].tolist()
        return answer


def _attend_plainly(model: Any) -> None:
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


# --- the trial -----------------------------------------------------------------------------------


@torch.inference_mode()
def _run_trial(paged: PagedModel) -> None:
    """Raise ConfigError where the logits on pages differ from the plain model's. Two texts, of
    which one is longer than a window, are computed in chunks, packed, on pages out of order."""
    # 1. By the plain model.
    long = 11 + (paged.window if paged.window <= _LONG_TRIAL else 0)
    texts = [np.arange(num) * 7919 % paged.vocab_size for num in (long, 6)]
    plain = []
    for text in texts:
        ids = torch.as_tensor(text)[None].to(paged.device)
        plain.append(paged.model(input_ids=ids, use_cache=False).logits[0, -1])
    # 2. On pages. The first chunks end within a page, so the second ones write to a used page.
    paged.model.set_attn_implementation(NAME)
    size, num = 4, pages_for(long, 4)
    pool = paged.make_pool(num + 5, size, window_pages=num + 5 if paged.window else 0)
    flat = paged.flat_pool(pool)
    memory = paged.make_states(3) if paged.layers.parts else None
    order = [5, 0, 3, *range(8, num + 5), 1, 7]
    pages = as_pages(order[:num]), as_pages(order[-2:])

    def rows(begins: Sequence[int], ends: Sequence[int], *slots: Sequence[int]) -> list[Row]:
        # In a window group the same pages: it is another memory.
        return [
            Row(text[begin:end], begin, own, GroupPages(0, own), source=source, slot=slot)
            for text, own, begin, end, source, slot
            in zip(texts, pages, begins, ends, *slots, strict=True)
        ]  # fmt: skip

    first = long - 6, 5
    paged.forward(flat, rows((0, 0), first, (NO_SLOT, NO_SLOT), (2, 0)), memory)
    logits, _ = paged.forward(flat, rows(first, (long, 6), (2, 0), (2, 1)), memory)
    # 3. Page 0 is in use, so each layer must have written to it: a layer that bypasses our
    # attention could agree on logits and still leave no KV to send.
    for part in (flat, flat.sliding) if flat.sliding is not None else (flat,):
        for layer, kept in part.pages.items():
            if not bool(kept[part.k_row].any()):
                raise ConfigError(f"layer {layer} wrote no KV")
    expected = torch.stack(plain).float()
    most = float((logits.float() - expected).abs().max())
    if not most <= _TOLERANCE[paged.dtype] * float(expected.abs().max()):
        raise ConfigError(f"on pages its logits differ by {most:.3g}")


transformers_logging.disable_progress_bar()
