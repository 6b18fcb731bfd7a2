"""Searches at a server that speaks as Search-R1's does: an E5 index on GPUs, or `make retriever`."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from urllib.parse import urlsplit

import httpx

from rollout.search.batches import Batches
from rollout.search.checks import check_number, check_whole
from rollout.search.documents import Found
from rollout.search.outages import Outages
from rollout.search.wire import Form, read_answer, request_body

PROBE = "capital of France"
IDLE_S = 2.0
"""How long an idle connection is kept: servers close them after five seconds or more."""
MIB = 2**20
Asked = tuple[str, int]
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
    """Where to POST, such as "http://127.0.0.1:8000/retrieve"."""
    _: KW_ONLY
    form: str = "queries"
    """What the server reads: `queries`, a list, or `query`, one text."""
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
    """In place of a network."""

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
        self._form, self._cache = Form(self.form), OrderedDict[Asked, Found]()
        self._outages = Outages(
            f"the retriever at {self.url}",
            self._probe,
            max_failures=self.max_failures,
            timeout_s=self.down_timeout_s,
        )
        alone = self._form is Form.query
        self._batches = Batches[Asked, Found](
            self._ask,
            max_size=1 if alone else self.max_batch,
            max_running=self.max_in_flight,
            delay_s=0.0 if alone else self.batch_s,
        )

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return list(await asyncio.gather(*(self._one(query.strip(), topk) for query in queries)))

    async def close(self) -> None:
        await self._batches.close()
        await self._outages.close()
        await self._client.aclose()

    async def _one(self, query: str, topk: int) -> Found:
        asked = query.encode(errors="replace").decode(), topk
        if not query:
            return Found()
        if asked in self._cache:
            self._cache.move_to_end(asked)
            return self._cache[asked]
        found = await self._batches.answer(asked)
        if found.error is None:
            self._cache[asked] = found
            if len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return found

    async def _ask(self, batch: Sequence[Asked]) -> list[Found]:
        """A call that failed as the server went down is made again when it is back. Raises RetrievalError."""
        queries, topk = [query for query, _ in batch], max(topk for _, topk in batch)
        while True:
            await self._outages.over()
            found = await self._called(queries, topk)
            errors = [one.error for one in found if one.error is not None]
            self._outages.note(errors[0] if len(errors) == len(found) else None)
            if not errors or not self._outages.is_down:
                return [Found(one.documents[:k], one.error) for one, (_, k) in zip(found, batch, strict=True)]

    async def _probe(self) -> str | None:
        [found] = await self._called([PROBE], 1)
        return found.error

    async def _called(self, queries: Sequence[str], topk: int) -> list[Found]:
        """Of one call; each query has its error where it failed."""
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
        """The body of the answer. Raises httpx.HTTPError, and ValueError where it is none."""
        try:
            return await self._posted_once(body)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):  # the connection was old
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
