"""Searches at a server that speaks as Search-R1's does: an E5 index on GPUs, or `make retriever`."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from urllib.parse import urlsplit

import httpx

from rollout.environments.search.batches import Batches
from rollout.environments.search.documents import Found, RetrievalError, check_number, check_whole
from rollout.environments.search.wire import Form, read_answer, request_body

logger = logging.getLogger(__name__)
FIRST_PROBE_S, MAX_PROBE_S = 1.0, 30.0
"""The seconds between two probes: at first, and at most, twice as long each time."""
REMIND_S = 60.0
"""The seconds between two warnings about the same."""


class Outages:
    """Counts the failures of a server. After `max_failures` in a row it is down, until a probe succeeds. One that has
    never answered is down at its first failure: its name may be wrong."""

    def __init__(self, name: str, probe: Callable[[], Awaitable[str | None]], *, max_failures: int, timeout_s: float):
        """`probe` asks the server, and returns what is wrong, or None. `timeout_s`: how long searches wait for the end
        of an outage, counted from its beginning."""
        self._name, self._probe = name, probe
        self._max_failures, self._timeout_s = max_failures, timeout_s
        self._has_answered = False
        self._failures = self._unreported = 0
        self._since = self._reported_at = float("-inf")
        self._last_error = ""
        self._up: asyncio.Event | None = None
        self._probing: asyncio.Task[None] | None = None
        self.num_waiting = 0

    @property
    def is_down(self) -> bool:
        return self._up is not None

    def note(self, error: str | None) -> None:
        """Note the outcome of a call; None is success."""
        if error is None:
            self._failures, self._has_answered = 0, True
            return
        self._failures += 1
        self._unreported += 1
        self._last_error = error
        now = asyncio.get_running_loop().time()
        if self.is_down:
            return
        if self._failures >= (self._max_failures if self._has_answered else 1):
            self._since, self._up = now, asyncio.Event()
            text = "%s is down after %d failures in a row, the last with: %s. Searches wait for it, for up to %g s"
            logger.warning(text, self._name, self._failures, error, self._timeout_s)
            self._probing = asyncio.get_running_loop().create_task(self._probe_until_up())
        elif now >= self._reported_at + REMIND_S:
            logger.warning("%s: %d searches failed, the last with: %s", self._name, self._unreported, error)
            self._reported_at, self._unreported = now, 0

    async def over(self) -> None:
        """Wait until the server is up. Raises RetrievalError where the outage has lasted for `timeout_s` seconds."""
        if self._up is None:
            return
        self.num_waiting += 1
        try:
            async with asyncio.timeout_at(self._since + self._timeout_s):
                await self._up.wait()
        except TimeoutError:
            for_s = f"for more than down_timeout_s={self._timeout_s:g}"
            raise RetrievalError(f"{self._name} is down {for_s}: {self._last_error}") from None
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _probe_until_up(self) -> None:
        delay_s, reminded_at, clock = FIRST_PROBE_S, self._since, asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(delay_s)
            error = await self._probe()
            if error is None:
                break
            self._last_error = error
            delay_s = min(MAX_PROBE_S, 2 * delay_s)
            if clock() >= reminded_at + REMIND_S:
                reminded_at, down_s = clock(), clock() - self._since
                text = "%s is still down, for %.0f s now: %s. %d calls wait for it"
                logger.warning(text, self._name, down_s, error, self.num_waiting)
        logger.warning("%s is back after %.0f s; %d calls waited", self._name, clock() - self._since, self.num_waiting)
        self._failures, self._unreported, self._has_answered = 0, 0, True
        up, self._up = self._up, None
        assert up is not None
        up.set()


PROBE = "capital of France"
IDLE_S = 2.0
"""The seconds that an idle connection is kept: servers close them after five or more."""
MIB = 2**20
Question = tuple[str, int]
"""A query, and how many documents are wanted."""


@dataclass(eq=False)
class HttpRetriever:
    """A `Retriever` that asks a server. What comes too late, or cannot be read, is the `error` of what was found.

    Searches of concurrent episodes are sent together. While the server is down they wait, and raise RetrievalError
    where that takes too long: see `Outages`. Proxies of the environment are not used. Raises ValueError, which names
    the argument and what is allowed.

    Example:
        retriever = HttpRetriever("http://127.0.0.1:8000/retrieve", timeout_s=5.0)
        [found] = await retriever.search(["capital of France"], topk=3)
    """

    url: str
    """The address to POST to, such as "http://127.0.0.1:8000/retrieve"."""
    _: KW_ONLY
    form: str = "queries"
    """The form of a request: `queries`, a list, or `query`, one text."""
    timeout_s: float = 10.0
    """Seconds that a call may take."""
    batch_s: float = 0.005
    """Seconds that a query waits for others to be sent with, where form=queries."""
    max_batch: int = 64
    """Queries in one call, where form=queries."""
    max_in_flight: int = 64
    """Calls at once. A query beyond them waits for its turn."""
    cache_size: int = 10_000
    """Answers that are kept, those used last; 0 keeps none."""
    max_answer_mb: float = 16.0
    """MiB of an answer. A longer one is not read to its end."""
    max_failures: int = 8
    """Calls that fail one after another until the server is taken to be down; before it has ever answered, one."""
    down_timeout_s: float = 600.0
    """Seconds of an outage that searches wait. The loop's step_timeout_s must be longer."""
    transport: httpx.AsyncBaseTransport | None = None
    """A stand-in for the network."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"retriever.url={self.url}: must be such as http://127.0.0.1:8000/retrieve")
        if self.form not in [*Form]:
            raise ValueError(f"retriever.form={self.form}: must be one of {', '.join(Form)}")
        for name in ("timeout_s", "max_answer_mb", "down_timeout_s"):
            check_number(f"retriever.{name}", getattr(self, name), above=0)
        check_number("retriever.batch_s", self.batch_s, least=0)
        for name, least in (("max_batch", 1), ("max_in_flight", 1), ("max_failures", 1), ("cache_size", 0)):
            check_whole(f"retriever.{name}", getattr(self, name), least)
        limits = httpx.Limits(max_connections=self.max_in_flight, keepalive_expiry=IDLE_S)
        self._client = httpx.AsyncClient(
            transport=self.transport,
            headers={"content-type": "application/json", "accept-encoding": "identity"},
            timeout=None,
            limits=limits,
            trust_env=False,
        )
        self._form, self._cache = Form(self.form), OrderedDict[Question, Found]()
        self._outages = Outages(
            f"the retriever at {self.url}",
            self._probe,
            max_failures=self.max_failures,
            timeout_s=self.down_timeout_s,
        )
        alone = self._form is Form.query
        self._batches = Batches[Question, Found](
            self._ask,
            max_size=1 if alone else self.max_batch,
            max_running=self.max_in_flight,
            delay_s=0.0 if alone else self.batch_s,
        )

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return list(await asyncio.gather(*(self._answer(query.strip(), topk) for query in queries)))

    async def close(self) -> None:
        await self._batches.close()
        await self._outages.close()
        await self._client.aclose()

    async def _answer(self, query: str, topk: int) -> Found:
        question = query.encode(errors="replace").decode(), topk
        if not query:
            return Found()
        if question in self._cache:
            self._cache.move_to_end(question)
            return self._cache[question]
        result = await self._batches.answer(question)
        if result.error is None:
            self._cache[question] = result
            if len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return result

    async def _ask(self, batch: Sequence[Question]) -> list[Found]:
        """Answer a batch. A call that failed as the server went down is made again when it is back. Raises
        RetrievalError."""
        queries, topk = [query for query, _ in batch], max(topk for _, topk in batch)
        while True:
            await self._outages.over()
            results = await self._called(queries, topk)
            errors = [answer.error for answer in results if answer.error is not None]
            self._outages.note(errors[0] if len(errors) == len(results) else None)
            if not errors or not self._outages.is_down:
                return [
                    Found(result.documents[:k], result.error) for result, (_, k) in zip(results, batch, strict=True)
                ]

    async def _probe(self) -> str | None:
        [result] = await self._called([PROBE], 1)
        return result.error

    async def _called(self, queries: Sequence[str], topk: int) -> list[Found]:
        """Return the answers of one call; each query has its error where it failed."""
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await self._posted(request_body(self._form, queries, topk))
            return read_answer(body, len(queries), topk)
        except TimeoutError:
            error = f"no answer within timeout_s={self.timeout_s:g}"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        except ValueError as malformed:
            error = f"malformed: {malformed}"
        return [Found(error=error)] * len(queries)

    async def _posted(self, body: bytes) -> bytes:
        """Return the body of the answer. Raises httpx.HTTPError, and ValueError where it is none."""
        try:
            return await self._posted_once(body)
        except (
            httpx.ReadError,
            httpx.WriteError,
            httpx.RemoteProtocolError,
        ):  # the server had closed an idle connection
            return await self._posted_once(body)

    async def _posted_once(self, body: bytes) -> bytes:
        answer = bytearray()
        async with self._client.stream("POST", self.url, content=body) as response:
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > self.max_answer_mb * MIB:
                    raise ValueError(f"more than max_answer_mb={self.max_answer_mb:g} MiB")
        if response.status_code != 200:
            text = f"{response.status_code} {ascii(answer[:200].decode(errors='replace'))}"
            raise httpx.HTTPStatusError(text, request=response.request, response=response)
        return bytes(answer)
