"""What a configuration promises of a ledger, held against ledgers written by hand."""

from __future__ import annotations

import pytest

from jshard.errors import JShardError, Location
from jshard.inspect.ledger import Ledger, Line
from jshard.inspect.ledger.entries import Left
from jshard.inspect.ledger.memory import Resident
from jshard.inspect.ledger.promises import check_promises, over_budget
from jshard.programs.provenance import Cause
from jshard.signals.active_config import configuration
from tests.support import cases

MESH = {"mesh": {"data": 2, "tensor": 4}}


def line(collective="all_reduce", count=1, signal="a", payload=1024) -> Line:
    return Line(
        Cause(() if signal == "-" else (signal,)),
        collective,
        "p",
        ("tensor",),
        4,
        count,
        True,
        payload,
        "float32",
        (payload // 4,),
    )


def left(signal="a", primitive="rev") -> Left:
    return Left(Cause(() if signal == "-" else (signal,)), primitive, ("data",), 1, True)


def told(ledger: Ledger, **expected) -> list[str] | int:
    """How many promises of signals are kept; or the faults without where they are written."""
    signals = {name.replace("_any", "*"): {"expect": each} for name, each in expected.items()}
    with cases.loaded({"jshard": MESH, **signals}):
        try:
            return check_promises(ledger, configuration())
        except JShardError as error:
            return [each.replace(" (<dict>)", "") for each in str(error).splitlines()]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line()], {"all_reduce": 1}),
        (
            [line(signal="-"), line(), line(count=2), line("all_gather"), line("permute"), line(signal="b")],
            {"all_reduce": 3, "bytes": 1536 * 3 + 768 + 1024},
        ),
        ([line()], {"bytes": 1537, "permute": 0}),
        ([], {"all_reduce": 0, "bytes": 0}),
    ],
    ids=["count", "counts and bytes", "fewer bytes", "nothing"],
)
def test_a_promise_is_kept(lines, expected):
    assert told(Ledger(tuple(lines)), a=expected, b={}) == len(expected)


def test_a_promise_of_a_signal_whose_name_sorts_before_a_dash_is_kept():
    assert told(Ledger((line(signal="+a"),)), **{"+a": {"all_reduce": 1}}) == 1


@pytest.mark.parametrize(
    ("lines", "expected", "fault"),
    [
        ([line()], {"all_reduce": 2}, "2 all_reduce, and 1 is asked for; write all_reduce: 1"),
        ([], {"permute": 1}, "1 permute, and 0 are asked for; write permute: 0"),
        ([line("permute", 2)], {"permute": 3}, "3 permute, and 2 are asked for; write permute: 2"),
        ([line("permute", 2)], {"permute": 1}, "1 permute, and 2 are asked for; write permute: 2"),
        (
            [line()],
            {"bytes": 1535},
            "at most 1,535 bytes on the wire per device, and 1,536 are asked for; write bytes: 1536",
        ),
    ],
    ids=["fewer", "none", "fewer of a later name", "more", "bytes"],
)
def test_a_promise_that_is_broken_is_told_with_what_is_asked_for(lines, expected, fault):
    assert told(Ledger(tuple(lines)), a=expected) == [f'signal "a" expects {fault}, or see jshard explain']


@pytest.mark.parametrize(("many", "more"), [(1, ""), (2, " and 1 more"), (3, " and 2 more")])
def test_what_is_left_to_the_compiler_breaks_the_promise_of_its_place_alone(many, more):
    assert told(Ledger((), left=(left("b"), left("-"), left("+a"))), a={"all_reduce": 0}, b={}, **{"+a": {}}) == 1
    ledger = Ledger((line(signal="a1"), line(signal="a3")), left=(*[left("a2")] * many, left("a4")))
    faults = told(ledger, a_any={"all_reduce": 2})
    assert isinstance(faults, list)
    promise = "expects 2 all_reduce, and 1 is asked for; write all_reduce: 1, or see jshard explain"
    found = "\n".join(faults)
    assert f'signal "a1" {promise}' in found and f'signal "a3" {promise}' in found
    assert 'signal "a4" expects a count, but only the compiler decides what rev over data moves' in found
    assert (
        f'signal "a2" expects a count, but only the compiler decides what rev over data{more} moves; do it inside '
        in found
    )


@pytest.mark.parametrize(
    ("signal", "who"),
    [("-", "outside every signal"), ("+a", 'under signal "+a" (a.yaml:7)'), ("mlp", 'under signal "mlp" (a.yaml:7)')],
)
def test_a_budget_is_held_to_the_byte_and_names_who_holds_most(signal, who):
    ledger = Ledger((), memory=(Resident(None, "head", 40), Resident(Location("a.yaml", 7), signal, 60)))
    for budget, fault in [
        (100, None),
        (
            99,
            f"jshard.budget (<dict>) is 99 B, and 100 B are at rest on each device, 60 B of it {who}; write budget: 100, or "
            "split more of it: store: data",
        ),
    ]:
        with cases.loaded({"jshard": {**MESH, "budget": budget}}):
            assert over_budget(ledger, configuration()) == fault
