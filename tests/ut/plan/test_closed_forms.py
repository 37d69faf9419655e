"""The closed forms of bubble and memory that are published for the schedules, and what pre-firing gains.

Each test is one form for one number of ranks p and the numbers of micro-batches m = p..4p for which the form holds; its
id names the form and where it was published. The simulator and the schedules must meet them to 1e-9.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import pytest

from pipeline.plan import Costs, Plan, insert_recompute, make_plan, simulate

EXACT = 1e-9
RANKS = range(2, 17)
EVEN = Costs()
UNEVEN = Costs(forward=1.25, backward_input=1.5, backward_weight=0.75, recompute=0.5)

GPIPE = "Huang-2019-GPipe"
ONE_F_ONE_B = "Narayanan-2021-section-2.2.1"
INTERLEAVED = "Narayanan-2021-section-2.2.2"
BREADTH_FIRST = "Lamy-Poirier-2023-breadth-first"
ZB_H1 = "Qi-2023-zero-bubble-section-2.1"
ZB_H2 = "Qi-2023-zero-bubble-section-2.2"
ZB_V = "Qi-2023-zero-bubble-section-6"
CONTROLLABLE = "Qi-2024-controllable-memory-section-3"
DUALPIPE = "DeepSeek-2025-DualPipeV"


def any_number(p: int, m: int) -> bool:
    """The form holds for every number of micro-batches."""
    return True


def whole_groups(p: int, m: int) -> bool:
    """The interleaved schedule is drawn for groups of p micro-batches."""
    return m % p == 0


def v_is_filled(p: int, m: int) -> bool:
    """ZB-V and ZB-H2 are drawn for as many micro-batches as the first rank warms up with."""
    return m >= 2 * p - 1


def both_ways_filled(p: int, m: int) -> bool:
    """DualPipeV is drawn for at least 2p micro-batches."""
    return m >= 2 * p


class Form(NamedTuple):
    """One published form: what is measured, its text, its value, and for which m it holds."""

    schedule: str
    text: str
    source: str
    measure: str
    value: Callable[[int, int, Costs], float]
    holds: Callable[[int, int], bool] = any_number
    costs: Costs = EVEN
    virtual: int | None = None
    least_ranks: int = 2


def one_step(costs: Costs) -> float:
    """f + b + w."""
    return costs.forward + costs.backward_input + costs.backward_weight


def plain_bubble(p: int, m: int, costs: Costs) -> float:
    """(p-1)(f+b+w)."""
    return (p - 1) * one_step(costs)


def zb_h1_bubble(p: int, m: int, costs: Costs) -> float:
    """(p-1) max(f, f+b-w), for w <= f or b <= f: else p chunks cannot fill the wait for the first gradient."""
    f, b, w = costs.forward, costs.backward_input, costs.backward_weight
    return (p - 1) * max(f, f + b - w)


def dualpipe_bubble(p: int, m: int, costs: Costs) -> float:
    """(p-1)(FB+B-3w), for f = b >= w: that is how long the figure's ramps are."""
    pair = one_step(costs) if costs.overlapped is None else costs.overlapped
    return (p - 1) * (pair + costs.backward_input - 2 * costs.backward_weight)


BUBBLES = [
    Form("gpipe", "(p-1)(f+b+w)", GPIPE, "bubble", plain_bubble, costs=UNEVEN),
    Form("1f1b", "(p-1)(f+b+w)", ONE_F_ONE_B, "bubble", plain_bubble, costs=UNEVEN),
    Form("interleaved", "(p-1)(f+b+w)", INTERLEAVED, "bubble", plain_bubble, whole_groups, UNEVEN, 2),
    Form("interleaved", "(p-1)(f+b+w)-v=3", INTERLEAVED, "bubble", plain_bubble, whole_groups, UNEVEN, 3),
    Form("bfs", "(p-1)(f+b+w)", BREADTH_FIRST, "bubble", plain_bubble, any_number, UNEVEN, 2),
    Form("zb-h1", "(p-1)max(f,f+b-w)", ZB_H1, "bubble", zb_h1_bubble, costs=UNEVEN),
    Form("zb-h1", "(p-1)max(f,f+b-w)-b<w", ZB_H1, "bubble", zb_h1_bubble, costs=Costs(1.25, 1.0, 1.5)),
    Form("zb-h2", "p-1", ZB_H2, "bubble", lambda p, m, costs: p - 1, v_is_filled),
    Form("zb-h2", "0", ZB_H2, "span_bubble", lambda p, m, costs: 0, v_is_filled),
    Form("zb-v", "p-1", ZB_V, "bubble", lambda p, m, costs: p - 1, v_is_filled),
    Form("zb-v", "0", ZB_V, "span_bubble", lambda p, m, costs: 0, v_is_filled),
    Form(
        "v-half", "6ceil(p/2)-7", CONTROLLABLE, "span_bubble", lambda p, m, costs: 6 * ((p + 1) // 2) - 7, least_ranks=3
    ),
    Form(
        "v-min",
        "4p-5-or-4p-7",
        CONTROLLABLE,
        "span_bubble",
        lambda p, m, costs: 4 * p - (5 if p % 3 else 7),
    ),
    Form("dualpipe-v", "(p-1)(FB+B-3w)", DUALPIPE, "bubble", dualpipe_bubble, both_ways_filled),
    Form(
        "dualpipe-v",
        "(p-1)(FB+B-3w)-long-pair",
        DUALPIPE,
        "bubble",
        dualpipe_bubble,
        both_ways_filled,
        Costs(1.25, 1.25, 0.5, overlapped=3.5),
    ),
]

# The most chunks that rank i holds. What no rank can exceed is m chunks of each of its stages.
PEAKS = {
    ("gpipe", "m", GPIPE): (lambda p, m, i: m, any_number),
    ("1f1b", "min(m,p-i)", ONE_F_ONE_B): (lambda p, m, i: min(m, p - i), any_number),
    ("interleaved", "p(v-1)+2(p-1-i)+1", INTERLEAVED): (
        lambda p, m, i: min(2 * m, p + 2 * (p - 1 - i) + 1),
        whole_groups,
    ),
    ("bfs", "vm", BREADTH_FIRST): (lambda p, m, i: 2 * m, any_number),
    ("zb-h1", "p", ZB_H1): (lambda p, m, i: p, any_number),
    ("zb-h2", "2p-1", ZB_H2): (lambda p, m, i: 2 * p - 1, v_is_filled),
    ("zb-v", "2p", ZB_V): (lambda p, m, i: 2 * p, v_is_filled),
    ("dualpipe-v", "2p+1", DUALPIPE): (lambda p, m, i: 2 * p + 1, both_ways_filled),
}

LARGEST_PEAKS = {
    ("v-half", "2floor((p+2)/2)", CONTROLLABLE): lambda p: 2 * ((p + 2) // 2),
    ("v-min", "2floor((p+4)/3)", CONTROLLABLE): lambda p: 2 * ((p + 4) // 3),
}


def numbers(p: int, holds: Callable[[int, int], bool]) -> list[int]:
    """The m from p to 4p for which a form holds."""
    return [m for m in range(p, 4 * p + 1) if holds(p, m)]


def name_of(form: Form) -> str:
    return f"{form.schedule}:{form.measure}={form.text}:{form.source}"


@pytest.mark.parametrize(
    ("form", "p"),
    [pytest.param(form, p, id=f"{name_of(form)}:p={p}") for form in BUBBLES for p in RANKS if p >= form.least_ranks],
)
def test_the_bubble_is_the_published_one(form, p):
    for m in numbers(p, form.holds):
        simulation = simulate(make_plan(form.schedule, p, m, form.virtual), form.costs)
        assert getattr(simulation, form.measure) == pytest.approx(form.value(p, m, form.costs), abs=EXACT), (p, m)


@pytest.mark.parametrize("p", RANKS, ids="p={}".format)
@pytest.mark.parametrize("row", PEAKS, ids=":".join)
def test_every_rank_holds_the_published_number_of_chunks(row, p):
    chunks, holds = PEAKS[row]
    for m in numbers(p, holds):
        assert peak_chunks(make_plan(row[0], p, m)) == [chunks(p, m, i) for i in range(p)], m


@pytest.mark.parametrize("p", RANKS, ids="p={}".format)
@pytest.mark.parametrize("row", LARGEST_PEAKS, ids=":".join)
def test_the_fullest_rank_holds_the_published_number_of_chunks(row, p):
    for m in numbers(p, any_number):
        assert max(peak_chunks(make_plan(row[0], p, m))) == LARGEST_PEAKS[row](p), m


def peak_chunks(plan: Plan) -> list[int]:
    """The most chunks that each rank holds, counted here: from F to B or W."""
    peaks = []
    for row in plan.rows:
        live = peak = 0
        for action in row:
            kinds = [part.kind.value for part in action.parts]
            live += kinds.count("F")
            peak = max(peak, live)
            live -= kinds.count("B") + kinds.count("W")
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("p", RANKS, ids="p={}".format)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_lazy_recompute_joins_the_backward(schedule, p):
    """(m+p-1)(f+b+w+r)."""
    for m in numbers(p, any_number):
        makespan = simulate(insert_recompute(make_plan(schedule, p, m), "lazy"), UNEVEN).makespan
        assert makespan == pytest.approx((m + p - 1) * (one_step(UNEVEN) + UNEVEN.recompute), abs=EXACT), m


@pytest.mark.parametrize("p", RANKS, ids="p={}".format)
@pytest.mark.parametrize(
    ("schedule", "costs", "holds"),
    [
        ("gpipe", UNEVEN, any_number),
        ("1f1b", UNEVEN, any_number),
        ("zb-h1", UNEVEN, any_number),
        ("interleaved", UNEVEN, whole_groups),
        ("zb-v", Costs(recompute=0.5), v_is_filled),
        ("zb-v", Costs(recompute=1.0), v_is_filled),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "(p-1)r"),
)
def test_pre_firing_gains_exactly_r_for_every_rank_but_one(schedule, costs, holds, p):
    for m in numbers(p, holds):
        plan = make_plan(schedule, p, m)
        lazy, prefired = (simulate(insert_recompute(plan, mode), costs).makespan for mode in ("lazy", "prefire"))
        assert lazy - prefired == pytest.approx((p - 1) * costs.recompute, abs=EXACT), m


@pytest.mark.parametrize("p", RANKS, ids="p={}".format)
def test_a_pair_shorter_than_its_parts_leaves_the_published_bubble_on_the_last_rank(p):
    """The last rank overlaps most, so it is not the busiest when pairs are short. The form counts its idle time."""
    costs = Costs(overlapped=2.5)
    for m in numbers(p, both_ways_filled):
        simulation = simulate(make_plan("dualpipe-v", p, m), costs)
        idle = simulation.makespan - simulation.busy[-1]
        assert idle == pytest.approx(dualpipe_bubble(p, m, costs), abs=EXACT), m
