"""The question: does a fleet follow a load that changes, and what does it save? A minute.

python -m scripts.bench.autoscale

The real scheduling runs on a virtual clock, with simulated engines and a trainer whose step takes 20 seconds. In the
middle third of the steps, responses are six times as long. A new replica takes 90 seconds to start. The arms are
`fixed_N`, N replicas from beginning to end, and `autoscaled`, 1 to 8 beginning with 2 (rollout.autoscale).
`steps_per_h_1` to `_3` are those of each third; `replica_h_per_step` is what is paid for; `changes` says how often
replicas came or went.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.engines.virtual_clock import run_virtual
from rollout.fleet.autoscaler import Autoscaler, Autoscaling
from rollout.fleet.control import FleetControl
from rollout.fleet.operator import FleetOperator
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from scripts.bench.harness import Figures, Runs, make_parser
from scripts.observe.tables import write_json
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.episodes import Drawn, Draws, Together
from scripts.simulate.machine import Machine
from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles
from scripts.simulate.setup import Setup
from scripts.simulate.simulate import ProfiledTrainer
from scripts.simulate.simulated_run import Driver, SimulatedRun
from scripts.simulate.stand_ins import Nothing

PROFILE = Profile(
    step_s=0.012,
    step_s_per_request=5e-5,
    turn_tokens=Quantiles.lognormal(500, 0.3, 1000),
    train_s=20.0,
    stage_s=1.0,
    swap_s=0.05,
)
SETUP = Setup(max_num_seqs=8, max_staleness=4, group_size=4, prompts_per_step=4)
STEPS, LONGER, START_S, MOST, FIXED = 450, 6, 90.0, 8, (2, 4, 8)


@dataclass(frozen=True, slots=True)
class ChangingDraws(Draws):
    """Responses that are longer in the middle third of the prompts."""

    third: int = 0
    """The prompts of a third."""

    def episode(self, which: RequestId) -> Drawn:
        drawn = Draws.episode(self, which)
        longer = LONGER if self.third <= which.ordinal < 2 * self.third else 1
        return replace(drawn, tokens=tuple(longer * tokens for tokens in drawn.tokens))


@dataclass(kw_only=True)
class Scene(Nothing):
    """A run whose steps are noted, with the replicas that serve."""

    num_replicas: int
    steps: int
    autoscaled: bool = False
    marks: list[tuple[float, int]] = field(default_factory=list)
    """The time of each step and the replicas that serve then."""
    changes: int = 0

    def record_step(self, *args: Any, **kwargs: Any) -> None:
        alive = [replica for replica in self._fleet.replicas.values() if not replica.is_dead]
        self.marks.append((asyncio.get_running_loop().time(), len(alive)))

    async def run(self) -> Figures:
        setup = replace(SETUP, num_replicas=self.num_replicas, steps=self.steps)
        self._config, self._machine = setup.config(), Machine(PROFILE, 1)
        run = SimulatedRun(
            config=self._config,
            engines=[self._engine() for _ in range(self.num_replicas)],
            workers=ProfiledTrainer(PROFILE, self._machine, 1),
            loop=Together(ChangingDraws(PROFILE, third=self.steps // 3 * setup.prompts_per_step)),
            recorder=self,
            collect_s=1.0,
            beside=self._beside,
        )
        await run.train()
        return self._figures()

    def _engine(self) -> ProfiledEngine:
        return ProfiledEngine(PROFILE, self._machine, SETUP.max_num_seqs)

    def _beside(self, driver: Driver) -> Sequence[Coroutine[Any, Any, None]]:
        self._fleet = fleet = driver.fleet
        if not self.autoscaled:
            return []

        async def start(name: str) -> RolloutReplica:
            await asyncio.sleep(START_S)
            replica = RolloutReplica(name, self._engine(), self._config.weight_sync)
            driver.agents.replicas[name] = replica.generate_group
            return replica

        operator = FleetOperator(
            fleet=fleet, control=FleetControl(fleet), start=start, catch_up=driver.manager.catch_up, drain_timeout_s=1e9
        )
        scaling = Autoscaling(operator=operator, buffer=driver.buffer, scaler=Autoscaler(1, MOST))
        return [operator.run(), scaling.run()]

    def _figures(self) -> Figures:
        marks, third = self.marks, self.steps // 3
        (began, _), (ended, _) = marks[0], marks[-1]
        pairs = list(zip(marks, marks[1:], strict=False))
        replica_s = sum(count * (until - since) for (since, count), (until, _) in pairs)
        thirds = [marks[index * third : (index + 1) * third] for index in range(3)]
        return {
            "steps_per_h": 3600 * (len(marks) - 1) / (ended - began),
            **{f"steps_per_h_{n}": 3600 * (len(p) - 1) / (p[-1][0] - p[0][0]) for n, p in enumerate(thirds, 1)},
            "replicas": replica_s / (ended - began),
            "replica_h_per_step": replica_s / 3600 / (len(marks) - 1),
            "changes": sum(before != after for (_, before), (_, after) in pairs),
        }


def main() -> None:
    make_parser(__doc__).parse_args()
    arms = {f"fixed_{count}": Scene(num_replicas=count, steps=STEPS) for count in FIXED}
    arms["autoscaled"] = Scene(num_replicas=2, steps=STEPS, autoscaled=True)
    runs = Runs.exact({name: run_virtual(scene.run()) for name, scene in arms.items()})
    runs.show("responses that become six times as long, and short again")
    write_json(runs.all_medians())


if __name__ == "__main__":
    main()
