"""Eviction policies with settings, on the command line."""

import sys
from pathlib import Path

import pytest

from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cli.main import run_command
from prefixkv.cli.policies import policy_of
from prefixkv.cli.replay import check_policy
from prefixkv.errors import ConfigError
from prefixkv.spi import Policy, Use, make_policy


def test_a_name_alone_has_the_default_settings() -> None:
    assert policy_of("lru").name == "lru"
    assert policy_of("adaptive").half_life_s == 900.0


def test_settings_reach_the_object() -> None:
    policy = policy_of("adaptive:trust=5:half_life_s=600.5:ghosts=0")
    assert (policy.trust, policy.half_life_s, policy.ghosts) == (5, 600.5, 0)


@pytest.mark.parametrize(
    "text", ["newest", "lru:trust=5", "adaptive:tust=5", "adaptive:trust=x", "adaptive:trust",
             "adaptive:trust=0", "adaptive:period=1.5", ""],
)  # fmt: skip
def test_what_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        policy_of(text)


OWN_POLICIES = """
from prefixkv.spi import Policy

nothing = None

class Half(Policy):
    name = "half"

class Whole(Policy):
    name = "whole"

    def __init__(self, size, share=0.5):
        self.size, self.share = size, share

    def mark(self, use):
        return use.tick

    def fold(self, upper, lower):
        return max(upper, lower)

    def last_tick(self, history):
        return history

class Lawful(Policy):
    name = "lawful"

    def mark(self, use):
        return use.tick, 1, 0.1 * use.tick

    def fold(self, upper, lower):
        return max(upper[0], lower[0]), upper[1] + lower[1], upper[2] + lower[2]

    def last_tick(self, history):
        return history[0]

    def rank(self, history):
        return history[1] > 2, history[0]

class Equal(Lawful):
    def rank(self, history):
        return history[1]

class Unfair(Lawful):
    def fold(self, upper, lower):
        return max(upper[0], lower[0]), upper[1] - lower[1], 0.0

class Lies(Lawful):
    def last_tick(self, history):
        return history[1]

class Keeps(Lawful):
    def mark(self, use):
        return use

    def rank(self, history):
        return history.tick

class Forgets(Lawful):
    def fold(self, upper, lower):
        return lower

class Raises(Lawful):
    def rank(self, history):
        return history[7]

class NoNumber(Lawful):
    def rank(self, history):
        return float("nan")

class Unsure(Lawful):
    asked = 0.0

    def rank(self, history):
        self.asked += 1
        return self.asked

class Picky(Whole):
    def __init__(self, size=0):
        if size != 4:
            raise ValueError("only\\n4 will do")

class Nameless(Whole):
    name = None

    def __init__(self):
        pass

class Open(Whole):
    def __init__(self, *rest, **settings):
        self.settings = settings

class Placed(Whole):
    def __init__(self, size=1, /):
        self.size = size
"""
MODULES = {
    "own_policies": OWN_POLICIES, "broken": "class = 3\n", "raises": "1 / 0\n",
    "ends": "import sys; sys.exit(3)\n", "lacks": "import nothing_like_this\n",
}  # fmt: skip


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_class_of_a_module_in_the_current_folder_is_a_policy(modules: None) -> None:
    policy = policy_of("own_policies:Whole:size=3")
    assert (type(policy).__name__, policy.size, policy.share) == ("Whole", 3, 0.5)
    assert "whole" not in policy_names()
    assert policy_of("own_policies:Open:size=3:share=0.5").settings == {"size": 3, "share": 0.5}
    assert policy_of("own_policies:Open").settings == {}
    assert policy_of("own_policies:Placed").size == 1
    assert policy_of("own_policies:Lawful").name == "lawful"
    assert policy_of("own_policies:Raises").name == "lawful"  # the replay shows where it raises


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("optimum:size=3", "'optimum' is not one of"),
        ("registered_elsewhere", "priority, slru; one of your own is MODULE:CLASS"),
        ("own_policies:Keeps", "Keeps gives two leaves the same rank, 16: no two may be equal"),
        (":Whole", "module '' cannot be imported"),
        ("own_policies:", "module 'own_policies' has no class ''"),
        ("own_policies:nothing", "has no class 'nothing'"),
        ("json:JSONDecoder", "'JSONDecoder' is no class derived from prefixkv's Policy"),
        ("own_policies:Half", "'Half' does not define fold, last_tick, mark"),
        ("own_policies:Whole", "missing a required argument: 'size'"),
        ("own_policies:Whole:size=3:width=4", "got an unexpected keyword argument 'width'"),
        ("own_policies:Placed:size=2", "settings of own_policies:Placed: "),
        ("own_policies:Open:width", "'width' is no number"),
        ("own_policies:Picky:", "'' is no number"),
        ("own_policies:Picky", "own_policies:Picky cannot be made: ValueError: only 4 will do"),
        ("own_policies:Nameless", "own_policies:Nameless has no name"),
        ("own_policies:Equal", "Equal gives two leaves the same rank, 1: no two may be equal"),
        ("own_policies:NoNumber", "NoNumber gives two leaves the same rank, nan: no two may be"),
        ("own_policies:Unsure", "Unsure has a rank that is another one when asked for again"),
        ("own_policies:Unfair", "Unfair has a fold that is not associative: of three marks it"),
        ("own_policies:Lies", "Lies has a last_tick of 1 for a history whose last is 4"),
        ("own_policies:Forgets", "Forgets has a last_tick of "),
        ("no_policies:Whole", "module 'no_policies' cannot be imported: No module named"),
        ("broken:Whole", "module 'broken' cannot be imported: invalid syntax (broken.py, line 1)"),
        ("raises:Whole", "module 'raises' cannot be imported: ZeroDivisionError: division by zero"),
        ("ends:Whole", "module 'ends' cannot be imported: SystemExit: 3"),
        ("lacks:Whole", "module 'lacks' cannot be imported: No module named 'nothing_like_this'"),
    ],
)
def test_a_policy_that_cannot_be_made_or_breaks_a_law_is_one_line(
    policy: str, why: str, modules: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # There is no trace, and that is not reached.
    assert run_command(["replay", "none.jsonl", "--policy", f"lru,{policy}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("prefixkv: ")
    assert len(err.splitlines()) == 1
    assert why in err


def test_the_policies_that_ship_break_no_law() -> None:
    for name in policy_names():
        check_policy(name)
    check_policy("benchmarks.policies.gated:Gated")


def test_a_check_of_what_makes_no_policy_with_a_name_says_so() -> None:
    class Nameless(Policy):
        def mark(self, use: Use) -> int:
            return use.tick

        fold = max

        def last_tick(self, history: int) -> int:
            return history

    made = make_policy("lru")
    for wrong in (Nameless, made, lambda: None):
        with pytest.raises(ConfigError, match="is no class or function that makes a policy with"):
            check_policy(wrong)


def test_a_check_goes_through_a_cache_as_well(modules: None) -> None:
    check_policy("own_policies:Lawful")
    with pytest.raises(IndexError):
        check_policy("own_policies:Raises")
    with pytest.raises(ConfigError, match="not associative"):
        check_policy("own_policies:Unfair")
