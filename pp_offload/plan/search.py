"""Search of the best way for one limit: groups that stay, layers recomputed, and bounds.

    Search(predictor, limit_bytes).best()

    proposals = fill(as_saved(tapes))               # of one rank
    stay = next(proposals)                          # groups to try
    proposals.send(peak_with(stay) <= limit_bytes)  # and so on, until it returns those that stay

A fill predicts nothing: it proposes groups that stay, and learns whether these fit. So all ranks
are filled at the same time, each from the peaks of the same predicted steps.

NOTE [ No plan is faster ]
    The step without offload is a lower bound. Each rank runs its operators in the same order with
    any plan; a plan adds waits, and a wait never makes an operator begin earlier. So the search
    ends with a plan whose step is as short.

NOTE [ When to recompute ]
    Recomputation always takes time, a copy only if the link is overloaded. So ways without
    recomputation are tried first. If the step could be shorter with a single layer recomputed,
    ranks that are above the limit without offload recompute layers: as few as suffice, but no fewer
    than the number from which more layers do not make compute and its waits shorter. The number is
    searched on all ranks at once, by halves, because the number of one rank has little effect on
    other ranks.

NOTE [ Which bounds ]
    Orders are tried within the bounds that an engine chooses if all groups leave. If the link is
    overloaded, compute waits with any bounds, and copies in flight take room in which groups could
    stay. So the best order is also tried within parts of these bounds, and within those that an
    engine would choose for the groups that leave in the best way so far.

NOTE [ Spread out ]
    The link is always busy if groups that leave are spread over a forward, between groups that
    stay. If groups that leave are saved one after the other, the link is first overloaded, and then
    idle. So groups stay in the order of the reversed bits of their positions, as with an engine's
    limit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import mul

from pp_offload._groups.which_stay import reversed_bits
from pp_offload.config import AUTO
from pp_offload.plan.pipeline import Bounds, Choice, Nums, Predictor, RankChoice, Tried, nums_of
from pp_offload.plan.tape import Candidate, RankTapes, first_saved
from pp_offload.simulate.pipeline import RankStep

WORTH_IT = 1e-3  # part of a step that another way must be able to save to be tried
NEARLY = 0.02  # ways whose short step is longer than the shortest by this part are dropped
SAME = 1e-6  # steps that differ by at most this part count as equal
NUM_IMPROVED = 4  # number of the best ways in which single groups are tried
MOST_RUNS = 8  # of a fill: if no group of a kind fits, groups of another kind may
# Parts of the bounds that an engine chooses by itself, see NOTE [ Which bounds ]. With the last
# part one group at a time is in flight.
BOUNDS = (1.0, 0.5, 0.0)


# Groups that stay on a rank


def as_saved(tapes: RankTapes) -> list[Candidate]:
    """Sort groups, the largest first; of equal groups, the last saved: backward needs it first."""
    return sorted(first_saved(tapes), reverse=True)


def largest_first(tapes: RankTapes) -> list[Candidate]:
    """Sort groups, the largest first; of equal groups, the first saved first."""
    return sorted(first_saved(tapes), key=lambda group: -group.nbytes)


def spread_out(tapes: RankTapes) -> list[Candidate]:
    """Sort groups in the order of NOTE [ Spread out ]."""
    last_first = first_saved(tapes)[::-1]
    order = partial(reversed_bits, num=len(last_first))
    return [last_first[index] for index in sorted(range(len(last_first)), key=order)]


def fill(groups: Sequence[Candidate]) -> Generator[Sequence[Candidate], bool, Sequence[Candidate]]:
    """Search the groups that stay on one rank, in this order. Yields groups to try, is sent whether
    they fit, and returns the groups that stay; none if the peak is above the limit even if all
    groups leave.

    As many groups as fit are added; then more groups, without the kinds that did not fit.
    """
    if (yield groups):
        return groups
    stay, more = list[Candidate](), list(groups)
    if not (yield stay):
        return stay
    for _ in range(MOST_RUNS):
        fits, too_many = 0, len(more)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if (yield [*stay, *more[:middle]]):
                fits = middle
            else:
                too_many = middle
        stay += more[:fits]
        more = [group for group in more[fits:] if group.kind != more[fits].kind]
        # All may have a lower peak than fewer: less is reloaded.
        if not more or (yield [*stay, *more]):
            return [*stay, *more]
    return stay


# Ways

# Function that sorts groups in the order in which they are chosen to stay.
Order = Callable[[RankTapes], list[Candidate]]
ORDERS: tuple[Order, ...] = (as_saved, spread_out, largest_first, first_saved)


@dataclass(frozen=True)
class Search:
    """Search of the best way for one limit."""

    predictor: Predictor
    limit_bytes: int

    def best(self) -> Tried | None:
        """Return the shortest way that fits as an engine follows it; None if no way fits."""
        fitting = self._each_settled(self._ways(), self.predictor.short)
        if self.predictor.has_few and fitting and self._may_be_shorter(fitting[0]):
            improved = map(self._improved, fitting[:NUM_IMPROVED])
            fitting = sorted([*improved, *fitting[NUM_IMPROVED:]], key=lambda way: way.cost)
        shortest_s = fitting[0].step.seconds if fitting else 0.0
        nearly = [way for way in fitting if not is_longer(way.step.seconds, shortest_s, NEARLY)]
        return self._best_proven(nearly) or self._best_proven(fitting[len(nearly) :])

    def _best_proven(self, ways: Sequence[Tried]) -> Tried | None:
        """Return the shortest of these ways in steps with all microbatches."""
        best: Tried | None = None
        for way in self._each_settled(ways, self.predictor.whole):
            if best is not None and best.cost <= way.cost:
                break
            proven = self._settled(way, self.predictor.proven)
            if proven is not None and (best is None or proven.cost < best.cost):
                best = proven
        return best

    def _each_settled(self, ways: Iterable[Tried], play: Callable[[Choice], Tried]) -> list[Tried]:
        """Settle each way, and return those that fit, the shortest first."""
        settled = [self._settled(way, play) for way in ways]
        fitting = {id(way.step): way for way in settled if way is not None}  # each choice once
        return sorted(fitting.values(), key=lambda way: way.cost)

    def _settled(self, way: Tried, play: Callable[[Choice], Tried]) -> Tried | None:
        """Take more and more groups off ranks above the limit until all fit; None if none can."""
        choice, num = way.choice, 1
        while not self._fits(tried := play(choice)):
            less = tuple(
                old if self._fits(rank) else old._replace(stay=old.stay[:-num])
                for old, rank in zip(choice, tried.step.ranks, strict=True)
            )
            if less == choice:
                return None
            choice, num = less, 2 * num
        return tried

    def _fits(self, step: Tried | RankStep) -> bool:
        return step.peak_bytes <= self.limit_bytes

    def _best_of(self, ways: Sequence[Tried]) -> Tried:
        """Return the shortest way that fits; if none fits, the shortest of all."""
        return min(ways, key=lambda way: (not self._fits(way), way.cost))

    def _ways(self) -> list[Tried]:
        """Try ways, first without recomputed layers. Some may be above the limit."""
        predictor = self.predictor
        ways = self._filled(predictor.no_layers)
        best = self._best_of(ways)
        # Ranks that are above the limit if all groups stay may recompute their layers.
        without = predictor.without_offload(predictor.no_layers)
        needy = [not self._fits(rank) for rank in without.ranks]
        layers = tuple(map(mul, predictor.all_layers, needy))
        ranks = range(len(layers))
        single = (tuple(int(each == rank) for each in ranks) for rank in ranks if layers[rank])
        if self._may_be_shorter(best) and any(self._may_be_shorter(best, nums) for nums in single):
            ways += self._filled(self._enough(layers))
            ways.append(self._fill(layers, predictor.first_bounds, ORDERS[0]))
        return [*ways, self.mixed(ways)]

    def _filled(self, nums: Nums) -> list[Tried]:
        """Fill the ranks in each order, then within other bounds, while a way may be shorter."""
        predictor, filled = self.predictor, list[Tried]()
        for order in ORDERS:
            filled.append(self._fill(nums, predictor.first_bounds, order))
            if not self._may_be_shorter(filled[-1]):
                return filled
        if AUTO not in (predictor.config.max_in_flight_bytes, predictor.config.prefetch_bytes):
            return filled
        order = ORDERS[filled.index(self._best_of(filled))]
        orders = ORDERS if predictor.has_few else (order,)
        for part in BOUNDS[1:]:
            bounds = _scaled(predictor.first_bounds, part)
            filled += [self._fill(nums, bounds, each) for each in orders]
        own = predictor.own_bounds(self._best_of(filled).choice)
        return [*filled, self._fill(nums, own, order)]

    def _may_be_shorter(self, way: Tried, nums: Nums | None = None) -> bool:
        """Whether another way, with ``nums`` layers recomputed or as many, may fit in place of one
        that does not, or be much shorter; see NOTE [ No plan is faster ].
        """
        if not self._fits(way):
            return True
        nums = nums or nums_of(way.choice)
        least_s = self.predictor.without_offload(nums, is_short=True).seconds
        return is_longer(way.step.seconds, least_s, WORTH_IT)

    def mixed(self, ways: Sequence[Tried]) -> Tried:
        """Combine for each rank its choice from the way in which the rank costs least."""
        choice = tuple(
            min(ways, key=lambda way: self._cost(way.step.ranks[rank])).choice[rank]
            for rank in range(len(self.predictor.tapes))
        )
        return self.predictor.short(choice)

    def _improved(self, way: Tried) -> Tried:
        """Exchange a group on a rank, as long as that makes the step shorter."""
        while True:
            neighbours = map(self.predictor.short, self._neighbours(way.choice))
            best = self._best_of([way, *neighbours])
            if not is_longer(way.step.seconds, best.step.seconds, SAME):
                return way
            way = best

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices with one more group that stays, one less, or one exchanged."""
        for rank, tapes in enumerate(self.predictor.tapes_of(nums_of(choice))):
            stay, every = choice[rank].stay, [group.place for group in as_saved(tapes)]
            for out in (None, *stay):
                rest = tuple(place for place in stay if place != out)
                for more in ((), *((place,) for place in every if place not in stay)):
                    changed = choice[rank]._replace(stay=rest + more)
                    yield (*choice[:rank], changed, *choice[rank + 1 :])

    def _fill(self, nums: Nums, bounds: Sequence[Bounds], order: Order) -> Tried:
        """Keep as much on each rank as fits, as if other ranks did not change. Return the shortest
        way of the search: sometimes it keeps less than the last one.
        """
        searches = dict(enumerate(fill(order(tapes)) for tapes in self.predictor.tapes_of(nums)))
        stays, ways = [next(search) for search in searches.values()], list[Tried]()
        while True:
            places = [tuple(group.place for group in stay) for stay in stays]
            choice = tuple(map(RankChoice, nums, bounds, places))
            ways.append(self.predictor.short(choice))
            if not searches:
                return self._best_of(ways[::-1])
            for rank, search in [*searches.items()]:
                try:
                    stays[rank] = search.send(self._fits(ways[-1].step.ranks[rank]))
                except StopIteration as end:
                    stays[rank] = end.value
                    del searches[rank]

    def _enough(self, layers: Nums) -> Nums:
        """Search how many of ``layers`` each rank recomputes; see NOTE [ When to recompute ]."""
        too_few = [-(not above) for above, _ in self._costs(self.predictor.no_layers)]
        enough, costs = [*layers], self._costs(layers)
        while any(most - few > 1 for few, most in zip(too_few, enough, strict=True)):
            trial = tuple((few + most + 1) // 2 for few, most in zip(too_few, enough, strict=True))
            for rank, cost in enumerate(self._costs(trial)):
                if cost > costs[rank]:
                    too_few[rank] = min(trial[rank], enough[rank] - 1)
                else:
                    enough[rank], costs[rank] = trial[rank], cost
        return tuple(enough)

    def _costs(self, nums: Nums) -> list[tuple[int, float]]:
        """Fill the ranks in one order, and return the costs of all ranks."""
        filled = self._fill(nums, self.predictor.first_bounds, ORDERS[0])
        return list(map(self._cost, filled.step.ranks))

    def _cost(self, rank: RankStep) -> tuple[int, float]:
        """Return a rank's bytes above the limit, and its seconds without waits for other ranks."""
        seconds = rank.seconds - sum(rank.waited_s.values())
        return max(0, rank.peak_bytes - self.limit_bytes), float(f"{seconds:.6e}")


def lowest(predictor: Predictor) -> Tried:
    """Return the way with the lowest peak of those that keep or recompute all or nothing."""
    corners = [
        predictor.short(tuple(map(RankChoice, nums, _scaled(predictor.first_bounds, part), stays)))
        for nums in (predictor.no_layers, predictor.all_layers)
        for part in BOUNDS
        for stays in (repeat(()), [tapes.places for tapes in predictor.tapes_of(nums)])
    ]
    corners.append(Search(predictor, 0).mixed(corners))
    return predictor.proven(min(corners, key=lambda tried: tried.peak_bytes).choice)


def _scaled(bounds: Iterable[Bounds], part: float) -> list[Bounds]:
    """Scale both bounds, to at least 1: with 0 in flight compute would wait for each copy."""
    return [(max(1, int(part * flying)), max(1, int(part * ahead))) for flying, ahead in bounds]


def is_longer(seconds: float, other_s: float, part: float) -> bool:
    """Whether a step is longer than another one, by ``part`` of itself at least."""
    return other_s < seconds * (1 - part)
