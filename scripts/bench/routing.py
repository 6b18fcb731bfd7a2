"""The question: does it matter which replica a group, an episode or a turn goes to? Three minutes.

python -m scripts.bench.routing [--only answers agents documents shuffled] [--vllm]

The real router hands out work to 64 simulated replicas with KV caches on a virtual clock. The arms:

    turns      every turn goes to the least loaded replica
    episodes   every episode does, with all its turns
    groups     the episodes of a prompt go there together: what a run does
    prefixes   as groups, and where others have had the same beginning: the tokens that it saves count against load

The work:

    answers    prompts of 1,000 tokens that nobody shares, 8 short answers each
    agents     prompts of 1,000 tokens, 8 episodes each, 6 turns with a tool of a second
    documents  one turn after a document of 6,000 tokens, which 8 prompts in a row share
    shuffled   the same, in the random order of a stream of prompts, with an update of the weights every 30 s

With --vllm, two real engines on the CPU, and a small `agents` and `documents` beside it, in turns of the arms.

The last line is JSON, with <work>_<arm>_ before each: `hits`, the share of prompt tokens that are in the cache, and
`tokens_per_s`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from rollout.engines.base import Engine
from rollout.engines.simulated import simulated_manifest
from rollout.engines.virtual_clock import run_virtual
from rollout.request_ids import RequestId
from rollout.router import ReplicaRouter, max_inflight
from rollout.types import Completion, GenerationRequest, SamplingParams
from scripts.bench.harness import Figures, Runs, make_parser, take_turns
from scripts.bench.models import ON_CPU
from scripts.bench.updates import random_engine
from scripts.observe.tables import write_json
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.kv_cache import KvSegment
from scripts.simulate.machine import Machine
from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles

PROFILE = Profile(
    step_s=0.012,
    step_s_per_request=5e-5,
    prefill_s_per_token=4e-5,
    turn_tokens=Quantiles((1.0,)),
    train_s=1.0,
    kv_tokens=300_000,
    swap_s=0.05,
)
"""About a model of 7B on an H100."""
NUM_REPLICAS, GROUP, SEATS = 64, 8, 64
TRAJECTORY_TOKENS = 500.0
"""The prompt tokens whose prefill delays a replica as much as one more trajectory: with this profile, one of 400 tokens
adds 20 ms to the steps of the others, and so does the prefill of 500 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts, and what the episodes do."""

    document: int = 0
    """Tokens at the beginning of a prompt that a family of prompts shares."""
    family: int = 8
    """Prompts of a family."""
    prompt: int = 1000
    """Tokens of a prompt that are its own."""
    turns: int = 1
    turn_tokens: int = 400
    """The median of the tokens of a turn; long-tailed."""
    said: int = 200
    """Tokens of a tool's answer."""
    tool_s: float = 1.0
    is_shuffled: bool = False
    update_every_s: float = 0.0
    groups_per_replica: int = 24

    def order(self, count: int) -> Sequence[int]:
        return np.random.default_rng(0).permutation(count).tolist() if self.is_shuffled else range(count)

    def length(self, ordinal: int, index: int, turn: int) -> int:
        normal = np.random.default_rng([ordinal, index, turn]).standard_normal()
        return int(np.clip(self.turn_tokens * np.exp(0.7 * normal), 1, 8 * self.turn_tokens))


WORK = {
    "answers": Work(),
    "agents": Work(turns=6, turn_tokens=100, groups_per_replica=16),
    "documents": Work(document=6000, prompt=100, turn_tokens=200),
    "shuffled": Work(document=6000, prompt=100, turn_tokens=200, is_shuffled=True, update_every_s=30.0),
}
SMALL = {
    "agents": Work(turns=4, prompt=256, turn_tokens=8, said=32, tool_s=0.05, groups_per_replica=12),
    "documents": Work(document=768, family=4, prompt=32, turn_tokens=8, groups_per_replica=12),
}
ARMS = ("turns", "episodes", "groups", "prefixes")


def preferred(loads: Mapping[str, int], saved: Mapping[str, int], trajectory_tokens: float) -> str | None:
    """Return the replica with the most saved prefill less load, or None where nothing is saved anywhere.

    Args:
        loads: Replica in service -> trajectories that have room on it.
        saved: Replica -> tokens at the beginning of the prompt that it has computed before.
        trajectory_tokens: The tokens that are worth as much as one trajectory less.
    """
    if not any(saved.get(name) for name in loads):
        return None
    return max(loads, key=lambda name: (saved.get(name, 0) / trajectory_tokens - loads[name], saved.get(name, 0)))


@dataclass(eq=False)
class Bench:
    """Engines, the router before them, and what was counted."""

    work: Work
    arm: str
    engines: Mapping[str, Engine]
    seed: int = 0
    room: int = max_inflight(SEATS, GROUP, 1)
    """Episodes that a replica has at most."""
    is_real: bool = False
    """Its engines read the tokens. Simulated ones only count them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    _had: dict[int, set[str]] = field(default_factory=dict)  # family -> replicas that have its document

    def __post_init__(self) -> None:
        self._router = ReplicaRouter([*self.engines], self.room)
        # As many episodes are under way in the arm whose episodes hold no room as in the others.
        self._places = asyncio.Semaphore(len(self.engines) * self.room)

    async def run(self) -> Figures:
        """Dispatch all groups as fast as there is room, and count until the last one is dispatched: after it the
        replicas run empty."""
        clock = asyncio.get_running_loop().time
        began, count = clock(), self.work.groups_per_replica * len(self.engines)
        updating = asyncio.create_task(self._update()) if self.work.update_every_s else None
        async with asyncio.TaskGroup() as groups:
            for ordinal in self.work.order(count):
                name, family = None, ordinal // self.work.family
                if self.arm == "groups":
                    name = await self._router.acquire(GROUP)
                elif self.arm == "prefixes":
                    loads = {name: replica.in_flight for name, replica in self._router.replicas.items()}
                    saved = dict.fromkeys(self._had.get(family, ()), self.work.document)
                    name = await self._router.acquire(GROUP, prefer=preferred(loads, saved, TRAJECTORY_TOKENS))
                    self._had.setdefault(family, set()).add(name)
                for index in range(GROUP):
                    await self._places.acquire()
                    own = name or (await self._router.acquire(1) if self.arm == "episodes" else None)
                    episode = groups.create_task(self._episode(ordinal, index, own))
                    episode.add_done_callback(lambda _: self._places.release())
            seconds, sampled = clock() - began, self.sampled_tokens
        if updating is not None:
            updating.cancel()
        return {"tokens_per_s": sampled / seconds, "hits": self.cached_tokens / self.prompt_tokens}

    async def _update(self) -> None:
        """Bring new weights to every engine again and again, after which cached documents are of no use."""
        version = 0
        while True:
            await asyncio.sleep(self.work.update_every_s)
            version += 1
            for engine in self.engines.values():
                await engine.stage(simulated_manifest(version))
                await engine.freeze(clear_cache=False)
                await engine.swap(version)
                await engine.thaw()
            self._had.clear()

    async def _episode(self, ordinal: int, index: int, name: str | None) -> None:
        async def ask(request: GenerationRequest) -> Completion:
            own = name or await self._router.acquire(1)
            completion = await self.engines[own].generate(request)
            self.prompt_tokens += len(request.prompt_ids)
            self.cached_tokens += completion.cached_tokens
            self.sampled_tokens += completion.num_tokens
            if name is None:
                self._router.release(own, 1)
            return completion

        work, which = self.work, RequestId(ordinal=ordinal, episode=index, attempt=self.seed)
        lengths = [work.length(ordinal, index, turn) for turn in range(work.turns)]
        await converse(ask, which, self.prompt_ids(ordinal), lengths, said=work.said, tool_s=work.tool_s)
        if name is not None:
            self._router.release(name, 1)

    def prompt_ids(self, ordinal: int) -> list[int]:
        work = self.work
        if not self.is_real:
            return [0] * (work.document + work.prompt)
        document = random_ids(work.document, self.seed, 0, ordinal // work.family)
        return document + random_ids(work.prompt, self.seed, 1, ordinal)


async def converse(
    ask: Callable[[GenerationRequest], Awaitable[Completion]],
    which: RequestId,
    prompt: Sequence[int],
    lengths: Sequence[int],
    *,
    said: int,
    tool_s: float,
) -> None:
    """Ask for turns of these lengths, one after another. Between two, a tool takes its time and says so many tokens."""
    context = [*prompt]
    for turn, length in enumerate(lengths):
        if turn:
            await asyncio.sleep(tool_s)
            context += random_ids(said, which.attempt, which.ordinal, which.episode, turn)
        request = GenerationRequest(
            request_id=replace(which, turn=turn),
            prompt_ids=tuple(context),
            sampling=SamplingParams(max_tokens=length, ignore_eos=True),
            num_observed=said if turn else 0,
        )
        context += (await ask(request)).token_ids.tolist()


def random_ids(count: int, *seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 500, count).tolist()


class SharingEngine(ProfiledEngine):
    """Shares the documents of families and the prompts of groups."""

    def __init__(self, profile: Profile, machine: Machine, max_num_seqs: int, work: Work):
        super().__init__(profile, machine, max_num_seqs)
        self._work = work

    def segments(self, request: GenerationRequest) -> Sequence[KvSegment]:
        ordinal, work = request.request_id.ordinal, self._work
        own = len(request.prompt_ids) - work.document - work.prompt
        [(episode, _)] = super().segments(request)
        document = ("document", ordinal // work.family), work.document
        return [document, (("prompt", ordinal), work.prompt), (episode, own)]


async def simulated(
    work: Work, arm: str, num_replicas: int, *, room: int = Bench.room, profile: Profile = PROFILE
) -> Figures:
    machine, engines = Machine(profile, 1), dict[str, Engine]()
    for index in range(num_replicas):
        engine = SharingEngine(profile, machine, SEATS, work)
        await engine.tag_loaded(0)
        engines[f"replica-{index}"] = engine
    return await Bench(work, arm, engines, room=room).run()


async def on_vllm(repeats: int) -> Figures:
    """Run the small work on two engines. Every run has prompts of its own, so that no cache helps another."""
    seeds, figures, kv_bytes = count(), dict[str, float](), ON_CPU.kv_bytes(64 * 1024, 4)
    first, second = (random_engine(ON_CPU, seq_tokens=1024, num_seqs=SEATS, kv_cache_bytes=kv_bytes) for _ in range(2))
    async with first as engine, second as other:
        engines: Mapping[str, Engine] = {"replica-0": engine, "replica-1": other}
        for each in engines.values():
            await each.tag_loaded(0)
        for name, work in SMALL.items():

            async def run(arm: str, _: int, work: Work = work) -> Figures:
                return await Bench(work, arm, engines, seed=next(seeds), room=2 * GROUP, is_real=True).run()

            runs = await take_turns(run, ARMS, repeats, warm_ups=1)
            runs.show(f"{name} on two real engines", {"tokens_per_s": ".0f", "hits": ".3f"}, over="groups")
            figures |= runs.all_medians(f"vllm_{name}_")
    return figures


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=[*WORK])
    parser.add_argument("--vllm", action="store_true", help="two real engines, too")
    options = parser.parse_args()
    figures = dict[str, float]()
    for name in options.only:
        runs = Runs.exact({arm: run_virtual(simulated(WORK[name], arm, NUM_REPLICAS)) for arm in ARMS})
        runs.show(f"{name} on {NUM_REPLICAS} simulated replicas", {"tokens_per_s": ".0f", "hits": ".3f"}, over="groups")
        figures |= runs.all_medians(f"{name}_")
    if options.vllm:
        figures |= asyncio.run(on_vllm(options.repeats))
    write_json(figures)


if __name__ == "__main__":
    main()
