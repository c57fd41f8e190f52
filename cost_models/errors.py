"""The exception family: every error names the fault, its place, and the text to write instead."""


class CostModelError(Exception):
    """Base of every error that `cost_models` raises on purpose."""


class UnknownHardwareError(CostModelError, ValueError):
    """No chip or interconnect of that name is in the catalogue."""

    def __init__(self, name: str, near: tuple[str, ...], known: tuple[str, ...]) -> None:
        self.name, self.near, self.known = name, near, known
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"unknown chip `{name}`: {hint}")


class TopologyError(CostModelError, ValueError):
    """A physical topology does not exist for the chip that was named."""


class MeshFitError(CostModelError, ValueError):
    """A logical mesh does not fit the topology, or names an axis that it does not have."""


class HardwareFileError(CostModelError, ValueError):
    """A hardware file is malformed; the message names the file, the key and the remedy."""

    def __init__(self, file: str, what: str) -> None:
        self.file, self.what = file, what
        super().__init__(f"{file}: {what}")


class UnknownNumberError(CostModelError, KeyError):
    """A number is asked for that this hardware's file does not state."""

    def __init__(self, key: str, hardware: str, known: tuple[str, ...]) -> None:
        self.key, self.hardware, self.known = key, hardware, known
        super().__init__(key)

    def __str__(self) -> str:
        return f"{self.hardware} states no `{self.key}`; it states {', '.join(self.known)}"
