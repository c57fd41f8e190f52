"""The whole step: what a backward pass reads is kept, or made again, as it costs least together with every layout."""

from autoshard.problem.whole_step.build import whole_step as whole_step
from autoshard.problem.whole_step.enlarged import WholeStep as WholeStep
from autoshard.problem.whole_step.reading import kept_values as kept_values
from autoshard.problem.whole_step.reading import offloaded_values as offloaded_values
