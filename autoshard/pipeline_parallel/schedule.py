"""Schedule: which micro-batch and which layers are in which stage at which trip.

The layers are S · R equal chunks; stage s holds the chunks s, S + s, 2S + s, …, its
*repeats*. Micro-batches come in groups of S. A group goes round all stages R times, and
the next group follows without a gap. With u = t − s, stage s holds at trip t

    micro-batch  (u div R·S) · S + u mod S        repeat  (u mod R·S) div S

so that what leaves stage S − 1 at one trip enters stage 0 at the next, and nothing waits
in between. With R = 1 this is GPipe (Huang et al. 2019, arXiv:1811.06965), with more the
order of Megatron's interleaved schedule (Narayanan et al. 2021, arXiv:2104.04473, section
2.2): all trips are M·R + S − 1, of which S − 1 are the bubble.
"""

from dataclasses import dataclass

from autoshard.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The trips of a pipeline.

    Attributes:
      stages: S; what runs at one trip.
      repeats: R; how often a micro-batch goes round.
      steps: M; micro-batches.
    """

    stages: int
    repeats: int
    steps: int

    def __post_init__(self) -> None:
        for name, count in (("stages", self.stages), ("repeats", self.repeats), ("steps", self.steps)):
            if isinstance(count, bool) or count != int(count) or count < 1:
                raise SpecError(f"{name}={count}: there is at least one")
        if self.repeats > 1 and self.steps % self.stages:
            raise SpecError(
                f"steps={self.steps}, stages={self.stages}, repeats={self.repeats}: micro-batches go round in groups "
                "of as many as there are stages; make steps a multiple of stages, or repeats=1"
            )

    @property
    def trips(self) -> int:
        """How often all stages run."""
        return self.steps * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the trips in which a stage has nothing to do."""
        return (self.stages - 1) / self.trips

    def starts(self, trip: int) -> bool:
        """Whether stage 0 takes a new micro-batch at a trip, and not one that comes round."""
        return trip % (self.repeats * self.stages) < self.stages

    def enters(self, trip: int) -> int:
        """The micro-batch that stage 0 holds at a trip; after the last one, the last one again."""
        group, within = divmod(trip, self.repeats * self.stages)
        return min(group * self.stages + within % self.stages, self.steps - 1)

    def leaves(self, microbatch: int) -> int:
        """The trip at which a micro-batch leaves the last stage for good."""
        group, within = divmod(microbatch, self.stages)
        return (group * self.repeats + self.repeats - 1) * self.stages + within + self.stages - 1

    def repeat(self, trip: int, stage: int) -> int:
        """Which of its chunks of layers a stage applies at a trip."""
        return (trip - stage) % (self.repeats * self.stages) // self.stages
