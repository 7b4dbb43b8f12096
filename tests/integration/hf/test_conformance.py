"""The HF engine keeps every law of the conformance kit, with a real model."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from prefixkv import conformance
from prefixkv.config import ComputeConfig
from prefixkv.engines.hf import PagedModel, make_model
from prefixkv.engines.hf.conformance import HFSides
from prefixkv.engines.hf.models import Reference
from tests.support.hybrid_models import config_of
from tests.support.patience import PATIENCE_S


class ComputingSides(HFSides):
    """With a decode worker that computes what lacks at most 16 tokens."""

    def __init__(self, settings: Any) -> None:
        compute = ComputeConfig(below=16, chunk_tokens=5)
        super().__init__(replace(settings, decode=replace(settings.decode, compute=compute)))


@cache
def _made(family: str) -> tuple[PagedModel, Reference]:
    model = make_model(config_of(family), seed=1)
    return model, Reference(model)


class RecurrentSides(HFSides):
    def _models(self) -> tuple[PagedModel, Reference]:
        return _made("granitemoehybrid")


class ComputingRecurrentSides(RecurrentSides, ComputingSides):
    pass


class WindowedSides(HFSides):
    """With a model that has sliding windows, whose pages are of one size."""

    def __init__(self, settings: Any) -> None:
        if settings.page_size != settings.prefill_page_size:
            raise NotImplementedError("both sides have pages of one size")
        super().__init__(settings)

    def _models(self) -> tuple[PagedModel, Reference]:
        return _made("gpt_oss")


@pytest.mark.slow
@pytest.mark.parametrize("sides", [HFSides, ComputingSides, ComputingRecurrentSides, WindowedSides])
@pytest.mark.parametrize("case", conformance.scenarios(), ids=str)
def test_the_engine_keeps_every_law(case: conformance.Case, sides: type[HFSides]) -> None:
    # Where decode computes, it begins at a checkpoint, which a prompt of whole pages that is cached
    # as a whole has no use for: these look at what it hits.
    if sides is ComputingRecurrentSides and case.scenario in ("full hit", "namespaces"):
        sides = RecurrentSides
    case.check(sides, patience_s=PATIENCE_S)


def test_retracted_requests_come_back_in_time() -> None:
    """By the machine's own clock: with a deadline of seconds, long after its start."""
    report = conformance.run(HFSides, only=["tiny decode pool"], seeds=[0])
    assert report.ok, str(report)


def test_it_takes_part_in_all_but_drafts() -> None:
    report = conformance.run(HFSides, only=["several tokens per step"])
    assert [*report.skipped.values()] == ["this engine gives one token per step"]


def test_a_restarted_worker_uses_no_room_of_its_former_life() -> None:
    sides = [HFSides(conformance.ScenarioSettings()) for _ in range(2)]
    try:
        rooms = [one._decode._rooms for one in sides]
        assert abs(rooms[0] - rooms[1]) > 1_000_000
    finally:
        for one in sides:
            one.close()
