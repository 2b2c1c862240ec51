"""Which texts run next: one queue of tokenised texts over all waiting requests.

Requests share the engine by tokens, as in start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM
1996). Virtual time is how many tokens each waiting request would have been served, had all been
served equally. A text's start tag is the virtual time of its arrival plus the tokens of its request
before it, and the lowest tag leads the next chunk. So a short request never waits for more of a
long one than is the long one's share, and the long one gets its share all the same. Where that is
thin, age steps in: every other chunk may be led by the request that has waited longest without
being served.

The leading text decides the chunk's length; texts of the same or nearly the same length fill it
up, whatever request they belong to. Texts that are not due yet, those of a long request beyond its
share, only fill it up to an efficient size: short requests shall not wait for them. Nothing ever
waits for a fuller chunk.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Sequence

import attrs

from .cost_model import CostModel
from .padding import GPU_PADDING, PaddingRule
from .ports import Clock

AGING_SECONDS = 2.0
"""A request that was not served for so long may lead every other chunk."""

EFFICIENT_POSITIONS = 512
"""Rows × tokens that keep a processor busy; beyond them, time grows in proportion."""

_FIRST_OF_ALL = -1.0
"""Start tag of urgent texts; no other is negative."""


@attrs.frozen
class QueuedText:
    """One waiting text: `index` is its place in its request, `tokens` its length."""

    request: int
    index: int
    tokens: int


@attrs.frozen
class ScheduledChunk:
    """Texts, of any requests of one group, that share the next forward pass.

    `texts`: the one that led the choice first.
    `max_tokens`: length that every row is padded to.
    """

    texts: tuple[QueuedText, ...]
    max_tokens: int

    def __len__(self) -> int:
        return len(self.texts)


_ByLength = list[tuple[int, int]]
"""Sorted tokens and sequence numbers of texts."""


@attrs.define(eq=False)
class _Draft:
    """A chunk in the making: sequence numbers, and lengths of the shortest and the longest."""

    lead_tokens: int
    chosen: dict[int, None]
    shortest: int
    longest: int


@attrs.frozen
class _Rule:
    """What may share a chunk."""

    cost_model: CostModel
    padding: PaddingRule

    def allows(self, count: int, shortest: int, longest: int) -> bool:
        return self.padding.allows(shortest, longest) and self.cost_model.fits(count, longest)


@attrs.define(eq=False)
class _Request:
    """A request's waiting texts by sequence number, lowest start tag first."""

    number: int
    group: Hashable
    served_at: float
    deadline: float | None
    waiting: OrderedDict[int, QueuedText] = attrs.field(factory=OrderedDict)


class Scheduler:
    """The queue and its policy; deterministic, and not safe to share between threads by itself."""

    def __init__(self, clock: Clock, aging_seconds: float = AGING_SECONDS) -> None:
        self._clock = clock
        self._aging_seconds = aging_seconds
        # The request that was served longest ago comes first.
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._owners: dict[int, _Request] = {}
        self._by_start: list[tuple[float, int, int]] = []
        self._not_due: list[tuple[float, int]] = []
        self._due: defaultdict[Hashable, _ByLength] = defaultdict(list)
        self._all: defaultdict[Hashable, _ByLength] = defaultdict(list)
        self._deadlines: list[tuple[float, int]] = []
        self._next_request = 0
        self._next_sequence = 0
        self._virtual_time = 0.0
        self._age_led_last = False
        self._waiting_tokens = 0

    @property
    def waiting_texts(self) -> int:
        """Texts that nobody has taken yet."""
        return len(self._owners)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of these texts."""
        return self._waiting_tokens

    @property
    def has_urgent(self) -> bool:
        """Urgent texts wait; the next chunk is theirs."""
        first = self._first_by_start()
        return first is not None and first[0] == _FIRST_OF_ALL

    def submit(
        self,
        lengths: Sequence[int],
        *,
        group: Hashable = None,
        deadline: float | None = None,
        urgent: bool = False,
    ) -> int:
        """Queue a request's texts; returns the number by which it is known here.

        Args:
            lengths: tokens of each text.
            group: texts of different groups never share a chunk.
            deadline: time on the clock from which nobody waits for the texts any more.
            urgent: goes before everything else, whatever its age.
        """
        request = _Request(self._next_request, group, self._clock(), deadline)
        self._next_request += 1
        self._requests[request.number] = request
        start = self._virtual_time
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            tokens, sequence = lengths[index], self._next_sequence
            self._next_sequence += 1
            request.waiting[sequence] = QueuedText(request.number, index, tokens)
            self._owners[sequence] = request
            tag = _FIRST_OF_ALL if urgent else start
            heapq.heappush(self._by_start, (tag, tokens, sequence))
            start += tokens
            heapq.heappush(self._not_due, (tag, sequence))
            insort(self._all[group], (tokens, sequence))
            self._waiting_tokens += tokens
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.number))
        self._forget_if_served(request)
        return request.number

    def cancel(self, request: int) -> int:
        """Remove what is still waiting of a request; returns how many texts that were."""
        known = self._requests.get(request)
        if known is None:
            return 0
        removed = list(known.waiting)
        for sequence in removed:
            self._remove(sequence)
        return len(removed)

    def expire(self) -> list[int]:
        """Remove the requests whose deadline has come; returns their numbers."""
        now = self._clock()
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if self.cancel(number):
                expired.append(number)
        return expired

    def take(
        self,
        cost_model: CostModel,
        max_positions: int | None = None,
        top_up_positions: int = EFFICIENT_POSITIONS,
        padding: PaddingRule = GPU_PADDING,
    ) -> ScheduledChunk | None:
        """Remove and return the next chunk; None only if nothing waits.

        A text that fits nowhere gets a chunk of its own.

        Args:
            cost_model: decides what fits the workspace.
            max_positions: limit of rows × padded length, which bounds the chunk's time.
            top_up_positions: limit up to which texts that are not due may fill the chunk while
                other requests wait.
            padding: decides which lengths may share the chunk.
        """
        self.expire()
        self._let_fall_due()
        lead = self._choose_lead()
        if lead is None:
            return None
        limit = math.inf if max_positions is None else max_positions
        rule = _Rule(cost_model, padding)
        chosen = self._fill(lead, rule, limit, min(limit, top_up_positions))
        now, sharers = self._clock(), len(self._requests)
        texts = []
        for sequence in chosen:
            owner = self._owners[sequence]
            owner.served_at = now
            self._requests.move_to_end(owner.number)
            texts.append(self._remove(sequence))
        self._virtual_time += sum(text.tokens for text in texts) / sharers
        return ScheduledChunk(tuple(texts), max(text.tokens for text in texts))

    def _choose_lead(self) -> int | None:
        first = self._first_by_start()
        if first is None:
            return None
        start, sequence = first
        if start == _FIRST_OF_ALL:
            return sequence
        oldest = next(iter(self._requests.values()))
        is_aged = self._clock() - oldest.served_at >= self._aging_seconds
        self._age_led_last = is_aged and not self._age_led_last
        return next(iter(oldest.waiting)) if self._age_led_last else sequence

    def _first_by_start(self) -> tuple[float, int] | None:
        """The lowest start tag of all that wait, and whose it is."""
        while self._by_start and self._by_start[0][-1] not in self._owners:
            heapq.heappop(self._by_start)
        if not self._by_start:
            return None
        start, _, sequence = self._by_start[0]
        return start, sequence

    def _let_fall_due(self) -> None:
        while self._not_due and self._not_due[0][0] <= self._virtual_time:
            _, sequence = heapq.heappop(self._not_due)
            if owner := self._owners.get(sequence):
                insort(self._due[owner.group], (owner.waiting[sequence].tokens, sequence))

    def _fill(self, lead: int, rule: "_Rule", limit: float, top_up_limit: float) -> Collection[int]:
        """The lead and its neighbours in length, nearest first, while they fit."""
        owner = self._owners[lead]
        tokens = owner.waiting[lead].tokens
        draft = _Draft(tokens, {lead: None}, tokens, tokens)
        due, everything = self._due[owner.group], self._all[owner.group]
        is_due = _place(due, tokens, lead) is not None  # else nothing is, or age made it lead
        if not is_due or len(self._requests) == 1:
            _extend(draft, everything, rule, limit)
        else:
            _extend(draft, due, rule, limit)
            _extend(draft, everything, rule, top_up_limit)
        return draft.chosen

    def _remove(self, sequence: int) -> QueuedText:
        owner = self._owners.pop(sequence)
        text = owner.waiting.pop(sequence)
        for lists in (self._due, self._all):
            by_length = lists[owner.group]
            if (place := _place(by_length, text.tokens, sequence)) is not None:
                del by_length[place]
            if not by_length:
                del lists[owner.group]
        self._waiting_tokens -= text.tokens
        self._forget_if_served(owner)
        if len(self._by_start) > 2 * len(self._owners) + 64:  # mostly texts that are gone
            self._by_start = [tag for tag in self._by_start if tag[-1] in self._owners]
            heapq.heapify(self._by_start)
            self._not_due = [tag for tag in self._not_due if tag[-1] in self._owners]
            heapq.heapify(self._not_due)
        return text

    def _forget_if_served(self, request: _Request) -> None:
        if request.waiting:
            return
        del self._requests[request.number]
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # mostly requests that are gone
            self._deadlines = [entry for entry in self._deadlines if entry[-1] in self._requests]
            heapq.heapify(self._deadlines)


def _place(by_length: _ByLength, tokens: int, sequence: int) -> int | None:
    place = bisect_left(by_length, (tokens, sequence))
    is_there = place < len(by_length) and by_length[place][1] == sequence
    return place if is_there else None


def _extend(draft: _Draft, by_length: _ByLength, rule: _Rule, max_positions: float) -> None:
    """Add the nearest in length until one does not fit."""
    right = bisect_left(by_length, (draft.lead_tokens, 0))
    left = right - 1
    while left >= 0 or right < len(by_length):
        is_shorter_nearer = right == len(by_length) or (
            left >= 0
            and draft.lead_tokens - by_length[left][0] <= by_length[right][0] - draft.lead_tokens
        )
        tokens, sequence = by_length[left if is_shorter_nearer else right]
        if is_shorter_nearer:
            left -= 1
        else:
            right += 1
        if sequence in draft.chosen:
            continue
        shortest, longest = min(draft.shortest, tokens), max(draft.longest, tokens)
        count = len(draft.chosen) + 1
        if count * longest > max_positions or not rule.allows(count, shortest, longest):
            return
        draft.chosen[sequence] = None
        draft.shortest, draft.longest = shortest, longest
