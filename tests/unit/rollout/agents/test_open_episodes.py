"""How a driver hears, across processes, of the episodes that have ended."""

import asyncio
import gc

from rollout.agents.open_episodes import ANSWER_S, OpenByAttempt
from tests.support.fakes import now, run_virtual, settle


def test_who_asks_is_answered_when_fewer_are_open_than_are_known() -> None:
    async def main() -> None:
        opened = OpenByAttempt().of(17, 0)
        asked = asyncio.create_task(opened.below(8))
        for count in (9, 8):  # a greedy episode besides
            opened.tell(count)
            await settle()
            assert not asked.done()
        opened.tell(7)
        opened.tell(5)
        assert await asked == 5
        assert await opened.below(6) == 5

    run_virtual(main())


def test_one_may_ask_before_the_attempt_begins() -> None:
    async def main() -> None:
        by_attempt = OpenByAttempt()

        async def ask() -> int:
            return await by_attempt.of(17, 1).below(8)

        asked = asyncio.create_task(ask())
        await settle()
        by_attempt.of(17, 0).tell(1)  # of the attempt before
        by_attempt.of(17, 1).tell(3)
        assert await asked == 3
        gc.collect()
        assert not by_attempt._known, "nobody runs them, and nobody asks"

    run_virtual(main())


def test_without_news_one_is_answered_after_a_while() -> None:
    async def main() -> None:
        assert await OpenByAttempt().of(17, 0).below(8) == 8 and now() == ANSWER_S

    run_virtual(main())
