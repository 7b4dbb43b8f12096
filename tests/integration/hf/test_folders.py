"""Folders, devices and dtypes that give no model: each is one line that says what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefixkv.engines.hf import load_model, load_tokenizer, make_model
from prefixkv.engines.hf.folder import check_folder
from prefixkv.errors import ConfigError
from tests.support.hf_world import TINY, Reference


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    Reference(make_model("llama", seed=4, trial=False, **TINY)).model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def lack(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if "q_proj" in name))
    save_file(tensors, file, {"format": "pt"})


def shard(folder: Path) -> None:
    """An index of two files, of which one is there."""
    file = folder / "model.safetensors"
    names = list(load_file(file))
    file.rename(folder / "model-00001-of-00002.safetensors")
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def quantized(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (shutil.rmtree, r"there is no model folder .*model \(nothing is downloaded\)"),
        (lambda folder: (folder / "config.json").unlink(), r"model has no config\.json$"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*\.safetensors$"),
        (other_format, r"has no \*\.safetensors; pytorch_model\.bin is of a format that"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not loaded: "),
        (lambda folder: (folder / "config.json").write_text("{}"), "is not loaded: "),
        (cut, "is not loaded: "),
        (lack, r"lacks 1 of the model's weights, .*q_proj"),
        (shard, "is not loaded: "),
        (quantized, "is not loaded: |is not served: "),
    ],
)
def test_a_folder_that_is_no_model_says_why(
    folder: Path, spoil: Callable[[Path], Any], why: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=why) as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)


def test_what_is_no_folder_says_so(folder: Path) -> None:
    for wrong, why in (
        (folder / "config.json", "is no folder"), ("meta-llama/Llama", "nothing is downloaded"),
        (7, "is 7, the path"), ("a\x00b", "there is no model folder"), (None, "is None"),
    ):  # fmt: skip
        for load in (load_model, load_tokenizer, check_folder):
            with pytest.raises(ConfigError, match=why):
                load(wrong)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "nonsense"}, "device is 'nonsense'"),
        ({"device": "cuda:99"}, "device is 'cuda:99', torch .* finds"),
        ({"device": "mps"}, 'must be "cpu", "cuda"'),
        ({"device": 0}, "a string such as"),
        ({"dtype": "float64"}, "dtype is 'float64', one of float32"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": "nonsense"}, "dtype is 'nonsense'"),
        ({"dtype": 7}, "dtype is 7"),
    ],
)
def test_a_device_or_dtype_that_is_none_is_refused_before_anything_is_loaded(
    folder: Path, options: dict[str, Any], why: str
) -> None:
    cut(folder)
    for make in (lambda: load_model(folder, **options), lambda: make_model("llama", **options)):
        with pytest.raises(ConfigError, match=why):
            make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', torch .* finds 0 GPUs"):
        load_model(folder, device="cuda")


def test_sizes_that_make_no_model_are_refused() -> None:
    with pytest.raises(ConfigError):
        make_model("llama", hidden_size=-3)
