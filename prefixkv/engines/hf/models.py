"""The transformers models that are served: from a folder of safetensors, or a config and a seed.

A model that would be served wrongly is refused by name: by its config where that is enough, and by
a trial, which compares its logits on the paged pool with those of the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prefixkv import (
    DecodeConfig,
    DecodeRequest,
    KVPool,
    ModelConfig,
    PoolGroup,
    PrefillConfig,
    PrefillRequest,
    StatePool,
)
from prefixkv.engines.hf.attention import NAME, FlatPool, Plan
from prefixkv.engines.hf.folder import MODEL_FILES, check_folder, one_line
from prefixkv.engines.hf.generation import end_tokens
from prefixkv.engines.hf.identity import Config, identity_of, with_model
from prefixkv.engines.hf.layers import DTYPES, find_layers, find_windows, has_states
from prefixkv.engines.hf.recurrent import NO_SLOT, StateMemory, StateRows, page_mixers
from prefixkv.errors import CapacityError, ConfigError
from prefixkv.spi import MAX_INDEX, GroupPages, Pages, as_pages, check_device, pages_for

# A small Llama: 1.2 million parameters.
SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 4096, "initializer_range": 0.08, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
_ROPE_BY_LENGTH: Final = ("dynamic", "longrope")
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
        config = model.config.get_text_config()
        self.config = config
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
            self.num_heads = int(config.num_attention_heads)
            self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
            # transformers has an error of its own where layers differ.
            with _as_config_error(f"{config.model_type} is not served: heads of several sizes"):
                head_dim = getattr(config, "head_dim", None)
            self.head_dim = int(head_dim or config.hidden_size // self.num_heads)
            # 2. What its layers keep, by a forward without pages.
            _attend_plainly(self.model)
            self.layers = find_layers(self.model, self.context)
            page_mixers(self.layers)
            # 3. The trial needs the sizes above, and leaves the model with the paged attention or
            # in an error; the last line sets that attention where there was no trial.
            if trial:
                _run_trial(self)
            self.model.set_attn_implementation(NAME)

    @property
    def num_layers(self) -> int:
        """Number of layers that keep the KV of every token; those with a window do not count."""
        return len(self.layers.full)

    @property
    def has_states(self) -> bool:
        return bool(self.layers.parts)

    @property
    def extra_state(self) -> ExtraState:
        if self.has_states:
            return ExtraState.STATES
        return ExtraState.WINDOWS if self.window else ExtraState.NONE

    def configured(self, config: Config, num_pages: int, page_size: int) -> Config:
        """Return a node's config with the model's identity, and with `num_checkpoints` where it
        keeps some and does not say how many. Raises ConfigError."""
        check_checkpoints(config, self.extra_state)
        config = with_model(config, self.identity, self.name)
        keeps = config.cache if isinstance(config, PrefillConfig) else config.compute is not None
        if keeps and not config.checkpoints:
            config = replace(config, checkpoints=self.num_checkpoints(num_pages, page_size))
        return config

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's state in all layers."""
        return sum(one.num_heads * one.head_bytes for one in self.layers.tensors)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Token ids that end a text, from the model's own settings."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        return () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)

    @property
    def window(self) -> int:
        """Tokens that a token sees in layers with a window, itself among them; 0: none."""
        return self.layers.window

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
        window = self.layers.window
        sizes: dict[str, Any] = {
            "dtype": DTYPES[self.dtype], "order": order, "device": self._device_name,
            "shared": shared,
        }  # fmt: skip
        heads = (self.num_kv_heads, self.head_dim)
        pool = KVPool.create(num_pages, page_size, self.num_layers, *heads, **sizes)
        if not window:
            if window_pages:
                raise ConfigError(no_windows(window_pages))
            return pool
        if not window_pages:
            of_one, kept = self._window_needs(page_size, step_tokens)
            window_pages = min(num_pages, requests * of_one + checkpoints * kept)
            window_pages = max(window_pages, of_one + kept)
        last = KVPool.create(window_pages, page_size, len(self.layers.sliding), *heads, **sizes)
        return pool.with_groups(PoolGroup(SLIDING, last, window, step_tokens))

    def _window_needs(self, page_size: int, step_tokens: int) -> tuple[int, int]:
        """Return the most pages of a request in the window group, and those of a checkpoint."""
        window = self.layers.window
        of_one = (window + step_tokens + page_size - 3) // page_size + 1
        return of_one, pages_for(window - 1, page_size)

    def num_checkpoints(self, num_pages: int, page_size: int) -> int:
        """Return the default beside a pool of `num_pages`: as many checkpoints as a quarter of its
        bytes holds, 16 to 256; 0 for a model that needs none."""
        if self.extra_state is ExtraState.NONE:
            return 0
        layer_bytes = 2 * page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        share = int(_CHECKPOINT_SHARE * num_pages * self.num_layers * layer_bytes)
        num_bytes = self.state_bytes
        if self.window:
            _, kept = self._window_needs(page_size, 1)
            num_bytes += kept * len(self.layers.sliding) * layer_bytes
        least, most = _CHECKPOINTS
        return min(max(share // num_bytes, least), most)

    @property
    def _device_name(self) -> str:
        device = self.device
        return device.type if device.index is None else f"{device.type}:{device.index}"

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

    def window_pages(self, reqs: Iterable[DecodeRequest | PrefillRequest]) -> list[GroupPages]:
        """Return the requests' pages in the window group; none where the model has no windows."""
        return [req.window_pages(SLIDING) for req in reqs] if self.window else []

    def make_states(self, num_slots: int, shared: bool = False) -> StateMemory:
        """Create the states on the model's device, one per slot. Raises as `StatePool.create`."""
        tensors = self.layers.tensors
        pool = StatePool.create(tensors, num_slots, device=self._device_name, shared=shared)
        return StateMemory(pool, self.layers)

    @torch.inference_mode()
    def forward(
        self,
        flat: FlatPool,
        tokens: Sequence[int] | np.ndarray[Any, Any],
        rows: Sequence[Pages],
        starts: Sequence[int],
        ends: Sequence[int],
        wanted: Sequence[int] | None = None,
        also: Sequence[int] = (),
        states: StateRows | None = None,
        windows: Sequence[GroupPages] = (),
        not_finite: list[int] | None = None,
    ) -> torch.Tensor:
        """Run over new tokens of several sequences; their KV goes to pages, their states to slots.
        On a GPU it returns before the device has finished, unless `not_finite` is asked for.

        Args:
            tokens: the new tokens of all sequences, one sequence after the other: [N].
            rows, starts, ends, windows: see `Plan`.
            wanted: indices of the sequences that need logits; None: all.
            also: indices into `tokens` of further tokens that need logits.
            not_finite: gets the indices of the sequences with NaN or infinity in a hidden state of
                a new token or a logit (-inf rules a token out and is allowed). What they wrote is
                zero then.
        Returns: logits after the last new token of each wanted sequence, then after each token of
        `also`: [wanted + also, vocabulary].
        """
        plan = Plan(flat, rows, starts, ends, self.device, states, windows)
        ids = torch.as_tensor(np.asarray(tokens, np.int64)).to(self.device)[None]
        keep = plan.last if wanted is None else plan.last[list(wanted)]
        if also:
            keep = torch.cat([keep, torch.tensor(also, dtype=keep.dtype, device=keep.device)])
        given = {"input_ids": ids, "position_ids": plan.positions, "use_cache": False}
        inner, rows_of = self.model.base_model, list[torch.Tensor]()
        hook = inner.register_forward_hook(
            lambda *call: rows_of.append(call[-1].last_hidden_state[0])
        )
        try:
            # No sequence is complete: the base model writes the KV, and the large head is not
            # computed.
            logits: torch.Tensor
            if len(keep):
                logits = self.model(**given, logits_to_keep=keep, prefixkv_plan=plan).logits[0]
            else:
                inner(**given, prefixkv_plan=plan)
                logits = rows_of[0].new_empty(0, self.vocab_size)
        finally:
            hook.remove()
        if not_finite is not None:
            not_finite += _not_finite(plan, rows_of[0], logits, keep)
        return logits

    def event(self) -> torch.cuda.Event | None:
        """Return a CUDA event after all work so far, for `ready=` and `after=`; None on the CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def check_checkpoints(config: DecodeConfig | PrefillConfig, extra: ExtraState) -> None:
    """Raise ConfigError for checkpoints where the model has none."""
    if config.checkpoints and extra is ExtraState.NONE:
        raise ConfigError(
            f"checkpoints: {config.checkpoints} are of states and windows, and the model has "
            "neither recurrent layers nor windows"
        )


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


def extra_state_of(folder: str | Path, context: int | None = None) -> ExtraState:
    """Tell by the folder's config, before the model is loaded. Raises ConfigError for a config that
    is not read."""
    path = check_folder(folder, MODEL_FILES)
    with _as_config_error(f"model folder {path} is not loaded"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    if has_states(text):
        return ExtraState.STATES
    limit = context or getattr(text, "max_position_embeddings", None) or MAX_INDEX
    return ExtraState.WINDOWS if find_windows(text, limit)[0] else ExtraState.NONE


def no_windows(window_pages: int) -> str:
    return f"window_pages: {window_pages} are of layers with a window, and the model has none"


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
    """Raise ConfigError for whatever transformers raises, and CapacityError where the device has
    not enough memory."""
    try:
        yield
    except (ConfigError, CapacityError):
        raise
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"{what}: {one_line(error)}") from error
    except Exception as error:
        raise ConfigError(f"{what}: {one_line(error)}") from error


def unpaged_copy(model: PagedModel) -> Any:
    """Return a copy of the model and its weights, with transformers' attention."""
    copy = deepcopy(model.model)
    _attend_plainly(copy)
    return copy


def _attend_plainly(model: Any) -> None:
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


# --- what is not served ---------------------------------------------------------------------------


def check_served(model: Any, context: int | None) -> int:
    """Return the longest context that is served: `context`, or what the model was made for.

    Raises ConfigError, which names the setting, for a model that needs more than attention to all
    earlier tokens on pages of K and V.
    """
    config = model.config.get_text_config()
    kind = config.model_type

    def refuse(why: str) -> NoReturn:
        raise ConfigError(f"{kind} is not served: {why}")

    # 1. Kinds of models that do not call our attention, or not for all of their text.
    if getattr(config, "is_encoder_decoder", False):
        refuse("it has an encoder")
    # Some with recurrent layers do go through it and do not say so.
    can_set = getattr(model, "_can_set_attn_implementation", None)
    told = getattr(model, "_supports_attention_backend", False)
    if not told and not (has_states(config) and can_set is not None and can_set()):
        refuse("its attention does not go through transformers' attention interface")
    # 2. The length, which the checks of windows below need.
    limit = getattr(config, "max_position_embeddings", None)
    if context is None:
        context = limit
    if not isinstance(context, int) or not 0 < context <= (limit or MAX_INDEX):
        raise ConfigError(f"context is {context!r}, {kind} was made for {limit} tokens")
    # 3. Attention of another kind.
    for name in ("attn_logit_softcapping", "kv_lora_rank", "attention_chunk_size"):
        if getattr(config, name, None):
            refuse(f"{name} is {getattr(config, name)}")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("its tokens see later ones (use_bidirectional_attention)")
    # Pages of layers that keep every token are what a cache of prefixes consists of.
    window, sliding = find_windows(config, context)
    why = ""
    if len(sliding) == config.num_hidden_layers:
        why = "no layer attends to all tokens"
    elif sliding and has_states(config):
        why = "it has recurrent layers beside a window"
    if why:
        refuse(
            f"{why}: its sliding window has {window} tokens, the context {context}; with "
            f"context={window} it would be"
        )
    # 4. Positions. The parameters are one dict, or one per kind of layer. Cached KV can be reused
    # only if it does not depend on how long its text became.
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        if rope.get("rope_type") in _ROPE_BY_LENGTH:
            refuse(f"its rope is {rope['rope_type']}: KV depends on the length of the text")
    return context


def _run_trial(paged: PagedModel) -> None:
    """Raise ConfigError where the logits on pages and those of the plain model differ. On pages,
    two sequences are computed in chunks, packed, on pages out of order."""
    # 1. The plain model, one sequence at a time; one is longer than a window.
    model = paged.model
    _attend_plainly(model)
    window = paged.window if paged.window <= _LONG_TRIAL else 0
    lens = (window + 11, 6)
    tokens = [np.arange(n) * 7919 % paged.vocab_size for n in lens]
    kind = paged.config.model_type
    own = []
    with torch.inference_mode():
        for ids in tokens:
            row = torch.as_tensor(ids)[None].to(paged.device)
            own.append(model(input_ids=row, use_cache=False).logits[0, -1])
    # 2. On pages. The first chunks end within a page, so the second ones write to a used page.
    model.set_attn_implementation(NAME)
    size, num_pages = 4, pages_for(window, 4) + 8
    pool = paged.make_pool(num_pages, size, window_pages=num_pages if paged.window else 0)
    # In a window group the same ids: it is another memory.
    num = pages_for(lens[0], size)
    ids = np.array([5, 0, 3, *range(8, num_pages), 1, 7], np.int32)
    rows = [as_pages(ids[:num]), as_pages(ids[-2:])]
    windows = [GroupPages(0, row) for row in rows] if paged.window else []
    flat = paged.flat_pool(pool)
    begin = carry_on = None
    if paged.has_states:
        memory = paged.make_states(3)
        begin = StateRows(memory, [NO_SLOT, NO_SLOT], [2, 0])
        carry_on = StateRows(memory, [2, 0], [2, 1])
    first = window + 5
    try:
        paged.forward(
            flat, np.concatenate([tokens[0][:first], tokens[1][:5]]), rows, [0, 0], [first, 5],
            states=begin, windows=windows,
        )  # fmt: skip
        new = np.concatenate([tokens[0][first:], tokens[1][5:]])
        logits = paged.forward(flat, new, rows, [first, 5], lens, states=carry_on, windows=windows)
    except ConfigError as error:  # of our attention
        raise ConfigError(f"{kind} is not served: {error}") from error
    # 3. Page 0 is in use, so each layer must have written to it: a layer that bypasses our
    # attention could agree on logits and still leave no KV to send.
    of_layers = [(pool, paged.layers.full)]
    if paged.window:
        of_layers.append((pool.group(SLIDING), paged.layers.sliding))
    for memory_of, layers in of_layers:
        for place, layer in enumerate(layers):
            if not bool(memory_of.k(place)[0].any()):
                raise ConfigError(f"{kind} is not served: layer {layer} wrote no KV")
    expected = torch.stack(own).float()
    most = float((logits.float() - expected).abs().max())
    if not most <= _TOLERANCE[paged.dtype] * float(expected.abs().max()):
        raise ConfigError(f"{kind} is not served: on pages its logits differ by {most:.3g}")


transformers_logging.disable_progress_bar()
