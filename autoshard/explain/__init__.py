"""Why a plan is as it is: the runner-up, attribution, sensitivity, differences."""
